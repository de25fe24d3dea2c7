"""A connection that breaks while chunks go out: whoever sends a blob hears of that, and not of our own channels."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import trio
import trio.testing

from neurogrid.errors import StreamBrokenError, TransportError
from neurogrid.p2p.transfer.chunks import BlobInfo
from neurogrid.p2p.transfer.sending import _Sending
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


class ReadsMeanwhile(_Sending):
    """Chunks come from the disk in the moment in which the stream breaks."""

    exchange: Breaking

    async def _read(self, indices: Iterable[int]) -> list[WeightsChunk]:
        wanted = list(indices)
        if wanted and wanted[0] > 0:
            await self.exchange.broken.wait()
        return [WeightsChunk(index, NUM_CHUNKS, memoryview(b"x")) for index in wanted]


def test_who_sends_hears_that_the_connection_broke() -> None:
    source = BytesSource(bytes(NUM_CHUNKS))
    info = BlobInfo.of_digests(source.digests(), source.num_bytes)
    offer = TensorMessage(msg_type=MessageType.TRANSFER_OFFER, data=b"")

    async def attempt() -> None:
        exchange = Breaking()
        sending = ReadsMeanwhile(exchange, "peer", offer, info, source, 60.0, None)  # type: ignore[arg-type]
        sending.exchange = exchange
        async with trio.open_nursery() as nursery:

            async def breaks() -> None:
                await trio.testing.wait_all_tasks_blocked()
                exchange.broken.set()

            nursery.start_soon(breaks)
            with pytest.raises(TransportError, match="the connection broke"):
                await sending.run(range(NUM_CHUNKS), Acknowledged(), 60.0)  # type: ignore[arg-type]

    for _ in range(ATTEMPTS):
        trio.run(attempt)
