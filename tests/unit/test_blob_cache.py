"""Blobs on disk: within a limit, the oldest first, none in use, and none that is not what its name says."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

import pytest

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.transfer import BlobCache, BlobInfo, BytesSource, StoredBlob
from neurogrid.p2p.transfer import cache as cache_module
from neurogrid.p2p.wire import CHUNK_BYTES
from tests.unit.forked import Forked
from tests.unit.full_disk import full_disk

SIZE = 2 * CHUNK_BYTES + 77


def blob_of(seed: int, num_bytes: int = SIZE) -> StoredBlob:
    data = Random(seed).randbytes(num_bytes)
    digests = BytesSource(data).digests()
    return StoredBlob(BlobInfo.of_digests(digests, num_bytes), memoryview(data))


ONE, TWO, THREE = (blob_of(seed) for seed in range(3))


def age(cache: BlobCache, blob: StoredBlob, seconds: int) -> None:
    os.utime(cache.path / f"{blob.info.blob_id.hex()}.blob", (0, 1_700_000_000 - seconds))


def names(cache: BlobCache) -> set[str]:
    return {path.name for path in cache.path.iterdir() if path.name != "lock"}


def test_what_was_stored_is_there_for_another_process(tmp_path: Path) -> None:
    assert BlobCache(tmp_path / "c").store(ONE)
    again = BlobCache(tmp_path / "c")
    found = again.load(ONE.info.blob_id)
    assert found is not None
    assert found.data == ONE.data
    assert found.info == ONE.info
    assert ONE.info.blob_id in again
    assert again.load(TWO.info.blob_id) is None
    assert again.load(ONE.info.blob_id, max_bytes=SIZE - 1) is None
    assert again.num_bytes == SIZE


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_every_length(tmp_path: Path, num_bytes: int) -> None:
    cache, blob = BlobCache(tmp_path), blob_of(9, num_bytes)
    assert cache.store(blob)
    found = cache.load(blob.info.blob_id)
    assert found is not None
    assert found.data == blob.data
    source = cache.source(blob.info)
    assert source is not None
    assert source.chunk(0) == bytes(blob.chunk(0))
    assert source.digests() == blob.digests()


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "c")
    cache.store(ONE)
    assert cache.path.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in cache.path.iterdir())


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, max_bytes=2 * SIZE)
    cache.store(ONE)
    cache.store(TWO)
    age(cache, ONE, 20)
    age(cache, TWO, 10)
    assert cache.load(ONE.info.blob_id) is not None  # it was the oldest until now
    assert cache.store(THREE)
    assert TWO.info.blob_id not in cache
    assert ONE.info.blob_id in cache
    assert THREE.info.blob_id in cache


def test_what_is_in_use_stays_also_in_another_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = BlobCache(tmp_path, max_bytes=SIZE)
    cache.store(ONE)

    def use() -> None:
        BlobCache(tmp_path).use(ONE.info.blob_id)
        print("used", flush=True)
        sys.stdin.read()

    with Forked(use, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "used\n"
        assert not cache.store(TWO)
        assert "is not cached" in caplog.text
        assert ONE.info.blob_id in cache
        other.stdin.close()
        other.wait(60)
    assert cache.store(TWO)
    assert ONE.info.blob_id not in cache


def test_use_and_release(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, max_bytes=SIZE)
    cache.store(ONE)
    cache.use(ONE.info.blob_id)
    cache.use(ONE.info.blob_id)
    cache.use(TWO.info.blob_id)  # not here: nothing
    assert not cache.store(TWO)
    cache.release(ONE.info.blob_id)
    cache.release(ONE.info.blob_id)
    assert cache.store(TWO)
    cache.use(TWO.info.blob_id)
    cache.close()
    assert cache.store(ONE)


def test_nothing_is_dropped_in_vain(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, max_bytes=2 * SIZE)
    cache.store(ONE)
    cache.store(TWO)
    assert not cache.store(blob_of(5, 3 * SIZE))
    cache.use(TWO.info.blob_id)
    assert not cache.store(blob_of(6, 2 * SIZE))
    assert ONE.info.blob_id in cache
    assert TWO.info.blob_id in cache


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "empty"])
def test_a_damaged_file_is_dropped_and_said(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = BlobCache(tmp_path)
    cache.store(ONE)
    path = tmp_path / f"{ONE.info.blob_id.hex()}.blob"
    data = bytearray(path.read_bytes())
    data[CHUNK_BYTES + 5] ^= 1
    path.write_bytes(
        {"flipped": data, "cut": ONE.data[:-1], "longer": bytes(ONE.data) + b"0"}.get(damage, b"")
    )
    assert cache.load(ONE.info.blob_id) is None
    assert "is damaged" in caplog.text
    assert not path.exists()
    assert cache.store(ONE)
    assert cache.load(ONE.info.blob_id) is not None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "c")
    target = tmp_path / "elsewhere"
    target.write_bytes(ONE.data)
    (cache.path / f"{ONE.info.blob_id.hex()}.blob").symlink_to(target)
    assert cache.load(ONE.info.blob_id) is None
    cache.use(ONE.info.blob_id)
    assert target.exists()


def test_what_a_crash_left_is_dropped_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    left, written = tmp_path / "00-a.tmp", tmp_path / "00-b.tmp"
    left.write_bytes(b"half")
    written.write_bytes(b"half")
    with written.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache = BlobCache(tmp_path)
        assert names(cache) == {"00-b.tmp"}


def test_many_at_once_stay_within_the_limit(tmp_path: Path) -> None:
    caches = [BlobCache(tmp_path, max_bytes=3 * SIZE) for _ in range(2)]
    blobs = [blob_of(seed) for seed in range(6)]

    def work(cache: BlobCache, turn: int) -> None:
        for blob in blobs[turn:] + blobs[:turn]:
            assert cache.store(blob)
            found = cache.load(blob.info.blob_id)
            assert found is None or found.data == blob.data

    threads = [
        threading.Thread(target=work, args=(caches[turn % 2], turn)) for turn in range(len(blobs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caches[0].num_bytes <= 3 * SIZE
    assert all(name.endswith(".blob") for name in names(caches[0]))


def stop_in_turn(path: Path) -> None:
    with BlobCache(path)._turn():
        print("has its turn", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_process_that_was_stopped_in_its_turn_is_waited_for_with_a_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker of the machine would get no layers any more, and could not even end."""
    monkeypatch.setattr(cache_module, "TURN_TIMEOUT", 0.2)
    cache = BlobCache(tmp_path)
    with Forked(stop_in_turn, tmp_path, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "has its turn\n"
            assert not cache.store(ONE)
            assert f"process {process.pid} keeps it locked" in caplog.text
        finally:
            process.send_signal(signal.SIGCONT)
    assert process.returncode == 0
    assert cache.store(ONE)


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlobCache(tmp_path)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert not cache.store(ONE)
    assert "No space left" in caplog.text
    assert names(cache) == set()


def test_that_blobs_cannot_be_written_is_said_once_until_one_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = BlobCache(tmp_path)
    for _ in range(2):
        with full_disk():
            assert not cache.store(ONE)
            assert not cache.store(TWO)
        assert cache.store(TWO)
        (tmp_path / cache._file(TWO.info.blob_id)).unlink()
    assert caplog.text.count("cannot be cached") == 2


def test_a_directory_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="--cache-dir"):
        BlobCache(tmp_path / "file" / "below")
