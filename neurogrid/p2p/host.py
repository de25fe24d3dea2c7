"""Open a libp2p host: identity, transports, limits, and the workarounds for py-libp2p 0.8.1.

What this module knows and nobody above it needs to:

- py-libp2p listens with SO_REUSEPORT, so that two processes share a port without a word. We bind it
  once ourselves, without that flag, to find out whether it is free.
- `host.connect` waits 250 ms after success and remembers failures; `Swarm.dial_addr` does neither.
- an exception that leaves a stream handler ends the whole host, so every handler is wrapped.
- the stock Yamux can deadlock (`yamux.py`).
- the swarm dials peers that it knows on its own when it has few connections; we switch that off.

Everything that runs lives in the nursery of `open_host`; leaving it ends all of it.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import trio
from libp2p import new_host
from libp2p.abc import IHost, INetConn, INetStream, INetwork, INotifee
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.config import ConnectionConfig
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.utils.address_validation import expand_wildcard_address
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from neurogrid.errors import ConfigurationError, PeerUnreachableError, TransportError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.identity import Identity
from neurogrid.p2p.inbound import end_inbound_tasks
from neurogrid.p2p.stream import Stream
from neurogrid.p2p.yamux import install_yamux

__all__ = ["Host", "check_listen_address", "open_host", "parse_peer_address"]

logger = logging.getLogger(__name__)

StreamHandler = Callable[[Stream], Awaitable[None]]
ConnectionHandler = Callable[[str], None]

DIAL_TIMEOUT = 10.0  # seconds: TCP connect, Noise and Yamux on a slow and distant link
NEGOTIATE_TIMEOUT = 15.0  # seconds: one or two round trips of multistream-select
CLOSE_TIMEOUT = 3.0  # seconds, to say goodbye on all connections
# A cluster is some dozens of machines; the rest is for bootstrap peers and passers-by.
MAX_CONNECTIONS = 256


def parse_peer_address(address: str) -> tuple[Multiaddr, str]:
    """Split `/ip4/.../tcp/.../p2p/ID` into the multiaddr and the peer id.

    Raises:
        ConfigurationError: not a multiaddr, no TCP part, or no `/p2p/` part.
    """
    example = "expected /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID, as the other command prints it"
    try:
        multiaddr = Multiaddr(address)
        protocols = {protocol.name for protocol in multiaddr.protocols()}
        peer_id = multiaddr.value_for_protocol("p2p") if "p2p" in protocols else None
    except (MultiaddrError, ValueError) as exc:
        raise ConfigurationError(f"{address!r} is not a multiaddr: {example}") from exc
    if peer_id is None:
        raise ConfigurationError(f"{address!r} names no peer id: {example}")
    if "tcp" not in protocols:
        raise ConfigurationError(f"{address!r} has no TCP port: {example}")
    return multiaddr, str(peer_id)


def check_listen_address(address: str) -> Multiaddr:
    """Parse an address to listen on, and try whether it can be had.

    Raises:
        ConfigurationError: not of the form `/ip4/ADDRESS/tcp/PORT`, taken, or not this machine's.
    """
    try:
        multiaddr = Multiaddr(address)
        names = [protocol.name for protocol in multiaddr.protocols()]
    except (MultiaddrError, ValueError) as exc:
        raise ConfigurationError(
            f"{address!r} is not a multiaddr: expected /ip4/ADDRESS/tcp/PORT"
        ) from exc
    if len(names) != 2 or names[0] not in ("ip4", "ip6") or names[1] != "tcp":
        raise ConfigurationError(f"cannot listen on {address!r}: expected /ip4/ADDRESS/tcp/PORT")
    host = str(multiaddr.value_for_protocol(names[0]))
    port = int(str(multiaddr.value_for_protocol("tcp")))
    family = socket.AF_INET6 if names[0] == "ip6" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise ConfigurationError(f"cannot listen on {multiaddr}: {_bind_reason(exc)}") from exc
    return multiaddr


def _bind_reason(exc: OSError) -> str:
    hint = {
        errno.EADDRINUSE: "; choose another port, or 0 for a free one",
        errno.EADDRNOTAVAIL: "; it is no address of this machine",
        errno.EACCES: "; ports below 1024 are the system's",
    }.get(exc.errno or 0, "")
    return (exc.strerror or str(exc)).lower() + hint


class _Opening:
    """A stream that is being opened, and whether anybody still waits for it."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.outcome: Stream | PeerUnreachableError | None = None
        self.is_abandoned = False


