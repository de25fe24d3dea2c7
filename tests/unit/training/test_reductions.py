"""Reductions between members on a network in memory: the same bits for all, or an error that names who is lost."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from neurogrid.errors import ConfigurationError, LocalProtocolError, PeerRefusedError
from neurogrid.p2p import TensorMessage
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.averaging.plan import ReductionPlan, Way
from neurogrid.training.averaging.reductions.gathering import MAX_WINDOW
from neurogrid.training.averaging.reductions.reduction import ENDED, GIVE_UP_GRACE
from neurogrid.training.wire.types import TrainingMessage
from tests.unit.training.reducing import (
    DEADLINE,
    Outcome,
    Peer,
    assert_equal,
    chunk_of,
    expected,
    open_group,
    plan_of,
    reduce_all,
    reduce_one,
    vectors,
)

WAYS = (Way.BUTTERFLY, Way.EVERYBODY)  # those of rows: test_grids.py
NUM = 1000  # elements: four chunks, the last one shorter


@pytest.mark.parametrize("num", [1, 2, 5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("codec", "result_codec", "aggregator"),
    [("f32", "f32", "mean"), ("f32", "f32", "median"), ("int8", "f16", "mean")],
)
async def test_all_members_get_the_bits_of_one_process(
    num: int, way: Way, codec: str, result_codec: str, aggregator: str
) -> None:
    async with open_group(num) as group:
        plan = plan_of(
            group.ids,
            NUM,
            way=way,
            weights=[1.0 + index for index in range(num)],
            codec=codec,
            result_codec=result_codec,
            aggregator=aggregator,
        )
        values = vectors(num, NUM)
        assert_equal(await reduce_all(group.peers, plan, values), expected(plan, values))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    """Members, elements, elements of a chunk, cuts."""
    num = draw(st.integers(1, 4))
    chunk_elements = draw(st.integers(1, 40))
    num_elements = draw(st.integers(1, 200))
    num_chunks = math.ceil(num_elements / chunk_elements)
    inner = st.lists(st.integers(0, num_chunks), min_size=num - 1, max_size=num - 1)
    return num, num_elements, chunk_elements, [0, *sorted(draw(inner)), num_chunks]


@given(shapes())
@settings(max_examples=40)
def test_any_sizes_and_cuts(shape: tuple[int, int, int, list[int]]) -> None:
    num, num_elements, chunk_elements, cuts = shape

    async def reduce() -> None:
        async with open_group(num) as group:
            plan = plan_of(group.ids, num_elements, chunk_elements=chunk_elements, cuts=cuts)
            values = vectors(num, num_elements)
            assert_equal(await reduce_all(group.peers, plan, values), expected(plan, values))

    trio.run(reduce)


async def test_a_server_that_is_no_member_averages_for_all() -> None:
    async with open_group(4) as group:
        *members, server = group.ids
        plan = plan_of(members, NUM, reducers=[server], weights=[1, 0, 3])
        values = vectors(3, NUM)
        outcomes = await reduce_all(group.peers, plan, [*values, None])
        assert_equal(outcomes, expected(plan, values))


async def test_a_reducer_with_a_part_that_is_no_member_has_no_result() -> None:
    async with open_group(3) as group:
        plan = plan_of(group.ids[:2], NUM, reducers=group.ids[1:])
        values = vectors(2, NUM)
        *members, reducer = await reduce_all(group.peers, plan, [*values, None])
        assert_equal(members, expected(plan, values))
        assert (reducer.result, reducer.error) == (None, None)


async def test_a_result_may_have_memory_that_is_there() -> None:
    async with open_group(1) as group:
        out = torch.zeros(NUM)
        (values,) = vectors(1, NUM)
        result = await group.peers[0].reductions.reduce(
            plan_of(group.ids, NUM), values, timeout=DEADLINE, out=out
        )
        assert result is not None
        assert result.values.data_ptr() == out.data_ptr()
        assert torch.equal(out, values)


# Lost peers


@given(num_bytes=st.integers(0, 4500), way=st.sampled_from(WAYS))
@settings(max_examples=30)
def test_whoever_survives_a_lost_member_names_it(num_bytes: int, way: Way) -> None:
    async def reduce() -> None:
        async with open_group(4) as group:
            *survivors, dead = group.peers
            first = survivors[0]
            # The life of one member ends when so much of it has come.
            group.network.cut_after(num_bytes, sender=dead.host, receiver=first.host)
            first.host.on_disconnected(
                lambda peer_id: dead.life.cancel() if peer_id == dead.peer_id else None
            )
            plan = plan_of(group.ids, NUM, way=way)
            outcomes = [Outcome() for _ in group.peers]
            values = vectors(4, NUM)
            async with trio.open_nursery() as nursery:
                for peer, own, outcome in zip(group.peers, values, outcomes, strict=True):
                    nursery.start_soon(reduce_one, peer, plan, own, outcome, DEADLINE)
            *of_survivors, _ = outcomes
            errors = [outcome.error for outcome in of_survivors if outcome.error]
            if errors:
                named = set().union(*(error.lost for error in errors))
                assert named == {dead.peer_id}
            for outcome in of_survivors:
                assert outcome.error is not None or outcome.result is not None
                assert outcome.seconds <= GIVE_UP_GRACE
            digests = {outcome.result.digest for outcome in of_survivors if outcome.result}
            assert len(digests) <= 1

    trio.run(reduce, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("silent", [0, 1, 2])
@pytest.mark.parametrize("chunk_elements", [256, 8])
async def test_a_silent_member_is_named_at_the_deadline(
    chunk_elements: int, silent: int, way: Way, autojump_clock: MockClock
) -> None:
    """And nobody else, although the others' rows wait for its own, or were not sent since answers are owed."""
    async with open_group(3) as group:
        plan = plan_of(group.ids, NUM, way=way, chunk_elements=chunk_elements)
        values = vectors(3, NUM)
        others = [peer for index, peer in enumerate(group.peers) if index != silent]
        own = [vector for index, vector in enumerate(values) if index != silent]
        outcomes = await reduce_all(others, plan, own, timeout=8)
        for outcome in outcomes:
            assert outcome.lost == {group.ids[silent]}
            assert outcome.error is not None
            # Before those that only wait for an aggregate would name who aggregates.
            assert "it has not sent its part within 6 s" in str(outcome.error)
            assert outcome.seconds == pytest.approx(6, abs=1e-3)


