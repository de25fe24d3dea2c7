"""What a worker was sent is on its disk when it starts again, and is believed by its hash alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from neurogrid import CoordinatorSettings
from tests.e2e.support import (
    DEADLINE,
    Outcome,
    WorkerProcess,
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


def test_a_small_limit_is_kept_and_serves_all_the_same(
    llama: tuple[Path, list[int]], tmp_path: Path
) -> None:
    path, expected = llama
    cache = tmp_path / "cache"
    limit = 200_000
    with start_worker(tmp_path, "--cache-dir", str(cache), "--cache-limit", str(limit)) as worker:
        assert run(path, worker).tokens == [expected]
        wait_for_blobs(cache, 1)
        assert sum(file.stat().st_size for file in (cache / "blobs").glob("*.blob")) <= limit
