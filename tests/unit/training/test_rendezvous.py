"""The rendezvous by a ticket in a file, in which there may be one of an earlier run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from neurogrid.training.distributed.node import Places
from neurogrid.training.distributed.rendezvous import find_store

PLACES = Places(["/ip4/127.0.0.1/tcp/0"])
TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("lifetime", [1.0, 600.0])
def test_a_ticket_of_an_earlier_run_makes_room_for_that_of_this_one(
    tmp_path: Path, stack: ExitStack, lifetime: float
) -> None:
    """It may be read before rank 0 has written the next, when it leads nowhere or has expired."""
    url = f"neurogrid://@{tmp_path / 'ticket'}?world_size=2&rank="
    thread, *_ = find_store(f"{url}0", PLACES, timedelta(seconds=lifetime))
    thread.close()
    time.sleep(1.5)
    pool = stack.enter_context(ThreadPoolExecutor(1))
    finding = pool.submit(find_store, f"{url}1", PLACES, TIMEOUT)
    time.sleep(1.0)
    assert not finding.done()
    thread, store, _, _ = find_store(f"{url}0", PLACES, TIMEOUT)
    stack.callback(thread.close)
    thread, other_store, rank, size = finding.result()
    stack.callback(thread.close)
    assert (rank, size) == (1, 2)
    other_store.set("a", b"1")
    assert store.get("a") == b"1"