async def test_who_is_waited_for_can_be_told(autojump_clock: MockClock) -> None:
    async with open_group(3) as group:
        plan = plan_of(group.ids, NUM)
        values = vectors(3, NUM)
        outcomes = [Outcome() for _ in group.peers]
        async with trio.open_nursery() as nursery:
            for index in (0, 1, 2):
                await trio.testing.wait_all_tasks_blocked()
                if index == 2:
                    for peer in group.peers[:2]:
                        assert peer.reductions.waiting_for(plan.reduction) == {group.ids[2]}
                nursery.start_soon(
                    reduce_one, group.peers[index], plan, values[index], outcomes[index], DEADLINE
                )
        assert_equal(outcomes, expected(plan, values))
        assert group.peers[0].reductions.waiting_for(plan.reduction) == frozenset()
        assert frozenset(group.ids[1:]) in outcomes[0].waiting
        told = outcomes[0].waiting
        assert all(one != other for one, other in pairwise(told))


async def test_a_peer_that_is_not_connected_is_lost_at_once() -> None:
    async with open_group(2) as group:
        group.network.cut(*(peer.host for peer in group.peers))
        outcomes = await reduce_all(group.peers, plan_of(group.ids, NUM), vectors(2, NUM))
        assert [outcome.lost for outcome in outcomes] == [{group.ids[1]}, {group.ids[0]}]


async def test_a_member_that_is_cancelled_is_not_waited_for(autojump_clock: MockClock) -> None:
    async with open_group(3) as group:
        plan = plan_of(group.ids, NUM)
        values = vectors(3, NUM)
        leaving = trio.CancelScope()
        outcomes = [Outcome() for _ in group.peers]

        async def leave() -> None:
            with leaving:
                await reduce_one(group.peers[1], plan, values[1], outcomes[1], DEADLINE)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            nursery.start_soon(reduce_one, group.peers[0], plan, values[0], outcomes[0], DEADLINE)
            await trio.testing.wait_all_tasks_blocked()
            leaving.cancel()
            nursery.start_soon(reduce_one, group.peers[2], plan, values[2], outcomes[2], DEADLINE)
        for outcome in (outcomes[0], outcomes[2]):
            assert outcome.error is not None
            assert outcome.error.lost == {}
            assert group.ids[1] in outcome.error.gave_up
            assert outcome.seconds <= 2 * GIVE_UP_GRACE
        # Nothing of it is in the way of the next.
        plan = plan_of(group.ids, NUM)
        assert_equal(await reduce_all(group.peers, plan, values), expected(plan, values))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
async def test_values_that_are_not_finite_are_found_by_their_owner(
    bad: float, autojump_clock: MockClock
) -> None:
    async with open_group(3) as group:
        values = vectors(3, NUM)
        values[1][NUM - 1] = bad
        outcomes = await reduce_all(group.peers, plan_of(group.ids, NUM), values)
        assert outcomes[1].lost == {group.ids[1]}
        assert all(outcome.result is None for outcome in outcomes)


# What a peer may send


