"""One real worker that lives through all of these tests, and models for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.bad_input_peer.scenarios import MAX_SEQ_LEN, MAX_WORKER_BYTES, MEMORY_LIMIT, Good
from tests.e2e.support import (
    WorkerProcess,
    start_worker,
)


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    return Good(tmp_path_factory.mktemp("good"), seed=7)


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Good:
    """Another fine-tune: the same config, other weights."""
    return Good(tmp_path_factory.mktemp("tuned"), seed=8)


@pytest.fixture(scope="session")
def long_lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    directory = tmp_path_factory.mktemp("long-lived")
    limits = ("--memory-limit", str(MEMORY_LIMIT), "--max-seq-len", str(MAX_SEQ_LEN))
    with start_worker(directory, *limits) as worker:
        yield worker


@pytest.fixture
def worker(long_lived: WorkerProcess, good: Good) -> Iterator[WorkerProcess]:
    """The worker, which must serve well after the test."""
    logged = len(long_lived.log)
    yield long_lived
    assert long_lived.is_alive()
    good.check_on(long_lived.address)
    assert "Traceback" not in long_lived.log[logged:]
    assert peak_bytes(long_lived) < MAX_WORKER_BYTES


def peak_bytes(worker: WorkerProcess) -> int:
    """The most memory that the worker ever had."""
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
