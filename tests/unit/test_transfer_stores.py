"""Where blobs are kept: in memory that grows with what came, and in files that are believed by their hash alone."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from random import Random

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.transfer import (
    BlobInfo,
    BlobStore,
    BytesSource,
    DirectoryStore,
    MemoryStore,
    TransferLimits,
)
from neurogrid.p2p.transfer.memory_store import populate_pages, reserve_pages
from neurogrid.p2p.transfer.store import PartialBlob
from neurogrid.p2p.wire import CHUNK_BYTES, MAX_BLOB_BYTES, ErrorCode

MIB = 1024 * 1024
BLOB = Random(4).randbytes(9 * CHUNK_BYTES + 77)
SOURCE = BytesSource(BLOB)
INFO = BlobInfo.of_digests(SOURCE.digests(), len(BLOB))
LAST = INFO.num_chunks - 1


def info_of(blob: bytes) -> BlobInfo:
    return BlobInfo.of_digests(BytesSource(blob).digests(), len(blob))


def put(partial: PartialBlob, *indices: int) -> None:
    for index in indices:
        partial.write(index, SOURCE.chunk(index))
        partial.chunks.add(index)


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return MemoryStore() if request.param == "memory" else DirectoryStore(tmp_path)


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(INFO.num_chunks)))
def test_in_any_order_into_memory(order: list[int]) -> None:
    partial = MemoryStore().open(INFO)
    put(partial, *order)
    assert partial.finish().data == BLOB


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(INFO.num_chunks)), stops=st.sets(st.integers(0, LAST)))
def test_in_any_order_into_a_directory_that_is_opened_again_and_again(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], stops: set[int]
) -> None:
    path = tmp_path_factory.mktemp("blobs")
    partial = DirectoryStore(path).open(INFO)
    for number, index in enumerate(order):
        put(partial, index)
        if number in stops:
            partial.suspend()
            partial = DirectoryStore(path).open(INFO)
            assert set(partial.chunks) == set(order[: number + 1])
    stored = partial.finish()
    assert stored.data == BLOB
    assert stored.path is not None
    assert stored.path.read_bytes() == BLOB
    assert [entry.name for entry in path.iterdir()] == [f"{INFO.blob_id.hex()}.blob"]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_any_size(store: BlobStore, size: int) -> None:
    blob = BLOB[:size]
    partial = store.open(info_of(blob))
    source = BytesSource(blob)
    for index in range(partial.info.num_chunks):
        partial.write(index, source.chunk(index))
        partial.chunks.add(index)
    stored = partial.finish()
    assert stored.data == blob
    assert stored.num_bytes == size
    assert stored.digests() == source.digests()
    assert b"".join(stored.chunk(i) for i in range(partial.info.num_chunks)) == blob


def test_what_is_there_is_counted(store: BlobStore) -> None:
    partial = store.open(INFO)
    assert partial.kept_bytes == 0
    put(partial, 3, LAST)
    assert partial.kept_bytes == 2 * CHUNK_BYTES
    partial.discard()


def test_two_stores_of_one_place_are_one(tmp_path: Path) -> None:
    assert MemoryStore() == MemoryStore()
    assert hash(MemoryStore()) == hash(MemoryStore())
    assert DirectoryStore(tmp_path) == DirectoryStore(tmp_path / ".." / tmp_path.name)
    assert len({DirectoryStore(tmp_path), DirectoryStore(tmp_path)}) == 1
    assert DirectoryStore(tmp_path / "a") != DirectoryStore(tmp_path)
    assert DirectoryStore(tmp_path) != MemoryStore()


def test_the_largest_blob_costs_address_space_at_most() -> None:
    info = BlobInfo(bytes(32), MAX_BLOB_BYTES, b"")
    try:
        partial = MemoryStore().open(info)
    except RequestRefusedError as exc:
        # A system that does not overcommit.
        if exc.code != ErrorCode.OUT_OF_MEMORY:
            raise
    else:
        partial.write(40_000, bytes(CHUNK_BYTES))
        status = Path("/proc/self/status").read_text()
        assert int(status.partition("VmRSS:")[2].split()[0]) < 8 * 1024 * 1024


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **more: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("neurogrid.p2p.transfer.memory_store.mmap.mmap", full)
    with pytest.raises(RequestRefusedError, match=f"10 MiB of blob {INFO.short_id}") as caught:
        MemoryStore().open(INFO)
    assert caught.value.code == ErrorCode.OUT_OF_MEMORY


# Files


def part_of(path: Path) -> Path:
    return path / f"{INFO.blob_id.hex()}-{len(BLOB)}.part"


class PagesWithout(mmap.mmap):
    """Pages whose kernel answers a request to populate them with an error."""

    answer = errno.ENOMEM

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        raise OSError(self.answer, os.strerror(self.answer))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_pages_are_there_before_they_are_written_to_and_no_others() -> None:
    view = reserve_pages(64 * MIB, "a test")
    before = resident_bytes()
    populate_pages(view, 8 * MIB, 16 * MIB, "a test")
    assert 15 * MIB < resident_bytes() - before < 20 * MIB
    assert bytes(view[8 * MIB : 24 * MIB]) == bytes(16 * MIB)
    populate_pages(view, 64 * MIB, 0, "a test")


def test_memory_that_ends_within_a_blob_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", PagesWithout)
    partial = MemoryStore().open(INFO)
    with pytest.raises(RequestRefusedError, match="no memory for the 1 MiB of blob") as caught:
        put(partial, 0)
    assert caught.value.code == ErrorCode.OUT_OF_MEMORY


def test_a_kernel_that_cannot_populate_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", PagesWithout)
    monkeypatch.setattr(PagesWithout, "answer", errno.EINVAL)
    partial = MemoryStore().open(INFO)
    put(partial, *range(INFO.num_chunks))
    assert partial.finish().data == BLOB


def test_a_file_takes_room_for_what_came(tmp_path: Path) -> None:
    partial = DirectoryStore(tmp_path).open(INFO)
    put(partial, 8)
    status = part_of(tmp_path).stat()
    assert status.st_size == len(BLOB)
    assert status.st_blocks * 512 < 3 * CHUNK_BYTES
    partial.suspend()


def test_chunks_that_rotted_do_not_count(tmp_path: Path) -> None:
    partial = DirectoryStore(tmp_path).open(INFO)
    put(partial, 0, 1, 2, LAST)
    partial.suspend()
    with part_of(tmp_path).open("r+b") as file:
        file.seek(CHUNK_BYTES + 5)
        file.write(bytes([BLOB[CHUNK_BYTES + 5] ^ 1]))
    partial = DirectoryStore(tmp_path).open(INFO)
    assert set(partial.chunks) == {0, 2, LAST}
    put(partial, 1, *range(3, LAST))
    assert partial.finish().data == BLOB


@pytest.mark.parametrize("bitmap", [b"", b"\xff", b"\xff" * 100, b"\x00\x00"])
def test_a_bitmap_is_a_hint(tmp_path: Path, bitmap: bytes) -> None:
    """Whatever it says, only chunks with the right hash count."""
    partial = DirectoryStore(tmp_path).open(INFO)
    put(partial, 0, 5)
    partial.suspend()
    part_of(tmp_path).with_suffix(".have").write_bytes(bitmap)
    partial = DirectoryStore(tmp_path).open(INFO)
    assert set(partial.chunks) <= {0, 5}
    put(partial, *(set(range(INFO.num_chunks)) - set(partial.chunks)))
    assert partial.finish().data == BLOB


def test_a_file_of_another_length_is_made_right(tmp_path: Path) -> None:
    partial = DirectoryStore(tmp_path).open(INFO)
    put(partial, 0, 5)
    partial.suspend()
    os.truncate(part_of(tmp_path), 3 * CHUNK_BYTES)
    partial = DirectoryStore(tmp_path).open(INFO)
    assert set(partial.chunks) == {0}
    put(partial, *range(1, INFO.num_chunks))
    assert partial.finish().data == BLOB


def test_a_whole_blob_is_found_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    assert store.load(INFO.blob_id) is None
    partial = store.open(INFO)
    put(partial, *range(INFO.num_chunks))
    stored = partial.finish()
    for found in (store.load(INFO.blob_id), DirectoryStore(tmp_path).open(INFO).finish()):
        assert found is not None
        assert found.info == stored.info
        assert found.data == BLOB
        assert found.path == stored.path
    assert len(list(tmp_path.iterdir())) == 1


def test_a_whole_blob_that_rotted_is_mended(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    partial = store.open(INFO)
    put(partial, *range(INFO.num_chunks))
    path = partial.finish().path
    assert path is not None
    rotten = bytearray(BLOB)
    rotten[4 * CHUNK_BYTES] ^= 1
    path.write_bytes(rotten)
    assert store.load(INFO.blob_id) is None
    partial = store.open(INFO)
    assert set(range(INFO.num_chunks)) - set(partial.chunks) == {4}
    put(partial, 4)
    assert partial.finish().data == BLOB
    assert path.read_bytes() == BLOB


def test_a_length_that_is_a_lie_does_not_spoil_the_honest_one(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    honest = store.open(INFO)
    put(honest, 0, LAST)
    liar = store.open(BlobInfo(INFO.blob_id, INFO.num_bytes - 1, INFO.digests))
    assert len(liar.chunks) == 0
    liar.discard()
    honest.suspend()
    assert set(store.open(INFO).chunks) == {0, LAST}


@pytest.mark.parametrize("lie", [-1, 1])
def test_a_length_that_is_a_lie_leaves_the_whole_blob_where_it_is(tmp_path: Path, lie: int) -> None:
    store = DirectoryStore(tmp_path)
    partial = store.open(INFO)
    put(partial, *range(INFO.num_chunks))
    stored = partial.finish()
    liar = store.open(BlobInfo(INFO.blob_id, INFO.num_bytes + lie, INFO.digests))
    assert len(liar.chunks) == 0
    liar.discard()
    assert stored.path is not None
    # To read a page that was cut off would end the process.
    assert stored.path.stat().st_size == INFO.num_bytes
    assert stored.data == BLOB
    again = store.load(INFO.blob_id)
    assert again is not None
    assert again.data == BLOB


def test_a_whole_blob_that_was_cut_is_mended(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    partial = store.open(INFO)
    put(partial, *range(INFO.num_chunks))
    path = partial.finish().path
    assert path is not None
    os.truncate(path, INFO.num_bytes - 1)
    partial = store.open(INFO)
    assert set(range(INFO.num_chunks)) - set(partial.chunks) == {LAST}
    put(partial, LAST)
    assert partial.finish().data == BLOB


def test_chunks_that_are_written_together_are_all_found_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    partial = store.open(INFO)
    for index in range(INFO.num_chunks):
        partial.write(index, SOURCE.chunk(index))
    for index in range(INFO.num_chunks):  # as a table does, when all are written
        partial.chunks.add(index)
    partial.suspend()
    assert len(store.open(INFO).chunks) == INFO.num_chunks


def test_another_process_that_was_first(tmp_path: Path) -> None:
    one, other = (DirectoryStore(tmp_path).open(INFO) for _ in range(2))
    for partial in (one, other):
        put(partial, *range(INFO.num_chunks))
    assert one.finish().data == BLOB
    assert other.finish().data == BLOB


def test_a_discarded_blob_is_gone(tmp_path: Path) -> None:
    partial = DirectoryStore(tmp_path).open(INFO)
    put(partial, 1)
    partial.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (TransferLimits(max_partial_files=2), {3, 4}),
        (TransferLimits(max_partial_file_bytes=2 * CHUNK_BYTES + CHUNK_BYTES // 2), {3, 4}),
        (TransferLimits(partial_file_age=150.0), {4}),
    ],
)
def test_the_oldest_unfinished_files_go_first(
    tmp_path: Path, limits: TransferLimits, left: set[int]
) -> None:
    infos = {number: info_of(bytes([number]) * 2 * CHUNK_BYTES) for number in range(5)}
    before = DirectoryStore(tmp_path)
    now = os.stat(tmp_path).st_mtime
    for number, info in infos.items():
        partial = before.open(info)
        partial.write(0, bytes([number]) * CHUNK_BYTES)
        partial.chunks.add(0)
        partial.suspend()
        then = now - 100 * (5 - number)
        os.utime(tmp_path / f"{info.blob_id.hex()}-{info.num_bytes}.part", (then, then))
    store = DirectoryStore(tmp_path, limits=limits)
    store.prune()
    names = {f"{infos[number].blob_id.hex()}-{2 * CHUNK_BYTES}" for number in left}
    assert {entry.stem for entry in tmp_path.iterdir()} == names
    assert len(list(tmp_path.iterdir())) == 2 * len(left)


def test_a_file_that_is_open_is_not_dropped(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, limits=TransferLimits(max_partial_files=0))
    partial = store.open(INFO)
    put(partial, 1)
    store.prune()
    assert part_of(tmp_path).exists()
    put(partial, 0, *range(2, INFO.num_chunks))
    assert partial.finish().data == BLOB


def test_a_full_disk_is_an_error_that_the_peer_is_told_without_our_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = DirectoryStore(tmp_path).open(INFO)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr("neurogrid.p2p.transfer.directory_store.os.pwrite", full)
    with pytest.raises(RequestRefusedError, match="on disk: No space left on device") as caught:
        put(partial, 0)
    assert caught.value.code == ErrorCode.OUT_OF_MEMORY
    assert str(tmp_path) not in str(caught.value)
    partial.suspend()


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = DirectoryStore(tmp_path).open(INFO)
    pwrite = os.pwrite
    monkeypatch.setattr(
        "neurogrid.p2p.transfer.directory_store.os.pwrite",
        lambda file, data, offset: pwrite(file, bytes(data)[:300_000], offset),
    )
    put(partial, *range(INFO.num_chunks))
    assert partial.finish().data == BLOB


def test_the_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "new" / "cache")
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    partial = DirectoryStore(tmp_path).open(INFO)
    assert part_of(tmp_path).stat().st_mode & 0o077 == 0
    assert blake3(INFO.digests).digest() == partial.info.blob_id
    partial.discard()
