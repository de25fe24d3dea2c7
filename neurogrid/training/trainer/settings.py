"""What a trainer is told: the model, its own optimiser, and what it may use. Plain data, checked, as JSON and back."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from neurogrid.errors import ConfigurationError

__all__ = ["FileRange", "InnerSettings", "KINDS", "TrainerSettings"]

KINDS: Final = ("causal-lm", "image-classification")
OPTIMIZERS: Final = ("adamw", "sgd")
PRECISIONS: Final = ("float32", "bfloat16")
_SCHEDULES: Final = ("cosine", "linear", "constant", "wsd")
_MAX_STEPS: Final = 2**40
_MAX_SAMPLES: Final = 2**20
_MAX_THREADS: Final = 4096
_MAX_CONFIG_CHARS: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class InnerSettings:
    """The inner optimiser, and how a batch is computed.

    Attributes:
        optimizer: "adamw" or "sgd".
        lr: greatest learning rate.
        betas, eps: of "adamw".
        weight_decay: of both, on all parameters.
        momentum: of "sgd".
        schedule: of the learning rate: "cosine", "linear", "constant" or "wsd" (warm-up, stable, decay).
        warmup: steps from 0 up to `lr`.
        decay: steps at the end, of "wsd" alone.
        batch_tokens, batch_samples: of each step; the trainer computes the batches that it is given.
        precision: what products are computed in; weights, gradients and optimiser are float32.
        clip: the greatest norm of all gradients together; 0 for no bound.
        micro_batch: samples that are computed at once; 0 for as many as fit into memory.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    optimizer: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    schedule: str = "cosine"
    warmup: int = 0
    decay: int = 0
    batch_tokens: int = 4096
    batch_samples: int = 0
    precision: str = "float32"
    clip: float = 1.0
    micro_batch: int = 0

    def __post_init__(self) -> None:
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("schedule", self.schedule, _SCHEDULES)
        _one_of("precision", self.precision, PRECISIONS)
        _check("lr", self.lr, _is_number(self.lr) and self.lr > 0, "a number above 0")
        fits = len(self.betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in self.betas)
        _check("betas", self.betas, fits, "two numbers from 0 to less than 1")
        _check("eps", self.eps, _is_number(self.eps) and self.eps > 0, "a number above 0")
        fits = _is_number(self.momentum) and 0 <= self.momentum < 1
        _check("momentum", self.momentum, fits, "from 0 to less than 1")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            _check(name, value, _is_number(value) and value >= 0, "a number of at least 0")
        for name in ("warmup", "decay", "batch_tokens"):
            _whole(name, getattr(self, name), 0, _MAX_STEPS)
        for name in ("batch_samples", "micro_batch"):
            _whole(name, getattr(self, name), 0, _MAX_SAMPLES)


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """All that a trainer needs to know before it begins.

    Attributes:
        kind: "causal-lm" or "image-classification".
        config: JSON of transformers' config.
        seed: of the initial weights, where they come from no checkpoint.
        inner: the inner optimiser.
        total_steps: of the whole run, for the schedule; later steps have the rate of the last one.
        device: of torch: "cpu", "cuda", "cuda:1".
        threads: of torch, on the CPU; 0 for torch's own choice.
        memory_limit: bytes that the process may have, or of the device's memory where that is no CPU; 0 for what is
            free.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    kind: str
    config: str
    seed: int = 0
    inner: InnerSettings = field(default_factory=InnerSettings)
    total_steps: int = 1000
    device: str = "cpu"
    threads: int = 1
    memory_limit: int = 0

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, KINDS)
        fits = 0 < len(self.config) <= _MAX_CONFIG_CHARS
        _check("config", f"{len(self.config)} characters", fits, "a config.json of at most 1 MiB")
        _whole("seed", self.seed, 0, 2**63 - 1)
        _whole("total_steps", self.total_steps, 1, _MAX_STEPS)
        _whole("threads", self.threads, 0, _MAX_THREADS)
        _whole("memory_limit", self.memory_limit, 0, 2**63 - 1)
        if self.inner.warmup + self.inner.decay > self.total_steps:
            raise ConfigurationError(
                f"{self.inner.warmup} steps of warm-up and {self.inner.decay} of decay do not fit into the "
                f"{self.total_steps} steps of the run"
            )
        if (self.inner.schedule == "wsd") != (self.inner.decay > 0):
            raise ConfigurationError(
                f"decay is {self.inner.decay} and the schedule {self.inner.schedule!r}: steps of decay belong to "
                "'wsd', which has at least 1"
            )

    def text(self) -> str:
        """The same as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> TrainerSettings:
        """Read what `text` gave.

        Raises:
            ConfigurationError: it is something else.
        """
        try:
            told: Any = json.loads(text)
            inner = told.pop("inner")
            first, second = inner.pop("betas")
            return cls(**told, inner=InnerSettings(**inner, betas=(first, second)))
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise ConfigurationError(f"these are no settings of a trainer: {text[:100]!r}") from exc


@dataclass(frozen=True, slots=True)
class FileRange:
    """Some samples of a slice.

    Attributes:
        path: the slice, a file of safetensors.
        start, stop: its samples from `start` to before `stop`.
    """

    path: Path
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"samples {self.start} to {self.stop} of {self.path} are none")

    @property
    def num_samples(self) -> int:
        """How many."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.path}, samples {self.start} to {self.stop - 1}"


def as_fields(value: FileRange) -> list[Any]:
    """A range as it goes to the child."""
    return [str(value.path), value.start, value.stop]


def from_fields(fields: list[Any]) -> FileRange:
    """What `as_fields` gave."""
    return FileRange(Path(fields[0]), fields[1], fields[2])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(name: str, value: object, least: int, most: int) -> None:
    fits = type(value) is int and least <= value <= most
    _check(name, value, fits, f"a whole number from {least} to {most}")


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    _check(name, value, value in known, " or ".join(map(repr, known)))


def _check(name: str, value: object, fits: bool, wanted: str) -> None:
    if not fits:
        raise ConfigurationError(f"{name} is {wanted}, not {str(value)[:60]!r}")
