"""The sections of a run file that are about a model in stages: how it is cut, and what of it learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from neurogrid.training.runs.run_file.section import Section
from neurogrid.training.runs.run_file.values import (
    BOOLEAN,
    Kind,
    array,
    number,
    one_of,
    text,
    whole,
)

__all__ = [
    "MAX_RANK",
    "MAX_REPLICAS",
    "MAX_STAGES",
    "MAX_SUBSPACE",
    "AdapterSection",
    "LayoutSection",
]

MAX_STAGES: Final = 64
"""Stages of a chain."""

MAX_SUBSPACE: Final = 65_536
"""Dimensions that hidden states travel in, where they are fewer than the model's own."""

MAX_STAGE_MEMBERS: Final = 64
"""Members of a stage."""

MAX_MICRO_BATCHES: Final = 1024
"""Micro-batches of a step."""

MAX_REPLICAS: Final = 64
"""Chains of a run."""

MAX_MEMBERS_AT_ONCE: Final = 256
"""Members of all chains, over all stages."""

MAX_RANK: Final = 1024
"""Rank of an adapter, and of what gradients are compressed to."""

# Micro-batches of a step, for each member of each stage, where nobody says how many: where stages are one member each,
# a fifth of the time is the bubble's then.
_MICRO_BATCHES_A_MEMBER: Final = 4
# Steps until a state is kept again, of weights; adapters are small, and are kept after each.
_STEPS_OF_WEIGHTS: Final = 25


@dataclass(frozen=True, slots=True)
class LayoutSection(Section):
    """The cut of the model: one stage is a whole model on each member, more are a chain of members with a part each.

    Attributes:
        stages: of the chain; of each of several replicas at most.
        replicas: most replicas of the model, which average what they have learned: each is a chain, or a machine that
            has room for all of it.
        stage_members: most members of a stage, which share its work; more join in while the run goes on.
        micro_batches: that a batch of a chain is cut into; 0 for four for each member, or one a sample where those are
            fewer.
        activations: what hidden states and their gradients travel in.
        recompute: whether stages compute forward passes again in the backward pass, for less memory.
        state_every: steps after which the leader keeps the state of all stages, besides before each checkpoint; 0 for 1
            with an adapter, else 25.
        gradients: what gradients travel in between the members of a stage.
        power_sgd: the rank that members of a stage send each other gradients of matrices at; 0 for all of them.
        weights_every: steps after which members of a stage average a twentieth of their weights; 0 for never.
        memory_tier: megabytes that what members lend is rounded down to before the model is cut, so that about the same
            memory gives the same cut; 0 for what they lend.
        subspace: dimensions of a subspace that hidden states between stages are kept in, so that fewer numbers travel;
            below the model's hidden size, and for a model that begins with random weights; 0 for whole ones.
    """

    stages: int = 1
    replicas: int = 1
    stage_members: int = 1
    micro_batches: int = 0
    activations: str = "bfloat16"
    recompute: bool = False
    state_every: int = 0
    gradients: str = "float32"
    power_sgd: int = 0
    weights_every: int = 0
    memory_tier: int = 0
    subspace: int = 0

    title: ClassVar[str] = "layout"
    keys: ClassVar[Mapping[str, Kind]] = {
        "stages": whole(1, MAX_STAGES),
        "replicas": whole(1, MAX_REPLICAS),
        "stage_members": whole(1, MAX_STAGE_MEMBERS),
        "micro_batches": whole(0, MAX_MICRO_BATCHES),
        "activations": one_of("bfloat16", "float32"),
        "recompute": BOOLEAN,
        "state_every": whole(0, 10**9),
        "gradients": one_of("float32", "bfloat16"),
        "power_sgd": whole(0, MAX_RANK),
        "weights_every": whole(0, 10**9),
        "memory_tier": whole(0, 10**6),
        "subspace": whole(0, MAX_SUBSPACE),
    }

    def _check(self) -> None:
        if self.replicas > 1 and self.stage_members > 1:
            raise self.fault(
                "replicas",
                "are of stages of one member each: stage_members is 1 with them",
                self.place_of("stage_members"),
            )
        if self.replicas > 1 and self.subspace:
            raise self.fault("replicas", "have no subspace", self.place_of("subspace"))
        if self.replicas > 1 and self.replicas * self.stages > MAX_MEMBERS_AT_ONCE:
            raise self.fault(
                "replicas",
                f"of {self.stages} stages are at most {MAX_MEMBERS_AT_ONCE // self.stages}: a round has "
                f"{MAX_MEMBERS_AT_ONCE} members",
                self.place_of("stages"),
            )
        if self.power_sgd and self.gradients != "float32":
            raise self.fault(
                "power_sgd", "sends what it sends in float32", self.place_of("gradients")
            )
        for key in ("power_sgd", "weights_every"):
            if getattr(self, key) and self.stage_members == 1:
                raise self.fault(
                    key,
                    "is for stages of several members: give stage_members, too",
                    self.place_of("stage_members"),
                )
        if self.subspace and self.stages == 1:
            raise self.fault(
                "subspace",
                "is for hidden states between stages: give stages, too",
                self.place_of("stages"),
            )

    def tiered(self, memory: int) -> int:
        """Bytes that count for the cut, of those that a member lends; 0 stays 0, which is any."""
        tier = self.memory_tier * 10**6
        return max(memory // tier * tier, 1) if tier and memory else memory

    def num_micro_batches(self, num_samples: int, num_members: int = 0) -> int:
        """Micro-batches of a batch of so many samples, for a chain of so many members; 0 for one a stage."""
        wanted = self.micro_batches or _MICRO_BATCHES_A_MEMBER * (num_members or self.stages)
        wanted = min(wanted, MAX_MICRO_BATCHES)
        return max(1, min(wanted, num_samples))

    def steps_between_states(self, *, has_adapter: bool) -> int:
        """Steps after which the state is kept."""
        return self.state_every or (1 if has_adapter else _STEPS_OF_WEIGHTS)


@dataclass(frozen=True, slots=True)
class AdapterSection(Section):
    """A LoRA adapter: the model stays as it is, and small matrices beside its linear layers learn. Names are PEFT's.

    Attributes:
        r: the rank of the matrices; 0 for no adapter: all weights learn.
        alpha: what comes of them counts alpha / r.
        targets: names of linear layers, as "q_proj"; empty for all that lie in the layers of the model.
        dropout: of what goes into them.
        quantize: what the matrices of the model become, which stay as they are: "int8", "int4", or "none" for what they
            are in the checkpoint.
    """

    r: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    quantize: str = "none"

    title: ClassVar[str] = "adapter"
    keys: ClassVar[Mapping[str, Kind]] = {
        "r": whole(0, MAX_RANK),
        "alpha": number("above 0 and at most 10^6", lambda value: 0 < value <= 1e6),
        "targets": array(
            text("the name of a linear layer", is_needed=True),
            "an array of names of linear layers, each once at most",
            fits=lambda values: len(set(values)) == len(values) <= 256,
        ),
        "dropout": number("from 0 and below 1", lambda value: 0 <= value < 1),
        "quantize": one_of("none", "int8", "int4"),
    }

    def _check(self) -> None:
        if self.quantize != "none" and not self.r:
            raise self.fault(
                "quantize", "is for a model that stays as it is: give r, too", self.place_of("r")
            )
