"""The sections of a run file that are about witnessed runs: what members send of a round, and how long phases are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from neurogrid.training.runs.run_file.section import Section
from neurogrid.training.runs.run_file.values import BOOLEAN, Kind, number, whole

__all__ = ["MAX_EPOCH_BATCHES", "MAX_EPOCH_MEMBERS", "DistroSection", "EpochsSection"]

MAX_EPOCH_MEMBERS: Final = 128
"""Members of an epoch: each has a connection to each other."""

MAX_EPOCH_BATCHES: Final = 4096
"""Batches of a round, of all members together."""

_WEEK: Final = 7 * 86_400
_SECONDS: Final = number(
    f"of seconds, above 0 and at most {_WEEK}", lambda value: 0 < value <= _WEEK
)


@dataclass(frozen=True, slots=True)
class DistroSection(Section):
    """Coefficients that members send in a round with method "distro".

    Attributes:
        top_k: coefficients that are sent of a chunk.
        chunk: sides of a chunk, in elements, at most.
        one_bit: whether signs are sent in place of values.
        decay: what is left of the momentum after each round.
    """

    top_k: int = 8
    chunk: int = 64
    one_bit: bool = True
    decay: float = 0.999

    title: ClassVar[str] = "distro"
    keys: ClassVar[Mapping[str, Kind]] = {
        "top_k": whole(1, 4096),
        "chunk": whole(1, 256),
        "one_bit": BOOLEAN,
        "decay": number("from 0 to 1", lambda value: 0 <= value <= 1),
    }


@dataclass(frozen=True, slots=True)
class EpochsSection(Section):
    """The rounds between two changes of members with method "distro", and the phases of a round.

    Attributes:
        rounds: of an epoch of members.
        batches: of a round, of all members together; 0 for one a member.
        warmup: seconds, at most, in which members get the weights.
        train: seconds, at most, in which members train and send what came of it.
        witness: seconds, at most, in which witnesses say what they have.
        cooldown: seconds, at most, in which members offer the weights.
        witnesses: members of a round that say what they have; 0 for all.
    """

    rounds: int = 20
    batches: int = 0
    warmup: float = 300.0
    train: float = 300.0
    witness: float = 30.0
    cooldown: float = 300.0
    witnesses: int = 0

    title: ClassVar[str] = "epochs"
    keys: ClassVar[Mapping[str, Kind]] = {
        "rounds": whole(1, 1_000_000),
        "batches": whole(0, MAX_EPOCH_BATCHES),
        "warmup": _SECONDS,
        "train": _SECONDS,
        "witness": _SECONDS,
        "cooldown": _SECONDS,
        "witnesses": whole(0, MAX_EPOCH_MEMBERS),
    }
