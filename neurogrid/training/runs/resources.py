"""Resources that a leader asks for and workers offer, and the leases of them. Pure: the clock is handed in.

A worker keeps what it offers for half a second, in which the leader chooses among all offers. One that is taken is a
lease of ten seconds, which the leader renews when two thirds of it are over: a worker is free again soon after its
leader is gone, and three attempts to renew may be lost. Leases are counted by each side's own clock, the leader's from
when it asked and the worker's from when it answered, so that the leader never takes for its own what has ended.

Source: protocol_spec/training/runs.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.wire import ErrorCode

__all__ = [
    "LEASE_SECONDS",
    "OFFER_SECONDS",
    "Bid",
    "Lease",
    "LeaseBook",
    "LeaseTable",
    "Need",
    "Resources",
    "choose_offers",
    "lacking",
]

OFFER_SECONDS: Final = 0.5
"""Seconds for which a worker keeps what it offers."""

LEASE_SECONDS: Final = 10.0
"""Seconds of a lease."""

_RENEWED_AFTER: Final = 2 / 3
_ASKED_AGAIN_AFTER: Final = 1 / 12
# More of something than a member needs makes it faster, or bears a larger batch, up to here.
_MAX_SURPLUS: Final = 4.0
_GIB: Final = 1024**3


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a worker.

    Attributes:
        memory: bytes, of the GPU if it has one that is offered, else of the machine.
        storage: bytes on its disk.
        cores: of its CPU.
        gpu: the name of its GPU; empty for none.
    """

    memory: int = 0
    storage: int = 0
    cores: int = 0
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """Resources that a leader asks for.

    Attributes:
        memory, storage, cores: at least so much, as in `Resources`.
        gpu: whether a GPU is needed.
        price: the most that is paid; None for whatever is asked.
    """

    memory: int = 0
    storage: int = 0
    cores: int = 0
    gpu: bool = False
    price: float | None = None


@dataclass(frozen=True, slots=True)
class Bid:
    """Resources that a worker offers, and their price."""

    resources: Resources
    price: float = 0.0


def lacking(bid: Bid, need: Need) -> str:
    """The first need that an offer does not meet, in words; empty where it has all that is needed."""
    has = bid.resources
    if has.memory < need.memory:
        return (
            f"{need.memory:,} bytes of memory ({need.memory / _GIB:.2f} GiB) are needed, and {has.memory:,} "
            f"({has.memory / _GIB:.2f} GiB) are lent (--memory-limit)"
        )
    if has.storage < need.storage:
        return f"{need.storage / _GIB:.2f} GiB of storage are needed, {has.storage / _GIB:.2f} are free"
    if has.cores < need.cores:
        return f"{need.cores} cores are needed, {has.cores} are free"
    if need.gpu and not has.gpu:
        return "a GPU is needed, and none is free"
    if need.price is not None and bid.price > need.price:
        return f"at most {need.price:g} is paid, {bid.price:g} is asked"
    return ""


def choose_offers(
    bids: Mapping[str, Bid], need: Need, num_members: int | None = None
) -> tuple[str, ...]:
    """The workers whose offers are taken, the best first: those of the least price for what they are worth.

    Of several at one price, as where nothing is asked, those that are worth more come first, then those whose ids do.

    Args:
        num_members: how many are wanted at most; None for all that have what is needed.
    """
    fitting = [worker for worker, bid in bids.items() if not lacking(bid, need)]
    fitting.sort(
        key=lambda worker: (
            bids[worker].price / _worth(bids[worker].resources, need),
            -_worth(bids[worker].resources, need),
            worker,
        )
    )
    return tuple(fitting[:num_members])


def _worth(has: Resources, need: Need) -> float:
    """1 where it is just what is needed, more where there is more; a GPU is as much more as there can be."""
    ratios = [
        min(there / needed, _MAX_SURPLUS)
        for there, needed in (
            (has.memory, need.memory),
            (has.storage, need.storage),
            (has.cores, need.cores),
        )
        if needed
    ]
    ratios.append(_MAX_SURPLUS if has.gpu else 1.0)
    return sum(ratios) / len(ratios)