def wrong(plan: ReductionPlan, what: str) -> list[TensorMessage]:
    """Messages of which the last is refused."""
    whole = bytes(4 * plan.chunk_elements)
    return {
        "short": [chunk_of(plan, 0, whole[4:])],
        "long": [chunk_of(plan, 0, whole + bytes(4))],
        "long at the end": [chunk_of(plan, plan.num_chunks - 1, whole)],
        "empty": [chunk_of(plan, 0, b"")],
        "of another reducer": [chunk_of(plan, plan.num_chunks, whole)],
        "not finite": [chunk_of(plan, 0, whole[4:] + b"\0\0\xc0\x7f")],
        "twice": [chunk_of(plan, 0, whole), chunk_of(plan, 0, whole)],
        "too many": [chunk_of(plan, chunk, whole) for chunk in range(MAX_WINDOW + 1)],
    }[what]


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("short", ErrorCode.SHAPE_MISMATCH),
        ("long", ErrorCode.SHAPE_MISMATCH),
        ("long at the end", ErrorCode.SHAPE_MISMATCH),
        ("empty", ErrorCode.SHAPE_MISMATCH),
        ("of another reducer", ErrorCode.POSITION_MISMATCH),
        ("not finite", ErrorCode.NOT_FINITE),
        ("twice", ErrorCode.PROTOCOL_VIOLATION),
        ("too many", ErrorCode.LIMIT_EXCEEDED),
    ],
)
async def test_a_member_that_sends_what_is_wrong_is_lost(what: str, code: ErrorCode) -> None:
    async with open_group(2) as group:
        reducer, liar = group.peers
        plan = plan_of(
            [liar.peer_id, reducer.peer_id], 3950, chunk_elements=100, reducers=[reducer.peer_id]
        )
        # The other row is not there, so what is right waits.
        plan = replace(plan, members=(liar.peer_id, "somebody"))
        outcome = Outcome()
        codes: list[int] = []

        async def send(message: TensorMessage) -> None:
            with pytest.raises(PeerRefusedError) as refused:
                await liar.exchange.request(
                    reducer.peer_id, message, TrainingMessage.MEAN, timeout=DEADLINE
                )
            codes.append(refused.value.code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reduce_one, reducer, plan, None, outcome, DEADLINE)
            await trio.testing.wait_all_tasks_blocked()
            for message in wrong(plan, what):
                nursery.start_soon(send, message)
                await trio.testing.wait_all_tasks_blocked()
        assert outcome.lost == {liar.peer_id}
        assert set(codes) - {ENDED} == {code}
        assert codes.count(code) == 1


async def test_chunks_of_outsiders_are_refused_and_disturb_nobody() -> None:
    async with open_group(4) as group:
        *members, outsider = group.peers
        plan = plan_of(group.ids[:3], NUM)
        values = vectors(3, NUM)
        data = bytes(4 * plan.chunk_elements)
        outcomes = [Outcome() for _ in members]
        async with trio.open_nursery() as nursery:
            for index in (0, 1):
                nursery.start_soon(
                    reduce_one, members[index], plan, values[index], outcomes[index], DEADLINE
                )
            await trio.testing.wait_all_tasks_blocked()
            for reason in ("is no member of this reduction", "is not of this group"):
                with pytest.raises(PeerRefusedError, match=reason) as refused:
                    await ask(outsider, members[0], chunk_of(plan, 0, data))
                assert refused.value.code == ErrorCode.UNAUTHORIZED
                members[0].admitted.discard(outsider.peer_id)
            nursery.start_soon(reduce_one, members[2], plan, values[2], outcomes[2], DEADLINE)
        assert_equal(outcomes, expected(plan, values))


async def ask(
    peer: Peer,
    other: Peer,
    message: TensorMessage,
    answer: TrainingMessage = TrainingMessage.MEAN,
) -> TensorMessage:
    return await peer.exchange.request(other.peer_id, message, answer, timeout=DEADLINE)


@pytest.mark.parametrize(
    ("chunk", "data"),
    [(0, bytes(10)), (1, bytes(1024)), (0, b"\0\0\xc0\x7f" * 256), (0, b"")],
    ids=["short", "of another chunk", "not finite", "empty"],
)
async def test_a_reducer_that_answers_what_is_wrong_is_lost(chunk: int, data: bytes) -> None:
    async with open_group(2) as group:
        member, reducer = group.peers

        async def lie(message: TensorMessage) -> None:
            answer = TensorMessage(
                TrainingMessage.MEAN, chunk, message.seq_id, message.request_id, data
            )
            await reducer.exchange.send(member.peer_id, answer)

        reducer.exchange._dispatcher.subscribers._by_type.clear()
        reducer.exchange.on_message(TrainingMessage.CHUNK, lie)
        plan = plan_of([member.peer_id], 256, reducers=[reducer.peer_id])
        (outcome,) = await reduce_all([member], plan, vectors(1, 256))
        assert outcome.lost == {reducer.peer_id}


