"""Sessions in turns: as many micro-batches as a chain has stages, so that each of its stages has one to compute.

If all sessions go in one batch, one stage computes and the others wait. In micro-batches each stage has one while the
others have theirs. Every one of them reads the weights anew, which is all that few rows cost: so none is small.

They are made where the tokens are chosen, the one place that all sessions of a coordinator come through. Workers run
together what comes together (burst.py), so each starts a while after the one before: two that a worker did run
together, since both waited there, come apart again.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from neurogrid.model.stages.stage import MAX_ROWS

__all__ = ["MicroBatch", "MicroBatches"]

# What a batch is split into has so many rows at least, and is joined again when it has fewer than this.
MIN_ROWS, FEW_ROWS = 4, 2
# A session that did not come when waited for is waited for again after so many steps of its batch, then twice as many.
MIN_PAUSE, MAX_PAUSE = 16, 1024
# One starts so much of its share of a way around after another: more than a worker waits for the end of a burst.
SPACING = 0.7


class MicroBatch:
    """Sessions that go through the stages together.

    Args:
        peer_ids: of the stages.
        beside: all that take turns there, in a list that holds this one, too.

    Attributes:
        peer_ids: as given.
        sessions: all of them, whether they have something to send or not.
        started: when its last step began, in seconds.
    """

    def __init__(self, peer_ids: tuple[str, ...], beside: Sequence[MicroBatch]) -> None:
        self.peer_ids = peer_ids
        self.sessions: list[Hashable] = []
        self.started = -math.inf
        self._beside = beside
        self._pause = MIN_PAUSE
        self._steps_left = 0

    @property
    def is_gathering(self) -> bool:
        """Whether the waiting sessions should wait for the others to come around, so that all go on together."""
        return self._steps_left == 0

    def changed(self) -> None:
        """Others are in it now."""
        self._pause, self._steps_left = MIN_PAUSE, 0

    @property
    def others_started(self) -> float:
        """When the last step of another began, in seconds; minus infinity if none did."""
        return max((each.started for each in self._beside if each is not self), default=-math.inf)

    def spacing(self, away: float) -> float:
        """Seconds to leave between its step and one of another, for a way around of so many."""
        return SPACING * away / len(self._beside)

    def starts(self, now: float, *, is_whole: bool) -> None:
        """Note that a step of the waiting sessions begins, which are all of it or not."""
        self.started = now
        if is_whole:
            self.changed()
        elif self._steps_left:
            self._steps_left -= 1
        else:
            self._steps_left, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE)


class MicroBatches:
    """Which sessions go together, by the peers that their stages are on."""

    def __init__(self) -> None:
        self._batches: dict[tuple[str, ...], list[MicroBatch]] = {}
        self._of: dict[Hashable, MicroBatch] = {}

    def of(self, session: Hashable) -> MicroBatch:
        """The one that a session is in.

        Raises:
            KeyError: it has not joined.
        """
        return self._of[session]

    def join(self, session: Hashable, peer_ids: Sequence[str]) -> None:
        """A session decodes over stages on these peers, in this order; it may have been on others before."""
        peer_ids, batch = tuple(peer_ids), self._of.get(session)
        if batch is not None and batch.peer_ids == peer_ids:
            return
        self.leave(session)
        batches = self._batches.setdefault(peer_ids, [])
        if not batches:
            batches.append(MicroBatch(peer_ids, batches))
        self._put(session, min(batches, key=_size))
        self._balance(peer_ids)

    def leave(self, session: Hashable) -> None:
        """A session is over, if it was there."""
        batch = self._of.pop(session, None)
        if batch is not None:
            batch.sessions.remove(session)
            self._balance(batch.peer_ids)

    def _put(self, session: Hashable, batch: MicroBatch) -> None:
        self._of[session] = batch
        batch.sessions.append(session)
        batch.changed()

    def _balance(self, peer_ids: tuple[str, ...]) -> None:
        """Have as many batches as are due, of equal sizes, and move as few sessions as that takes."""
        batches = self._batches[peer_ids]
        num_sessions = sum(map(_size, batches))
        if not num_sessions:
            del self._batches[peer_ids]
            return
        due = max(min(len(peer_ids), num_sessions // MIN_ROWS), -(-num_sessions // MAX_ROWS))
        while len(batches) < due:
            batches.append(MicroBatch(peer_ids, batches))
        while len(batches) > max(due, 1) and num_sessions < FEW_ROWS * len(batches):
            dissolved = min(batches, key=_size)
            batches.remove(dissolved)
            for session in dissolved.sessions:
                self._put(session, min(batches, key=_size))
        while True:
            largest, smallest = max(batches, key=_size), min(batches, key=_size)
            if _size(largest) - _size(smallest) <= 1:
                return
            self._put(largest.sessions.pop(), smallest)


def _size(batch: MicroBatch) -> int:
    return len(batch.sessions)