@dataclass(frozen=True, slots=True)
class Lease:
    """Resources that a worker keeps for a leader: an offer, and a lease once it is taken.

    Attributes:
        number: u64, from 1, drawn at random.
        leader: its peer id.
        run: the id of the run.
        need: what is kept.
        until: when it ends, by the worker's clock.
        is_taken: it was offered, and the leader has taken it.
    """

    number: int
    leader: str
    run: bytes
    need: Need
    until: float
    is_taken: bool = False


def _draw() -> int:
    return secrets.randbelow(2**64 - 1) + 1


class LeaseTable:
    """A worker's side: what it has offered, and to whom it is leased. One run at a time may train on it.

    Args:
        resources: all that may be leased; may be set anew as it changes.
        price: that is asked.
        draw: gives numbers of leases.
    """

    def __init__(
        self, resources: Resources, *, price: float = 0.0, draw: Callable[[], int] = _draw
    ) -> None:
        self.resources = resources
        self.price = price
        self._draw = draw
        self._leases: dict[int, Lease] = {}

    def running(self, now: float) -> Lease | None:
        """The lease that was taken; None where there is none."""
        return next((lease for lease in self._live(now) if lease.is_taken), None)

    def free(self, now: float) -> Resources:
        """Resources that are neither offered nor leased."""
        return self._free([lease.need for lease in self._live(now)])

    def offer(self, leader: str, run: bytes, need: Need, now: float) -> Lease:
        """Keep for a leader what it asks for, until `OFFER_SECONDS` from now.

        An offer to the same leader for the same run before this one ends. The leader of the run that trains here may
        ask again, as when it was started again: what it has counts as free.

        Raises:
            RequestRefusedError: another run trains here, or others were offered what is there (BUSY); or it was never
                there, or costs more (NOT_SUPPORTED).
        """
        self.expire(now)
        running = self.running(now)
        if running is not None and (running.leader, running.run) != (leader, run):
            raise self._busy("another run trains here", LEASE_SECONDS)
        if reason := lacking(Bid(self.resources, self.price), need):
            raise RequestRefusedError(reason, code=ErrorCode.NOT_SUPPORTED, is_expected=True)
        others = [lease for lease in self._live(now) if (lease.leader, lease.run) != (leader, run)]
        if reason := lacking(Bid(self._free([each.need for each in others]), self.price), need):
            raise self._busy(f"{reason}: others were offered the rest", OFFER_SECONDS)
        self._leases = {
            number: lease
            for number, lease in self._leases.items()
            if lease.is_taken or (lease.leader, lease.run) != (leader, run)
        }
        number = self._draw()
        while number in self._leases:
            number = self._draw()
        lease = Lease(number, leader, run, need, now + OFFER_SECONDS)
        self._leases[number] = lease
        return lease

    def take(self, leader: str, run: bytes, number: int, now: float) -> Lease:
        """A leader takes what it was offered: it has it for `LEASE_SECONDS` from now. Offers to others end.

        To take it twice is to renew it. A lease of the same run that was taken before ends.

        Raises:
            RequestRefusedError: another run trains here (BUSY), or there is no such offer to that leader, any more
                (UNAUTHORIZED).
        """
        running = self.running(now)
        if running is not None and (running.leader, running.run) != (leader, run):
            raise self._busy("another run trains here", LEASE_SECONDS)
        lease = self._find(leader, run, number, now)
        lease = replace(lease, until=now + LEASE_SECONDS, is_taken=True)
        self._leases = {number: lease}
        return lease

    def renew(self, leader: str, run: bytes, number: int, now: float) -> Lease:
        """A leader needs it for longer: `LEASE_SECONDS` from now.

        Raises:
            RequestRefusedError: there is no such lease of that leader, any more (UNAUTHORIZED).
        """
        lease = self._find(leader, run, number, now)
        if not lease.is_taken:
            raise self._unknown(number)
        lease = replace(lease, until=now + LEASE_SECONDS)
        self._leases[number] = lease
        return lease

    def release(self, leader: str, run: bytes) -> Lease | None:
        """A leader needs nothing more for a run; returns the lease that it had taken."""
        ended = [
            lease for lease in self._leases.values() if (lease.leader, lease.run) == (leader, run)
        ]
        for lease in ended:
            del self._leases[lease.number]
        return next((lease for lease in ended if lease.is_taken), None)

    def hand_over(self, leader: str, other: str, run: bytes) -> None:
        """Give the offers and leases of a leader for a run to another leader."""
        for number, lease in list(self._leases.items()):
            if (lease.leader, lease.run) == (leader, run):
                self._leases[number] = replace(lease, leader=other)

    def expire(self, now: float) -> tuple[Lease, ...]:
        """Forget what has ended by its time, and return it."""
        ended = tuple(lease for lease in self._leases.values() if lease.until <= now)
        for lease in ended:
            del self._leases[lease.number]
        return ended

    def _live(self, now: float) -> list[Lease]:
        return [lease for lease in self._leases.values() if now < lease.until]

    def _free(self, kept: list[Need]) -> Resources:
        return Resources(
            memory=max(0, self.resources.memory - sum(each.memory for each in kept)),
            storage=max(0, self.resources.storage - sum(each.storage for each in kept)),
            cores=max(0, self.resources.cores - sum(each.cores for each in kept)),
            gpu="" if any(each.gpu for each in kept) else self.resources.gpu,
        )

    def _find(self, leader: str, run: bytes, number: int, now: float) -> Lease:
        lease = self._leases.get(number)
        if lease is None or now >= lease.until or (lease.leader, lease.run) != (leader, run):
            raise self._unknown(number)
        return lease

    @staticmethod
    def _busy(reason: str, retry_after: float) -> RequestRefusedError:
        return RequestRefusedError(
            reason, code=ErrorCode.BUSY, retry_after=retry_after, is_expected=True
        )

    @staticmethod
    def _unknown(number: int) -> RequestRefusedError:
        return RequestRefusedError(
            f"lease {number} has ended, or never was the sender's: ask for another",
            code=ErrorCode.UNAUTHORIZED,
            is_expected=True,
        )


