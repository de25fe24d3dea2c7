"""What is kept of blobs that stopped coming: by content, bounded in number, bytes and time, oldest dropped first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing

from neurogrid.p2p.transfer import (
    BlobInfo,
    BytesSource,
    DirectoryStore,
    MemoryStore,
    TransferLimits,
)
from neurogrid.p2p.transfer.partials import Added, PartialTable
from neurogrid.p2p.transfer.store import BlobStore
from neurogrid.p2p.wire import CHUNK_BYTES

SOURCES = [BytesSource(Random(seed).randbytes(2 * CHUNK_BYTES + 5)) for seed in range(6)]
INFOS = [BlobInfo.of_digests(source.digests(), source.num_bytes) for source in SOURCES]
MEMORY = MemoryStore()


@pytest.fixture(autouse=True)
def clock() -> trio.testing.MockClock:
    """A clock that stands still until it is told to jump."""
    return trio.testing.MockClock()


def jump(seconds: float) -> None:
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)
    clock.jump(seconds)


@asynccontextmanager
async def table_of(limits: TransferLimits) -> AsyncIterator[PartialTable]:
    async with trio.open_nursery() as nursery:
        yield PartialTable(nursery.start_soon, limits)
        nursery.cancel_scope.cancel()


@pytest.fixture
def table() -> AbstractAsyncContextManager[PartialTable]:
    return table_of(TransferLimits())


async def leave(
    table: PartialTable, number: int, num_chunks: int = 1, store: BlobStore = MEMORY
) -> None:
    """Let so many chunks of a blob come, and no more."""
    shared = await table.open(store, INFOS[number])
    for index in range(num_chunks):
        async with shared.lock:
            assert await table.add(shared, [(index, SOURCES[number].chunk(index))]) == [Added.NEW]
    table.close(shared)


async def kept(table: PartialTable, number: int, store: BlobStore = MEMORY) -> int:
    """How many chunks of a blob are there."""
    shared = await table.open(store, INFOS[number])
    try:
        return shared.num_received
    finally:
        table.close(shared)


async def test_what_came_is_there_for_the_next(table: PartialTable) -> None:
    await leave(table, 0, 2)
    await leave(table, 1, 1)
    assert [blob.info for blob in table.idle] == [INFOS[0], INFOS[1]]
    assert await kept(table, 0) == 2
    assert await kept(table, 1) == 1
    assert await kept(table, 2) == 0
    assert len(table.idle) == 2


async def test_what_becomes_of_a_chunk(table: PartialTable) -> None:
    shared = await table.open(MEMORY, INFOS[0])
    first, second, third = (SOURCES[0].chunk(index) for index in range(3))
    async with shared.lock:
        assert await table.add(shared, [(0, second)]) == [Added.WRONG]
        assert shared.num_received == 0
        assert await table.add(shared, [(0, first)]) == [Added.NEW]
        assert await table.add(shared, [(0, first)]) == [Added.AGAIN]
        assert await table.add(shared, [(0, second)]) == [Added.WRONG]
        assert await table.add(shared, [(2, third[:-1])]) == [Added.WRONG]
        assert shared.num_received == 1
        assert await table.add(shared, [(2, third)]) == [Added.NEW]
        assert shared.stored is None
        assert await table.add(shared, [(1, second)]) == [Added.NEW]
    assert shared.stored is not None
    assert shared.stored.data == b"".join((first, second, third))
    table.close(shared)
    # Whole blobs are their user's affair.
    assert table.idle == []
    assert await kept(table, 0) == 0


async def test_of_several_those_before_the_wrong_one_are_kept(table: PartialTable) -> None:
    shared = await table.open(MEMORY, INFOS[0])
    first, second, third = (SOURCES[0].chunk(index) for index in range(3))
    async with shared.lock:
        assert await table.add(shared, [(0, first), (1, first), (2, third)]) == [
            Added.NEW,
            Added.WRONG,
        ]
        assert shared.num_received == 1
        assert await table.add(shared, []) == []
        assert await table.add(shared, [(0, first), (2, third), (1, second)]) == [
            Added.AGAIN,
            Added.NEW,
            Added.NEW,
        ]
    assert shared.stored is not None
    assert shared.stored.data == b"".join((first, second, third))
    table.close(shared)


async def test_progress_is_a_chunk_that_was_not_there(table: PartialTable) -> None:
    shared = await table.open(MEMORY, INFOS[0])
    async with shared.lock:
        jump(5)
        await table.add(shared, [(0, SOURCES[0].chunk(0))])
        came = shared.last_progress
        assert came == trio.current_time()
        jump(5)
        await table.add(shared, [(0, SOURCES[0].chunk(0))])
        await table.add(shared, [(1, SOURCES[0].chunk(0))])
        assert shared.last_progress == came
    table.close(shared)


async def test_two_transfers_share_what_is_there_and_both_are_told(table: PartialTable) -> None:
    told: list[str] = []
    one = await table.open(MEMORY, INFOS[0])
    other = await table.open(MEMORY, INFOS[0])
    assert one is other
    one.on_stored["one"] = lambda: told.append("one")
    one.on_stored["other"] = lambda: told.append("other")
    for index in range(3):
        assert told == []
        async with one.lock:
            await table.add(one, [(index, SOURCES[0].chunk(index))])
    assert told == ["one", "other"]
    table.close(one)
    assert other.stored is not None
    table.close(other)


async def test_a_blob_is_idle_when_its_last_user_has_gone(table: PartialTable) -> None:
    shared = await table.open(MEMORY, INFOS[0])
    async with shared.lock:
        await table.add(shared, [(0, SOURCES[0].chunk(0))])
    assert await table.open(MEMORY, INFOS[0]) is shared
    table.close(shared)
    assert table.idle == []
    table.close(shared)
    assert table.idle == [shared]


@pytest.mark.parametrize(
    "limits",
    [TransferLimits(max_idle_blobs=2), TransferLimits(max_idle_bytes=3 * CHUNK_BYTES)],
)
async def test_the_oldest_goes_first(limits: TransferLimits) -> None:
    async with table_of(limits) as table:
        await leave(table, 0, 1)
        jump(1)
        await leave(table, 1, 1)
        jump(1)
        # Used again, so that it is the youngest.
        assert await kept(table, 0) == 1
        jump(1)
        await leave(table, 2, 2)
        assert [blob.info for blob in table.idle] == [INFOS[0], INFOS[2]]
        assert await kept(table, 1) == 0


async def test_a_blob_that_is_larger_than_all_that_may_be_kept_is_not() -> None:
    async with table_of(TransferLimits(max_idle_bytes=CHUNK_BYTES)) as table:
        await leave(table, 0, 2)
        assert table.idle == []


async def test_what_nobody_offers_again_goes_after_a_while(table: PartialTable) -> None:
    await leave(table, 0)
    jump(400)
    await leave(table, 1)
    await trio.testing.wait_all_tasks_blocked()
    assert len(table.idle) == 2
    jump(201)
    await trio.testing.wait_all_tasks_blocked()
    assert [blob.info for blob in table.idle] == [INFOS[1]]
    jump(400)
    await trio.testing.wait_all_tasks_blocked()
    assert table.idle == []
    # The task that saw to it has ended; the next blob starts another.
    await leave(table, 2)
    jump(601)
    await trio.testing.wait_all_tasks_blocked()
    assert table.idle == []


async def test_a_blob_that_is_in_use_is_never_dropped() -> None:
    async with table_of(TransferLimits(max_idle_blobs=1)) as table:
        await leave(table, 0)
        shared = await table.open(MEMORY, INFOS[0])
        jump(10_000)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(1, 4):
            await leave(table, number)
        assert shared.num_received == 1
        for index in (1, 2):
            async with shared.lock:
                await table.add(shared, [(index, SOURCES[0].chunk(index))])
        assert shared.stored is not None
        table.close(shared)


async def test_nothing_that_came_is_nothing_to_keep(table: PartialTable, tmp_path: Path) -> None:
    assert await kept(table, 0) == 0
    assert await kept(table, 0, DirectoryStore(tmp_path)) == 0
    assert table.idle == []
    assert list(tmp_path.iterdir()) == []


async def test_files_are_left_to_their_directory(table: PartialTable, tmp_path: Path) -> None:
    await leave(table, 0, 2, DirectoryStore(tmp_path))
    assert table.idle == []
    assert await kept(table, 0, DirectoryStore(tmp_path)) == 2
    # Another place, another blob.
    assert await kept(table, 0) == 0
    shared = await table.open(DirectoryStore(tmp_path), INFOS[0])
    async with shared.lock:
        await table.add(shared, [(2, SOURCES[0].chunk(2))])
    assert shared.stored is not None
    table.close(shared)
    # The whole blob is found when it is asked for once more.
    shared = await table.open(DirectoryStore(tmp_path), INFOS[0])
    assert shared.stored is not None
    table.close(shared)


async def test_a_length_that_is_a_lie_has_a_place_of_its_own(table: PartialTable) -> None:
    await leave(table, 0, 2)
    lie = BlobInfo(INFOS[0].blob_id, INFOS[0].num_bytes - 1, INFOS[0].digests)
    shared = await table.open(MEMORY, lie)
    assert shared.num_received == 0
    table.close(shared)
    assert await kept(table, 0) == 2


async def test_a_store_that_has_no_room_leaves_nothing(table: PartialTable, tmp_path: Path) -> None:
    class Full(MemoryStore):
        def open(self, info: BlobInfo) -> None:  # type: ignore[override]
            raise OSError("full")

    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            await table.open(Full(), INFOS[0])
    assert table.idle == []