class Host:
    """A libp2p host that runs. Made by `open_host`, never by hand.

    Attributes:
        identity: key pair and peer id.
        libp2p: the py-libp2p host underneath, for what this class does not offer.
    """

    def __init__(self, libp2p: IHost, identity: Identity, nursery: trio.Nursery) -> None:
        self.libp2p = libp2p
        self.identity = identity
        self._nursery = nursery
        self._connected_handlers: list[ConnectionHandler] = []
        self._disconnected_handlers: list[ConnectionHandler] = []
        self._disconnected: dict[str, trio.Event] = {}

    @property
    def peer_id(self) -> str:
        """This host's peer id (base58)."""
        return self.identity.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs that this host can be dialled at: one for each interface it listens on."""
        concrete = (
            interface
            for address in self.libp2p.get_transport_addrs()
            for interface in (
                expand_wildcard_address(address) if _is_wildcard(address) else [address]
            )
        )
        return tuple(dict.fromkeys(f"{address}/p2p/{self.peer_id}" for address in concrete))

    @property
    def connected_peers(self) -> frozenset[str]:
        """Peers with at least one open connection."""
        return frozenset(peer.to_base58() for peer in self.libp2p.get_connected_peers())

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run `function(*args)` in the host's nursery, until it ends or the host does."""
        self._nursery.start_soon(function, *args)

    async def connect(self, address: str) -> str:
        """Dial a full multiaddr and return the peer id; an open connection is used again.

        Raises:
            ConfigurationError: `address` is not a full multiaddr, or is our own.
            PeerUnreachableError: nobody answers there, or somebody else does.
        """
        multiaddr, peer_id = parse_peer_address(address)
        if peer_id == self.peer_id:
            raise ConfigurationError(f"{address} is this peer's own address")
        if peer_id in self.connected_peers:
            return peer_id
        remote = ID.from_base58(peer_id)
        try:
            with trio.fail_after(DIAL_TIMEOUT):
                connection = await self._swarm.dial_addr(multiaddr, remote)
                await connection.event_started.wait()
        except trio.TooSlowError as exc:
            raise PeerUnreachableError(f"no answer from {address} in {DIAL_TIMEOUT:g} s") from exc
        except (BaseLibp2pError, OSError, ValueError) as exc:
            raise PeerUnreachableError(f"cannot connect to {address}: {_dial_reason(exc)}") from exc
        return peer_id

    async def open_stream(self, peer_id: str, protocol_ids: Sequence[str]) -> Stream:
        """Open a stream to a connected peer; the first protocol id that the peer speaks is used.

        Raises:
            PeerUnreachableError: not connected, or the peer speaks none of `protocol_ids`.
        """
        if peer_id not in self.connected_peers:
            raise PeerUnreachableError(f"there is no connection to {peer_id}")
        opening = _Opening()
        self._nursery.start_soon(self._negotiate, opening, peer_id, tuple(protocol_ids))
        try:
            await opening.done.wait()
        except trio.Cancelled:
            opening.is_abandoned = True
            raise
        if isinstance(opening.outcome, Stream):
            return opening.outcome
        assert opening.outcome is not None
        raise opening.outcome

    async def _negotiate(
        self, opening: _Opening, peer_id: str, protocol_ids: tuple[str, ...]
    ) -> None:
        """Open a stream in the host's own task: to cancel a negotiation would break the connection."""
        try:
            with trio.fail_after(NEGOTIATE_TIMEOUT):
                net_stream = await self.libp2p.new_stream(
                    ID.from_base58(peer_id), [TProtocol(name) for name in protocol_ids]
                )
            stream = _wrap(net_stream, peer_id, str(net_stream.get_protocol()))
            opening.outcome = stream
            if opening.is_abandoned:
                await stream.reset()
        except trio.TooSlowError as exc:
            opening.outcome = PeerUnreachableError(f"{peer_id} does not answer a new stream")
            opening.outcome.__cause__ = exc
        except (BaseLibp2pError, OSError, ValueError) as exc:
            opening.outcome = PeerUnreachableError(
                f"cannot open a stream to {peer_id} for {' or '.join(protocol_ids)}"
            )
            opening.outcome.__cause__ = exc
        finally:
            opening.outcome = opening.outcome or PeerUnreachableError("this host is closing")
            opening.done.set()

    def set_stream_handler(self, protocol_id: str, handler: StreamHandler) -> None:
        """Serve inbound streams of `protocol_id` with `handler`, one task a stream.

        What leaves `handler` is logged with its traceback and resets that stream alone.
        """

        async def guarded(net_stream: INetStream) -> None:
            peer_id = net_stream.muxed_conn.peer_id.to_base58()
            stream = _wrap(net_stream, peer_id, protocol_id)
            try:
                await handler(stream)
            except Exception:
                logger.exception("the handler of a %s stream from %s failed", protocol_id, peer_id)
                await stream.reset()

        self.libp2p.set_stream_handler(TProtocol(protocol_id), guarded)

    def on_connected(self, handler: ConnectionHandler) -> None:
        """Call `handler(peer_id)` for each new connection; it must not block or raise."""
        self._connected_handlers.append(handler)

    def on_disconnected(self, handler: ConnectionHandler) -> None:
        """Call `handler(peer_id)` when the last connection to a peer is gone; as `on_connected`."""
        self._disconnected_handlers.append(handler)

    async def wait_disconnected(self, peer_id: str) -> None:
        """Return when there is no connection to the peer; at once if there is none now."""
        if peer_id in self.connected_peers:
            await self._disconnected.setdefault(peer_id, trio.Event()).wait()

    async def disconnect(self, peer_id: str) -> None:
        """Close all connections to a peer; its streams break on both sides."""
        try:
            await self.libp2p.disconnect(ID.from_base58(peer_id))
        except BaseLibp2pError as exc:
            raise TransportError(f"cannot close the connection to {peer_id}: {exc}") from exc

    @property
    def _swarm(self) -> Any:
        return self.libp2p.get_network()

    def _note_connected(self, peer_id: str) -> None:
        for handler in self._connected_handlers:
            handler(peer_id)

    def _note_disconnected(self, peer_id: str) -> None:
        if peer_id in self.connected_peers:
            return  # another connection to the same peer is still there
        event = self._disconnected.pop(peer_id, None)
        if event is not None:
            event.set()
        for handler in self._disconnected_handlers:
            handler(peer_id)


