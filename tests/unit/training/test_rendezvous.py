"""The rendezvous by a ticket in a file, in which there may be one of an earlier run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import neurogrid.training.distributed  # noqa: F401 - the backend
from neurogrid.p2p.shares import share_of
from neurogrid.training.distributed.errors import RankError
from neurogrid.training.distributed.node import Places
from neurogrid.training.distributed.rendezvous import find_store, note_met

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


def test_a_rank_that_comes_while_the_earlier_run_is_there_waits_for_the_next_ticket(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Its rank 0 has not ended, and has not written the ticket of the next run yet."""
    file = tmp_path / "ticket"
    url = f"neurogrid://@{file}?world_size=2&rank="
    for rank in range(2):
        thread, store, *_ = find_store(f"{url}{rank}", PLACES, TIMEOUT)
        stack.callback(thread.close)
    note_met(store)
    pool = stack.enter_context(ThreadPoolExecutor(1))
    finding = pool.submit(find_store, f"{url}1", PLACES, TIMEOUT)
    with pytest.raises(TimeoutError):
        finding.result(1.0)
    with pytest.raises(RankError, match="have met without rank 1"):
        find_store(f"neurogrid://{file.read_text().strip()}?world_size=2&rank=1", PLACES, TIMEOUT)
    thread, store, *_ = find_store(f"{url}0", PLACES, TIMEOUT)
    stack.callback(thread.close)
    thread, other_store, *_ = finding.result()
    stack.callback(thread.close)
    other_store.set("a", b"1")
    assert store.get("a") == b"1"


def test_without_a_next_ticket_it_says_so(tmp_path: Path, stack: ExitStack) -> None:
    url = f"neurogrid://@{tmp_path / 'ticket'}?world_size=2&rank="
    thread, store, *_ = find_store(f"{url}0", PLACES, TIMEOUT)
    stack.callback(thread.close)
    note_met(store)
    with pytest.raises(RankError, match="the ranks of the ticket that is there have met before"):
        find_store(f"{url}1", PLACES, timedelta(seconds=2))


def test_ranks_that_have_met_say_so(tmp_path: Path) -> None:
    file = tmp_path / "ticket"
    dist.init_process_group(
        "neurogrid", init_method=f"neurogrid://@{file}", rank=0, world_size=1, timeout=TIMEOUT
    )
    try:
        with pytest.raises(RankError, match="have met without rank 1"):
            find_store(f"neurogrid://{file.read_text()}?world_size=2&rank=1", PLACES, TIMEOUT)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 24, 200])
def test_rank_0_relays_between_all_ranks_as_long_as_they_are_there(
    stack: ExitStack, size: int
) -> None:
    """Where none of them reaches another, and all dial at once."""
    thread, *_ = find_store(f"neurogrid://?world_size={size}&rank=0", PLACES, TIMEOUT)
    stack.callback(thread.close)
    assert thread.node.reach is not None
    service = thread.node.reach._relay_service
    assert service is not None
    limits, others = service._limits, size - 1
    assert share_of(limits.max_reservations) >= others
    assert min(limits.max_circuits_per_peer, limits.max_requests_per_peer) >= others
    assert min(limits.max_circuits, limits.max_requests) >= others * (others - 1) / 2
    assert limits.circuit_time >= 300 * 86_400
    assert limits.circuit_bytes >= 2**50
