"""The hosts of the network in memory, and what lies between them."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio
from multiaddr import Multiaddr

from neurogrid.errors import ConfigurationError, LocalProtocolError, PeerUnreachableError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.hosts.host import (
    DIAL_TIMEOUT,
    NEGOTIATE_TIMEOUT,
    Host,
    StreamHandler,
    serve_stream,
)
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.memory.connection import Connection, ConnectionEnd, Link, MemoryStream
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.trust.admission import Admission

__all__ = ["MemoryHost", "MemoryNetwork", "open_memory_network"]


class MemoryNetwork:
    """Hosts in this process, and the links between them. Made by `open_memory_network`."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._numbers = itertools.count(1)
        self._hosts: dict[str, MemoryHost] = {}  # by address
        self._default_link = Link()
        self._links: dict[frozenset[str], Link] = {}
        self._connections: set[Connection] = set()

    @asynccontextmanager
    async def open_host(
        self, *, identity: Identity | None = None, admission: Admission | None = None
    ) -> AsyncIterator[MemoryHost]:
        """Run a host until the block is left; its connections then end in order.

        Args:
            identity: the key pair; a new one when None.
            admission: which peers it serves (`neurogrid.p2p.trust`); None is every peer.

        Raises:
            ConfigurationError: a host with this identity is in the network already, or `admission` is
                another host's.
        """
        identity = identity or Identity.generate()
        if any(host.peer_id == identity.peer_id for host in self._hosts.values()):
            raise ConfigurationError(f"{identity.peer_id} is in this network already")
        address = f"/memory/{next(self._numbers)}"
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                host = MemoryHost(self, address, identity, nursery, admission)
                host._start_gate()
                self._hosts[address] = host
                try:
                    yield host
                finally:
                    del self._hosts[address]
                    nursery.cancel_scope.cancel()
                    host._close()

    def set_link(self, link: Link, *, between: tuple[Host, Host] | None = None) -> None:
        """Change a link, also for what is under way on it.

        Args:
            link: how the hosts reach each other from now on.
            between: which two; None is all, those included that were set before and hosts yet to come.
        """
        if between is None:
            self._default_link = link
            self._links.clear()
        else:
            self._links[_pair(*between)] = link
        for connection in self._connections:
            connection.wake()

    def link(self, one: Host, other: Host) -> Link:
        """The link between two hosts as it is now."""
        return self._links.get(_pair(one, other), self._default_link)

    def cut(self, one: Host, other: Host) -> None:
        """Lose the connection of two hosts now: both are told, and what is under way is lost.

        Raises:
            LocalProtocolError: they are not connected.
        """
        self._connection(one, other).cut("the connection was lost")

    def cut_after(self, num_bytes: int, *, sender: Host, receiver: Host) -> None:
        """Lose the connection once `num_bytes` more bytes of streams have gone from sender to receiver.

        The bytes are counted as they arrive, over all streams. The next byte after them is not delivered:
        in its place both hosts lose the connection. What arrived can still be read.

        Raises:
            LocalProtocolError: they are not connected.
            ValueError: `num_bytes` is negative.
        """
        if num_bytes < 0:
            raise ValueError(f"cannot cut after {num_bytes} bytes")
        for end in self._connection(sender, receiver).ends:
            if end.peer_id == receiver.peer_id:
                end.way.bytes_until_cut = num_bytes

    def _connection(self, one: Host, other: Host) -> Connection:
        for connection in self._connections:
            ends = {end.peer_id for end in connection.ends}
            if connection.is_open and ends == _pair(one, other):
                return connection
        raise LocalProtocolError(f"{one.peer_id} and {other.peer_id} are not connected")

    async def _dial(self, dialler: MemoryHost, address: str, peer_id: str) -> None:
        """One round trip, then a connection or `PeerUnreachableError`."""
        place = address.removesuffix(f"/p2p/{peer_id}")
        listener = self._hosts.get(place)
        if listener is None:
            await trio.lowlevel.checkpoint()
            raise PeerUnreachableError(
                f"cannot connect to {address}: nobody is there", is_refused=True
            )
        await trio.sleep(2 * self.link(dialler, listener).delay)
        if not self.link(dialler, listener).is_reachable or self._hosts.get(place) is not listener:
            raise PeerUnreachableError(f"cannot connect to {address}: connection refused")
        if listener.peer_id != peer_id:
            raise PeerUnreachableError(f"cannot connect to {address}: another peer lives there")
        if not dialler.is_linked(peer_id):
            self._join(dialler, listener)

    def _join(self, dialler: MemoryHost, listener: MemoryHost) -> None:
        connection = Connection(lambda: self.link(dialler, listener))

        def end_of(host: MemoryHost, peer: MemoryHost, number: int) -> ConnectionEnd:
            def on_closed(end: ConnectionEnd) -> None:
                connection.end_if_closed()
                host._lose(end)

            return ConnectionEnd(
                peer.peer_id, connection.ways[number], on_stream=host._serve, on_closed=on_closed
            )

        connection.join(end_of(dialler, listener, 0), end_of(listener, dialler, 1))
        self._connections.add(connection)
        self._nursery.start_soon(self._run, connection)
        dialler._keep(connection.ends[0], is_dialler=True)
        listener._keep(connection.ends[1], is_dialler=False)

    async def _run(self, connection: Connection) -> None:
        await connection.run()
        self._connections.discard(connection)


