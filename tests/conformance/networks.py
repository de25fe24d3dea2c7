"""The networks that the suite runs over, behind one face: hosts, dialling, links that break on command.

libp2p runs on loopback. Over TCP every connection goes through a relay of bytes of its own, so that it can be cut
without touching either end; over QUIC the tests that cut are skipped. What these networks cannot do alike (delay,
hosts that hang) is tested for memory alone, in test_memory_links.py.
"""

from __future__ import annotations

import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import pytest
import trio

from neurogrid.p2p import Host, Identity, open_host
from neurogrid.p2p.memory import MemoryNetwork, open_memory_network
from tests.ports import free_port

DEADLINE = 120.0  # seconds for one test; virtual ones in memory
# Ends the connection by a reset, as a crashed machine or a cut cable does in the end.
ABORT_ON_CLOSE = struct.pack("ii", 1, 0)


class Network(ABC):
    """A network that runs."""

    @abstractmethod
    def open_host(self) -> AbstractAsyncContextManager[Host]:
        """A host that lives until the block is left."""

    @abstractmethod
    async def address_of(self, host: Host) -> str:
        """An address to dial `host` at, over a link that can be cut."""

    @abstractmethod
    def cut(self, one: Host, other: Host) -> None:
        """Lose the connection of two hosts now."""

    @abstractmethod
    def cut_after(self, num_bytes: int, *, sender: Host, receiver: Host) -> None:
        """Lose the connection once about `num_bytes` more bytes have gone one way."""

    @abstractmethod
    def address_of_nobody(self) -> str:
        """A good address where nobody answers."""

    async def connect(self, dialler: Host, listener: Host) -> None:
        """Connect two hosts; returns when both know."""
        assert await dialler.connect(await self.address_of(listener)) == listener.peer_id
        await until(lambda: dialler.peer_id in listener.connected_peers)


class InMemory(Network):
    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

    def open_host(self) -> AbstractAsyncContextManager[Host]:
        return self._network.open_host()

    async def address_of(self, host: Host) -> str:
        return host.addresses[0]

    def cut(self, one: Host, other: Host) -> None:
        self._network.cut(one, other)

    def cut_after(self, num_bytes: int, *, sender: Host, receiver: Host) -> None:
        self._network.cut_after(num_bytes, sender=sender, receiver=receiver)

    def address_of_nobody(self) -> str:
        return f"/memory/4711/p2p/{Identity.generate().peer_id}"


class OverLibp2p(Network):
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._relays: dict[str, _Relay] = {}

    def open_host(self) -> AbstractAsyncContextManager[Host]:
        return open_host()

    async def address_of(self, host: Host) -> str:
        relay = self._relays.get(host.peer_id)
        if relay is None:
            port = int(host.addresses[0].split("/")[4])
            relay = self._relays[host.peer_id] = _Relay(port)
            self._nursery.start_soon(relay.run)
        await relay.is_listening.wait()
        return f"/ip4/127.0.0.1/tcp/{relay.port}/p2p/{host.peer_id}"

    def cut(self, one: Host, other: Host) -> None:
        for relay in self._between(one, other):
            relay.cut()

    def cut_after(self, num_bytes: int, *, sender: Host, receiver: Host) -> None:
        for relay in self._between(sender, receiver):
            relay.cut_after(num_bytes, to_listener=relay is self._relays.get(receiver.peer_id))

    def address_of_nobody(self) -> str:
        return f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{Identity.generate().peer_id}"

    def _between(self, one: Host, other: Host) -> list[_Relay]:
        """Those of the relays in front of either host; the tests that cut have two hosts alone."""
        return [self._relays[host.peer_id] for host in (one, other) if host.peer_id in self._relays]


class OverQuic(Network):
    """QUIC on loopback, as it is. Datagrams that are lost break nothing for 30 s, so that nothing cuts it here."""

    def open_host(self) -> AbstractAsyncContextManager[Host]:
        return open_host(listen=["/ip4/127.0.0.1/udp/0/quic-v1"])

    async def address_of(self, host: Host) -> str:
        return host.addresses[0]

    def cut(self, one: Host, other: Host) -> None:
        pytest.skip("a connection over datagrams is not cut, it falls silent")

    def cut_after(self, num_bytes: int, *, sender: Host, receiver: Host) -> None:
        self.cut(sender, receiver)

    def address_of_nobody(self) -> str:
        port = free_port(socket.SOCK_DGRAM)
        return f"/ip4/127.0.0.1/udp/{port}/quic-v1/p2p/{Identity.generate().peer_id}"


class _Relay:
    """Passes bytes on between a TCP port of its own and a host's."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.is_listening = trio.Event()
        self._target_port = target_port
        self._scopes: list[trio.CancelScope] = []
        self._until_cut: dict[bool, int] = {}

    async def run(self) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        self.is_listening.set()
        await trio.serve_listeners(self._serve, listeners)

    async def _serve(self, dialler: trio.SocketStream) -> None:
        with suppress(OSError, trio.BrokenResourceError):
            listener = await trio.open_tcp_stream("127.0.0.1", self._target_port)
            try:
                with trio.CancelScope() as scope:
                    self._scopes.append(scope)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._pass_on, dialler, listener, True, scope)
                        nursery.start_soon(self._pass_on, listener, dialler, False, scope)
            finally:  # also when the network ends before its hosts' last bytes have come
                for stream in (dialler, listener):
                    with suppress(OSError):
                        stream.socket.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, ABORT_ON_CLOSE
                        )
                    stream.socket.close()

    async def _pass_on(
        self,
        source: trio.SocketStream,
        sink: trio.SocketStream,
        to_listener: bool,
        scope: trio.CancelScope,
    ) -> None:
        try:
            async for data in source:
                left = self._until_cut.get(to_listener)
                if left is not None:
                    if len(data) > left:
                        await sink.send_all(data[:left])
                        self.cut()
                        return
                    self._until_cut[to_listener] = left - len(data)
                await sink.send_all(data)
            await sink.send_eof()
        except trio.BrokenResourceError:
            scope.cancel()  # one side went away, which the other is to see

    def cut(self) -> None:
        for scope in self._scopes:
            scope.cancel()
        self._scopes.clear()
        self._until_cut.clear()

    def cut_after(self, num_bytes: int, *, to_listener: bool) -> None:
        self._until_cut[to_listener] = num_bytes


@asynccontextmanager
async def open_network(name: str) -> AsyncIterator[Network]:
    """A network of one of the three kinds, for as long as a test may take."""
    with trio.fail_after(DEADLINE):
        if name == "memory":
            async with open_memory_network() as network:
                yield InMemory(network)
        elif name == "libp2p":
            async with trio.open_nursery() as nursery:
                yield OverLibp2p(nursery)
                nursery.cancel_scope.cancel()
        else:
            yield OverQuic()


# For tests that know nothing of the network below, or more of it than others can do.
in_memory = pytest.mark.parametrize("over", ["memory"], indirect=True)


async def until(condition: Callable[[], bool]) -> None:
    """Look again and again; the test's deadline is the bound."""
    while not condition():
        await trio.sleep(0.01)


@asynccontextmanager
async def two_hosts(network: Network) -> AsyncIterator[tuple[Host, Host]]:
    """A host that has dialled another."""
    async with network.open_host() as one, network.open_host() as other:
        await network.connect(one, other)
        yield one, other
