"""Process groups as torch calls them: two in this process, over loopback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.trust import AllowList
from neurogrid.training.distributed.meeting import meet
from neurogrid.training.distributed.node import NodeThread, Places
from neurogrid.training.distributed.process_group import NeuroGridProcessGroup
from neurogrid.training.distributed.work import Pending

TIMEOUT = 20.0

Groups = tuple[NeuroGridProcessGroup, NeuroGridProcessGroup]


@pytest.fixture
def groups() -> Iterator[Groups]:
    store = dist.HashStore()

    def open_rank(rank: int) -> NeuroGridProcessGroup:
        thread = NodeThread(Places(["/ip4/127.0.0.1/tcp/0"]), Identity.generate(), AllowList({}))
        thread.hold()
        group = meet(thread, store, rank, 2, timeout=TIMEOUT, name="all", global_ranks=range(2))
        return NeuroGridProcessGroup(thread, group, TIMEOUT)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(open_rank, range(2))
    yield one, other
    for group in (one, other):
        group.shutdown()


def wait(works: Sequence[Pending]) -> None:
    for work in works:
        work.wait()


def test_tensors_of_inference_mode_are_written_to(groups: Groups) -> None:
    """Metrics of an evaluation are added up in it, and the loop's thread is not."""
    with torch.inference_mode():
        sums = [torch.full((3,), 1.0 + rank) for rank in range(2)]
        strided = [torch.full((2, 3), 1.0 + rank).t() for rank in range(2)]
        gathered = [torch.empty(6) for _ in range(2)]
        for tensors in (sums, strided):
            wait([g.allreduce([t]) for g, t in zip(groups, tensors, strict=True)])
        wait([g.all_gather_single(*pair) for g, *pair in zip(groups, gathered, sums, strict=True)])
    for tensor in (*sums, *strided, *gathered):
        assert tensor.is_inference()
        assert bool((tensor == 3.0).all())
