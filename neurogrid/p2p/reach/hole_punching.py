"""Direct connections between peers behind NATs: DCUtR, over the relayed connection that they have.

The peer called through the relay (B) begins. It learns the caller's (A's) addresses and dials them plainly: A may
be reachable after all. That is not done from our listening port: it would leave a trace in our NAT, through which
A's dial would come in later, before we have dialled, and be answered in a way that the NAT takes for an error.
If A cannot be reached, B measures the way through the relay, says "now", and both dial at the same moment
from their listening ports: each SYN opens the own NAT for the other's. What comes about is one TCP connection that
both have dialled; by the specification A is the client on it, B the server.

A direct connection takes over: new streams go over it. The relayed one is closed when it is not used any more, so
what runs on it goes on. When three attempts fail, all stays relayed, and the state says so; B begins again after a
growing pause: networks change, and two machines that have just begun may have had no time for it.

TCP alone. QUIC would have to dial from the socket that it listens on, and ours dials each peer from a socket of its own
(quic/transport.py), whose port no NAT has shown to anybody.

Source: https://github.com/libp2p/specs/blob/master/relay/DCUtR.md
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import Any, Final

import trio
from libp2p.connection_types import ConnectionType
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from neurogrid.errors import RemoteProtocolError, TransportError
from neurogrid.p2p.hosts.host import ip_place
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.reach.backoff import Backoff
from neurogrid.p2p.reach.own_port import own_tcp_source
from neurogrid.p2p.reach.protobuf_frames import receive_message, send_message
from neurogrid.p2p.streams.stream import Stream

__all__ = ["DCUTR_PROTOCOL", "HolePuncher", "Path", "PeerPath"]

logger = logging.getLogger(__name__)

DCUTR_PROTOCOL: Final = "/libp2p/dcutr"
ATTEMPTS: Final = 3
MAX_ADDRESSES: Final = 8
# All in seconds.
MESSAGE_TIMEOUT: Final = 20.0  # for the other side's next message; it may be dialling
PLAIN_TIMEOUT: Final = 3.0  # for addresses that answer at once or not at all
PUNCH_TIMEOUT: Final = 6.0  # for three SYNs: at once, after 1 s, after 3 s
LATER: Final = Backoff(first=20.0, largest=900.0)
AGAIN: Final = 0.2  # between two dials that were refused: the other side's NAT was not open yet
# A relayed connection is closed when it had no stream for so long, or nothing on its streams for so long: a
# computation of minutes may lie between a request and its answer.
UNUSED_AFTER: Final = 5.0
SILENT_AFTER: Final = 600.0
PROTECTED: Final = "neurogrid-hole-punching"


class Path(Enum):
    """Kind of way that leads to a peer."""

    RELAYED = "relayed"
    PUNCHING = "punching"  # relayed, and a direct way is being tried
    DIRECT = "direct"


@dataclass(frozen=True)
class PeerPath:
    """Path to a peer that was connected through a relay.

    Attributes:
        peer_id: whom.
        path: which way new streams take.
        reason: why it is that way, one line.
    """

    peer_id: str
    path: Path
    reason: str


class _Dial(Enum):
    PLAIN = auto()
    AS_CLIENT = auto()  # from our listening port
    AS_SERVER = auto()  # likewise, and then wait for the other side to begin


class HolePuncher:
    """DCUtR for one host, from its making on until the host ends.

    Args:
        host: the libp2p host.
        own_addresses: gives the addresses at which we might be dialled, the best first, without `/p2p/`.
        last_used: gives when data last went over the relayed connection to a peer (`trio.current_time`).
    """

    def __init__(
        self,
        host: Libp2pHost,
        *,
        own_addresses: Callable[[], Sequence[str]],
        last_used: Callable[[str], float],
    ) -> None:
        self._host = host
        self._own_addresses = own_addresses
        self._last_used = last_used
        self._paths: dict[str, PeerPath] = {}
        self._retiring: set[str] = set()
        self._told: set[str] = set()  # of whom the log says that they stay relayed
        self._draw = random.SystemRandom()
        host.set_stream_handler(DCUTR_PROTOCOL, self._serve)
        host.on_disconnected(self._lost)

    def paths(self) -> tuple[PeerPath, ...]:
        """The ways to all connected peers that were connected through a relay."""
        return tuple(self._paths.values())

    def upgrade(self, peer_id: str) -> None:
        """Try for a direct connection to a peer that has connected to us through a relay."""
        if peer_id not in self._paths:
            self._note(peer_id, Path.PUNCHING, "a direct connection is being tried")
            self._host.start_soon(self._upgrade, peer_id)

    # ------------------------------------------------------------------ B: we were called

    async def _upgrade(self, peer_id: str) -> None:
        for num_failures in count(1):
            if not await self._try_upgrade(peer_id):
                return
            stayed = self._paths.get(peer_id)
            await trio.sleep(LATER.delay(num_failures, self._draw))
            if stayed is None or self._paths.get(peer_id) is not stayed:
                return  # it was lost meanwhile; if it is there again, by another task's doing

    async def _try_upgrade(self, peer_id: str) -> bool:
        """Returns whether it is of use to try again later."""
        self._protect(peer_id)
        try:
            stream = await self._host.open_stream(peer_id, [DCUTR_PROTOCOL])
        except TransportError as exc:
            # It may not know how, or have had no time: a stream each quarter of an hour costs neither anything.
            self._stay_relayed(peer_id, f"it does not punch holes now: {exc}")
            return True
        try:
            reason = await self._coordinate(stream)
        except (TransportError, RemoteProtocolError) as exc:
            reason = str(exc)
        except trio.TooSlowError:
            reason = "it does not answer"
        finally:
            await stream.reset()
        if self._direct_connections(peer_id):
            self._take_over(peer_id)
            return False
        self._stay_relayed(peer_id, reason)
        return True

    async def _coordinate(self, stream: Stream) -> str:
        """Attempt by attempt; returns why there is no direct connection, if there is none."""
        peer_id = stream.peer_id
        addresses: list[Multiaddr] = []
        for attempt in range(ATTEMPTS):
            started_at = trio.current_time()
            await self._send(stream, HolePunch.CONNECT)
            addresses = await self._receive(stream, HolePunch.CONNECT)
            round_trip = trio.current_time() - started_at
            if attempt == 0 and await self._dial_all(peer_id, addresses, _Dial.PLAIN):
                return ""
            await self._send(stream, HolePunch.SYNC)
            await trio.sleep(round_trip / 2)
            if await self._dial_all(peer_id, addresses, _Dial.AS_SERVER):
                return ""
        return _failure(addresses, self._sent_addresses())

    # ------------------------------------------------------------------ A: we have called

    async def _serve(self, stream: Stream) -> None:
        peer_id = stream.peer_id
        if not stream.is_relayed:
            await stream.reset()  # there is nothing to be upgraded
            return
        self._protect(peer_id)
        before = self._paths.get(peer_id)
        if before is None or before.path is not Path.RELAYED:  # else it is known why it stayed so
            self._note(peer_id, Path.PUNCHING, "a direct connection is being tried")
        addresses: list[Multiaddr] = []
        reason = "the peer gave up"
        try:
            for _ in range(ATTEMPTS):
                addresses = await self._receive(stream, HolePunch.CONNECT)
                await self._send(stream, HolePunch.CONNECT)
                await self._receive(stream, HolePunch.SYNC)
                if await self._dial_all(peer_id, addresses, _Dial.AS_CLIENT):
                    break
            else:
                reason = _failure(addresses, self._sent_addresses())
        except (TransportError, RemoteProtocolError) as exc:
            reason = str(exc)
        except trio.TooSlowError:
            reason = "it does not answer"
        finally:
            await stream.reset()
        if await self._wait_direct(peer_id, AGAIN):
            self._take_over(peer_id)
        else:
            self._stay_relayed(peer_id, reason)

    # ------------------------------------------------------------------ messages

    async def _send(self, stream: Stream, kind: Any) -> None:
        addresses = self._sent_addresses() if kind == HolePunch.CONNECT else []
        message = HolePunch(type=kind, ObsAddrs=[Multiaddr(a).to_bytes() for a in addresses])
        with trio.fail_after(MESSAGE_TIMEOUT):
            await send_message(stream, message)

    async def _receive(self, stream: Stream, kind: Any) -> list[Multiaddr]:
        with trio.fail_after(MESSAGE_TIMEOUT):
            message = await receive_message(stream, HolePunch)
        if message.type != kind:
            raise RemoteProtocolError(f"{stream.peer_id} punches holes in another order")
        addresses = []
        for raw in message.ObsAddrs[:MAX_ADDRESSES]:
            try:
                address = Multiaddr(bytes(raw))
                if _may_be_dialled(address):
                    addresses.append(address)
            except (MultiaddrError, ValueError) as exc:
                logger.debug("%s names a strange address: %s", stream.peer_id, exc)
        return addresses

    def _sent_addresses(self) -> list[str]:
        return list(dict.fromkeys(self._own_addresses()))[:MAX_ADDRESSES]

    # ------------------------------------------------------------------ dialling

    async def _dial_all(self, peer_id: str, addresses: Sequence[Multiaddr], how: _Dial) -> bool:
        """Dial side by side; whether there is a direct connection then."""
        timeout = PLAIN_TIMEOUT if how is _Dial.PLAIN else PUNCH_TIMEOUT
        with trio.move_on_after(timeout):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    nursery.start_soon(self._dial, peer_id, address, how)
                await self._wait_direct(peer_id, timeout)
                nursery.cancel_scope.cancel()
        return bool(self._direct_connections(peer_id))

    async def _dial(self, peer_id: str, address: Multiaddr, how: _Dial) -> None:
        """Dial again and again: what is refused now may be let in when the other side has dialled as well."""
        source = own_tcp_source(self._host, str(address))
        transport = self._host.swarm.transport_manager.transport_for_dialing(address)
        if source is None or not hasattr(transport, "dial_with_source"):
            return
        while True:
            try:
                if how is _Dial.PLAIN:
                    raw = await transport.dial(address)
                else:
                    raw = await transport.dial_with_source(address, source)
                # In a task of the host: what is a connection now is not to be ended with this attempt.
                self._host.start_soon(self._run_connection, raw, peer_id, address, how)
                return
            except (BaseLibp2pError, OSError) as exc:
                await trio.lowlevel.checkpoint_if_cancelled()
                logger.debug("cannot dial %s yet: %s", address, exc)
                if how is _Dial.PLAIN:
                    return
            await trio.sleep(AGAIN)

    async def _run_connection(self, raw: Any, peer_id: str, address: Multiaddr, how: _Dial) -> None:
        with trio.move_on_after(PUNCH_TIMEOUT) as scope:
            try:
                if how is not _Dial.AS_SERVER:
                    await self._host.swarm.upgrade_outbound_raw_conn(raw, ID.from_base58(peer_id))
                    return
                raw.is_initiator = False
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._lift, peer_id, scope)
                    # Stays until the connection is over: `end_inbound_tasks` sees to that.
                    await self._host.swarm.upgrade_inbound_raw_conn(raw, address)
                    nursery.cancel_scope.cancel()
            except* (BaseLibp2pError, OSError, ValueError) as group:
                logger.debug("a connection to %s at %s is over: %s", peer_id, address, group)
        if not self._direct_connections(peer_id):
            await raw.close()

    async def _lift(self, peer_id: str, scope: trio.CancelScope) -> None:
        """An upgrade has a deadline, and a connection has none."""
        await self._wait_direct(peer_id, PUNCH_TIMEOUT)
        if self._direct_connections(peer_id):
            scope.deadline = float("inf")

    async def _wait_direct(self, peer_id: str, timeout: float) -> bool:
        with trio.move_on_after(timeout):
            while not self._direct_connections(peer_id):
                await trio.sleep(0.02)
        return bool(self._direct_connections(peer_id))

    # ------------------------------------------------------------------ what becomes of it

    def _take_over(self, peer_id: str) -> None:
        self._note(peer_id, Path.DIRECT, "a direct connection came about")
        logger.info("the connection to %s is direct now", peer_id)
        if peer_id not in self._retiring:
            self._retiring.add(peer_id)
            self._host.start_soon(self._retire_relayed, peer_id)
            self._host.note_direct(peer_id)

    def _stay_relayed(self, peer_id: str, reason: str) -> None:
        self._host.swarm.unprotect(ID.from_base58(peer_id), PROTECTED)
        if self._host.is_connected(peer_id):
            self._note(peer_id, Path.RELAYED, reason)
            level = logging.DEBUG if peer_id in self._told else logging.WARNING
            self._told.add(peer_id)
            logger.log(level, "the connection to %s stays relayed: %s", peer_id, reason)
        else:
            self._paths.pop(peer_id, None)

    async def _retire_relayed(self, peer_id: str) -> None:
        """Close the relayed connection once nobody uses it any more."""
        unused_since = trio.current_time()
        try:
            while self._direct_connections(peer_id):
                relayed = self._connections(peer_id, ConnectionType.RELAYED)
                if not relayed:
                    return
                now = trio.current_time()
                if any(connection.get_streams() for connection in relayed):
                    unused_since = now
                is_silent = now - self._last_used(peer_id) >= SILENT_AFTER
                if is_silent or now - unused_since >= UNUSED_AFTER:
                    for connection in relayed:
                        await connection.close()
                    return
                await trio.sleep(1)
        finally:
            self._retiring.discard(peer_id)
            self._host.swarm.unprotect(ID.from_base58(peer_id), PROTECTED)

    def _protect(self, peer_id: str) -> None:
        """Let the swarm not take one connection too many for a reason to close the one that is in use."""
        self._host.swarm.protect(ID.from_base58(peer_id), PROTECTED)

    def _lost(self, peer_id: str) -> None:
        self._paths.pop(peer_id, None)
        self._told.discard(peer_id)

    def _note(self, peer_id: str, path: Path, reason: str) -> None:
        self._paths[peer_id] = PeerPath(peer_id, path, reason)

    def _direct_connections(self, peer_id: str) -> list[Any]:
        return self._connections(peer_id, ConnectionType.DIRECT)

    def _connections(self, peer_id: str, kind: ConnectionType) -> list[Any]:
        return [
            connection
            for connection in self._host.swarm.get_connections(ID.from_base58(peer_id))
            if connection.get_connection_type() == kind and not connection.is_closed
        ]


def _may_be_dialled(address: Multiaddr) -> bool:
    """Whether it is a plain TCP address of one machine."""
    place = ip_place(address)
    if place is None or place.is_quic:
        return False
    return not (place.ip.is_multicast or place.ip.is_unspecified)


def _failure(theirs: Sequence[Multiaddr], ours: Sequence[str]) -> str:
    if not theirs or not ours:
        return f"{'we do' if not ours else 'it does'} not know an address to be dialled at"
    return (
        f"no direct connection in {ATTEMPTS} attempts: the NAT on one side gives each peer another port, or lets"
        f" nothing in; dialled {', '.join(map(str, theirs))}, offered {', '.join(ours)}"
    )
