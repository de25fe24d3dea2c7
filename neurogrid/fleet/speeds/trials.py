"""Trials of members that were found slow, and compute nothing since.

A member without a stage takes no steps to be judged by (`drift`), so that a worker that was slow for a minute would
stay unused for as long as it is there. It is tried instead. One that is still slow, or slow again, is tried after twice
the time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Final

from neurogrid.fleet.member import Member
from neurogrid.fleet.speeds.drift import Steps

__all__ = ["FIRST_DELAY", "MAX_DELAY", "TrialTimes", "Trials"]

# Until a member that was found slow is tried for the first time; each time it is found slow again doubles it, unless
# it was fast for longer than the longest. Seconds.
FIRST_DELAY: Final = 60.0
MAX_DELAY: Final = 1800.0


class TrialTimes:
    """Times at which members are due for a trial. Pure: they are given, in seconds of a clock that never goes back."""

    def __init__(self) -> None:
        self._delays: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._fast_since: dict[str, float] = {}

    def found_slow(self, peer_id: str, now: float) -> None:
        """A member was found slow, for the first time or again: it is due later."""
        was_fast_for = now - self._fast_since.pop(peer_id, now)
        before = self._delays.get(peer_id, 0.0) if was_fast_for <= MAX_DELAY else 0.0
        delay = self._delays[peer_id] = min(max(2 * before, FIRST_DELAY), MAX_DELAY)
        self._due[peer_id] = now + delay

    def found_fast(self, peer_id: str, now: float) -> None:
        """A member is as fast as it said again; how often it was not is remembered for a while."""
        self._due.pop(peer_id, None)
        if peer_id in self._delays:
            self._fast_since[peer_id] = now

    def is_due(self, peer_id: str, now: float) -> bool:
        """Whether it may be tried: it was found slow, and that is long enough ago."""
        return now >= self._due.get(peer_id, math.inf)

    def forget(self, peer_id: str) -> None:
        """The peer id is that of a new member."""
        for times in (self._delays, self._due, self._fast_since):
            times.pop(peer_id, None)


class Trials(ABC):
    """Trials of members that no session goes through.

    Attributes:
        times: when a member is due.
    """

    def __init__(self) -> None:
        self.times = TrialTimes()

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether a member is being tried."""

    @abstractmethod
    async def run(self, member: Member) -> Steps | None:
        """Have a member that no session goes through compute tokens one by one, through all its layers.

        Returns:
            The steps that it took; none if it did not get through in time. None where it was not tried: it does not
            do it, or was needed meanwhile.
        """

    @abstractmethod
    async def give_way(self, peer_ids: Collection[str]) -> None:
        """Give up the trial of a member that is needed; when this returns, it takes up no room there any more."""
