"""`Host` on libp2p: identity, transports, limits, and the workarounds for py-libp2p 0.8.1.

What this module knows and nobody above it needs to:

- py-libp2p listens with SO_REUSEPORT, so that two processes share a port without a word. We take it
  ourselves first, without that flag, and hold it until py-libp2p has it, too.
- `host.connect` waits 250 ms after success and remembers failures; `Swarm.dial_addr` does neither.
- an exception that leaves a stream handler ends the whole host, so every handler is wrapped.
- the stock Noise and Yamux are slow, and break when a write is cancelled: ours take their place (`link/`).
- the swarm dials peers that it knows on its own when it has few connections; we switch that off.
- to take a protocol out ends the host, if a peer has just begun to ask for it (a `KeyError` in its negotiation); here
  that peer's stream is reset.
- to open a stream dials the peer again if its connection has just ended; we refuse that, since the peer that
  ended it would be left with a connection that it does not know of.
- without LIBP2P_DEBUG it means to be silent, but leaves its loggers without a handler: Python's last resort then prints
  what it says, such as that a peer went during identify. Errors that concern us are raised to us.

Everything that runs lives in the nursery of `open_host`; leaving it ends all of it.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, cast

import trio
from libp2p import new_host
from libp2p.abc import IHost, INetConn, INetStream, INetwork, INotifee
from libp2p.custom_types import StreamHandlerFn, TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.config import ConnectionConfig
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.utils.address_validation import expand_wildcard_address
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from neurogrid.errors import (
    ConfigurationError,
    LocalProtocolError,
    PeerUnreachableError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p import quic
from neurogrid.p2p.hosts.detached_call import DetachedCall
from neurogrid.p2p.hosts.host import (
    DIAL_TIMEOUT,
    NEGOTIATE_TIMEOUT,
    Host,
    StreamHandler,
    serve_stream,
)
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.libp2p.http_answer import answer_http
from neurogrid.p2p.libp2p.inbound import (
    bound_inbound_connections,
    close_connections,
    closed_listeners,
    end_inbound_tasks,
)
from neurogrid.p2p.libp2p.libp2p_stream import Libp2pStream
from neurogrid.p2p.libp2p.negotiation import propose_at_once
from neurogrid.p2p.libp2p.patience import link_limits, quic_limits
from neurogrid.p2p.libp2p.security import security_options
from neurogrid.p2p.libp2p.tcp import TcpTransport
from neurogrid.p2p.libp2p.upgrades import close_failed_upgrades
from neurogrid.p2p.link import install_link
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.trust.admission import Admission

__all__ = ["Libp2pHost", "check_listen_address", "open_host"]

logger = logging.getLogger(__name__)

# 26 us each, and each new stream asks.
_id_of = lru_cache(maxsize=1024)(ID.from_base58)

CLOSE_TIMEOUT = 3.0  # seconds, to say goodbye on all connections
# A cluster is some dozens of machines; the rest is for bootstrap peers and passers-by.
MAX_CONNECTIONS = 256

# Whether a task may dial a peer without having been asked to.
_may_dial: ContextVar[bool] = ContextVar("may_dial", default=True)


def check_listen_address(address: str) -> Multiaddr:
    """Parse an address to listen on, and try whether it can be had.

    Raises:
        ConfigurationError: neither of the form `/ip4/ADDRESS/tcp/PORT` nor `/ip4/ADDRESS/udp/PORT/quic-v1`, taken,
            or not this machine's.
    """
    multiaddr, claim = _claim(address)
    claim.close()
    return multiaddr


def _claim(address: str) -> tuple[Multiaddr, socket.socket]:
    """Parse an address, and take its place: py-libp2p may listen there beside this socket, another process of ours not.

    A socket for port 0 or UDP takes nothing from anybody: there are free ports enough, and QUIC shares none.
    """
    try:
        multiaddr = Multiaddr(address)
        names = [protocol.name for protocol in multiaddr.protocols()]
    except (MultiaddrError, ValueError) as exc:
        raise ConfigurationError(
            f"{address!r} is not a multiaddr: expected /ip4/ADDRESS/tcp/PORT"
        ) from exc
    is_quic = names[1:] == ["udp", "quic-v1"]
    if names[:1] not in (["ip4"], ["ip6"]) or not (is_quic or names[1:] == ["tcp"]):
        raise ConfigurationError(f"cannot listen on {address!r}: expected /ip4/ADDRESS/tcp/PORT")
    host = str(multiaddr.value_for_protocol(names[0]))
    port = int(str(multiaddr.value_for_protocol(names[1])))
    family = socket.AF_INET6 if names[0] == "ip6" else socket.AF_INET
    claim = socket.socket(family, socket.SOCK_DGRAM if is_quic else socket.SOCK_STREAM)
    try:
        if is_quic:
            claim.bind((host, port))
            claim.close()
        else:
            # As servers do: a port whose last connections are in TIME_WAIT is free.
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            claim.bind((host, port))
            claim.listen()  # bound alone, it would be had twice
            if hasattr(socket, "SO_REUSEPORT"):
                claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as exc:
        claim.close()
        raise ConfigurationError(f"cannot listen on {multiaddr}: {_bind_reason(exc)}") from exc
    return multiaddr, claim


def _bind_reason(exc: OSError) -> str:
    hint = {
        errno.EADDRINUSE: "; choose another port, or 0 for a free one",
        errno.EADDRNOTAVAIL: "; it is no address of this machine",
        errno.EACCES: "; ports below 1024 are the system's",
    }.get(exc.errno or 0, "")
    return (exc.strerror or str(exc)).lower() + hint


# As `_dial_reason` says it.
_REFUSED = os.strerror(errno.ECONNREFUSED).lower()


class Libp2pHost(Host):
    """A libp2p host that runs. Made by `open_host`, never by hand.

    Attributes:
        libp2p: the py-libp2p host underneath, for what this class does not offer.
    """

    def __init__(
        self,
        libp2p: IHost,
        identity: Identity,
        nursery: trio.Nursery,
        admission: Admission | None = None,
    ) -> None:
        super().__init__(identity, nursery, admission)
        self.libp2p = libp2p
        self._served: set[str] = set()
        self._dials: dict[str, DetachedCall[None]] = {}

    @property
    def listen_addresses(self) -> tuple[str, ...]:
        concrete = [
            str(interface)
            for address in self.libp2p.get_transport_addrs()
            for interface in _on_each_interface(address)
        ]
        # They began to listen side by side: TCP comes first, whichever was ready.
        concrete.sort(key=lambda address: "/udp/" in address)
        return tuple(dict.fromkeys(f"{address}/p2p/{self.peer_id}" for address in concrete))

    def addresses_of(self, peer_id: str) -> tuple[str, ...]:
        suffix = f"/p2p/{peer_id}"
        circuits = self._reach.circuits_to(peer_id) if self._reach is not None else ()
        try:
            known = self.libp2p.get_peerstore().addrs(_id_of(peer_id))
        except PeerStoreError:
            return circuits
        # Stock hosts tell what they listen at: a host that dials 0.0.0.0 finds itself.
        places = (str(a).removesuffix(suffix) for a in known if not _is_wildcard(a))
        # One of those may be private to a network that nobody else is on; a relay was reached from here at least.
        return tuple(dict.fromkeys((*circuits, *(f"{place}{suffix}" for place in places))))

    def remote_ip(self, peer_id: str) -> str:
        if not self.is_linked(peer_id):
            return ""
        # Of a relayed connection there is none: at the other end of its socket is the relay.
        remotes = (
            connection.muxed_conn.get_remote_address()
            for connection in self.swarm.get_connections(_id_of(peer_id))
        )
        return next((remote[0] for remote in remotes if remote is not None), "")

    @property
    def linked_peers(self) -> frozenset[str]:
        return frozenset(peer.to_base58() for peer in self.libp2p.get_connected_peers())

    def is_linked(self, peer_id: str) -> bool:
        try:
            return _id_of(peer_id) in self.swarm.connections
        except ValueError:
            return False  # it is no peer id at all

    async def _dial(self, address: str, multiaddr: Multiaddr, peer_id: str) -> None:
        dial = self._dials.get(address)
        if dial is None:
            dial = DetachedCall(partial(self._dial_now, address, multiaddr, peer_id))
            self._dials[address] = dial
            self._nursery.start_soon(dial.run)
        await dial.wait()

    async def _dial_now(self, address: str, multiaddr: Multiaddr, peer_id: str) -> None:
        try:
            with trio.fail_after(DIAL_TIMEOUT):
                connection = await self.swarm.dial_addr(multiaddr, _id_of(peer_id))
                await connection.event_started.wait()
        except trio.TooSlowError as exc:
            raise PeerUnreachableError(f"no answer from {address} in {DIAL_TIMEOUT:g} s") from exc
        except (BaseLibp2pError, OSError, ValueError) as exc:
            # Stock code takes a cancellation for an error of the network.
            await trio.lowlevel.checkpoint_if_cancelled()
            reason = _dial_reason(exc)
            raise PeerUnreachableError(
                f"cannot connect to {address}: {reason}", is_refused=reason == _REFUSED
            ) from exc
        finally:
            del self._dials[address]

    async def open_stream(self, peer_id: str, protocol_ids: Sequence[str]) -> Stream:
        self._check_may_ask(peer_id, protocol_ids)
        opening = DetachedCall(
            partial(self._negotiate, peer_id, tuple(protocol_ids)), undo=Libp2pStream.reset
        )
        self._nursery.start_soon(opening.run)
        return await opening.wait()

    async def _negotiate(self, peer_id: str, protocol_ids: tuple[str, ...]) -> Libp2pStream:
        _may_dial.set(False)  # in this task alone
        try:
            with trio.fail_after(NEGOTIATE_TIMEOUT):
                net_stream = await self.libp2p.new_stream(
                    _id_of(peer_id), [TProtocol(name) for name in protocol_ids]
                )
        except trio.TooSlowError as exc:
            raise PeerUnreachableError(f"{peer_id} does not answer a new stream") from exc
        except (BaseLibp2pError, OSError, ValueError) as exc:
            raise PeerUnreachableError(
                f"cannot open a stream to {peer_id} for {' or '.join(protocol_ids)}"
            ) from exc
        return _wrap(net_stream, peer_id, str(net_stream.get_protocol()))

    def set_stream_handler(self, protocol_id: str, handler: StreamHandler) -> None:
        if protocol_id in self._served:
            raise LocalProtocolError(f"{protocol_id} has a handler on this host already")

        async def serve(net_stream: INetStream) -> None:
            peer_id = net_stream.muxed_conn.peer_id.to_base58()
            await serve_stream(_wrap(net_stream, peer_id, protocol_id), handler)

        self._served.add(protocol_id)
        self.libp2p.set_stream_handler(TProtocol(protocol_id), serve)

    def remove_stream_handler(self, protocol_id: str) -> None:
        multiselect: Any = self.libp2p.get_mux()
        multiselect.remove_handler(TProtocol(protocol_id))
        self._served.discard(protocol_id)

    async def disconnect(self, peer_id: str) -> None:
        goodbye = DetachedCall(partial(self._disconnect, peer_id))
        self._nursery.start_soon(goodbye.run)
        await goodbye.wait()

    async def _disconnect(self, peer_id: str) -> None:
        try:
            # Not by the swarm's own `close_peer`: that also forgets, without closing it, a connection that the
            # peer has made meanwhile.
            for connection in self.swarm.get_connections(_id_of(peer_id)):
                await connection.close()
        except BaseLibp2pError as exc:
            raise TransportError(f"cannot close the connection to {peer_id}: {exc}") from exc

    @property
    def swarm(self) -> Any:
        """The swarm of py-libp2p: its connections, by peer."""
        return self.libp2p.get_network()


def _keep_libp2p_from_last_resort() -> None:
    theirs = logging.getLogger("libp2p")
    if not theirs.handlers:
        theirs.addHandler(logging.NullHandler())


@asynccontextmanager
async def open_host(
    *,
    listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
    listen_fallback: Sequence[str] = (),
    identity: Identity | None = None,
    admission: Admission | None = None,
    keep_alive: float | None = None,
) -> AsyncIterator[Libp2pHost]:
    """Run a libp2p host (TCP; Noise or TLS; Yamux. QUIC) until the block is left.

    Args:
        listen: multiaddrs to listen on; port 0 takes a free one. TCP on loopback alone by default.
        listen_fallback: where to listen, with a warning, if one of `listen` is taken. Empty: an error.
        identity: the key pair; a new one for this process when None.
        admission: which peers it serves (`neurogrid.p2p.trust`); None is every peer that reaches it.
        keep_alive: seconds without a sign of life after which a peer is lost, a second or more; each is pinged four
            times in it. None for 40 (TCP) and 30 (QUIC): more than a peer on a slow machine is ever silent.

    Raises:
        ConfigurationError: an address is not a multiaddr that we can listen on, is in use, or is not to be listened
            at with this `admission`; or `admission` is another host's; or `keep_alive` is too short.
    """
    _keep_libp2p_from_last_resort()
    identity = identity or Identity.generate()
    if admission is not None:
        admission.check_listen([*listen, *listen_fallback])
    libp2p = new_host(
        key_pair=identity.key_pair,
        sec_opt=security_options(identity),
        transports=[TcpTransport(), quic.QuicTransport(identity, quic_limits(keep_alive))],
        connection_config=ConnectionConfig(
            max_connections=MAX_CONNECTIONS,
            min_connections=0,
            low_watermark=0,
            high_watermark=MAX_CONNECTIONS,
            max_connections_per_peer=1,
            dial_timeout=DIAL_TIMEOUT,
        ),
    )
    install_link(libp2p.get_network(), link_limits(keep_alive))
    propose_at_once(libp2p)
    bound_inbound_connections(libp2p.get_network())
    answer_http(libp2p.get_network())
    close_failed_upgrades(libp2p.get_network())
    end_inbound_tasks(libp2p.get_network())
    _dial_on_request(libp2p.get_network())
    quic.prefer_tcp(libp2p.get_network())
    hosts: list[Libp2pHost] = []
    multiselect: Any = libp2p.get_mux()
    multiselect.handlers = _Handlers(multiselect.handlers)
    if admission is not None:
        _gate_streams(libp2p, hosts)
    with ExitStack() as claims, unwrap_errors():
        listen_addrs = _take_places(listen, listen_fallback, claims)
        async with (
            closed_listeners(libp2p.get_network()),
            libp2p.run(listen_addrs),
            trio.open_nursery() as nursery,
        ):
            host = Libp2pHost(libp2p, identity, nursery, admission)
            claims.close()
            hosts.append(host)
            _tell_where_to_dial(libp2p, host)
            host._start_gate()
            if len(host.listen_addresses) < len(listen_addrs):
                raise ConfigurationError(f"cannot listen on {', '.join(map(str, listen_addrs))}")
            libp2p.get_network().register_notifee(_Notifee(host))
            await host.swarm.auto_connector.stop()
            try:
                yield host
            finally:
                nursery.cancel_scope.cancel()
                with trio.move_on_after(CLOSE_TIMEOUT) as scope:
                    scope.shield = True
                    await close_connections(libp2p.get_network())
                    await libp2p.close()


def _take_places(
    listen: Sequence[str], fallback: Sequence[str], claims: ExitStack
) -> list[Multiaddr]:
    """The multiaddrs to listen on, held until `claims` are closed."""
    taken: list[Multiaddr] = []
    for address in listen:
        try:
            multiaddr, claim = _claim(address)
        except ConfigurationError:
            if not fallback:
                raise
            logger.warning("%s is taken: listening on a free port instead", address)
            claims.close()
            return _take_places(fallback, (), claims)
        claims.enter_context(claim)
        taken.append(multiaddr)
    return taken


class _Handlers(dict[TProtocol, StreamHandlerFn]):
    """The protocols that a host serves, of which one may be taken out while a peer asks for it."""

    def __missing__(self, protocol_id: TProtocol) -> StreamHandlerFn:
        return INetStream.reset


def _gate_streams(libp2p: IHost, hosts: Sequence[Libp2pHost]) -> None:
    """Put the gate of the host, once there is one, in front of every stream handler, ours or not.

    So also in front of py-libp2p's own services: Kademlia, relay, identify push.
    """
    multiselect: Any = libp2p.get_mux()
    add_handler = multiselect.add_handler

    def add_gated(protocol: TProtocol | None, handler: StreamHandlerFn | None) -> None:
        async def serve(net_stream: INetStream) -> None:
            peer_id = net_stream.muxed_conn.peer_id.to_base58()
            if handler and hosts and await hosts[0]._lets_in(peer_id, str(protocol)):
                await handler(net_stream)
            else:
                await _wrap(net_stream, peer_id, str(protocol)).reset()

        add_handler(protocol, serve)

    for protocol, handler in tuple(multiselect.handlers.items()):
        add_gated(protocol, handler)
    multiselect.add_handler = add_gated


def _dial_on_request(swarm: Any) -> None:
    """Let a swarm dial nobody for the sake of a stream that `Libp2pHost` opens."""
    dial = swarm.dial_peer

    async def dial_if_asked(peer_id: ID) -> Any:
        if not _may_dial.get():
            raise SwarmException(f"there is no connection to {peer_id}")
        return await dial(peer_id)

    swarm.dial_peer = dial_if_asked


def _wrap(net_stream: INetStream, peer_id: str, protocol_id: str) -> Libp2pStream:
    # The interface lacks the half-close that the only implementation has.
    return Libp2pStream(cast(NetStream, net_stream), peer_id=peer_id, protocol_id=protocol_id)


def _is_wildcard(address: Multiaddr) -> bool:
    return str(address).startswith(("/ip4/0.0.0.0/", "/ip6/::/"))


def _tell_where_to_dial(libp2p: IHost, host: Libp2pHost) -> None:
    """Have identify name addresses that can be dialled; relayed ones are for peers that look for one."""

    def addresses() -> list[Multiaddr]:
        return [Multiaddr(a) for a in host.addresses if "/p2p-circuit/" not in a]

    stock: Any = libp2p
    stock.get_addrs = addresses


def _on_each_interface(address: Multiaddr) -> list[Multiaddr]:
    """A listening address, as addresses that can be dialled."""
    if not _is_wildcard(address):
        return [address]
    expanded = expand_wildcard_address(address)
    if not str(address).endswith("/quic-v1"):
        return expanded
    # py-libp2p leaves out what follows the port.
    return [Multiaddr(f"{str(place).removesuffix('/quic-v1')}/quic-v1") for place in expanded]


def _dial_reason(exc: BaseException) -> str:
    """The innermost cause that says something, on one line."""
    reason = str(exc)
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, OSError) and cause.errno is not None:
            return os.strerror(cause.errno).lower()
        reason = str(cause).strip() or reason
        cause = cause.__cause__
    if "peer id" in reason and "pubkey" in reason:
        return "another peer lives there (its key is not that of this peer id)"
    return reason.splitlines()[0][:200] if reason else type(exc).__name__


class _Notifee(INotifee):
    """Tells the host of new connections; the other events are nobody's concern."""

    def __init__(self, host: Libp2pHost) -> None:
        self._host = host

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        muxed = conn.muxed_conn
        self._host._note_connected(muxed.peer_id.to_base58(), is_dialler=bool(muxed.is_initiator))

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        self._host._note_disconnected(conn.muxed_conn.peer_id.to_base58())

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...
