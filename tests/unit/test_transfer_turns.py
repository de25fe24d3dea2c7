"""Blobs to one peer go one after the other, and none is silent while it waits. Over a network in memory."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio

from neurogrid.p2p.transfer import BytesSource, Transfers, outgoing, send_blob
from neurogrid.p2p.transfer.chunks import BlobInfo
from neurogrid.p2p.wire import CHUNK_BYTES
from tests.unit.transfer_peers import Taking, two_protocols

DEADLINE = 60.0
NUM_CHUNKS = 9


class Slow(BytesSource):
    """Bytes that can be read once `may_go` is set."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.digests()
        self.may_go = threading.Event()

    def chunk(self, index: int) -> memoryview:
        assert self.may_go.wait(DEADLINE)
        return super().chunk(index)


def blob(number: int) -> bytes:
    return Random(number).randbytes(NUM_CHUNKS * CHUNK_BYTES)


Send = Callable[[int, BytesSource], trio.CancelScope]


@asynccontextmanager
async def sender() -> AsyncIterator[tuple[Send, list[int]]]:
    """What starts to send a blob as a layer, and the layers of the chunks that went. Left when all have."""
    went: list[int] = []
    with trio.fail_after(DEADLINE):
        async with two_protocols() as (protocol, taker):
            Transfers(taker, Taking())

            async def send_one(layer: int, source: BytesSource, scope: trio.CancelScope) -> None:
                with scope:
                    sent = await send_blob(
                        protocol,
                        taker.host.peer_id,
                        source,
                        layer_id=layer,
                        on_sent=lambda num_bytes: went.append(layer),
                    )
                    assert sent.sent_bytes == source.num_bytes

            async with trio.open_nursery() as nursery:

                def send(layer: int, source: BytesSource) -> trio.CancelScope:
                    scope = trio.CancelScope()
                    nursery.start_soon(send_one, layer, source, scope)
                    return scope

                yield send, went


async def test_one_is_sent_whole_before_the_next() -> None:
    async with sender() as (send, went):
        for layer in range(3):
            send(layer, BytesSource(blob(layer)))
    order = [went[at] for at in range(0, len(went), NUM_CHUNKS)]
    assert sorted(order) == [0, 1, 2]
    assert went == [layer for layer in order for _ in range(NUM_CHUNKS)]


async def test_one_that_waits_gives_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "SIGN_OF_LIFE", 0.05)
    slow = Slow(blob(0))
    async with sender() as (send, went):
        try:
            send(0, slow)
            await trio.sleep(0.2)  # it has its turn, and nothing to send
            send(1, BytesSource(blob(1)))
            while went.count(1) < 2:
                await trio.sleep(0.01)
            assert went.count(0) == 0
        finally:
            slow.may_go.set()
    assert sorted(went) == [0] * NUM_CHUNKS + [1] * NUM_CHUNKS


async def test_one_that_is_given_up_makes_room() -> None:
    slow = Slow(blob(0))
    async with sender() as (send, went):
        scope = send(0, slow)
        await trio.sleep(0.2)
        send(1, BytesSource(blob(1)))
        await trio.sleep(0.1)
        assert went == []
        scope.cancel()
        slow.may_go.set()  # the thread that reads it is waited for
    assert went == [1] * NUM_CHUNKS


async def test_what_a_source_gives_is_sent_as_bytes_whatever_its_elements() -> None:
    class Floats(BytesSource):
        def chunk(self, index: int) -> memoryview:
            return super().chunk(index).cast("f")

    async with sender() as (send, went):
        send(0, Floats(blob(0)))
    assert went == [0] * NUM_CHUNKS


async def test_a_policy_that_has_nothing_yet_is_the_policy() -> None:
    """Though it counts what it has, and is there before anything is: adapters are added while a server runs."""

    class Counting(Taking):
        def __len__(self) -> int:
            return len(self.given)

    with trio.fail_after(DEADLINE):
        async with two_protocols() as (giver, taker):
            policy, source = Counting(), BytesSource(blob(0))
            Transfers(giver, policy)
            blob_id = BlobInfo.of_digests(source.digests(), source.num_bytes).blob_id
            policy.given[blob_id] = source
            got = await Transfers(taker).fetch_blob(giver.host.peer_id, blob_id)
            assert bytes(got.blob.data) == blob(0)