@dataclass(slots=True)
class _Granted:
    number: int
    until: float
    renew_at: float


class LeaseBook:
    """A leader's side: the leases that it has, and when each is to be renewed."""

    def __init__(self) -> None:
        self._granted: dict[str, _Granted] = {}

    def granted(self, member: str, number: int, seconds: float, *, asked_at: float) -> None:
        """A worker has answered that a lease lasts so long; of another lease of it there was, that is the end.

        Args:
            asked_at: when the leader had asked.
        """
        self._granted[member] = _Granted(
            number, asked_at + seconds, asked_at + _RENEWED_AFTER * seconds
        )

    def renewed(self, member: str, number: int, seconds: float, *, asked_at: float) -> None:
        """The same of a lease that is renewed. An answer that was overtaken, or of another lease, changes nothing."""
        lease = self._granted.get(member)
        if lease is not None and lease.number == number and lease.until < asked_at + seconds:
            self.granted(member, number, seconds, asked_at=asked_at)

    def due(self, now: float) -> tuple[tuple[str, int], ...]:
        """Members whose leases are to be renewed now, each with the number of its lease; not again at once."""
        found = []
        for member, lease in self._granted.items():
            if lease.renew_at <= now < lease.until:
                lease.renew_at = now + _ASKED_AGAIN_AFTER * LEASE_SECONDS
                found.append((member, lease.number))
        return tuple(found)

    def number(self, member: str, now: float) -> int | None:
        """The lease of a member; None where it has none, or that has ended."""
        lease = self._granted.get(member)
        return lease.number if lease is not None and now < lease.until else None

    def left(self, member: str, now: float) -> float | None:
        """Seconds until the lease of a member ends; None where it has none."""
        lease = self._granted.get(member)
        return lease.until - now if lease is not None and now < lease.until else None

    def drop(self, member: str) -> None:
        """A member is needed no more, or is lost."""
        self._granted.pop(member, None)

    def expire(self, now: float) -> tuple[str, ...]:
        """Forget the leases that have ended, and return whose they were."""
        ended = tuple(member for member, lease in self._granted.items() if lease.until <= now)
        for member in ended:
            del self._granted[member]
        return ended
