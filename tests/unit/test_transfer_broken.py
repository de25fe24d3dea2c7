"""A connection that breaks while chunks go out: whoever sends a blob hears of that, and not of our own channels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest
import trio
import trio.testing

from neurogrid.errors import StreamBrokenError, TransportError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.exchange.pending import Waiter
from neurogrid.p2p.transfer.chunks import BlobInfo
from neurogrid.p2p.transfer.outgoing import _Sending
from neurogrid.p2p.transfer.source import BytesSource
from neurogrid.p2p.wire import MessageType, TensorMessage, WeightsChunk

NUM_CHUNKS = 20
# What runs first of what can run is drawn anew each time; one in nine orders was the bad one.
ATTEMPTS = 100


class Breaking:
    """An `Exchange` as far as chunks need it, whose stream breaks when `broken` is set."""

    def __init__(self) -> None:
        self.broken = trio.Event()

    async def send(self, peer_id: str, message: TensorMessage, *more: object) -> None:
        await self.broken.wait()
        raise StreamBrokenError("the connection broke")


class Acknowledged:
    """A waiter for what never comes."""

    async def wait(self, *, timeout: float) -> None:
        await trio.sleep_forever()


class ReadsBefore(_Sending):
    """Chunks have come from the disk, and wait for room, when the stream breaks."""

    async def _read(self, indices: Iterable[int]) -> list[WeightsChunk]:
        return [WeightsChunk(index, NUM_CHUNKS, memoryview(b"x")) for index in indices]


class ReadsMeanwhile(ReadsBefore):
    """Chunks come from the disk in the moment in which the stream breaks."""

    async def _read(self, indices: Iterable[int]) -> list[WeightsChunk]:
        chunks = await super()._read(indices)
        if chunks and chunks[0].chunk_index:
            await cast(Breaking, self.protocol).broken.wait()
        return chunks


@pytest.mark.parametrize("kind", [ReadsBefore, ReadsMeanwhile])
def test_who_sends_hears_that_the_connection_broke(kind: type[_Sending]) -> None:
    source = BytesSource(bytes(NUM_CHUNKS))
    info = BlobInfo.of_digests(source.digests(), source.num_bytes)
    offer = TensorMessage(msg_type=MessageType.TRANSFER_OFFER, data=b"")

    async def attempt() -> None:
        exchange = Breaking()
        sending = kind(cast(Exchange, exchange), "peer", offer, info, source, 60.0, None)
        async with trio.open_nursery() as nursery:

            async def breaks() -> None:
                await trio.testing.wait_all_tasks_blocked()
                exchange.broken.set()

            nursery.start_soon(breaks)
            with pytest.raises(TransportError, match="the connection broke"):
                await sending.run(range(NUM_CHUNKS), cast(Waiter, Acknowledged()), 60.0)

    for _ in range(ATTEMPTS):
        trio.run(attempt)
