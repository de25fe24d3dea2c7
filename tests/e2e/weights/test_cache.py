"""What a worker was sent is on its disk when it starts again, and is believed by its hash alone."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from neurogrid import CoordinatorSettings, WorkerSettings, open_coordinator, open_worker
from neurogrid.errors import NoRouteError
from neurogrid.node.cache_directory import CacheSettings
from tests.e2e.bad_input_peer.scenarios import Good
from tests.e2e.preloaded import DEADLINE, command_after
from tests.e2e.support import (
    Outcome,
    WorkerProcess,
    generate,
    reference_tokens,
    run_coordinator,
    start_worker,
)
from tests.families import FAMILIES, save_checkpoint

PROMPT = [5, 17, 200, 33]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    path = tmp_path_factory.mktemp("llama")
    return path, reference_tokens(save_checkpoint(FAMILIES[0], path), PROMPT, 12)


def run(path: Path, *workers: WorkerProcess, **more: Any) -> Outcome:
    addresses = tuple(worker.address for worker in workers)
    settings = CoordinatorSettings(model=path, peers=addresses, max_seq_len=512, **more)
    return run_coordinator(settings, [PROMPT])


def weight_bytes(outcome: Outcome) -> int:
    return sum(sent.get("weights", 0) for sent in outcome.sent.values())


def wait_for_blobs(cache: Path, count: int) -> list[Path]:
    """The blobs in the cache; they are written beside the work."""
    deadline = time.monotonic() + DEADLINE
    while len(found := sorted((cache / "blobs").glob("*.blob"))) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def filled(llama: tuple[Path, list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that a worker has filled that was killed afterwards."""
    path, expected = llama
    directory = tmp_path_factory.mktemp("filled")
    cache = directory / "cache"
    with start_worker(directory, "--cache-dir", str(cache)) as worker:
        outcome = run(path, worker)
        assert outcome.tokens == [expected]
        assert weight_bytes(outcome) > 0
        wait_for_blobs(cache, 6)
        worker.kill()
    return cache


def test_the_second_start_gets_no_weight_bytes(
    llama: tuple[Path, list[int]], filled: Path, tmp_path: Path
) -> None:
    path, expected = llama
    # Two at once on one directory.
    with (
        start_worker(tmp_path, "--cache-dir", str(filled)) as first,
        start_worker(tmp_path, "--cache-dir", str(filled)) as second,
    ):
        outcome = run(path, first, second, stages=2)
    assert outcome.tokens == [expected]
    assert weight_bytes(outcome) == 0
    assert (filled.stat().st_mode & 0o777) == 0o700


def test_a_damaged_file_is_said_and_fetched_anew(
    llama: tuple[Path, list[int]], filled: Path, tmp_path: Path
) -> None:
    path, expected = llama
    damaged = wait_for_blobs(filled, 6)[0]
    data = bytearray(damaged.read_bytes())
    data[-3] ^= 0xFF
    damaged.write_bytes(data)
    with start_worker(tmp_path, "--cache-dir", str(filled)) as worker:
        outcome = run(path, worker)
        assert outcome.tokens == [expected]
        assert f"{damaged.name} is damaged" in worker.log
        assert 0 < weight_bytes(outcome) < 2 * len(data)
        wait_for_blobs(filled, 6)
        assert damaged.read_bytes() != data


# No file of the process's own grows beyond this, as on a disk that is full.
SMALL_FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))"


def test_a_disk_that_is_full_while_layers_come_is_said_and_serves_all_the_same(
    tmp_path: Path,
) -> None:
    good, cache = Good(tmp_path / "model", seed=7), tmp_path / "cache"
    assert min(map(len, good.model.layers)) > 2**20
    command = command_after(SMALL_FILES)
    with start_worker(tmp_path, "--cache-dir", str(cache), command=command) as worker:
        for _ in range(2):
            good.check_on(worker.address)
        wait_for_words(worker, "File too large")
        assert worker.is_alive()
        assert "Traceback" not in worker.log
        assert worker.log.count("File too large") == 1
    assert not list(cache.rglob("*.tmp"))
    assert not list(cache.rglob("*.blob"))


def wait_for_words(worker: WorkerProcess, words: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while words not in worker.log:
        assert time.monotonic() < deadline, worker.log
        time.sleep(0.05)


def test_a_small_limit_is_kept_and_serves_all_the_same(
    llama: tuple[Path, list[int]], tmp_path: Path
) -> None:
    path, expected = llama
    limit = 200_000

    async def main() -> None:
        cache = CacheSettings(tmp_path, max_bytes=limit)
        async with open_worker(WorkerSettings(cache=cache)) as worker:
            settings = CoordinatorSettings(model=path, peers=worker.addresses[:1], max_seq_len=512)
            with trio.fail_after(DEADLINE):
                async with open_coordinator(settings) as coordinator:
                    assert (await generate(coordinator, [PROMPT], 12)).tokens == [expected]
                await trio.to_thread.run_sync(wait_for_blobs, tmp_path, 1)
        assert sum(file.stat().st_size for file in (tmp_path / "blobs").glob("*.blob")) <= limit

    trio.run(main)


def test_hashes_are_kept_and_found_out_when_they_are_wrong(
    llama: tuple[Path, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The model was written a moment ago.
    monkeypatch.setattr("neurogrid.model.files.hash_cache._TICK_NS", -1)
    path, expected = llama
    hashes = tmp_path / "hashes"

    async def start() -> Outcome:
        async with open_worker(WorkerSettings()) as worker:
            settings = CoordinatorSettings(
                model=path,
                peers=worker.addresses[:1],
                max_seq_len=512,
                cache=CacheSettings(tmp_path),
            )
            async with open_coordinator(settings) as coordinator:
                return await generate(coordinator, [PROMPT], 12)

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            assert (await start()).tokens == [expected]
            (file,) = hashes.glob("*.json")
            kept = json.loads(file.read_text())
            assert len(kept["layers"]) == 6
            kept["layers"]["3"][1] = base64.b64encode(bytes(32)).decode()
            file.write_text(json.dumps(kept))
            with pytest.raises(NoRouteError, match=r"hashes anew: .*layer 3: chunk 0"):
                await start()
            assert not file.exists()
            assert (await start()).tokens == [expected]
            assert json.loads(file.read_text())["layers"] != kept["layers"]

    trio.run(main)
