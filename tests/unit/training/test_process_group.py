"""Process groups as torch calls them: two in this process, over loopback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.trust import AllowList
from neurogrid.training.distributed.errors import RankError
from neurogrid.training.distributed.meeting import Record, meet
from neurogrid.training.distributed.node import NodeThread, Places
from neurogrid.training.distributed.process_group import NeuroGridProcessGroup
from neurogrid.training.distributed.work import Pending

TIMEOUT = 20.0

Groups = tuple[NeuroGridProcessGroup, NeuroGridProcessGroup]


@contextmanager
def opened(size: int) -> Iterator[list[NeuroGridProcessGroup]]:
    store = dist.HashStore()

    def open_rank(rank: int) -> NeuroGridProcessGroup:
        thread = NodeThread(Places(["/ip4/127.0.0.1/tcp/0"]), Identity.generate(), AllowList({}))
        thread.hold()
        ranks = range(size)
        group = meet(thread, store, rank, size, timeout=TIMEOUT, name="all", global_ranks=ranks)
        return NeuroGridProcessGroup(thread, group, TIMEOUT)

    with ThreadPoolExecutor(size) as pool:
        groups = list(pool.map(open_rank, range(size)))
    yield groups
    for group in groups:
        group.shutdown()


@pytest.fixture
def groups() -> Iterator[Groups]:
    with opened(2) as (one, other):
        yield one, other


def wait(works: Sequence[Pending]) -> None:
    for work in works:
        work.wait()


def test_tensors_that_are_gathered_together_are_listed_by_rank(groups: Groups) -> None:
    """As `all_gather_coalesced` has them: the list of a rank has its tensors, in their order."""

    def of(rank: int) -> list[Tensor]:
        return [torch.full((2,), 10.0 * rank), torch.full((2,), 10.0 * rank + 1)]

    places = [[[torch.empty(2) for _ in range(2)] for _ in range(2)] for _ in groups]
    wait(
        [
            group.allgather_coalesced(out, of(rank))
            for rank, (group, out) in enumerate(zip(groups, places, strict=True))
        ]
    )
    for out in places:
        for rank, row in enumerate(out):
            assert all(map(torch.equal, row, of(rank)))


def test_other_tensors_than_are_gathered_together_are_refused(groups: Groups) -> None:
    with pytest.raises(ConfigurationError, match="all_gather_coalesced wants 1 tensors"):
        groups[0].allgather_coalesced([[torch.empty(2)] * 2] * 2, [torch.empty(2)])
    with pytest.raises(ConfigurationError, match="all_gather_coalesced wants 2 tensors"):
        groups[0].allgather_coalesced([[torch.empty(2)]], [torch.empty(2)])


def test_parts_of_a_tensor_that_is_not_contiguous_are_its_rows(groups: Groups) -> None:
    shared = torch.arange(12.0).view(3, 4)
    outs = [torch.empty(2, 3) for _ in groups]
    opts = dist.ReduceScatterOptions()
    opts.reduceOp = dist.ReduceOp.SUM
    wait(
        [
            group.reduce_scatter_single(out, shared.t(), opts)
            for group, out in zip(groups, outs, strict=True)
        ]
    )
    assert torch.equal(torch.cat(outs), 2 * shared.t())
    strided = [torch.empty(3, 4).t() for _ in groups]
    wait(
        [
            group.all_gather_single(out, shared.t()[2 * rank : 2 * rank + 2])
            for rank, (group, out) in enumerate(zip(groups, strided, strict=True))
        ]
    )
    assert all(torch.equal(out, shared.t()) for out in strided)
    with pytest.raises(ConfigurationError, match="make it contiguous"):
        groups[0].all_gather_single(torch.empty(4, 3).t(), torch.empty(6))


def test_tensors_of_two_dtypes_are_refused_before_anything_is_sent(groups: Groups) -> None:
    """Torch lets them through where there is one tensor, and not a list: gloo refuses them, too."""
    opts = dist.ReduceScatterOptions()
    wanted = "one dtype, not torch.float16, torch.float32"
    with pytest.raises(
        ConfigurationError, match=f"reduce_scatter_tensor wants tensors of {wanted}"
    ):
        groups[0].reduce_scatter_single(torch.empty(2, dtype=torch.float16), torch.ones(4), opts)
    with pytest.raises(
        ConfigurationError, match=f"all_gather_into_tensor wants tensors of {wanted}"
    ):
        groups[0].all_gather_single(torch.empty(4, dtype=torch.float16), torch.ones(2))
    wait([group.barrier() for group in groups])


def test_a_receive_from_any_rank_for_which_nothing_is_sent_names_the_others(groups: Groups) -> None:
    groups[0].set_timeout(timedelta(seconds=0.3))
    with pytest.raises(RankError, match=r"recv in all did not end .* waited for rank 1 ") as caught:
        groups[0].recv_anysource([torch.empty(1)], 0).wait()
    assert caught.value.ranks == (1,)


def test_a_rank_that_is_alone_receives_from_nobody() -> None:
    with opened(1) as (alone,):
        with pytest.raises(ConfigurationError, match="recv is between two ranks, and all has one"):
            alone.recv_anysource([torch.empty(1)], 0)
        alone.barrier().wait()


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


def test_what_another_rank_says_is_safe_to_print() -> None:
    store = dist.HashStore()
    other = Record(Identity.generate().peer_id, (), 5)
    for what, data in (("record", other.encode()), ("ready", b""), ("linked", b"\x1b[2Jno\n")):
        store.set(f"neurogrid/{what}/1", b"+" + data)
    thread = NodeThread(Places(["/ip4/127.0.0.1/tcp/0"]), Identity.generate(), AllowList({}))
    try:
        with pytest.raises(RankError, match=r"cannot take part: \ufffd\[2Jno $"):
            meet(thread, store, 0, 2, timeout=TIMEOUT, name="all", global_ranks=range(2))
    finally:
        thread.close()
