"""The bytes that a worker has: on disk soon after they came, in memory as long as somebody else holds them."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import trio

from neurogrid.errors import ConfigurationError
from neurogrid.node.cache_directory import CacheSettings, default_cache_directory, open_directory
from neurogrid.p2p.transfer import BlobCache, BlobInfo, BytesSource, MemoryStore, StoredBlob
from neurogrid.worker.blobs import WorkerBlobs
from tests.unit.full_disk import full_disk

MODEL = "ab" * 32


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the network to be quiet."""
    monkeypatch.setattr("neurogrid.worker.blobs.QUIET", 0.0)


def blob_of(seed: int) -> StoredBlob:
    data = Random(seed).randbytes(100_000)
    info = BlobInfo.of_digests(BytesSource(data).digests(), len(data))
    partial = MemoryStore().open(info)
    partial.write(0, data)
    return partial.finish()


@asynccontextmanager
async def writing(settings: CacheSettings | None) -> AsyncIterator[WorkerBlobs]:
    blobs = WorkerBlobs(settings)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(blobs.run)
            yield blobs
            nursery.cancel_scope.cancel()


async def until_written(blobs: WorkerBlobs, layer_id: int) -> None:
    while layer_id not in await blobs.layers_on_disk(MODEL):
        await trio.lowlevel.checkpoint()


async def test_what_came_is_on_disk_for_the_next_start(tmp_path: Path) -> None:
    settings = CacheSettings(tmp_path / "cache")
    one, two = blob_of(1), blob_of(2)
    async with writing(settings) as blobs:
        await blobs.keep(one, model=MODEL, layer_id=3)
        await blobs.keep(two, model=MODEL, layer_id=5)
        await until_written(blobs, 5)
    async with writing(settings) as blobs:
        assert await blobs.layers_on_disk(MODEL) == {3, 5}
        assert await blobs.layers_on_disk("cd" * 32) == frozenset()
        assert await blobs.load(one.info.blob_id, max_bytes=one.num_bytes - 1) is None
        found = await blobs.load(one.info.blob_id, max_bytes=one.num_bytes)
        assert found is not None
        assert found.data == one.data
        del found
        source = blobs.source(one.info.blob_id)  # no longer in memory: from the file
        assert source is not None
        assert source.chunk(0) == bytes(one.data)


async def test_it_is_served_from_memory_only_while_that_is_somebody_elses() -> None:
    one = blob_of(1)
    blob_id, content = one.info.blob_id, bytes(one.data)
    async with writing(None) as blobs:
        await blobs.keep(one, model=MODEL, layer_id=0)
        assert await blobs.load(blob_id, max_bytes=one.num_bytes) is None
        source = blobs.source(blob_id)
        assert source is not None
        assert source.chunk(0) == content
        assert source.digests() == one.digests()
        del source, one
        gc.collect()
        assert blobs.source(blob_id) is None


@pytest.mark.parametrize("is_kept", [False, True], ids=["nowhere", "on disk"])
async def test_what_is_gone_is_forgotten(tmp_path: Path, is_kept: bool) -> None:
    """Parts of adapters come for no model, and there is no end of them."""
    settings = CacheSettings(tmp_path, max_bytes=250_000) if is_kept else None
    async with writing(settings) as blobs:
        for seed in range(10):
            await blobs.keep(blob_of(seed))
            await blobs.flush()
            gc.collect()
            assert len(blobs._on_disk) <= 2
            assert len(blobs._in_memory) <= 2
        assert len(blobs._on_disk) == 2 * is_kept


