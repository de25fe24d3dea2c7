"""Collectives between ranks in one process, over a network in memory; and what a rank may send that it should not."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
import torch
import trio
from torch.distributed import ReduceOp

from neurogrid.errors import NeuroGridError, TransportError
from neurogrid.p2p.memory import Link, open_memory_network
from neurogrid.p2p.trust import Insecure
from neurogrid.p2p.wire import TensorMessage
from neurogrid.training.distributed import collectives, group
from neurogrid.training.distributed.chunks import CHUNK_BYTES
from neurogrid.training.distributed.collectives import Flat
from neurogrid.training.distributed.errors import RankError
from neurogrid.training.distributed.group import NOTICE, Group
from neurogrid.training.distributed.node import Node
from neurogrid.training.distributed.operation import Operation
from neurogrid.training.distributed.posts import WINDOW_BYTES
from neurogrid.training.distributed.sums import reduction_of
from neurogrid.training.wire import GroupFailure, TrainingMessage

NUMBER = 77
TIMEOUT = 30.0


@asynccontextmanager
async def open_ranks(size: int, link: Link | None = None) -> AsyncIterator[list[Group]]:
    """Groups of so many ranks, connected."""
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_memory_network(link))
        hosts = [await stack.enter_async_context(network.open_host()) for _ in range(size)]
        nodes = [Node(host, Insecure()) for host in hosts]
        peer_ids = [host.peer_id for host in hosts]
        groups = []
        for rank, node in enumerate(nodes):
            groups.append(Group(NUMBER, "all", rank, peer_ids, range(size), node.exchange))
            node.add(groups[-1])
            for host in hosts[:rank]:
                await node.host.connect(host.addresses[0])
                await node.exchange.open(host.peer_id)
        with trio.fail_after(2 * TIMEOUT):
            yield groups


async def on_all(
    groups: Sequence[Group], task: Callable[[Operation], Awaitable[None]], timeout: float = TIMEOUT
) -> None:
    """Run an operation on each rank."""
    async with trio.open_nursery() as nursery:
        for of in groups:
            nursery.start_soon(task, Operation(of, "test", timeout=timeout))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_items", [0, 1, 1000, 600_001])
async def test_all_ranks_get_the_sum_in_the_order_of_ranks(size: int, num_items: int) -> None:
    generator = torch.Generator().manual_seed(num_items)
    rows = [torch.randn(num_items, generator=generator) for _ in range(size)]
    wanted = rows[0].clone()
    for row in rows[1:]:
        wanted += row
    reduction = reduction_of(ReduceOp.SUM, torch.float32, size)
    async with open_ranks(size) as groups:
        await on_all(
            groups,
            lambda operation: collectives.all_reduce(
                operation, Flat(rows[operation.group.rank]), reduction
            ),
        )
    assert all(torch.equal(row, wanted) for row in rows)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("num_items", [1, 600_001])
async def test_a_broadcast_reaches_all(size: int, num_items: int) -> None:
    async with open_ranks(size) as groups:
        for root in range(size):
            rows = [torch.full((num_items,), float(rank)) for rank in range(size)]
            await on_all(
                groups,
                lambda operation, rows=rows, root=root: collectives.broadcast(
                    operation, Flat(rows[operation.group.rank]), root
                ),
            )
            assert all(torch.equal(row, rows[root]) for row in rows)


async def test_many_small_sends_wait_for_a_receiver_that_is_late() -> None:
    """More than a window, unasked: nothing is refused, and all arrives once somebody asks."""
    num_posts = 3000
    async with open_ranks(2) as (one, other), trio.open_nursery() as nursery:
        sending = Operation(one, "send", tag=5, timeout=TIMEOUT)
        empty = memoryview(b"")

        async def send_all() -> None:
            for _ in range(num_posts):
                await sending.outgoing(1, 0, 0).send_all(empty)

        nursery.start_soon(send_all)
        await trio.testing.wait_all_tasks_blocked(0.01)
        receiving = Operation(other, "recv", tag=5, timeout=TIMEOUT)
        assert other.channel(0, 5).incoming.early_cost == WINDOW_BYTES
        for _ in range(num_posts):
            assert len(await receiving.incoming(0, 0, 0).take(0)) == 0


async def test_a_post_that_was_begun_arrives_as_it_was_when_its_operation_has_failed() -> None:
    """The caller has its tensor back, and may write to it while the rest of the post is still to go out."""
    async with open_ranks(2, Link(delay=0.05)) as (one, other):
        tensor = torch.ones(CHUNK_BYTES, dtype=torch.uint8)
        sending = Operation(one, "send", tag=1, timeout=TIMEOUT).outgoing(1, 0, CHUNK_BYTES)
        with trio.move_on_after(0.1) as scope:
            await sending.send_all(Flat(tensor).memory)
        assert scope.cancelled_caught
        tensor.zero_()
        receiving = Operation(other, "recv", tag=1, timeout=TIMEOUT).incoming(0, 0, CHUNK_BYTES)
        assert bytes(await receiving.take(0)) == b"\x01" * CHUNK_BYTES


async def send_raw(of: Group, data: bytes = b"", **fields: int) -> None:
    message = TensorMessage(
        msg_type=TrainingMessage.POST,
        **{"layer_id": 1, "seq_id": 0, "request_id": NUMBER, **fields},  # type: ignore[arg-type]
        data=data,
    )
    await of.exchange.send(of.peer_ids[0], message)


@pytest.mark.parametrize(
    ("posts", "said"),
    [
        ([{"data": b"a"}, {"data": b"a"}], "post 0 came twice"),
        ([{"data": bytes(WINDOW_BYTES + 1)}], "may come unasked"),
        ([{"data": b"a", "seq_id": NOTICE | 3}], "a notice has Data"),
        (
            [{"layer_id": tag} for tag in range(100, 120)],
            "more than 16 tags: take the same ones again",
        ),
        (
            [{"data": bytes(4 << 20), "layer_id": tag} for tag in range(3)],
            "B under 4 tags came unasked",
        ),
    ],
)
async def test_what_a_rank_may_not_send_costs_it_the_group(
    posts: list[dict[str, object]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "MAX_CHANNELS_PER_RANK", 16)
    monkeypatch.setattr(group, "MAX_UNASKED_PER_RANK", 8 << 20)
    async with open_ranks(3) as groups:
        waiting = Operation(groups[0], "recv", tag=9, timeout=TIMEOUT).incoming(1, 0, 4)
        with contextlib.suppress(NeuroGridError):  # its stream breaks at some time
            for post in posts:
                await send_raw(groups[1], **post)  # type: ignore[arg-type]
        with pytest.raises(RankError, match=said) as caught:
            await waiting.take(0)
        assert caught.value.ranks == (1,)
        assert groups[0].lost.keys() == {1}


async def test_one_tag_more_than_there_may_be_is_an_error_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "MAX_CHANNELS_PER_RANK", 4)
    async with open_ranks(2) as (one, other):
        for tag in range(4):
            one.channel(1, tag)
        with pytest.raises(RankError, match="more than 4 tags: take the same ones again"):
            Operation(one, "send", tag=4, timeout=TIMEOUT).outgoing(1, 0, 4)
        assert not other.lost


async def test_what_came_unasked_and_was_taken_counts_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "MAX_UNASKED_PER_RANK", 2 * CHUNK_BYTES)
    async with open_ranks(2) as (one, other):
        for tag in range(1, 7):
            await send_raw(other, bytes(CHUNK_BYTES), layer_id=tag)
            channel = one.channel(1, tag)
            while not channel.incoming.has_early:
                await channel.changed.wait()
            receiving = Operation(one, "recv", tag=tag, timeout=TIMEOUT)
            assert len(await receiving.incoming(1, 0, CHUNK_BYTES).take(0)) == CHUNK_BYTES
        assert not one.lost


async def test_a_peer_that_is_no_rank_is_refused_and_costs_nothing() -> None:
    async with open_ranks(3) as groups:
        stranger = Group(NUMBER, "all", 1, groups[0].peer_ids, range(3), groups[1].exchange)
        groups[0]._ranks.pop(groups[1].peer_ids[1])
        await send_raw(stranger, data=b"a")
        while groups[1].exchange.hello_of(groups[0].peer_ids[0]) is not None:
            await trio.lowlevel.checkpoint()
        assert not groups[0].lost
        sending = Operation(groups[2], "send", tag=1, timeout=TIMEOUT)
        receiving = Operation(groups[0], "recv", tag=1, timeout=TIMEOUT)
        await sending.outgoing(0, 0, 4).send_all(memoryview(b"abcd"))
        assert bytes(await receiving.incoming(2, 0, 4).take(0)) == b"abcd"


async def test_at_the_deadline_the_rank_that_did_not_come_is_named() -> None:
    """Rank 1 does not call: the others name it, though each waits for the other's sums as well."""
    reduction = reduction_of(ReduceOp.SUM, torch.float32, 3)
    async with open_ranks(3) as groups:
        for of in (groups[0], groups[2]):
            operation = Operation(of, "all_reduce", timeout=0.2)
            assert "waited for its turn" in str(operation.late())
        operations = [Operation(of, "all_reduce", timeout=0.2) for of in (groups[0], groups[2])]
        with trio.move_on_after(0.2):
            async with trio.open_nursery() as nursery:
                for operation in operations:
                    nursery.start_soon(
                        partial(collectives.all_reduce, reduction=reduction),
                        operation,
                        Flat(torch.ones(900_000)),
                    )
        for operation in operations:
            assert operation.late().ranks == (1,)


