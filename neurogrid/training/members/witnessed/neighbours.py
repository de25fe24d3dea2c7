"""Connections to the other members of an epoch, kept while it lasts; and which of them cannot be had."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import trio

from neurogrid.errors import NeuroGridError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.data.takers import SliceTakers
from neurogrid.training.wire.runs import Epoch, EpochSeat

__all__ = ["Neighbours"]

logger = logging.getLogger(__name__)

_DIAL_TIMEOUT: Final = 10.0
_RETRY: Final = 1.0
_MOMENT: Final = 0.2
# Of two members one dials. The other does when nothing has come for so many seconds.
_PATIENCE: Final = 3.0
# Members that are asked for a slice.
_MAX_ASKED: Final = 2
# Seconds without a connection after which the leader is told.
_LOST: Final = 6.0


class Neighbours:
    """The other members of an epoch, as this one reaches them. Keep `run` running.

    Args:
        host: this peer's.
        exchange: of runs.

    Attributes:
        changed: is set when one is reached, or is not any more.
    """

    def __init__(self, host: Host, exchange: Exchange) -> None:
        self._host, self._exchange = host, exchange
        self._members: Mapping[str, EpochSeat] = {}
        self._missing_since: dict[str, float] = {}
        self._dialling: set[str] = set()
        self._takers = SliceTakers()
        self._told = RenewedEvent()
        self.changed = RenewedEvent()

    def take(self, told: Epoch) -> None:
        """These are members from here on."""
        own = self._host.peer_id
        healthy = [each for each in told.members if each.health == "healthy"]
        self._members = {each.peer: each for each in healthy if each.peer != own}
        peers = {each.seat: each.peer for each in self._members.values()}
        for work in told.works:
            if work.seat in peers:
                self._takers.note(peers[work.seat], {each.slice for each in work.ranges})
        self._missing_since = {
            peer: since for peer, since in self._missing_since.items() if peer in self._members
        }
        self._told.set()

    @property
    def peers(self) -> tuple[str, ...]:
        """Peer ids of the members that are connected."""
        return tuple(peer for peer in self._members if self._host.is_connected(peer))

    def with_slice(self, number: int) -> tuple[str, ...]:
        """Connected members that took a slice to train on it: the last ones, the latest first."""
        there = (each for each in self._takers.of(number) if each in self._members)
        return tuple(islice((each for each in there if self._host.is_connected(each)), _MAX_ASKED))

    async def reach(self, peers: Sequence[str]) -> list[str]:
        """Wait until these peers are connected, at most some seconds, and return those that are."""
        with trio.move_on_after(_PATIENCE + _RETRY):
            while not all(map(self._host.is_connected, peers)):
                self._told.set()
                with trio.move_on_after(_MOMENT):
                    await self.changed.wait()
        return [peer for peer in peers if self._host.is_connected(peer)]

    def lost(self) -> tuple[int, ...]:
        """The seats of those that could not be reached for some seconds, rising."""
        now = trio.current_time()
        return tuple(
            sorted(
                self._members[peer].seat
                for peer, since in self._missing_since.items()
                if now - since >= _LOST
            )
        )

    async def run(self) -> None:
        """Reach those that are not there, again and again."""
        async with trio.open_nursery() as nursery:
            while True:
                now = trio.current_time()
                for peer, member in self._members.items():
                    if self._host.is_connected(peer):
                        if self._missing_since.pop(peer, None) is not None:
                            self.changed.set()
                        continue
                    since = self._missing_since.setdefault(peer, now)
                    dials = self._host.peer_id < peer or now - since >= _PATIENCE
                    if dials and member.addresses and peer not in self._dialling:
                        self._dialling.add(peer)
                        nursery.start_soon(self._dial, member)
                with trio.move_on_after(_RETRY):
                    await self._told.wait()

    async def _dial(self, member: EpochSeat) -> None:
        try:
            with trio.move_on_after(_DIAL_TIMEOUT):
                await self._host.connect_any(list(member.addresses))
                await self._exchange.open(member.peer)
        except NeuroGridError as exc:
            logger.info("member %d cannot be reached: %s", member.seat, exc)
        finally:
            self._dialling.discard(member.peer)
            self.changed.set()