@asynccontextmanager
async def open_host(
    *,
    listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
    listen_fallback: Sequence[str] = (),
    identity: Identity | None = None,
) -> AsyncIterator[Host]:
    """Run a libp2p host (TCP, Noise, Yamux) until the block is left.

    Args:
        listen: multiaddrs to listen on; TCP port 0 takes a free one. Loopback alone by default.
        listen_fallback: where to listen, with a warning, if one of `listen` is taken. Empty: an error.
        identity: the key pair; a new one for this process when None.

    Raises:
        ConfigurationError: an address is not a multiaddr that we can listen on, or is in use.
    """
    identity = identity or Identity.generate()
    try:
        listen_addrs = [check_listen_address(address) for address in listen]
    except ConfigurationError:
        if not listen_fallback:
            raise
        logger.warning("%s is taken: listening on a free port instead", ", ".join(listen))
        listen_addrs = [check_listen_address(address) for address in listen_fallback]
    libp2p = new_host(
        key_pair=identity.key_pair,
        connection_config=ConnectionConfig(
            max_connections=MAX_CONNECTIONS,
            min_connections=0,
            low_watermark=0,
            high_watermark=MAX_CONNECTIONS,
            max_connections_per_peer=1,
            dial_timeout=DIAL_TIMEOUT,
        ),
    )
    install_yamux(libp2p.get_network())
    end_inbound_tasks(libp2p.get_network())
    with unwrap_errors():
        async with libp2p.run(listen_addrs), trio.open_nursery() as nursery:
            host = Host(libp2p, identity, nursery)
            if len(host.addresses) < len(listen_addrs):
                raise ConfigurationError(f"cannot listen on {', '.join(map(str, listen_addrs))}")
            libp2p.get_network().register_notifee(_Notifee(host))
            await host._swarm.auto_connector.stop()
            try:
                yield host
            finally:
                nursery.cancel_scope.cancel()
                with trio.move_on_after(CLOSE_TIMEOUT) as scope:
                    scope.shield = True
                    await libp2p.close()


def _wrap(net_stream: INetStream, peer_id: str, protocol_id: str) -> Stream:
    # The interface lacks the half-close that the only implementation has.
    return Stream(cast(NetStream, net_stream), peer_id=peer_id, protocol_id=protocol_id)


def _is_wildcard(address: Multiaddr) -> bool:
    return str(address).startswith(("/ip4/0.0.0.0/", "/ip6/::/"))


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

    def __init__(self, host: Host) -> None:
        self._host = host

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        self._host._note_connected(conn.muxed_conn.peer_id.to_base58())

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        self._host._note_disconnected(conn.muxed_conn.peer_id.to_base58())

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...
