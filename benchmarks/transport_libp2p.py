"""Rows of `transport.py` over libp2p: stock py-libp2p, a Go pair, a JavaScript pair, and ours at two heights.

A foreign pair is two processes of that implementation; this side holds the ends of their streams over Unix sockets,
so that their figures contain two hops that ours do not have.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from libp2p import new_host
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.config import ConnectionConfig
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from transport_load import MIB, Client, Duplex, StreamClient, serve_stream

from neurogrid.p2p import Protocol, Stream, TensorMessage, open_host

__all__ = ["ROWS", "ProtocolClient", "serve_protocol"]

Ready = Callable[[str], None]
PROTOCOL_ID = "/neurogrid/benchmark/1"
TCP, QUIC = "/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"
TIMEOUT = 120.0
# js-libp2p takes five connections a second from one address.
PAUSE_BETWEEN_CONNECTS = 0.25


# ---------------------------------------------------------------------- stock py-libp2p


class StockDuplex(Duplex):
    def __init__(self, stream: INetStream) -> None:
        self._stream = stream

    async def send(self, data: bytes | bytearray) -> None:
        await self._stream.write(bytes(data))

    async def receive(self, max_bytes: int) -> bytes:
        try:
            return bytes(await self._stream.read(max_bytes))
        except StreamError:
            return b""

    async def close(self) -> None:
        await self._stream.close()


def _stock_host(listen: str) -> Any:
    return new_host(
        key_pair=create_new_key_pair(),
        enable_quic=listen == QUIC,
        connection_config=ConnectionConfig(max_connections_per_peer=1, min_connections=0),
    )


def _serve_stock(listen: str) -> Callable[[Ready], None]:
    def serve(ready: Ready) -> None:
        async def main() -> None:
            host = _stock_host(listen)
            host.set_stream_handler(
                TProtocol(PROTOCOL_ID), lambda stream: serve_stream(StockDuplex(stream))
            )
            async with host.run([Multiaddr(listen)]):
                ready(str(host.get_addrs()[0]))
                await trio.sleep_forever()

        trio.run(main)

    return serve


class StockClient(StreamClient):
    def __init__(self, host: Any, address: str, listen: str) -> None:
        self._host = host
        self._listen = listen
        self._address = Multiaddr(address)
        self._peer = ID.from_base58(address.rpartition("/")[2])

    async def dial(self) -> None:
        connection = await self._host.get_network().dial_addr(self._address, self._peer)
        await connection.event_started.wait()

    async def open(self) -> Duplex:
        return StockDuplex(await self._host.new_stream(self._peer, [TProtocol(PROTOCOL_ID)]))

    async def connect(self) -> float:
        host = _stock_host(self._listen)
        async with host.run([Multiaddr(self._listen)]):
            client = StockClient(host, str(self._address), self._listen)
            started = time.perf_counter()
            await client.dial()
            return time.perf_counter() - started


def _stock_client(listen: str) -> Callable[[str], Any]:
    @asynccontextmanager
    async def client(address: str) -> AsyncIterator[Client]:
        host = _stock_host(listen)
        async with host.run([Multiaddr(listen)]):
            client = StockClient(host, address, listen)
            await client.dial()
            yield client

    return client


# ---------------------------------------------------------------------- ours, a bare stream


class OurDuplex(Duplex):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        # The stream's own methods, unwrapped: a call of ours in between would be measured too.
        self.send = stream.send_all  # type: ignore[method-assign]
        self.receive = stream.receive_some  # type: ignore[method-assign]

    async def send(self, data: bytes | bytearray) -> None: ...

    async def receive(self, max_bytes: int) -> Any: ...

    async def close(self) -> None:
        await self._stream.aclose()


class OurIntoDuplex(OurDuplex):
    """Receives into memory of its own, as whoever has a tensor's would."""

    async def drain(self, num_bytes: int) -> None:
        memory = memoryview(bytearray(MIB))
        while num_bytes:
            num_bytes -= await self._stream.receive_into(memory[: min(num_bytes, MIB)])


def _serve_ours(ready: Ready, duplex: type[OurDuplex], listen: str = TCP) -> None:
    async def main() -> None:
        async with open_host(listen=[listen]) as host:
            host.set_stream_handler(PROTOCOL_ID, lambda stream: serve_stream(duplex(stream)))
            ready(host.addresses[0])
            await trio.sleep_forever()

    trio.run(main)


def serve_ours(ready: Ready) -> None:
    _serve_ours(ready, OurDuplex)


def serve_ours_into(ready: Ready) -> None:
    _serve_ours(ready, OurIntoDuplex)


def serve_ours_quic(ready: Ready) -> None:
    _serve_ours(ready, OurDuplex, QUIC)


class OurClient(StreamClient):
    def __init__(self, host: Any, address: str) -> None:
        self._host = host
        self._address = address
        self._peer_id = address.rpartition("/")[2]

    async def open(self) -> Duplex:
        return OurDuplex(await self._host.open_stream(self._peer_id, [PROTOCOL_ID]))

    async def connect(self) -> float:
        return await _connect_ours(self._address)


async def _connect_ours(address: str) -> float:
    async with open_host() as host:
        started = time.perf_counter()
        await host.connect(address)
        return time.perf_counter() - started


@asynccontextmanager
async def our_client(address: str) -> AsyncIterator[Client]:
    async with open_host() as host:
        await host.connect(address)
        yield OurClient(host, address)


