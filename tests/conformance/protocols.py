"""Pairs of protocols over a network of the suite, and what several files do with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from neurogrid.errors import TransportError
from neurogrid.p2p import PROTOCOL_V10, PROTOCOL_V11, Protocol, TensorMessage
from tests.conformance.networks import Network, until

# Seconds that a test waits for what must come; virtual ones in memory.
PATIENCE = 60.0

# What both sides speak. Legacy messages always go on a stream of 1.0.0.
VERSIONS = {"v11": (PROTOCOL_V11, PROTOCOL_V10), "v10": (PROTOCOL_V10,)}


class Pair:
    """Two protocols, and the connection that the first has dialled."""

    def __init__(self, network: Network, client: Protocol, server: Protocol, version: str) -> None:
        self.network = network
        self.client = client
        self.server = server
        self.version = version

    @property
    def is_v11(self) -> bool:
        return self.version == "v11"

    @property
    def server_id(self) -> str:
        return self.server.host.peer_id

    @property
    def client_id(self) -> str:
        return self.client.host.peer_id

    async def connect(self) -> None:
        await self.network.connect(self.client.host, self.server.host)
        expected = VERSIONS[self.version][0]
        assert await self.client.open(self.server_id) == expected

    async def wait_disconnected(self) -> None:
        await self.client.host.wait_disconnected(self.server_id)
        await self.server.host.wait_disconnected(self.client_id)

    def cut(self) -> None:
        self.network.cut(self.client.host, self.server.host)

    async def check(self) -> None:
        """A request is answered, on the connection that is there or on a new one. Needs `serve_echo`."""
        try:
            await check_echo(self.client, self.server_id)
        except TransportError:
            await self.wait_disconnected()
            await self.connect()
            await check_echo(self.client, self.server_id)


@asynccontextmanager
async def open_pair(network: Network, version: str) -> AsyncIterator[Pair]:
    async with network.open_host() as server_host, network.open_host() as client_host:
        server = Protocol(server_host, role="worker", versions=VERSIONS[version])
        client = Protocol(client_host, role="coordinator", versions=VERSIONS[version])
        pair = Pair(network, client, server, version)
        await pair.connect()
        yield pair


def serve_echo(protocol: Protocol) -> None:
    """Answer each activation with its own bytes reversed."""
    protocol.on_activation_received(lambda message: bytes(message.data)[::-1])


async def check_echo(client: Protocol, server_id: str, data: bytes = b"ping") -> None:
    answer = await client.request_activation(server_id, 1, 2, data, timeout=PATIENCE)
    assert bytes(answer.data) == data[::-1]


class Calls:
    """A handler that keeps what it was called with, sync or async."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.seen: list[tuple[Any, ...]] = []

    @property
    def handler(self) -> Callable[..., Any]:
        def handle(*args: Any) -> None:
            self.seen.append(args)

        async def handle_later(*args: Any) -> None:
            await trio.lowlevel.checkpoint()
            self.seen.append(args)

        return handle_later if self._kind == "async" else handle

    async def wait(self, num_calls: int = 1) -> list[tuple[Any, ...]]:
        await until(lambda: len(self.seen) >= num_calls)
        assert len(self.seen) == num_calls
        return self.seen

    async def message(self) -> TensorMessage:
        ((message,),) = await self.wait()
        assert isinstance(message, TensorMessage)
        return message
