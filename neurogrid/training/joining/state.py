"""States of peers that want to take part in a run, as data. What comes next is decided in `machine`. Pure.

Source: protocol_spec/training/joining.md, "States".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from neurogrid.training.joining.records import Ban

__all__ = [
    "Banned",
    "BeganTrial",
    "Became",
    "JoinRules",
    "JoinState",
    "Member",
    "Outcome",
    "Refused",
    "RefusedFor",
    "Spent",
    "Trial",
    "Waiter",
    "Waits",
]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class RefusedFor(StrEnum):
    """The reason why a peer may not take part at the moment."""

    BANNED = "banned"
    TOO_SOON = "too soon"
    WRONG_RUN = "wrong run"
    NOT_YET = "not yet"
    EXPIRED = "expired"
    USED_UP = "used up"
    FULL = "full"
    NOT_FOUND_RIGHT = "not found right in time"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class JoinRules:
    """Rules of a run about peers that join. Times in seconds.

    Attributes:
        max_members: members and peers on trial, together.
        max_trials, max_waiting: on trial, and waiting for that, at once.
        wait_seconds: that a peer waits.
        trial_seconds, trial_rounds: of a trial, and rounds to be found right in it.
        max_starts, window_seconds: trials that may begin in any such time, of all peers together.
        retry_seconds: between a refusal and the next try.
        ban_seconds: of a ban; None for as long as the run lasts.
    """

    max_members: int
    max_trials: int = 8
    max_waiting: int = 64
    wait_seconds: float = 600.0
    trial_seconds: float = 1800.0
    trial_rounds: int = 1
    max_starts: int = 30
    window_seconds: float = 3600.0
    retry_seconds: float = 300.0
    ban_seconds: float | None = None

    def __post_init__(self) -> None:
        counts = self.max_members, self.max_trials, self.trial_rounds, self.max_starts
        spans = self.wait_seconds, self.trial_seconds, self.window_seconds, self.retry_seconds
        if min(counts) < 1 or self.max_waiting < 0 or min(spans) <= 0:
            raise ValueError("rules of joining count from 1, and their times are above 0")
        if self.ban_seconds is not None and self.ban_seconds < 1:
            raise ValueError("a ban lasts a second at least")


@dataclass(frozen=True, slots=True)
class Waiter:
    """A peer that waits for its trial.

    Attributes:
        until: when it is refused.
        serial: of the invitation that it came by.
        max_uses: of that: one is spent when the trial begins; 0 for any number.
    """

    until: float
    serial: int = 0
    max_uses: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """A peer that takes part at weight zero.

    Attributes:
        until: when it is refused, if it was not found right.
        after_round: the last round that was decided before: those up to it are none of its trial.
        num_right: rounds of its that were found right.
        last_right: the last of these; 0 for none.
    """

    until: float
    after_round: int
    num_right: int = 0
    last_right: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """A peer that counts.

    Attributes:
        since_round: the last round that was decided before it counted.
    """

    since_round: int


@dataclass(frozen=True, slots=True)
class JoinState:
    """State of all peers at the leader of a run.

    Attributes:
        round: the last that was decided.
        waiting: by peer id, in the order in which they came.
        trials: the same of those on trial.
        members: of those that count.
        admitted: peers that counted before the leader came back, and have not come since: they take no place.
        bans: of each peer that was banned the newest, also one that is over.
        refused: of peers that were refused lately, until when they may not try again.
        starts: when trials began, within the window.
        uses: peers that have come by an invitation with a limit, by its serial; they stay when those leave.
        num_bans: that were made.
    """

    round: int = 0
    waiting: Mapping[str, Waiter] = field(default_factory=dict)
    trials: Mapping[str, Trial] = field(default_factory=dict)
    members: Mapping[str, Member] = field(default_factory=dict)
    admitted: frozenset[str] = frozenset()
    bans: Mapping[str, Ban] = field(default_factory=dict)
    refused: Mapping[str, float] = field(default_factory=dict)
    starts: tuple[float, ...] = ()
    uses: Mapping[int, frozenset[str]] = field(default_factory=dict)
    num_bans: int = 0

    def counts(self, peer: str) -> bool:
        """Whether what a peer comes to has a weight; for all others it is zero."""
        return peer in self.members

    def takes_part(self, peer: str) -> bool:
        """Whether a peer is to be given work: as a member, or on trial."""
        return peer in self.members or peer in self.trials

    @property
    def num_inside(self) -> int:
        """Members and peers on trial."""
        return len(self.members) + len(self.trials)


# What comes of an event


@dataclass(frozen=True, slots=True)
class Waits:
    """A peer waits for its trial until then, at most."""

    peer: str
    until: float


@dataclass(frozen=True, slots=True)
class Spent:
    """A use of an invitation that has a limit of them is spent: to be written down before what comes of it is told."""

    peer: str
    serial: int


@dataclass(frozen=True, slots=True)
class BeganTrial:
    """A peer is on trial until then, at most."""

    peer: str
    until: float


@dataclass(frozen=True, slots=True)
class Became:
    """A peer is a member from now on.

    Attributes:
        is_back: it was one before its leader came back.
    """

    peer: str
    is_back: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A peer takes no part.

    Attributes:
        reason: why.
        retry_after: seconds after which it may try again; None for never, as it is banned for as long as the run lasts.
    """

    peer: str
    reason: RefusedFor
    retry_after: float | None


@dataclass(frozen=True, slots=True)
class Banned:
    """A peer may not take part any more: to be written down, and signed for others."""

    ban: Ban


Outcome = Waits | Spent | BeganTrial | Became | Refused | Banned


def without(mapping: Mapping[_Key, _Value], key: _Key) -> dict[_Key, _Value]:
    """The same without a key."""
    return {each: value for each, value in mapping.items() if each != key}