async def test_what_the_model_is_made_of_stays_on_disk(tmp_path: Path) -> None:
    one, two = blob_of(1), blob_of(2)
    async with writing(CacheSettings(tmp_path, max_bytes=150_000)) as blobs:
        blobs.use([one.info.blob_id])
        await blobs.keep(one, model=MODEL, layer_id=0)
        await until_written(blobs, 0)
        await blobs.keep(two, model=MODEL, layer_id=1)
        await blobs.keep(one, model=MODEL, layer_id=2)  # written after the other was tried
        await until_written(blobs, 2)
        assert await blobs.layers_on_disk(MODEL) == {0, 2}
        blobs.use([])
        await blobs.keep(two, model=MODEL, layer_id=1)
        await until_written(blobs, 1)
        assert await blobs.layers_on_disk(MODEL) == {1}


def test_hints_are_within_the_limit(tmp_path: Path) -> None:
    """Those of models that nobody has come back to go, and so does their room on the disk."""
    limit = 20 * 4096
    notes = tmp_path / "models"
    notes.mkdir()
    cache = BlobCache(tmp_path / "blobs", max_bytes=limit, notes=notes)
    for number in range(200):
        assert cache.note(f"{number:064x}", b"{}")
        os.utime(notes / f"{number:064x}.json", (number, number))
        assert cache.num_bytes <= limit
    assert {int(file.stem, 16) for file in notes.iterdir()} == set(range(180, 200))
    # What is used stays, and one that would fill everything is not written.
    assert cache.noted(f"{180:064x}") == b"{}"
    assert cache.note("f" * 64, b"{}")
    assert cache.noted(f"{180:064x}") == b"{}"
    assert cache.noted(f"{181:064x}") is None
    assert not cache.note("e" * 64, bytes(limit + 1))
    assert cache.noted("f" * 64) == b"{}"


async def test_a_blob_takes_the_room_of_old_hints(tmp_path: Path) -> None:
    size = blob_of(1).num_bytes
    settings = CacheSettings(tmp_path, max_bytes=size + 2 * 4096)
    async with writing(settings) as blobs:
        for number in range(8):
            (tmp_path / "models" / f"{number:064x}.json").write_text("{}")
        (tmp_path / "models" / "torn.tmp").write_text("{")
        await blobs.keep(blob_of(1), model=MODEL, layer_id=3)
        await until_written(blobs, 3)
        used, most = blobs.disk_use()
        assert used is not None
        assert most is not None
        assert used <= most
    async with writing(settings) as blobs:
        assert await blobs.layers_on_disk(MODEL) == {3}
    assert not list(tmp_path.rglob("*.tmp"))


async def test_on_a_full_disk_layers_are_served_from_memory_and_leave_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = blob_of(1)
    async with writing(CacheSettings(tmp_path)) as blobs:
        with full_disk():
            await blobs.keep(stored, model=MODEL, layer_id=0)
            await blobs.flush()
            assert blobs.source(stored.info.blob_id) is not None
            assert not await blobs.layers_on_disk(MODEL)
            # The last bytes of a disk may have been a blob's, with none left for the hint.
            blobs._note_layer(MODEL, 0, stored.info.blob_id)
        left = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in left) == 0
        assert not [path for path in left if path.suffix == ".tmp"]
        # And the next one is kept, when there is room again.
        await blobs.keep(stored, model=MODEL, layer_id=0)
        await until_written(blobs, 0)
    assert "File too large" in caplog.text


async def test_hints_that_are_damaged_are_none(tmp_path: Path) -> None:
    blobs = WorkerBlobs(CacheSettings(tmp_path))
    for text in ("", "[]", '{"a": "b"}', '{"1": 2}', '{"-1": "00"}', "\xff"):
        (tmp_path / "models" / f"{MODEL}.json").write_bytes(text.encode("latin-1"))
        assert await blobs.layers_on_disk(MODEL) == frozenset()


def test_a_directory_that_cannot_be_had(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="give another with --cache-dir, or --no-cache"):
        WorkerBlobs(CacheSettings(tmp_path / "file", is_required=True))
    assert open_directory(CacheSettings(tmp_path / "file"), "blobs") is None
    assert "there is no cache" in caplog.text


def test_where_the_user_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / "neurogrid"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for other in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert default_cache_directory() == tmp_path / "home" / ".cache" / "neurogrid"
