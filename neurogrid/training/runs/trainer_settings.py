"""Settings of a trainer: the model, its own optimiser, and what it may use. Plain data, checked, as JSON and back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.runs.run_file.sections import CAUSAL_LM, IMAGE_CLASSIFICATION

__all__ = ["FileRange", "TrainerSettings"]

_KINDS: Final = (CAUSAL_LM, IMAGE_CLASSIFICATION)
_MAX_STEPS: Final = 2**40
_MAX_THREADS: Final = 4096
_MAX_CONFIG_CHARS: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """All that a trainer needs to know before it begins.

    Attributes:
        kind: "causal-lm" or "image-classification".
        config: JSON of transformers' config.
        seed: of the initial weights, where they come from no checkpoint.
        inner: the inner optimiser, and how a batch is computed; its batches are those that are given.
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
    inner: InnerSection = field(default_factory=InnerSection)
    total_steps: int = 1000
    device: str = "cpu"
    threads: int = 1
    memory_limit: int = 0

    def __post_init__(self) -> None:
        _check("kind", self.kind, self.kind in _KINDS, " or ".join(map(repr, _KINDS)))
        fits = 0 < len(self.config) <= _MAX_CONFIG_CHARS
        _check("config", f"{len(self.config)} characters", fits, "a config.json of at most 1 MiB")
        _whole("seed", self.seed, 0, 2**63 - 1)
        _whole("total_steps", self.total_steps, 1, _MAX_STEPS)
        _whole("threads", self.threads, 0, _MAX_THREADS)
        _whole("memory_limit", self.memory_limit, 0, 2**63 - 1)

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
            return cls(**{**told, "inner": InnerSection(**told["inner"])})
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
        """Samples of the range."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.path}, samples {self.start} to {self.stop - 1}"


def as_fields(value: FileRange) -> list[Any]:
    """A range as it goes to the child."""
    return [str(value.path), value.start, value.stop]


def from_fields(fields: list[Any]) -> FileRange:
    """Read a range from what `as_fields` gave."""
    return FileRange(Path(fields[0]), fields[1], fields[2])


def _whole(name: str, value: object, least: int, most: int) -> None:
    fits = type(value) is int and least <= value <= most
    _check(name, value, fits, f"a whole number from {least} to {most}")


def _check(name: str, value: object, fits: bool, wanted: str) -> None:
    if not fits:
        raise ConfigurationError(f"{name} is {wanted}, not {str(value)[:60]!r}")