class MemoryHost(Host):
    """A host of a network in memory. Made by `MemoryNetwork.open_host`."""

    def __init__(
        self,
        network: MemoryNetwork,
        address: str,
        identity: Identity,
        nursery: trio.Nursery,
        admission: Admission | None = None,
    ) -> None:
        super().__init__(identity, nursery, admission)
        self._network = network
        self._address = address
        self._stream_handlers: dict[str, StreamHandler] = {}
        self._ends: dict[str, ConnectionEnd] = {}

    @property
    def listen_addresses(self) -> tuple[str, ...]:
        return (f"{self._address}/p2p/{self.peer_id}",)

    def addresses_of(self, peer_id: str) -> tuple[str, ...]:
        return tuple(
            address
            for host in self._network._hosts.values()
            if host.peer_id == peer_id and peer_id in self._ends
            for address in host.addresses
        )

    @property
    def linked_peers(self) -> frozenset[str]:
        return frozenset(self._ends)

    def is_linked(self, peer_id: str) -> bool:
        return peer_id in self._ends

    async def _dial(self, address: str, multiaddr: Multiaddr, peer_id: str) -> None:
        with trio.move_on_after(DIAL_TIMEOUT) as scope:
            await self._network._dial(self, str(multiaddr), peer_id)
        if scope.cancelled_caught:
            raise PeerUnreachableError(f"no answer from {address} in {DIAL_TIMEOUT:g} s")

    async def open_stream(self, peer_id: str, protocol_ids: Sequence[str]) -> Stream:
        try:
            self._check_may_ask(peer_id, protocol_ids)
        except PeerUnreachableError:
            await trio.lowlevel.checkpoint()
            raise
        with trio.move_on_after(NEGOTIATE_TIMEOUT):
            return await self._ends[peer_id].open_stream(tuple(protocol_ids))
        raise PeerUnreachableError(f"{peer_id} does not answer a new stream")

    def set_stream_handler(self, protocol_id: str, handler: StreamHandler) -> None:
        if protocol_id in self._stream_handlers:
            raise LocalProtocolError(f"{protocol_id} has a handler on this host already")
        self._stream_handlers[protocol_id] = handler

    def remove_stream_handler(self, protocol_id: str) -> None:
        self._stream_handlers.pop(protocol_id, None)

    async def disconnect(self, peer_id: str) -> None:
        end = self._ends.get(peer_id)
        if end is not None:
            end.say_goodbye()
        await trio.lowlevel.checkpoint()

    # For the network

    def _serve(self, stream: MemoryStream, protocol_ids: tuple[str, ...]) -> bool:
        """Start the handler of the first protocol that is served; False if none is."""
        for protocol_id in protocol_ids:
            handler = self._stream_handlers.get(protocol_id)
            if handler is not None:
                stream.protocol_id = protocol_id
                self._nursery.start_soon(self._serve_if_admitted, stream, handler)
                return True
        return False

    async def _serve_if_admitted(self, stream: MemoryStream, handler: StreamHandler) -> None:
        if await self._lets_in(stream.peer_id, stream.protocol_id):
            await serve_stream(stream, handler)
        else:
            await stream.reset()

    def _keep(self, end: ConnectionEnd, *, is_dialler: bool) -> None:
        # The other side may have closed a connection whose end has not got here yet.
        stale = self._ends.get(end.peer_id)
        if stale is not None:
            stale.close("the peer has made a new connection")
        self._ends[end.peer_id] = end
        self._note_connected(end.peer_id, is_dialler=is_dialler)

    def _lose(self, end: ConnectionEnd) -> None:
        if self._ends.get(end.peer_id) is end:
            del self._ends[end.peer_id]
            self._note_disconnected(end.peer_id)

    def _close(self) -> None:
        for end in tuple(self._ends.values()):
            end.say_goodbye()


def _pair(one: Host, other: Host) -> frozenset[str]:
    return frozenset((one.peer_id, other.peer_id))


@asynccontextmanager
async def open_memory_network(link: Link | None = None) -> AsyncIterator[MemoryNetwork]:
    """Run a network without hosts until the block is left; open hosts within it.

    Args:
        link: how any two hosts reach each other; None is at once, without loss. See
            `MemoryNetwork.set_link`.
    """
    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            network = MemoryNetwork(nursery)
            network.set_link(link or Link())
            yield network
            nursery.cancel_scope.cancel()
