"""The sections of a run file, with the defaults.

Paths are for the process that leads the run: relative ones begin at the folder of the run file (`RunFile.place`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from neurogrid.training.runs.run_file.mixture import MAX_REPEAT, MIXTURE, MixturePart
from neurogrid.training.runs.run_file.section import Section, WrongValueError
from neurogrid.training.runs.run_file.values import (
    BOOLEAN,
    Kind,
    array,
    number,
    one_number_of,
    one_of,
    optional,
    pattern,
    shown,
    size,
    text,
    whole,
)

__all__ = [
    "CAUSAL_LM",
    "EMBEDDED",
    "IMAGE_CLASSIFICATION",
    "METHODS",
    "TRACKERS",
    "CheckpointsSection",
    "DataSection",
    "EvalSection",
    "InnerSection",
    "MembersSection",
    "ModelSection",
    "OuterSection",
    "StopSection",
    "TrackSection",
]

EMBEDDED: Final = "embedded"
CAUSAL_LM: Final = "causal-lm"
IMAGE_CLASSIFICATION: Final = "image-classification"
TRACKERS: Final = ("tensorboard", "wandb", "aim", "mlflow")
MAX_MEMBERS: Final = 1023
"""A group has 1,024 places, and the leader of the run has one of them."""

_WEEK: Final = 7 * 86_400
_POSITIVE: Final = number("above 0 and at most 10^9", lambda value: 0 < value <= 1e9)
_SHARE_OR_STEPS: Final = number(
    "of steps, or below 1 a share of the run's", lambda value: 0 <= value <= 1e9
)

METHODS: Final[dict[str, dict[str, Any]]] = {
    "streaming": {},
    "diloco": {"fragments": 1},
    "averaging": {"fragments": 1, "lr": 1.0, "momentum": 0.0},
    "data_parallel": {"fragments": 1, "lr": 1.0, "momentum": 0.0, "every": 1, "projected": False},
    "distro": {"fragments": 1, "lr": 1.0, "momentum": 0.0, "every": 1, "projected": False},
}
"""Methods of exchange between members, and their defaults of [outer] that differ from those of `OuterSection`."""


@dataclass(frozen=True, slots=True)
class ModelSection(Section):
    """The model that is trained.

    Attributes:
        config: "embedded", the directory of a checkpoint, a name at the hub, or a config.json: then from random
            weights, which the seed of the run makes.
        kind: what transformers opens it as: `AutoModelForCausalLM` or `AutoModelForImageClassification`.
    """

    config: str
    kind: str = CAUSAL_LM

    title: ClassVar[str] = "model"
    keys: ClassVar[Mapping[str, Kind]] = {
        "config": text(
            '"embedded", the directory of a checkpoint, a name at the hub, or a config.json',
            is_needed=True,
        ),
        "kind": one_of(CAUSAL_LM, IMAGE_CLASSIFICATION),
    }


@dataclass(frozen=True, slots=True)
class DataSection(Section):
    """Data that the model is trained on, by `path` or `mixture`; the other keys are for data that is not prepared yet.

    Attributes:
        path: a directory that `neurogrid train prepare` wrote, here or, by its address, behind a web server; or what
            that takes, which is prepared at the start.
        mixture: several such places here in its stead, which are mixed at the start: an epoch has of each as many
            samples as its weight says.
        repeat: times that a sample of a mixture may come in an epoch: that ends where a source has come so often, or
            where all have come once.
        tokenizer: the directory of a tokenizer; empty for the model's own, or where it has none one that is trained.
        sequence_length: tokens of a sample.
        vocab_size: of a tokenizer that is trained, at most.
        token_bytes: of an id in a file of token ids (.bin), of which a directory may have several; 0 for what its
            header says, else 2 where the vocabulary of the model allows it.
        held_out: share of the samples that is kept for evaluation.
        slice_samples: samples of a slice; None for as many as are about a mebibyte.
    """

    path: str = ""
    mixture: tuple[MixturePart, ...] = ()
    repeat: int = 1
    tokenizer: str = ""
    sequence_length: int = 256
    vocab_size: int = 4096
    token_bytes: int = 0
    held_out: float = 0.02
    slice_samples: int | None = None

    title: ClassVar[str] = "data"
    keys: ClassVar[Mapping[str, Kind]] = {
        "path": text("a directory, a file, or the address of a directory"),
        "mixture": MIXTURE,
        "repeat": whole(1, MAX_REPEAT),
        "tokenizer": text("the directory of a tokenizer"),
        "sequence_length": whole(2, 1_048_576),
        "vocab_size": whole(258, 10_000_000),
        "token_bytes": one_number_of(0, 2, 4),
        "held_out": number("from 0 to 0.5", lambda value: 0 <= value <= 0.5),
        "slice_samples": optional(whole(1, 1_048_576)),
    }

    @property
    def places(self) -> tuple[str, ...]:
        """The path, or those of the mixture."""
        return (self.path,) if self.path else tuple(part.path for part in self.mixture)

    def _check(self) -> None:
        if self.path and self.mixture:
            raise self.fault("path", "is one place, and mixture several: give one of them")
        if not self.path and not self.mixture:
            raise self.fault("path", f"is needed: {self.keys['path'].says}; or mixture")
        if self.repeat > 1 and not self.mixture:
            raise self.fault("repeat", "is of a mixture: 1 without")
        for part in self.mixture:
            if "://" in part.path:
                raise self.fault(
                    "mixture",
                    f"is of places here, not {shown(part.path)}: what was mixed may lie behind a web server",
                )


@dataclass(frozen=True, slots=True)
class StopSection(Section):
    """Ends of the run: it is done at the first of these that is reached. None for those that are not given.

    Attributes:
        tokens: of all members together.
        steps: inner steps of a member that takes as many as the run file says: rounds times `OuterSection.round_steps`.
        rounds: syncs, of a fragment each.
        hours: since the run began, those in which it did not run left out.
        epochs: times through the data.
    """

    tokens: int | None = None
    steps: int | None = None
    rounds: int | None = None
    hours: float | None = None
    epochs: float | None = None

    title: ClassVar[str] = "stop"
    keys: ClassVar[Mapping[str, Kind]] = {
        "tokens": optional(whole(1)),
        "steps": optional(whole(1)),
        "rounds": optional(whole(1)),
        "hours": optional(_POSITIVE),
        "epochs": optional(_POSITIVE),
    }

    def _check(self) -> None:
        if all(getattr(self, key) is None for key in self.keys):
            *most, last = self.keys
            raise WrongValueError(
                f"[stop] needs one of {', '.join(most)} or {last}", self.place_of()
            )


@dataclass(frozen=True, slots=True)
class InnerSection(Section):
    """The steps that each member takes by itself.

    Attributes:
        optimizer: "adamw" or "sgd".
        lr: the learning rate, where the schedule is at its height.
        betas, eps: of AdamW.
        weight_decay: decoupled with AdamW, in the gradient with SGD.
        momentum: of SGD.
        schedule: "cosine" and "linear" to 0, "constant", or "wsd": constant, then down.
        warmup: steps of linear warm-up, or below 1 their share of the run.
        decay: steps at the end that "wsd" goes down in, or below 1 their share of the run.
        batch_tokens: tokens of a step of each member, for text; whole samples of them are taken.
        batch_samples: samples of a step of each member, for images.
        precision: "float32", or "bfloat16" for products beside masters in float32.
        clip: the norm that gradients are clipped to; 0 for no clipping.
        micro_batch: samples that go through the model at once; 0 for as many as fit, which is found.
    """

    optimizer: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    schedule: str = "cosine"
    warmup: float = 0.05
    decay: float = 0.0
    batch_tokens: int = 4096
    batch_samples: int = 32
    precision: str = "float32"
    clip: float = 1.0
    micro_batch: int = 0

    title: ClassVar[str] = "inner"
    keys: ClassVar[Mapping[str, Kind]] = {
        "optimizer": one_of("adamw", "sgd"),
        "lr": number("above 0 and at most 1000", lambda value: 0 < value <= 1000),
        "betas": array(
            number("", lambda value: 0 <= value < 1),
            "two numbers from 0 to less than 1",
            fits=lambda values: len(values) == 2,
        ),
        "eps": number("above 0 and at most 1", lambda value: 0 < value <= 1),
        "weight_decay": number("from 0 to 1000", lambda value: 0 <= value <= 1000),
        "momentum": number("from 0 to less than 1", lambda value: 0 <= value < 1),
        "schedule": one_of("cosine", "linear", "constant", "wsd"),
        "warmup": _SHARE_OR_STEPS,
        "decay": _SHARE_OR_STEPS,
        "batch_tokens": whole(2, 10**9),
        "batch_samples": whole(1, 10**6),
        "precision": one_of("float32", "bfloat16"),
        "clip": number("from 0, which does not clip, to 10^9", lambda value: 0 <= value <= 1e9),
        "micro_batch": whole(0, 10**6),
    }

    def warmup_steps(self, num_steps: int) -> int:
        """Steps of warm-up in a run of so many: all of them at most."""
        return min(num_steps, _steps(self.warmup, num_steps))

    def decay_steps(self, num_steps: int) -> int:
        """Steps at the end of a run of so many in which "wsd" goes down, at least 1 where there are more than those of
        the warm-up; 0 for other schedules."""
        if self.schedule != "wsd":
            return 0
        rest = num_steps - self.warmup_steps(num_steps)
        return min(rest, max(1, _steps(self.decay, num_steps)))

    def _check(self) -> None:
        if self.momentum and self.optimizer != "sgd":
            raise self.fault(
                "momentum", f'is of "sgd": 0 with "{self.optimizer}"', self.place_of("optimizer")
            )
        if self.schedule == "wsd" and not self.decay:
            raise self.fault("decay", 'is above 0 with schedule "wsd"', self.place_of("schedule"))
        if self.schedule != "wsd" and self.decay:
            raise self.fault(
                "decay",
                f'is of schedule "wsd": 0 with "{self.schedule}"',
                self.place_of("schedule"),
            )
        if self.decay < 1 and self.warmup < 1 < self.warmup + self.decay:
            raise self.fault(
                "decay",
                "and warmup are shares of one run: together at most 1",
                self.place_of("warmup"),
            )


@dataclass(frozen=True, slots=True)
class OuterSection(Section):
    """The exchange among members, and what becomes of it. `of` makes one with the defaults of another method.

    Attributes:
        method: "streaming": fragments in turn (Streaming DiLoCo); "diloco": all at once; "averaging": of weights;
            "data_parallel": of gradients, in each step; "distro": of the greatest frequencies of momenta, in each step,
            which witnesses have to have seen.
        every: inner steps between two syncs of the same tensors, of a member that takes as many as the run file says.
        lr, momentum: of the outer step, SGD with Nesterov momentum; 0.7 and 0.9 are published for DiLoCo.
        codec: the form of what is sent, and of the aggregate (`protocol_spec/training/forms.md`); of that it is "f16"
            with "sign" and "topk", which have no room for it.
        fragments: into which "streaming" deals the tensors; each round is about one of them.
        projected: whether members take steps by their speed, so that all finish together.
        way: "butterfly", "server" or "everybody"; for many members "grid", of the mean alone.
        aggregator: how vectors become one.
        quorum: contributors that a round needs at least.
        grace: seconds that a round waits for late members once it has its quorum.
        attempt_timeout: seconds for one attempt at a round.
        overlap: whether members train on while a round is under way, so that a slow line holds nobody up; with
            "streaming" and at least 2 fragments.
        freshness: what is left of what a late member has learned, with each round that goes on without it.
    """

    method: str = "streaming"
    every: int = 20
    lr: float = 0.9
    momentum: float = 0.7
    codec: str = "f16"
    fragments: int = 4
    projected: bool = True
    way: str = "butterfly"
    aggregator: str = "mean"
    quorum: int = 1
    grace: float = 10.0
    attempt_timeout: float = 300.0
    overlap: bool = False
    freshness: float = 1.0

    title: ClassVar[str] = "outer"
    keys: ClassVar[Mapping[str, Kind]] = {
        "method": one_of(*METHODS),
        "every": whole(1, 1_000_000),
        "lr": number("above 0 and at most 100", lambda value: 0 < value <= 100),
        "momentum": number("from 0 to less than 1", lambda value: 0 <= value < 1),
        "codec": pattern(
            '"f32", "f16", "bf16", "int8", "int4", "sign", or "topk:1" to "topk:4096"',
            r"f32|f16|bf16|int8|int4|sign|topk(:[1-9][0-9]{0,2}|:[1-3][0-9]{3}|:40[0-8][0-9]|:409[0-6])?",
        ),
        "fragments": whole(1, 65_536),
        "projected": BOOLEAN,
        "way": one_of("butterfly", "server", "everybody", "grid"),
        "aggregator": pattern(
            '"mean", "median", "trimmed_mean", "trimmed_mean:0.2" and the like, or "mean_of_signs"',
            r"mean|median|mean_of_signs|trimmed_mean(:0|:0\.[0-4][0-9]{0,3})?",
        ),
        "quorum": whole(1, MAX_MEMBERS),
        "grace": number(
            f"of seconds, above 0 and at most {_WEEK}", lambda value: 0 < value <= _WEEK
        ),
        "attempt_timeout": number(
            f"of seconds from 1 to {_WEEK}", lambda value: 1 <= value <= _WEEK
        ),
        "overlap": BOOLEAN,
        "freshness": number("above 0 and at most 1", lambda value: 0 < value <= 1),
    }

    @property
    def round_steps(self) -> int:
        """Inner steps of a round, of a member that takes as many as the run file says."""
        return self.every // self.fragments

    @property
    def result_codec(self) -> str:
        """The form of the aggregate."""
        is_sparse = self.codec.partition(":")[0] in ("sign", "topk")
        return "f16" if is_sparse else self.codec

    @classmethod
    def of(cls, method: str, **values: Any) -> OuterSection:
        """One with the defaults of a method, and these values.

        Raises:
            WrongValueError: a value is not what it may be, or there is no such method.
        """
        return cls(method, **{**METHODS.get(method, {}), **values})

    def _check(self) -> None:
        method = self.place_of("method")
        for key, value in METHODS[self.method].items():
            if key != "projected" and getattr(self, key) != value:
                raise self.fault(key, f'is {value:g} with method "{self.method}"', method)
        if self.way == "grid" and self.aggregator not in ("mean", "mean_of_signs"):
            raise self.fault(
                "way",
                f'"grid" is of the aggregators "mean" and "mean_of_signs", and not of {self.aggregator}',
                self.place_of("aggregator"),
            )
        if self.fragments > self.every:
            raise self.fault(
                "fragments",
                f"is at most every, {self.every}: one is sent a step",
                self.place_of("every"),
                method,
            )
        if self.overlap and self.fragments < 2:
            raise self.fault(
                "overlap",
                'is of method "streaming" with at least 2 fragments: one is trained on while another is averaged',
                self.place_of("fragments"),
                method,
            )
        if self.freshness < 1 and (self.overlap or self.method == "distro"):
            key, why = ("overlap", "members have trained on by then, and all of it stays")
            if self.method == "distro":
                key, why = ("method", "nothing that is late counts with it")
            raise self.fault(
                "freshness",
                f"is 1 with {key} {shown(getattr(self, key))}: {why}",
                self.place_of(key),
            )


@dataclass(frozen=True, slots=True)
class MembersSection(Section):
    """Members of the run: how many there may be, and what each has to lend.

    Attributes:
        min: members that the run waits for, and below which it waits again.
        max: members at most; others stand by.
        open: whether anybody may come, on trial at first: what it gives counts once a result of its was computed again;
            with method "distro" and audits.
        memory: bytes that each has to lend.
        storage: bytes of its disk that each has to lend, for slices.
        cores: that each has to offer.
        gpu: whether each has to have one.
        price: the most that one may ask (`--price` of a worker); None for any.
    """

    min: int = 1
    max: int = 64
    open: bool = False
    memory: int = 0
    storage: int = 0
    cores: int = 0
    gpu: bool = False
    price: float | None = None

    title: ClassVar[str] = "members"
    keys: ClassVar[Mapping[str, Kind]] = {
        "min": whole(1, MAX_MEMBERS),
        "max": whole(1, MAX_MEMBERS),
        "open": BOOLEAN,
        "memory": size(),
        "storage": size(),
        "cores": whole(0, 65_536),
        "gpu": BOOLEAN,
        "price": optional(number("from 0 to 10^9", lambda value: 0 <= value <= 1e9)),
    }

    def _check(self) -> None:
        if self.min > self.max:
            raise self.fault("min", f"is at most max, {self.max}", self.place_of("max"))


@dataclass(frozen=True, slots=True)
class CheckpointsSection(Section):
    """Checkpoints of the run on disk.

    Attributes:
        dir: a directory for the checkpoints alone, which is new or empty; empty for `checkpoints` in that of the run.
        every: rounds between two checkpoints; the last round has one in any case.
        keep: checkpoints that stay, the newest.
        optimizers: whether the members' optimisers are in them, so that a run that is resumed gives the same bits.
    """

    dir: str = ""
    every: int = 10
    keep: int = 3
    optimizers: bool = True

    title: ClassVar[str] = "checkpoints"
    keys: ClassVar[Mapping[str, Kind]] = {
        "dir": text("a directory"),
        "every": whole(1, 10**9),
        "keep": whole(1, 10**6),
        "optimizers": BOOLEAN,
    }


@dataclass(frozen=True, slots=True)
class EvalSection(Section):
    """Evaluations: the loss on samples that are held out.

    Attributes:
        every: rounds between two evaluations; 0 for none.
        samples: held-out samples of an evaluation, at most.
    """

    every: int = 5
    samples: int = 256

    title: ClassVar[str] = "eval"
    keys: ClassVar[Mapping[str, Kind]] = {
        "every": whole(0, 10**9),
        "samples": whole(1, 10**9),
    }


@dataclass(frozen=True, slots=True)
class TrackSection(Section):
    """Trackers that figures of the run go to, besides metrics.jsonl.

    Attributes:
        to: trackers, as `accelerate` knows them.
    """

    to: tuple[str, ...] = ()

    title: ClassVar[str] = "track"
    keys: ClassVar[Mapping[str, Kind]] = {
        "to": array(
            one_of(*TRACKERS),
            f"an array of {', '.join(TRACKERS)}, each once at most",
            fits=lambda values: len(set(values)) == len(values),
        ),
    }


def _steps(value: float, num_steps: int) -> int:
    """Steps, or below 1 a share of `num_steps`."""
    return math.ceil(value * num_steps) if value < 1 else int(value)
