"""Deadlines of the steps of chains, and of what members load before: how long each may stand still. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["StepDeadline", "StepDeadlines"]

# A step may stand still for so many times what the longest has taken, and for so many seconds at least.
_LONGEST_STEPS: Final = 10.0
_LEAST_SECONDS: Final = 120.0


class StepDeadline:
    """The deadline of one step: each operation that its members come further moves it on.

    Or of what they load before: each piece is an operation then.

    Attributes:
        seconds: for which the step may stand still.
        at: when it has stood still for too long, on the clock of `now`.
    """

    def __init__(self, now: float, seconds: float, num_operations: int) -> None:
        """A step begins.

        Args:
            num_operations: that its members have to do in all. It is moved on as often at most, whatever they tell.
        """
        self.seconds = seconds
        self.at = now + seconds
        self._left = num_operations
        self._done: Mapping[str, int] = {}

    def look(self, now: float, done: Mapping[str, int]) -> None:
        """Move the deadline on where a member has done more than at the look before.

        Args:
            done: operations of each member; of those that have told of none, nothing.
        """
        if self._left > 0 and any(num > self._done.get(peer, 0) for peer, num in done.items()):
            self._left -= 1
            self.at = now + self.seconds
        self._done = dict(done)


class StepDeadlines:
    """Deadlines by what is known of steps: what the longest took, and what was not enough.

    Members whose step was given up have twice as long in the next, until one is made: else no chain would ever make a
    step whose micro-batches take each member longer than the shortest deadline.
    """

    def __init__(self, least: float = _LEAST_SECONDS) -> None:
        self._least = least
        self._longest = 0.0
        self._needed: dict[str, float] = {}

    def begin(self, now: float, peers: Sequence[str], num_operations: int) -> StepDeadline:
        """A step of these members begins."""
        needed = max(self._needed.get(peer, 0.0) for peer in peers)
        seconds = max(self._least, _LONGEST_STEPS * self._longest, needed)
        return StepDeadline(now, seconds, num_operations)

    def made(self, peers: Sequence[str], seconds: float) -> None:
        """These have made a step, which took so long."""
        self._longest = max(self._longest, seconds)
        for peer in peers:
            self._needed.pop(peer, None)

    def ran_out(self, peers: Sequence[str], deadline: StepDeadline) -> None:
        """A step of these was given up."""
        for peer in peers:
            self._needed[peer] = 2 * deadline.seconds