# ---------------------------------------------------------------------- ours, through Protocol 1.1.0


def serve_protocol(ready: Ready) -> None:
    """Count weights; answer an activation with its own data, once as many weights as it says have come."""

    async def main() -> None:
        async with open_host() as host:
            protocol = Protocol(host)
            num_weights = 0
            came = trio.Event()

            def on_weights(layer_id: int, chunk_index: int, total_chunks: int, data: Any) -> None:
                nonlocal num_weights, came
                num_weights += 1
                came.set()
                came = trio.Event()

            def on_activation(message: TensorMessage) -> Any:
                # At once where it can be, as who wants short round trips would have it.
                return message.data if num_weights >= message.seq_id else answer_later(message)

            async def answer_later(message: TensorMessage) -> Any:
                while num_weights < message.seq_id:
                    await came.wait()
                return message.data

            protocol.on_weights_received(on_weights)
            protocol.on_activation_received(on_activation)
            ready(host.addresses[0])
            await trio.sleep_forever()

    trio.run(main)


class ProtocolClient(Client):
    def __init__(self, protocol: Protocol, address: str) -> None:
        self.protocol = protocol
        self.peer_id = address.rpartition("/")[2]
        self._address = address
        self._num_sent = 0

    async def throughput(self, size: int, count: int) -> float:
        data = bytearray(os.urandom(size))
        started = time.perf_counter()
        for _ in range(count):
            await self.protocol.send_weights(self.peer_id, 0, data)
        self._num_sent += count
        await self.protocol.request_activation(
            self.peer_id, 0, self._num_sent, b"x", timeout=TIMEOUT
        )
        return time.perf_counter() - started

    async def round_trips(self, size: int, count: int) -> list[float]:
        data = os.urandom(size)
        times = []
        for _ in range(count):
            started = time.perf_counter()
            await self.protocol.request_activation(self.peer_id, 0, 0, data, timeout=TIMEOUT)
            times.append(time.perf_counter() - started)
        return times

    async def connect(self) -> float:
        return await _connect_ours(self._address)


@asynccontextmanager
async def protocol_client(address: str) -> AsyncIterator[Client]:
    async with open_host() as host:
        protocol = Protocol(host)
        await host.connect(address)
        client = ProtocolClient(protocol, address)
        await protocol.open(client.peer_id)
        yield client


# ---------------------------------------------------------------------- foreign pairs


class ForeignDuplex(Duplex):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def send(self, data: bytes | bytearray) -> None:
        await self._stream.send_all(data)

    async def receive(self, max_bytes: int) -> bytes:
        data: bytes = await self._stream.receive_some()
        if len(data) > max_bytes:
            self._stream.unread(data[max_bytes:])
            data = data[:max_bytes]
        return data

    async def close(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def foreign_peer(language: str) -> AsyncIterator[Any]:
    """A peer of the interop tests, which know how to drive one."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.e2e.interop.go_peer import start_go_peer
    from tests.e2e.interop.js_peer import start_js_peer

    start = {"go": start_go_peer, "js": start_js_peer}[language]
    with start("noise") as process:
        async with process.use() as peer:
            yield peer


def _serve_foreign(language: str) -> Callable[[Ready], None]:
    def serve(ready: Ready) -> None:
        async def main() -> None:
            async with foreign_peer(language) as peer, trio.open_nursery() as nursery:
                streams = await peer.accept_streams([PROTOCOL_ID])
                ready(peer.address)
                async for stream in streams:
                    nursery.start_soon(serve_stream, ForeignDuplex(stream))

        trio.run(main)

    return serve


class ForeignClient(StreamClient):
    def __init__(self, peer: Any, address: str) -> None:
        self._peer = peer
        self._address = address
        self._peer_id = address.rpartition("/")[2]

    async def open(self) -> Duplex:
        return ForeignDuplex(await self._peer.open_stream(self._peer_id, [PROTOCOL_ID]))

    async def connect(self) -> float:
        await self._peer.disconnect(self._peer_id)
        await trio.sleep(PAUSE_BETWEEN_CONNECTS)
        started = time.perf_counter()
        await self._peer.connect(self._address)
        return time.perf_counter() - started


def _foreign_client(language: str) -> Callable[[str], Any]:
    @asynccontextmanager
    async def client(address: str) -> AsyncIterator[Client]:
        async with foreign_peer(language) as peer:
            await peer.connect(address)
            yield ForeignClient(peer, address)

    return client


# name: (module that must be there, serve, client)
ROWS: dict[str, tuple[str, Callable[[Ready], None], Callable[[str], Any]]] = {
    "py-libp2p, stock": ("libp2p", _serve_stock(TCP), _stock_client(TCP)),
    "py-libp2p, stock, over QUIC": ("libp2p", _serve_stock(QUIC), _stock_client(QUIC)),
    "go-libp2p (p2pd)": ("hivemind", _serve_foreign("go"), _foreign_client("go")),
    "js-libp2p": ("libp2p", _serve_foreign("js"), _foreign_client("js")),
    "ours, bare stream": ("libp2p", serve_ours, our_client),
    "ours, bare, into memory": ("libp2p", serve_ours_into, our_client),
    "ours, bare, over QUIC": ("libp2p", serve_ours_quic, our_client),
    "ours, Protocol 1.1.0": ("libp2p", serve_protocol, protocol_client),
}
