"""Settings of the learner of a stage: its layers, the optimiser, and what it may use. Plain data, checked, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.runs.run_file.stage_sections import (
    MAX_RANK,
    MAX_SUBSPACE,
    AdapterSection,
)

__all__ = ["StageSettings"]

_MAX_LAYERS: Final = 2**16
_MAX_STEPS: Final = 2**40
_MAX_THREADS: Final = 4096
_MAX_CONFIG_CHARS: Final = 1024 * 1024
_MAX_DEVICE_CHARS: Final = 64
_MAX_OUTER_LR: Final = 100.0


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Settings of the learner of a stage: all that it needs to know before it begins.

    Attributes:
        config: JSON of transformers' config, of the whole model.
        start, stop: the layers of the stage, from `start` to before `stop`.
        inner: the optimiser, and how a batch is computed; its batches are those that are given.
        adapter: what learns in the place of the weights.
        total_steps: of the whole run, for the schedule; later steps have the rate of the last one.
        seed: of what is dropped at random, and of new adapters.
        device: of torch: "cpu", "cuda", "cuda:1".
        threads: of torch, on the CPU; 0 for torch's own choice.
        memory_limit: bytes that the process may have, or of the device's memory where that is no CPU; 0 for what is
            free.
        recompute: whether forward passes are computed again in the backward pass, for less memory.
        quantization: JSON of what of the layers comes as codes, as `Quantization.record` gives it; with an adapter
            alone. Empty for nothing.
        power_sgd: the rank that gradients go to the other members of the stage at; 0 for as they are.
        subspace: dimensions of the subspace that hidden states between stages are kept in; without an adapter alone. 0
            for whole ones.
        outer_lr, outer_momentum: of the step that replicas make together in each round; a rate of 0 for a chain alone.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    config: str
    start: int
    stop: int
    inner: InnerSection = field(default_factory=InnerSection)
    adapter: AdapterSection = field(default_factory=AdapterSection)
    total_steps: int = 1000
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    memory_limit: int = 0
    recompute: bool = False
    quantization: str = ""
    power_sgd: int = 0
    subspace: int = 0
    outer_lr: float = 0.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        fits = 0 < len(self.config) <= _MAX_CONFIG_CHARS
        _check("config", f"{len(self.config)} characters", fits, "a config.json of at most 1 MiB")
        _whole("stop", self.stop, 1, _MAX_LAYERS)
        _whole("start", self.start, 0, self.stop - 1)
        _whole("total_steps", self.total_steps, 1, _MAX_STEPS)
        _whole("seed", self.seed, 0, 2**63 - 1)
        fits = isinstance(self.device, str) and 0 < len(self.device) <= _MAX_DEVICE_CHARS
        _check("device", self.device, fits, "a device of torch")
        _whole("threads", self.threads, 0, _MAX_THREADS)
        _whole("memory_limit", self.memory_limit, 0, 2**63 - 1)
        _check("recompute", self.recompute, type(self.recompute) is bool, "true or false")
        fits = isinstance(self.quantization, str) and len(self.quantization) <= _MAX_CONFIG_CHARS
        fits = fits and bool(self.adapter.r or not self.quantization)
        _whole("power_sgd", self.power_sgd, 0, MAX_RANK)
        _real("outer_lr", self.outer_lr, _MAX_OUTER_LR)
        _real("outer_momentum", self.outer_momentum, 1.0)
        _check("quantization", self.quantization, fits, "JSON of at most 1 MiB, with an adapter")
        _whole("subspace", self.subspace, 0, 0 if self.adapter.r else MAX_SUBSPACE)

    def text(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> StageSettings:
        """Read what `text` gave.

        Raises:
            ConfigurationError: it is something else.
        """
        try:
            told: Any = json.loads(text)
            inner, adapter = InnerSection(**told["inner"]), AdapterSection(**told["adapter"])
            return cls(**{**told, "inner": inner, "adapter": adapter})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            raise ConfigurationError(f"these are no settings of a stage: {text[:100]!r}") from exc


def _whole(name: str, value: object, least: int, most: int) -> None:
    fits = type(value) is int and least <= value <= most
    _check(name, value, fits, f"a whole number from {least} to {most}")


def _real(name: str, value: object, most: float) -> None:
    fits = isinstance(value, float) and 0 <= value <= most
    _check(name, value, fits, f"a number from 0 to {most:g}")


def _check(name: str, value: object, fits: bool, wanted: str) -> None:
    if not fits:
        raise ConfigurationError(f"{name} is {wanted}, not {str(value)[:60]!r}")
