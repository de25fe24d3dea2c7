"""A host, over any network: an identity, connections to peers, streams on them.

The layers above know this interface alone. `libp2p_host.open_host` makes one on libp2p,
`memory.open_memory_network` makes several in one process; both pass the same conformance suite
(tests/conformance). What no network decides is done here: peer addresses, which handlers are told of
connections, and what becomes of an error that leaves a stream handler.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple, Protocol

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from neurogrid.errors import ConfigurationError, LocalProtocolError, PeerUnreachableError
from neurogrid.p2p.hosts.dialing import connect_any
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.trust.admission import Admission
from neurogrid.p2p.trust.gate import Gate
from neurogrid.p2p.trust.messages import TRUST_PROTOCOL
from neurogrid.p2p.trust.names import ANY_ROLE

__all__ = [
    "ConnectionHandler",
    "DIAL_TIMEOUT",
    "Host",
    "HostReach",
    "IpPlace",
    "NEGOTIATE_TIMEOUT",
    "StreamHandler",
    "ip_place",
    "is_address_of",
    "is_loopback_address",
    "own_addresses",
    "parse_peer_address",
    "serve_stream",
]

logger = logging.getLogger(__name__)

StreamHandler = Callable[[Stream], Awaitable[None]]
ConnectionHandler = Callable[[str], None]

DIAL_TIMEOUT = 10.0  # seconds: TCP connect, Noise and Yamux on a slow and distant link
NEGOTIATE_TIMEOUT = 15.0  # seconds: one or two round trips of multistream-select

# The parts of a multiaddr that say where a peer is: a TCP port, QUIC on a UDP port, or a place in this process's
# memory.
_PLACES = frozenset({"tcp", "quic-v1", "memory"})
_IP_PLACE = re.compile(r"/ip[46]/([^/]+)/(?:tcp/(\d+)|udp/(\d+)/quic-v1)(?:/p2p/[^/]+)?")


def parse_peer_address(address: str) -> tuple[Multiaddr, str]:
    """Split `/ip4/.../tcp/.../p2p/ID` or `/ip4/.../udp/.../quic-v1/p2p/ID` into the multiaddr and the peer id.

    An address through a relay, `.../p2p/RELAY/p2p-circuit/p2p/ID`, is that of the peer at its end.

    Raises:
        ConfigurationError: not a multiaddr, neither a TCP nor a QUIC part, or no `/p2p/` part.
    """
    example = "expected /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID, as the other command prints it"
    try:
        multiaddr = Multiaddr(address)
        protocols = {protocol.name for protocol in multiaddr.protocols()}
        ids = [value for protocol, value in multiaddr.items() if protocol.name == "p2p"]
    except (MultiaddrError, ValueError) as exc:
        raise ConfigurationError(f"{address!r} is not a multiaddr: {example}") from exc
    if not ids:
        raise ConfigurationError(f"{address!r} names no peer id: {example}")
    if not protocols & _PLACES:
        raise ConfigurationError(f"{address!r} has no TCP port: {example}")
    return multiaddr, str(ids[-1])


@lru_cache(maxsize=4096)
def is_address_of(address: str, peer_id: str) -> bool:
    """Whether a text is a peer address, and that of this peer."""
    try:
        return parse_peer_address(address)[1] == peer_id
    except ConfigurationError:
        return False


def own_addresses(addresses: Iterable[str], peer_id: str) -> tuple[str, ...]:
    """Return those addresses that are full multiaddrs of this peer: at others, another peer would be dialled."""
    return tuple(each for each in addresses if is_address_of(each, peer_id))


class IpPlace(NamedTuple):
    """IP address and port at which a host listens or is dialled, by TCP or by QUIC."""

    ip: IPv4Address | IPv6Address
    port: int
    is_quic: bool


def ip_place(address: Multiaddr | str) -> IpPlace | None:
    """The place in `/ip4/.../tcp/...` or `/ip4/.../udp/.../quic-v1`, whichever peer is there; None in any other."""
    found = _IP_PLACE.fullmatch(str(address))
    if found is None:
        return None
    ip, tcp_port, quic_port = found.groups()
    return IpPlace(ip_address(ip), int(tcp_port or quic_port), is_quic=quic_port is not None)


def is_loopback_address(address: str) -> bool:
    """Whether the first hop stays on this machine."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


