"""Sessions in turns: as many micro-batches as a chain has stages, so that each of its stages has one to compute.

If all sessions go in one batch, one stage computes and the others wait. In micro-batches each stage has one while the
others have theirs. Every one of them reads the weights anew, which is all that few rows cost: so none is small.

A micro-batch goes around as one: it leaves for the stages with all of its sessions that have a token to send, under a
number that tells the workers what belongs together (protocol_spec/sessions.md, "Batches"), and nobody leaves while
others are on their way, or come back to no choice. Only those whose tokens are with their readers are waited for by the
clock: a reader may take its time. Pure: times are given.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import Final

from neurogrid.model.stages.stage import MAX_ROWS

__all__ = ["MicroBatches"]

# What a micro-batch is split into has so many sessions at least, and is joined again when it has fewer than this.
MIN_ROWS: Final = 4
FEW_ROWS: Final = 2
# So long after the last of the others a token that is with its reader is waited for. Seconds.
PATIENCE: Final = 0.005
# A reader that let others wait in vain is waited for again after so many rounds, then twice as many.
MIN_PAUSE: Final = 16
MAX_PAUSE: Final = 1024


class _Place(Enum):
    HERE = auto()  # it has a token to send
    AWAY = auto()  # in the stages
    BACK = auto()  # its next token is being chosen
    OUT = auto()  # its token is with its reader


@dataclass(eq=False, slots=True)
class _Member:
    """A session.

    Attributes:
        session: which.
        pause: rounds for which it is not waited for when it lets others wait once more.
        paused: of these, what is left.
        batch: number and size of the batch that it is away with; empty where it is alone.
    """

    session: Hashable
    micro_batch: _MicroBatch
    place: _Place = _Place.OUT
    pause: int = MIN_PAUSE
    paused: int = 0
    batch: tuple[int, ...] = ()


class _MicroBatch:
    """Members that go through the stages on these peers together."""

    def __init__(self, peer_ids: tuple[str, ...]) -> None:
        self.peer_ids = peer_ids
        self.members: list[_Member] = []
        self.num_in: Counter[_Place] = Counter()
        self.num_awaited = 0  # those that are out and not paused
        self.changed_at = -math.inf

    @property
    def is_back(self) -> bool:
        """Whether none is in the stages any more."""
        return not self.num_in[_Place.AWAY]

    @property
    def leaves_at(self) -> float:
        """Time at which the micro-batch leaves if nothing else happens; -inf for at once, inf if something has to."""
        if not self.num_in[_Place.HERE] or self.num_in[_Place.AWAY] or self.num_in[_Place.BACK]:
            return math.inf
        return self.changed_at + PATIENCE if self.num_awaited else -math.inf

    def add(self, member: _Member) -> None:
        member.micro_batch = self
        self.members.append(member)
        self._count(member, 1)

    def remove(self, member: _Member) -> None:
        self.members.remove(member)
        self._count(member, -1)

    def move(self, member: _Member, place: _Place) -> None:
        self._count(member, -1)
        member.place = place
        self._count(member, 1)

    def _count(self, member: _Member, change: int) -> None:
        self.num_in[member.place] += change
        if member.place is _Place.OUT and not member.paused:
            self.num_awaited += change

    def leave(self, number: int) -> list[Hashable]:
        """Send off those that are here, and wait less often for those that are not; returns the sessions that left."""
        leaving = [member for member in self.members if member.place is _Place.HERE]
        for member in self.members:
            if member.place is _Place.HERE:
                member.batch = (number, len(leaving)) if len(leaving) > 1 else ()
                self.move(member, _Place.AWAY)
            elif member.paused:
                self._pause(member, member.paused - 1)
            else:
                self._pause(member, member.pause)
                member.pause = min(2 * member.pause, MAX_PAUSE)
        return [member.session for member in leaving]

    def _pause(self, member: _Member, rounds: int) -> None:
        self._count(member, -1)
        member.paused = rounds
        self._count(member, 1)


class MicroBatches:
    """The sessions that decode, by the peers that their stages are on.

    A session arrives, leaves, comes back, and has its token chosen, in this order and again; it may end at any time.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], list[_MicroBatch]] = {}
        self._members: dict[Hashable, _Member] = {}
        self._numbers = count(1)

    def __contains__(self, session: Hashable) -> bool:
        return session in self._members

    def arrived(self, session: Hashable, peer_ids: Sequence[str], now: float) -> None:
        """A session has a token to send over stages on these peers, in this order, be they others than before."""
        peer_ids, member = tuple(peer_ids), self._members.get(session)
        if member is None or member.micro_batch.peer_ids != peer_ids:
            self.ended(session)
            group = self._groups.setdefault(peer_ids, [])
            if not group:
                group.append(_MicroBatch(peer_ids))
            micro_batch = min(group, key=_size)
            member = self._members[session] = _Member(session, micro_batch)
            micro_batch.add(member)
            self._balance(peer_ids)
        if not member.paused:
            member.pause = MIN_PAUSE
        member.micro_batch.move(member, _Place.HERE)
        member.micro_batch.changed_at = now

    def leave(self, now: float) -> list[Hashable]:
        """Let all micro-batches leave that should by now; returns the sessions that did."""
        left: list[Hashable] = []
        for group in self._groups.values():
            for micro_batch in group:
                if micro_batch.leaves_at <= now:
                    left += micro_batch.leave(next(self._numbers))
        return left

    @property
    def leaves_at(self) -> float:
        """Time at which the next micro-batch leaves if nothing else happens; inf if something has to happen."""
        times = (batch.leaves_at for group in self._groups.values() for batch in group)
        return min(times, default=math.inf)

    def batch(self, session: Hashable) -> tuple[int, ...] | None:
        """Number and size of the batch that a session has left with, empty where it is alone; None before it leaves."""
        member = self._members[session]
        return member.batch if member.place is _Place.AWAY else None

    def came_back(self, session: Hashable) -> None:
        """A session comes out of the last stage."""
        member = self._members[session]
        member.micro_batch.move(member, _Place.BACK)

    def companions(self, session: Hashable) -> object:
        """The same object for all sessions that should have their tokens chosen together."""
        return self._members[session].micro_batch

    def is_back(self, session: Hashable) -> bool:
        """Whether all sessions that left together with this one are back, or have ended."""
        return self._members[session].micro_batch.is_back

    def chosen(self, session: Hashable, now: float) -> None:
        """The next token of a session goes to its reader."""
        member = self._members.get(session)
        if member is not None:
            member.micro_batch.move(member, _Place.OUT)
            member.micro_batch.changed_at = now

    def ended(self, session: Hashable) -> None:
        """A session is over, or goes another way, if it was there."""
        member = self._members.pop(session, None)
        if member is not None:
            member.micro_batch.remove(member)
            self._balance(member.micro_batch.peer_ids)

    def _balance(self, peer_ids: tuple[str, ...]) -> None:
        """Have as many micro-batches as are due, of equal sizes, and move as few sessions as that takes."""
        group = self._groups[peer_ids]
        num_sessions = sum(map(_size, group))
        if not num_sessions:
            del self._groups[peer_ids]
            return
        due = max(min(len(peer_ids), num_sessions // MIN_ROWS), -(-num_sessions // MAX_ROWS))
        while len(group) < due:
            group.append(_MicroBatch(peer_ids))
        while len(group) > max(due, 1) and num_sessions < FEW_ROWS * len(group):
            dissolved = min(group, key=_size)
            group.remove(dissolved)
            for member in list(dissolved.members):
                dissolved.remove(member)
                min(group, key=_size).add(member)
        while True:
            largest, smallest = max(group, key=_size), min(group, key=_size)
            if _size(largest) - _size(smallest) <= 1:
                return
            moved = largest.members[-1]
            largest.remove(moved)
            smallest.add(moved)


def _size(micro_batch: _MicroBatch) -> int:
    return len(micro_batch.members)
