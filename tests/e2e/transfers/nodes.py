"""Hosts with transfers, a policy that takes and gives everything, and a giver that does things by hand."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import trio
from blake3 import blake3

from neurogrid.errors import (
    NeuroGridError,
)
from neurogrid.p2p import (
    Direction,
    MessageType,
    Protocol,
    TensorMessage,
    new_request_id,
    open_host,
)
from neurogrid.p2p.transfer import (
    BlobSource,
    BlobStore,
    BytesSource,
    Held,
    MemoryStore,
    OfferedBlob,
    StoredBlob,
    TransferLimits,
    TransferPolicy,
    Transfers,
    Wanted,
    send_blob,
)
from neurogrid.p2p.transfer.outgoing import CHUNKS_A_READ
from neurogrid.p2p.wire import (
    CHUNK_BYTES,
    TransferAccept,
    TransferOffer,
    WeightsChunk,
    blob_id,
    iter_weights_chunks,
    num_chunks,
)

DEADLINE = 120.0
BLOB = Random(3).randbytes(20 * CHUNK_BYTES + 12_345)
NUM_CHUNKS = num_chunks(len(BLOB))
SMALL = BLOB[-3 * CHUNK_BYTES :]
CHUNKS = tuple(iter_weights_chunks(SMALL))
SHORT = TransferLimits(silence_timeout=2.0)


def digests_of(blob: bytes) -> list[bytes]:
    return [blake3(chunk.data).digest() for chunk in iter_weights_chunks(blob)]


def id_of(blob: bytes) -> bytes:
    return blob_id(digests_of(blob))


@dataclass
class Policy(TransferPolicy):
    """Takes everything, remembers it, and provides what it is given."""

    store: BlobStore = field(default_factory=MemoryStore)
    provided: dict[bytes, BlobSource] = field(default_factory=dict)
    taken: list[tuple[int, bytes]] = field(default_factory=list)
    acknowledged_layers: list[int] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    decide_hook: Callable[[OfferedBlob], Awaitable[None]] | None = None
    use_hook: Callable[[], Awaitable[None]] | None = None

    async def decide(self, offered: OfferedBlob) -> Held | Wanted:
        if self.decide_hook is not None:
            await self.decide_hook(offered)
        if any(id_of(data) == offered.info.blob_id for _, data in self.taken):
            return Held()

        async def use(stored: StoredBlob) -> None:
            assert stored.info == offered.info
            if self.use_hook is not None:
                await self.use_hook()
            self.taken.append((offered.layer_id, bytes(stored.data)))

        return Wanted(self.store, use)

    async def acknowledged(self, offered: OfferedBlob) -> None:
        self.acknowledged_layers.append(offered.layer_id)

    def gave_up(self, offered: OfferedBlob, reason: str) -> None:
        self.given_up.append(reason)

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        return self.provided.get(blob_id)


class LyingSource(BytesSource):
    """Says what the blob is, and sends something else in place of one chunk."""

    def __init__(self, blob: bytes, *, wrong: int) -> None:
        super().__init__(blob)
        self.wrong = wrong

    def chunk(self, index: int) -> memoryview:
        data = super().chunk(index)
        return memoryview(bytes(len(data))) if index == self.wrong else data


class HesitantSource(BytesSource):
    """Gives the first chunks, and the others when it is told to go on."""

    def __init__(self, blob: bytes, *, num_chunks: int) -> None:
        super().__init__(blob)
        self.go_on = threading.Event()
        self._num_chunks = num_chunks

    def chunk(self, index: int) -> memoryview:
        if index >= self._num_chunks:
            assert self.go_on.wait(DEADLINE)
        return super().chunk(index)


class Node:
    """A host with transfers."""

    def __init__(self, protocol: Protocol, policy: Policy, limits: TransferLimits) -> None:
        self.protocol = protocol
        self.policy = policy
        self.transfers = Transfers(protocol, policy, limits=limits)

    @property
    def peer_id(self) -> str:
        return self.protocol.host.peer_id

    async def meet(self, other: Node) -> None:
        await self.protocol.host.connect(other.protocol.host.addresses[0])
        await self.protocol.open(other.peer_id)

    def chunks_sent(self) -> int:
        sent = self.protocol.counters.total(Direction.SENT, msg_type=MessageType.WEIGHTS)
        return sent.num_messages

    async def all_over(self) -> None:
        """Return when nothing comes in any more."""
        while self.transfers.num_incoming:
            await trio.sleep(0.01)


@asynccontextmanager
async def node(
    policy: Policy | None = None, *, limits: TransferLimits | None = None, **more: Any
) -> AsyncIterator[Node]:
    async with open_host() as host:
        yield Node(Protocol(host, **more), policy or Policy(), limits or TransferLimits())


@asynccontextmanager
async def pair(**more: Any) -> AsyncIterator[tuple[Node, Node]]:
    """A giver that dialled a taker; the arguments are the taker's."""
    with trio.fail_after(DEADLINE):
        async with node(**more) as taker, node() as giver:
            await giver.meet(taker)
            yield giver, taker


def run(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main)


async def offer(
    giver: Node, taker: Node, blob: bytes, *, layer_id: int = 0, request_id: int | None = None
) -> tuple[int, TransferAccept]:
    """Offer by hand; the id of the transfer, and what the taker says."""
    digests = b"".join(digests_of(blob))
    message = TensorMessage(
        msg_type=MessageType.TRANSFER_OFFER,
        layer_id=layer_id,
        request_id=request_id or new_request_id(),
        data=TransferOffer(layer_id, len(blob), id_of(blob), digests).encode(),
    )
    reply = await giver.protocol.request(
        taker.peer_id, message, MessageType.TRANSFER_ACCEPT, timeout=DEADLINE
    )
    return message.request_id, TransferAccept.decode(reply.data)


async def send_chunk(
    giver: Node, taker: Node, request_id: int, chunk: WeightsChunk, layer_id: int = 0
) -> None:
    await giver.protocol.send(
        taker.peer_id,
        TensorMessage(
            msg_type=MessageType.WEIGHTS,
            layer_id=layer_id,
            request_id=request_id,
            data=chunk.encode(),
        ),
    )


async def stop_after(
    num_chunks: int, giver: Node, taker: Node, blob: bytes, then: Callable[[], Awaitable[None]]
) -> None:
    """Send a blob, and do something to it once so many chunks are there: a few more may come, and never all."""
    source = HesitantSource(blob, num_chunks=num_chunks + CHUNKS_A_READ)

    async def send() -> None:
        with suppress(NeuroGridError):  # what was done to it
            await send_blob(giver.protocol, taker.peer_id, source)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        try:
            while taker.transfers.incoming_bytes < num_chunks * CHUNK_BYTES:
                await trio.sleep(0)
            await then()
        finally:
            nursery.cancel_scope.cancel()
            source.go_on.set()