async def test_a_lost_rank_ends_what_waits_for_it_and_nothing_else() -> None:
    async with open_ranks(3) as groups:
        waiting = Operation(groups[0], "recv", tag=1, timeout=TIMEOUT)
        from_one, from_two = waiting.incoming(1, 0, 4), waiting.incoming(2, 0, 4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(groups[1].exchange.close_peer, groups[0].peer_ids[0])
            with pytest.raises(RankError, match=r"rank 1 \(.*\) was lost"):
                await from_one.take(0)
        sending = Operation(groups[2], "send", tag=1, timeout=TIMEOUT)
        await sending.outgoing(0, 0, 4).send_all(memoryview(b"abcd"))
        assert bytes(await from_two.take(0)) == b"abcd"


async def test_a_rank_that_fails_tells_the_others_why_before_it_ends() -> None:
    """Rank 2 is gone, which rank 0 sees first; rank 1 sees rank 0 end, and names rank 2 all the same."""
    async with open_ranks(3) as groups:
        waiting = Operation(groups[1], "recv", tag=1, timeout=TIMEOUT).incoming(0, 0, 4)
        groups[0].fail(groups[0].lose(2, TransportError("the peer closed the connection")))
        await groups[0].tell_failure()
        await groups[0].exchange.close_peer(groups[1].peer_ids[1])
        with pytest.raises(
            RankError, match=r"rank 0 \(.*\) failed: rank 2 \(.*\) was lost"
        ) as caught:
            await waiting.take(0)
        assert caught.value.ranks == (2,)


async def test_no_operation_ends_before_the_others_were_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two that are under way one tells them, and whoever waits for the other one may end the program."""
    monkeypatch.setattr(group, "TELL_TIMEOUT", TIMEOUT)
    async with open_ranks(2) as (_, failed):
        failed.fail(RankError("out of memory"))
        send, may_send = failed.exchange.send, trio.Event()
        num_told = 0

        async def send_late(peer_id: str, message: TensorMessage) -> None:
            await may_send.wait()
            await send(peer_id, message)

        async def tell() -> None:
            nonlocal num_told
            await failed.tell_failure()
            num_told += 1

        monkeypatch.setattr(failed.exchange, "send", send_late)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell)
            nursery.start_soon(tell)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert num_told == 0
            may_send.set()
        assert num_told == 2


async def test_what_was_sent_before_a_failure_is_there_after_it() -> None:
    async with open_ranks(2) as groups:
        sending = Operation(groups[0], "send", tag=1, timeout=TIMEOUT)
        await sending.outgoing(1, 0, 4).send_all(memoryview(b"abcd"))
        groups[0].fail(RankError("out of memory"))
        await groups[0].tell_failure()
        waiting = Operation(groups[1], "recv", tag=1, timeout=TIMEOUT)
        assert bytes(await waiting.incoming(0, 0, 4).take(0)) == b"abcd"
        with pytest.raises(RankError, match=r"rank 0 \(.*\) failed: out of memory") as caught:
            await waiting.incoming(0, 0, 4).take(0)
        assert caught.value.ranks == (0,)


async def test_a_failure_of_ranks_that_are_not_there_is_a_violation() -> None:
    async with open_ranks(3) as groups:
        message = TensorMessage(
            msg_type=TrainingMessage.FAILED,
            request_id=NUMBER,
            data=GroupFailure("it was not I", (1, 3)).encode(),
        )
        await groups[1].exchange.send(groups[0].peer_ids[0], message)
        waiting = Operation(groups[0], "recv", tag=1, timeout=TIMEOUT).incoming(1, 0, 4)
        with pytest.raises(RankError, match=r"rank 1 \(.*\) was lost") as caught:
            await waiting.take(0)
        assert caught.value.ranks == (1,)


async def test_a_failure_in_a_group_that_is_not_here_is_ignored() -> None:
    async with open_ranks(2) as groups:
        message = TensorMessage(
            msg_type=TrainingMessage.FAILED,
            request_id=NUMBER + 1,
            data=GroupFailure("another one").encode(),
        )
        await groups[1].exchange.send(groups[0].peer_ids[0], message)
        sending = Operation(groups[1], "send", tag=1, timeout=TIMEOUT)
        await sending.outgoing(0, 0, 4).send_all(memoryview(b"abcd"))
        waiting = Operation(groups[0], "recv", tag=1, timeout=TIMEOUT)
        assert bytes(await waiting.incoming(1, 0, 4).take(0)) == b"abcd"
        assert not groups[0].lost