async def test_an_early_chunk_waits_for_its_plan_and_a_late_one_does_not(
    autojump_clock: MockClock,
) -> None:
    async with open_group(2, early_timeout=5) as group:
        early, late = group.peers
        plan = plan_of(group.ids, NUM)
        values = vectors(2, NUM)
        outcomes = [Outcome(), Outcome()]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reduce_one, early, plan, values[0], outcomes[0], DEADLINE)
            await trio.sleep(4)
            nursery.start_soon(reduce_one, late, plan, values[1], outcomes[1], DEADLINE)
        assert_equal(outcomes, expected(plan, values))
        with pytest.raises(PeerRefusedError, match="is over") as refused:
            await ask(early, late, chunk_of(plan, 0, bytes(1024)))
        assert refused.value.code == ENDED
        begun = trio.current_time()
        with pytest.raises(PeerRefusedError, match="never began here") as refused:
            await ask(early, late, chunk_of(plan_of(group.ids, NUM), 0, bytes(1024)))
        assert refused.value.code == ENDED
        assert trio.current_time() - begun == pytest.approx(5, abs=1e-3)


async def test_chunks_wait_for_few_plans_at_once(autojump_clock: MockClock) -> None:
    async with open_group(2, early_timeout=5) as group:
        peer, other = group.peers
        codes: list[int] = []

        async def send() -> None:
            with pytest.raises(PeerRefusedError) as refused:
                await ask(peer, other, chunk_of(plan_of(group.ids, NUM), 0, bytes(1024)))
            codes.append(refused.value.code)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(send)
        assert codes.count(ErrorCode.LIMIT_EXCEEDED) == 16
        assert codes.count(ENDED) == 4


async def test_what_waits_for_a_late_member_is_bounded() -> None:
    """Members are not ahead of the last of them by more than a window, whatever the size of the vector."""
    async with open_group(3) as group:
        *early, late = group.peers
        plan = plan_of(
            [late.peer_id, *group.ids[:2]], 10_000, chunk_elements=50, reducers=[early[0].peer_id]
        )
        values = vectors(3, 10_000)
        outcomes = [Outcome() for _ in range(3)]
        async with trio.open_nursery() as nursery:
            for index, peer in enumerate(early):
                nursery.start_soon(
                    reduce_one, peer, plan, values[index + 1], outcomes[index], DEADLINE
                )
            await trio.testing.wait_all_tasks_blocked()
            running = early[0].reductions._running[plan.reduction]
            assert len(running._requests) == MAX_WINDOW
            assert len(running._gathering._open) == MAX_WINDOW
            nursery.start_soon(reduce_one, late, plan, values[0], outcomes[2], DEADLINE)
        assert_equal(outcomes, expected(plan, values))


@pytest.mark.parametrize(
    ("values", "fields", "text"),
    [
        (torch.zeros(NUM - 1), {}, "not contiguous float32"),
        (torch.zeros(NUM, dtype=torch.float64), {}, "not contiguous float32"),
        (torch.zeros(NUM * 2)[::2], {}, "not contiguous float32"),
        (None, {}, "has values by the plan"),
        (torch.zeros(NUM), {"chunk_elements": 2 * 1024 * 1024}, ""),
        (torch.zeros(NUM), {"aggregator": "krum"}, "needs distances"),
    ],
)
async def test_what_is_not_as_the_plan_says_is_an_error(
    values: torch.Tensor | None, fields: dict[str, object], text: str
) -> None:
    async with open_group(1) as group:
        (peer,) = group.peers
        plan = plan_of(group.ids, NUM, **fields)
        if text:
            with pytest.raises(LocalProtocolError, match=text):
                await peer.reductions.reduce(plan, values, timeout=DEADLINE)
        else:
            assert await peer.reductions.reduce(plan, values, timeout=DEADLINE) is not None
            with pytest.raises(LocalProtocolError, match="was begun before"):
                await peer.reductions.reduce(plan, values, timeout=DEADLINE)


async def test_who_has_no_place_in_a_plan_cannot_carry_it_out() -> None:
    async with open_group(2) as group:
        for way in Way:
            plan = plan_of(group.ids[:1], NUM, way=way)
            with pytest.raises(LocalProtocolError, match="neither member nor reducer"):
                await group.peers[1].reductions.reduce(plan, None, timeout=DEADLINE)
        plan = plan_of(group.ids, NUM, codec="f8")
        with pytest.raises(ConfigurationError, match="no form of the wire"):
            await group.peers[1].reductions.reduce(plan, torch.zeros(NUM), timeout=DEADLINE)
