"""The peers to ask for their records, and when: those that the DHT names, and members before their record expires.

Strategy: one table of peers, each with the time at which it is due; a single task sleeps until the first is. A peer
that fails is due again later and later; one that nobody names any more is forgotten.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from neurogrid.errors import NeuroGridError
from neurogrid.p2p.discovery.dht_reach import ask_anybody
from neurogrid.p2p.discovery.explanation import dial_outcome
from neurogrid.p2p.discovery.records import RecordRefusedError
from neurogrid.p2p.discovery.records_book import Acceptance, RecordBook
from neurogrid.p2p.discovery.records_exchange import RecordExchange
from neurogrid.p2p.discovery.sighting import Attempt, OnAttempt, OnSighting, Sighting
from neurogrid.p2p.hosts.host import Host
from neurogrid.renewed_event import RenewedEvent

__all__ = ["Members"]

logger = logging.getLogger(__name__)

# Peers that may be members: those that are, and some that were and are still named.
_MAX_CANDIDATES: Final = 2048
# Exchanges that we begin at once. Where many members start together, each pair of them dials: more handshakes at once
# only take longer, and in the end too long.
_MAX_ASKING: Final = 4
# Seconds until a peer that failed is asked again: the first time, and at most, if it is a member and if not. Servers
# name the dead for up to two days.
_FIRST_RETRY: Final = 1.0
_LAST_RETRY: Final = 60.0
_LAST_RETRY_OF_OTHERS: Final = 600.0
# Seconds after which a peer that fails is forgotten unless it is named again: some look-ups.
_FORGET_TIME: Final = 1200.0


@dataclass(slots=True)
class _Candidate:
    """A peer that may be a member, or is one.

    Attributes:
        addresses: where it was said to be.
        due: when to ask it, in trio's time.
        named_at: when it was named or heard of last, likewise.
        num_failures: in a row.
        is_asked: whether it is being asked now.
        is_outdated: whether what we say of ourselves has changed since we began to ask it.
    """

    addresses: tuple[str, ...]
    due: float
    named_at: float
    num_failures: int = 0
    is_asked: bool = False
    is_outdated: bool = False


class Members:
    """The members of one cluster: asked, kept, lost, reported.

    Args:
        host: where we ask from.
        book: decides what is believed.
        on_sighting: told of members found, moved and lost.
        on_attempt: told of each exchange that brought something new, and of each that failed.
        may_know: whether a peer id could be a member's; others are not asked.
    """

    def __init__(
        self,
        host: Host,
        book: RecordBook,
        *,
        on_sighting: OnSighting,
        on_attempt: OnAttempt,
        may_know: Callable[[str], bool] = lambda peer_id: True,
    ) -> None:
        self._host = host
        self._book = book
        self._on_sighting = on_sighting
        self._on_attempt = on_attempt
        self._may_know = may_know
        self._candidates: dict[str, _Candidate] = {}
        self._changed = RenewedEvent()
        self._limiter = trio.CapacityLimiter(_MAX_ASKING)

    def note_named(self, peer_id: str, addresses: Sequence[str]) -> bool:
        """The DHT says that a peer is a member; whether that is news."""
        now = trio.current_time()
        candidate = self._candidates.get(peer_id)
        if candidate is None:
            is_full = len(self._candidates) >= _MAX_CANDIDATES
            if peer_id == self._host.peer_id or is_full or not self._may_know(peer_id):
                return False
            self._candidates[peer_id] = _Candidate(tuple(addresses), now, now)
            self._changed.set()
            return True
        candidate.named_at = now
        if addresses and peer_id not in self._book.members:
            candidate.addresses = tuple(addresses)
        return False

    def note_connected(self, peer_id: str) -> None:
        """A peer is here: if it is one that we want to ask, now is the time."""
        candidate = self._candidates.get(peer_id)
        if candidate is not None and candidate.num_failures:
            candidate.due = trio.current_time()
            self._changed.set()

    def note_accepted(self, acceptance: Acceptance) -> None:
        """A member has told us its record, asked or not."""
        record = acceptance.record
        now = trio.current_time()
        candidate = self._candidates.setdefault(
            record.peer_id, _Candidate(record.addresses, now, now)
        )
        candidate.named_at = now
        candidate.addresses = record.addresses or candidate.addresses
        candidate.num_failures = 0
        # In the middle of what is left, and not all at once.
        wait = self._book.seconds_left(record) * random.uniform(0.4, 0.6)
        candidate.due = now + wait
        self._changed.set()
        if acceptance.is_new or acceptance.has_moved:
            self._on_sighting(Sighting(record.peer_id, record.addresses, "dht", role=record.role))
        if acceptance.is_new:
            text = f"record of {record.peer_id}"
            self._on_attempt(Attempt("dht", text, f"a {record.role}", True))
            logger.debug("%s is a member: %s", record.peer_id, record.role)

    def hurry(self) -> None:
        """Ask all peers that have failed again, at once."""
        for candidate in self._candidates.values():
            if candidate.num_failures:
                candidate.due = trio.current_time()
        self._changed.set()

    def tell_all(self) -> None:
        """Exchange records with every member at once: what we say of ourselves has changed."""
        for peer_id in self._book.members:
            if (candidate := self._candidates.get(peer_id)) is not None:
                candidate.due = trio.current_time()
                candidate.is_outdated = candidate.is_asked
        self._changed.set()

    async def run(self, exchange: RecordExchange) -> None:
        """Ask each peer that is due, and report each whose record has expired, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._report_lost()
                now = trio.current_time()
                for peer_id, candidate in self._candidates.items():
                    if candidate.due <= now and not candidate.is_asked:
                        candidate.is_asked = True
                        nursery.start_soon(self._ask, peer_id, candidate, exchange)
                with trio.move_on_after(self._seconds_to_next(now)):
                    await self._changed.wait()

    def _seconds_to_next(self, now: float) -> float:
        due = [c.due - now for c in self._candidates.values() if not c.is_asked]
        left = [self._book.seconds_left(record) for record in self._book.members.values()]
        return max(0.0, min([*due, *left, 3600.0]))

    def _report_lost(self) -> None:
        for record in self._book.expire():
            logger.info("%s is lost: its record has expired", record.peer_id)
            text = f"record of {record.peer_id}"
            self._on_attempt(Attempt("dht", text, "expired: nothing was heard of it", False))
            self._on_sighting(Sighting(record.peer_id, (), "dht", is_lost=True))

    async def _ask(self, peer_id: str, candidate: _Candidate, exchange: RecordExchange) -> None:
        text = f"record of {peer_id}"
        try:
            async with self._limiter:
                acceptance = await ask_anybody(
                    self._host, peer_id, candidate.addresses, lambda: exchange.ask(peer_id)
                )
        except NeuroGridError as exc:
            self._on_attempt(Attempt("dht", text, _reason(exc), is_good=False))
            self._note_failure(peer_id, candidate)
        else:
            if acceptance is None:
                self._on_attempt(Attempt("dht", text, "it is no member, and only looks", False))
                self._note_failure(peer_id, candidate)
            else:
                self.note_accepted(acceptance)
        finally:
            candidate.is_asked = False
            if candidate.is_outdated:
                candidate.is_outdated, candidate.due = False, trio.current_time()
            self._changed.set()

    def _note_failure(self, peer_id: str, candidate: _Candidate) -> None:
        now = trio.current_time()
        candidate.num_failures += 1
        is_member = peer_id in self._book.members
        if not is_member and now - candidate.named_at > _FORGET_TIME:
            self._candidates.pop(peer_id, None)
            return
        longest = _LAST_RETRY if is_member else _LAST_RETRY_OF_OTHERS
        wait = min(_FIRST_RETRY * 2 ** min(candidate.num_failures - 1, 16), longest)
        candidate.due = now + wait * random.uniform(0.8, 1.2)


def _reason(exc: NeuroGridError) -> str:
    return f"refused: {exc}" if isinstance(exc, RecordRefusedError) else dial_outcome(exc)