class HostReach(Protocol):
    """Ways to a host beside its listening sockets, and from it to others through relays."""

    @property
    def announced_addresses(self) -> tuple[str, ...]:
        """Full multiaddrs that are known to lead here, better than those that it listens at."""

    @property
    def more_addresses(self) -> tuple[str, ...]:
        """Full multiaddrs that lead here besides: a router's, those through relays."""

    def circuits_to(self, peer_id: str) -> tuple[str, ...]:
        """Addresses through relays at which this host has reached a peer that is connected."""

    def ways_to(self, peer_id: str) -> tuple[str, ...]:
        """Addresses at which a peer may be reached although nobody said so: through our own relays."""

    async def connect_relayed(self, address: str) -> str:
        """Dial `RELAY_ADDRESS/p2p-circuit/p2p/PEER_ID` and return the peer id; as `Host.connect`."""


class Host(ABC):
    """A host that runs; its opener ends it.

    Attributes:
        identity: key pair and peer id.
        gate: decides which peers it serves; None where every peer is served.
    """

    def __init__(
        self, identity: Identity, nursery: trio.Nursery, admission: Admission | None = None
    ) -> None:
        self.identity = identity
        self._nursery = nursery
        self.gate: Gate | None = None
        if admission is not None:
            admission.bind(identity.peer_id)
            self.gate = Gate(self, admission, self._announce)
        self._connected_handlers: list[ConnectionHandler] = []
        self._disconnected_handlers: list[ConnectionHandler] = []
        self._direct_handlers: list[ConnectionHandler] = []
        # Of each peer, from its connection until everybody was told that it is gone: the swarm forgets it before.
        self._disconnected: dict[str, trio.Event] = {}
        self._reach: HostReach | None = None

    @property
    def peer_id(self) -> str:
        """This host's peer id (base58)."""
        return self.identity.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs at which this host can be dialled: those that it listens at, and what its `Reach` adds.

        They change as mappings and slots at relays come and go.
        """
        if self._reach is None:
            return self.listen_addresses
        ours, reach = self.listen_addresses, self._reach
        return tuple(dict.fromkeys((*reach.announced_addresses, *ours, *reach.more_addresses)))

    @property
    @abstractmethod
    def listen_addresses(self) -> tuple[str, ...]:
        """Full multiaddrs that this host listens at: one for each interface and transport."""

    @property
    def connected_peers(self) -> frozenset[str]:
        """Peers with at least one open connection, as far as they are admitted."""
        if self.gate is None:
            return self.linked_peers
        return frozenset(filter(self.gate.is_admitted, self.linked_peers))

    @property
    def unadmitted_peers(self) -> frozenset[str]:
        """The other peers with an open connection: not admitted yet, or tolerated."""
        return self.linked_peers - self.connected_peers

    def is_connected(self, peer_id: str) -> bool:
        """Whether a peer is one of `connected_peers`, without a look at the others."""
        return self.is_linked(peer_id) and (self.gate is None or self.gate.is_admitted(peer_id))

    @property
    @abstractmethod
    def linked_peers(self) -> frozenset[str]:
        """Peers with at least one open connection, admitted or not: those of a relay and of a DHT may be outsiders."""

    @abstractmethod
    def is_linked(self, peer_id: str) -> bool:
        """Whether a peer is one of `linked_peers`, without a look at the others."""

    def addresses_of(self, peer_id: str) -> tuple[str, ...]:
        """Full multiaddrs at which a peer can be dialled, as far as is known: it was, or it said so itself."""
        return ()

    def remote_ip(self, peer_id: str) -> str:
        """The IP address at the other end of the connection to a peer.

        Empty without a direct connection, and on networks that have no such addresses.
        """
        return ""

    def role_of(self, peer_id: str) -> str | None:
        """Return the role that a connected peer may act in: "coordinator", "worker"; "any" where nobody decides.

        None for a peer that is not admitted, or not connected.
        """
        if self.gate is not None:
            return self.gate.role_of(peer_id)
        return ANY_ROLE if self.is_linked(peer_id) else None

    def tolerate(self, peer_id: str, protocol_ids: Iterable[str] = ()) -> None:
        """Keep connections to a peer although it is not admitted: a bootstrap peer, a relay.

        It is served these protocols beside identify and ping, has no role, and is none of `connected_peers`. Call
        it before the peer is dialled.
        """
        if self.gate is not None:
            self.gate.tolerate(peer_id, protocol_ids)

    def set_reach(self, reach: HostReach) -> None:
        """Use what makes this host reachable and leads to others through relays; `Reach` calls it for itself.

        Raises:
            LocalProtocolError: there is one already.
        """
        if self._reach is not None:
            raise LocalProtocolError("this host has its reach already")
        self._reach = reach

    def serve_strangers(self, protocol_ids: Iterable[str]) -> None:
        """Serve these protocols to every peer that connects, and ask any peer for them, admitted or not.

        Some connections to strangers are kept (`unadmitted_peers`); they have no role, and are served nothing else.
        """
        if self.gate is not None:
            self.gate.serve_strangers(protocol_ids)

    def refuse_strangers(self, protocol_ids: Iterable[str]) -> None:
        """Take back what `serve_strangers` granted."""
        if self.gate is not None:
            self.gate.refuse_strangers(protocol_ids)

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run `function(*args)` in the host's nursery, until it ends or the host does."""
        self._nursery.start_soon(function, *args)

    def ways_to(self, peer_id: str, addresses: Iterable[str]) -> list[str]:
        """The addresses that are known of a peer, and those at which it may be besides: for `connect_any`."""
        known = list(addresses)
        return known if self._reach is None else [*known, *self._reach.ways_to(peer_id)]

    async def connect(self, address: str) -> str:
        """Dial a full multiaddr and return the peer id; an open connection is used again.

        An address through a relay, `.../p2p/RELAY/p2p-circuit/p2p/ID`, takes a `Reach` of this host.

        Raises:
            ConfigurationError: `address` is not a full multiaddr, or is our own.
            PeerUnreachableError: nobody answers there, or somebody else does.
            NotAdmittedError: one of the two does not admit the other; says why.

        After cancellation there may be a connection or none; a half-open one is not left.
        """
        multiaddr, peer_id = parse_peer_address(address)
        if peer_id == self.peer_id:
            raise ConfigurationError(f"{address} is this peer's own address")
        if "/p2p-circuit/" in address:
            if self._reach is None:
                raise PeerUnreachableError(
                    f"{address} leads through a relay, and this host uses none: it takes a `Reach`"
                )
            return await self._reach.connect_relayed(address)
        if self.is_linked(peer_id):
            await trio.lowlevel.checkpoint()
        else:
            await self._dial(address, multiaddr, peer_id)
        if self.gate is not None:
            await self.gate.wait_admitted(peer_id)
        return peer_id

    @abstractmethod
    async def _dial(self, address: str, multiaddr: Multiaddr, peer_id: str) -> None:
        """Connect to a peer directly; raises PeerUnreachableError."""

    async def connect_any(self, addresses: Sequence[str]) -> str:
        """Dial one peer at several addresses side by side and return its peer id.

        They are tried in their order, those of TCP before those of QUIC, each 250 ms after the one before or as
        soon as that fails; those through relays when the others have failed, or after a second. The first
        connection is kept.

        Raises:
            ConfigurationError: there is no address, one is not a full multiaddr, or they name several peers.
            PeerUnreachableError: none answers; names each with its reason.

        After cancellation as `connect`.
        """
        peers = {parse_peer_address(address)[1] for address in addresses}
        if len(peers) > 1:
            raise ConfigurationError(f"the addresses are of {len(peers)} peers, not of one")
        ways = self.ways_to(next(iter(peers)), addresses) if peers else addresses
        return await connect_any(self.connect, ways)

    @abstractmethod
    async def open_stream(self, peer_id: str, protocol_ids: Sequence[str]) -> Stream:
        """Open a stream to a connected peer; the first protocol id that the peer speaks is used.

        Raises:
            PeerUnreachableError: not connected, or the peer speaks none of `protocol_ids`.

        After cancellation the connection is whole, and a stream that still comes about is reset.
        """

    @abstractmethod
    def set_stream_handler(self, protocol_id: str, handler: StreamHandler) -> None:
        """Serve inbound streams of `protocol_id` with `handler`, one task a stream.

        What leaves `handler` is logged with its traceback and resets that stream alone.

        Raises:
            LocalProtocolError: `protocol_id` has a handler already.
        """

    @abstractmethod
    def remove_stream_handler(self, protocol_id: str) -> None:
        """Serve `protocol_id` no more: new streams of it are refused, those that are served go on."""

    @abstractmethod
    async def disconnect(self, peer_id: str) -> None:
        """Close all connections to a peer; its streams break on both sides.

        Raises:
            TransportError: the connection could not be closed in order.
        """

    def on_connected(self, handler: ConnectionHandler) -> None:
        """Call `handler(peer_id)` for each new connection, once its peer is admitted; it must not block or raise."""
        self._connected_handlers.append(handler)

    def on_disconnected(self, handler: ConnectionHandler) -> None:
        """Call `handler(peer_id)` when the last connection to a peer is gone; as `on_connected`."""
        self._disconnected_handlers.append(handler)

    def on_direct(self, handler: ConnectionHandler) -> None:
        """Call `handler(peer_id)` when a peer that was connected through a relay is connected directly besides.

        Streams through the relay go on, and the connection there is closed once none is left. As `on_connected`.
        """
        self._direct_handlers.append(handler)

    def note_direct(self, peer_id: str) -> None:
        """Tell that a peer connected through a relay is now connected directly; for the code that connected it."""
        for handler in self._direct_handlers:
            handler(peer_id)

    async def wait_disconnected(self, peer_id: str) -> None:
        """Return when there is no connection to the peer and all were told so; at once if that is so now.

        All: the handlers of `on_disconnected`, and the gate (`role_of`).
        """
        if self.is_linked(peer_id) or peer_id in self._disconnected:
            await self._disconnected.setdefault(peer_id, trio.Event()).wait()

    # For implementations

    def _start_gate(self) -> None:
        if self.gate is not None:
            self.set_stream_handler(TRUST_PROTOCOL, self.gate.serve)
            self.start_soon(self.gate.run)

    async def _lets_in(self, peer_id: str, protocol_id: str) -> bool:
        """Whether a stream that a peer opened may be served."""
        return self.gate is None or await self.gate.lets_in(peer_id, protocol_id)

    def _check_may_ask(self, peer_id: str, protocol_ids: Sequence[str]) -> None:
        """Check that this host may open a stream to a peer.

        Raises:
            PeerUnreachableError: there is no connection, or the peer is not admitted.
        """
        if not self.is_linked(peer_id):
            raise PeerUnreachableError(f"there is no connection to {peer_id}")
        if self.gate is not None and not self.gate.may_ask(peer_id, protocol_ids):
            raise PeerUnreachableError(f"{peer_id} is connected, but not admitted")

    def _note_connected(self, peer_id: str, *, is_dialler: bool) -> None:
        self._disconnected.setdefault(peer_id, trio.Event())
        if self.gate is None:
            self._announce(peer_id)
        else:
            self.gate.connected(peer_id, is_dialler=is_dialler)

    def _announce(self, peer_id: str) -> None:
        for handler in self._connected_handlers:
            handler(peer_id)

    def _note_disconnected(self, peer_id: str) -> None:
        if self.is_linked(peer_id):
            return  # another connection to the same peer is still there
        if self.gate is None or self.gate.disconnected(peer_id):
            for handler in self._disconnected_handlers:
                handler(peer_id)
        # Last: a task that waits finds it told.
        event = self._disconnected.pop(peer_id, None)
        if event is not None:
            event.set()


async def serve_stream(stream: Stream, handler: StreamHandler) -> None:
    """Run the handler of an inbound stream: what it raises is logged, and resets this stream alone."""
    try:
        await handler(stream)
    except Exception:  # the handler is its user's: what it raises is not the connection's
        logger.exception(
            "the handler of a %s stream from %s failed", stream.protocol_id, stream.peer_id
        )
        await stream.reset()
