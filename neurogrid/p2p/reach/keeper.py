"""Connections that are kept: wanted peers are dialled, watched, and dialled again when they are lost.

A task for each wanted peer. While there is a connection, made by either side, it waits for the end of it and, where the
link does not do so by itself, pings. Without one it dials: the address of the last success first, then all that are
known (`Host.connect` and the rules of `dialing`), then after a growing pause again. A new address, or the peer
itself coming in, ends the pause. A peer that stays out of reach for a long time is a ghost: given up, and reported.

Everything is bounded: how many peers are wanted, how many addresses each has, how many dials are under way. When
there is no room for another peer, the one that has been out of reach for longest makes room.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import trio

from neurogrid.errors import (
    ConfigurationError,
    NeuroGridError,
    PeerUnreachableError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.hosts.dialing import connect_any, dial_order
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.reach.backoff import Backoff
from neurogrid.p2p.reach.circuit import is_relayed_address, parse_any_address
from neurogrid.p2p.reach.ping import ping
from neurogrid.renewed_event import RenewedEvent

__all__ = ["KeptPeer", "Keeper", "KeeperLimits", "OnGone", "keep_connections"]

logger = logging.getLogger(__name__)

Connect: TypeAlias = Callable[[str], Awaitable[str]]

OnGone: TypeAlias = Callable[[str, str], None]
"""Called with the peer id and the reason, one line, when a peer is given up; must not block or raise."""


@dataclass(frozen=True)
class KeeperLimits:
    """Bounds and times of a `Keeper`. All times in seconds.

    Attributes:
        max_peers: wanted at a time. Half of the connections of a host, so that others can connect to us.
        max_addresses: kept for each peer, the newest. A machine has a few for each interface.
        max_dials: peers that are dialled at the same time: a scan of a whole cluster is spread out.
        dial_timeout: for all addresses of a peer together: the last of 16 is tried after 4 s, and may take 10.
        preferred_timeout: for the address of the last success, before the others are tried.
        backoff: pauses between attempts.
        settled_after: a connection that lasted so long counts as a success; a shorter one as a failure, so that a
            peer that accepts and closes is not dialled in a tight loop.
        gone_after: a peer that has not been reached for so long is given up.
        ping_interval: between pings; infinity where the link pings by itself, as ours does over TCP.
        ping_timeout: without an answer for so long, the connection is closed.
    """

    max_peers: int = 128
    max_addresses: int = 16
    max_dials: int = 8
    dial_timeout: float = 20.0
    preferred_timeout: float = 3.0
    backoff: Backoff = field(default_factory=Backoff)
    settled_after: float = 10.0
    gone_after: float = 1800.0
    ping_interval: float = math.inf
    ping_timeout: float = 10.0


@dataclass
class KeptPeer:
    """State of a wanted peer. Times are of `trio.current_time`.

    Attributes:
        peer_id: whom.
        addresses: where it is dialled, in this order.
        connected_since: when the connection came about; None without one.
        unreachable_since: since when there has been none; None while there is one.
        num_failures: attempts that failed since the last connection that lasted.
        last_error: why the last attempt failed or the last connection ended; empty before.
        next_attempt: when it is dialled next; None while connected or being dialled.
        round_trip: seconds, by the last ping; None without one.
    """

    peer_id: str
    addresses: tuple[str, ...]
    connected_since: float | None = None
    unreachable_since: float | None = None
    num_failures: int = 0
    last_error: str = ""
    next_attempt: float | None = None
    round_trip: float | None = None


@dataclass
class _Peer(KeptPeer):
    """Its addresses are in the order in which they came, the newest first."""

    good_address: str | None = None  # of the last success
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    news: RenewedEvent = field(default_factory=RenewedEvent)

    def state(self) -> KeptPeer:
        return replace(self, addresses=self.ordered_addresses())

    def ordered_addresses(self) -> tuple[str, ...]:
        """The address of the last success, then direct ones, then those through relays."""
        direct = [address for address in self.addresses if not is_relayed_address(address)]
        relayed = [address for address in self.addresses if is_relayed_address(address)]
        first = [self.good_address] if self.good_address in self.addresses else []
        return tuple(dict.fromkeys([*first, *dial_order(direct), *relayed]))


class Keeper:
    """Keeps connections of a host. Made by `keep_connections`."""

    def __init__(
        self,
        host: Host,
        nursery: trio.Nursery,
        *,
        limits: KeeperLimits,
        connect: Connect,
        on_gone: OnGone | None,
        draw: random.Random,
    ) -> None:
        self._host = host
        self._connect = connect
        self._nursery = nursery
        self._limits = limits
        self._on_gone = on_gone
        self._draw = draw
        self._peers: dict[str, _Peer] = {}
        self._dials = trio.CapacityLimiter(limits.max_dials)
        host.on_connected(self._peer_connected)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The peers to which connections are kept."""
        return tuple(self._peers)

    def want(self, peer_id: str, addresses: Iterable[str]) -> bool:
        """Keep a connection to a peer; for one that is wanted already, learn new addresses.

        Args:
            peer_id: whom; not ourselves.
            addresses: full multiaddrs of that peer, the most useful first; none is right for a peer that dials us.

        Returns:
            Whether it is wanted now: False when there is no room, since all others are in reach.

        Raises:
            ConfigurationError: an address is malformed or another peer's, or the peer is this host.
        """
        if peer_id == self._host.peer_id:
            raise ConfigurationError(f"{peer_id} is this host: it needs no connection to itself")
        fresh = tuple(dict.fromkeys(addresses))[: self._limits.max_addresses]
        for address in fresh:
            if parse_any_address(address)[1] != peer_id:
                raise ConfigurationError(f"{address} is no address of {peer_id}")
        peer = self._peers.get(peer_id)
        if peer is None:
            if len(self._peers) >= self._limits.max_peers and not self._make_room():
                return False
            peer = self._peers[peer_id] = _Peer(
                peer_id, fresh, unreachable_since=trio.current_time()
            )
            self._nursery.start_soon(self._keep, peer)
        elif not set(fresh) <= set(peer.addresses):
            merged = list(dict.fromkeys([*fresh, *peer.addresses]))[: self._limits.max_addresses]
            if peer.good_address is not None and peer.good_address not in merged:
                merged[-1] = peer.good_address
            peer.addresses = tuple(merged)
            peer.news.set()
        return True

    def forget(self, peer_id: str) -> None:
        """Keep no connection to a peer any more. One that is there stays, and is its users' affair."""
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            peer.scope.cancel()

    def state(self, peer_id: str) -> KeptPeer | None:
        """Return the state of a peer; None if it is not wanted."""
        peer = self._peers.get(peer_id)
        return None if peer is None else peer.state()

    def states(self) -> tuple[KeptPeer, ...]:
        """Return the states of all wanted peers, in the order in which they were first wanted."""
        return tuple(peer.state() for peer in self._peers.values())

    # ------------------------------------------------------------------ one peer

    async def _keep(self, peer: _Peer) -> None:
        with peer.scope:
            while True:
                if self._host.is_connected(peer.peer_id) or await self._dial(peer):
                    await self._stay(peer)
                if not peer.num_failures:
                    continue
                since = peer.unreachable_since
                if since is not None and trio.current_time() - since >= self._limits.gone_after:
                    reason = f"not reached for {self._limits.gone_after:g} s: {peer.last_error}"
                    self._give_up(peer, reason)
                    return
                await self._pause(peer)

    async def _stay(self, peer: _Peer) -> None:
        """Wait for the end of the connection that there is."""
        started_at = peer.connected_since = trio.current_time()
        peer.unreachable_since, peer.last_error = None, ""
        async with trio.open_nursery() as nursery:
            if self._limits.ping_interval < math.inf:
                nursery.start_soon(self._watch, peer)
            await self._host.wait_disconnected(peer.peer_id)
            nursery.cancel_scope.cancel()
        peer.last_error = peer.last_error or "the connection ended"
        logger.info("lost the connection to %s: %s", peer.peer_id, peer.last_error)
        now = peer.unreachable_since = trio.current_time()
        peer.connected_since = peer.round_trip = None
        has_settled = now - started_at >= self._limits.settled_after
        peer.num_failures = 0 if has_settled else peer.num_failures + 1

    async def _watch(self, peer: _Peer) -> None:
        """Ping for as long as the peer answers."""
        while True:
            await trio.sleep(self._limits.ping_interval)
            with trio.move_on_after(self._limits.ping_timeout) as scope:
                try:
                    peer.round_trip = await ping(self._host, peer.peer_id)
                except PeerUnreachableError:
                    pass  # it says that it speaks no ping: an answer as well
                except NeuroGridError as exc:
                    logger.debug("a ping of %s failed: %s", peer.peer_id, exc)
            if scope.cancelled_caught:
                peer.last_error = f"no answer to a ping in {self._limits.ping_timeout:g} s"
                try:
                    await self._host.disconnect(peer.peer_id)
                except TransportError as exc:
                    logger.debug("%s: %s", peer.peer_id, exc)

    async def _dial(self, peer: _Peer) -> bool:
        """Whether there is a connection now; if not, the failure is noted."""
        error = f"no answer in {self._limits.dial_timeout:g} s"
        async with self._dials:
            if not self._host.is_connected(peer.peer_id):
                with trio.move_on_after(self._limits.dial_timeout):
                    try:
                        await self._dial_addresses(peer)
                        error = "the connection ended at once"
                    except PeerUnreachableError as exc:
                        error = str(exc)
        if self._host.is_connected(peer.peer_id):
            return True
        if peer.last_error != error:
            logger.info("%s; trying again", error)
        peer.last_error = error
        peer.num_failures += 1
        return False

    async def _dial_addresses(self, peer: _Peer) -> None:
        if not peer.addresses:
            raise PeerUnreachableError(f"no address of {peer.peer_id} is known")

        async def connect(address: str) -> str:
            try:
                await self._connect(address)
            except NeuroGridError as exc:
                # An address of others' making, a peer that does not admit us, or one that goes away while it is asked
                # who it is: no reason to end ourselves.
                raise PeerUnreachableError(str(exc)) from exc
            reached.append(address)
            return peer.peer_id

        reached: list[str] = []
        addresses = peer.ordered_addresses()
        if peer.good_address == addresses[0]:
            with trio.move_on_after(self._limits.preferred_timeout):
                try:
                    await connect(addresses[0])
                except PeerUnreachableError as exc:
                    if len(addresses) == 1:
                        raise
                    logger.debug("%s has moved: %s", peer.peer_id, exc)
                else:
                    return
        await connect_any(connect, addresses)
        peer.good_address = reached[0]

    async def _pause(self, peer: _Peer) -> None:
        """Wait for the next attempt, for a new address, or for the peer to come to us."""
        delay = self._limits.backoff.delay(max(1, peer.num_failures), self._draw)
        peer.next_attempt = trio.current_time() + delay
        if not self._host.is_connected(peer.peer_id):
            with trio.move_on_after(delay):
                await peer.news.wait()
        peer.next_attempt = None

    # ------------------------------------------------------------------ all of them

    def _peer_connected(self, peer_id: str) -> None:
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.news.set()

    def _make_room(self) -> bool:
        """Give up the peer that has been out of reach for longest; False if all are in reach."""
        away = [
            (peer.unreachable_since, peer)
            for peer in self._peers.values()
            if peer.unreachable_since is not None and peer.num_failures
        ]
        if not away:
            return False
        _, peer = min(away, key=lambda pair: pair[0])
        self._give_up(peer, "out of reach, and others are wanted")
        return True

    def _give_up(self, peer: _Peer, reason: str) -> None:
        self.forget(peer.peer_id)
        logger.info("giving up %s: %s", peer.peer_id, reason)
        if self._on_gone is not None:
            self._on_gone(peer.peer_id, reason)


@asynccontextmanager
async def keep_connections(
    host: Host,
    *,
    limits: KeeperLimits | None = None,
    connect: Connect | None = None,
    on_gone: OnGone | None = None,
    draw: random.Random | None = None,
) -> AsyncIterator[Keeper]:
    """Run a `Keeper` of a host until the block is left; connections that are there then stay.

    Args:
        limits: bounds and times.
        connect: what dials a full multiaddr, and raises `PeerUnreachableError`; `host.connect` when None.
        on_gone: told of each peer that is given up.
        draw: what jitter is drawn from; the system's randomness when None.
    """
    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            keeper = Keeper(
                host,
                nursery,
                limits=limits or KeeperLimits(),
                connect=connect or host.connect,
                on_gone=on_gone,
                draw=draw or random.SystemRandom(),
            )
            yield keeper
            nursery.cancel_scope.cancel()
