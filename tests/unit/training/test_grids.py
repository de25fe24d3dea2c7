"""Reductions in rows whose aggregates meet: the same bits for all, or an error that names who is lost."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from neurogrid.errors import LocalProtocolError, PeerRefusedError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.averaging.plan import ReductionPlan, Way
from neurogrid.training.averaging.reductions.reduction import ENDED, GIVE_UP_GRACE
from neurogrid.training.averaging.rounds.plans import (
    UNMEASURED,
    Shape,
    make_plan,
    read_plan,
    write_plan,
)
from neurogrid.training.wire import (
    Decision,
    DecisionPayload,
    GroupSettings,
    Member,
    Plan,
    table_of,
)
from neurogrid.training.wire.types import TrainingMessage
from tests.unit.training.reducing import (
    DEADLINE,
    Outcome,
    assert_equal,
    chunk_of,
    expected,
    open_group,
    plan_of,
    reduce_all,
    reduce_one,
    vectors,
)

NUM = 1000  # elements: four chunks, the last one shorter


def told_and_read(plan: ReductionPlan) -> ReductionPlan:
    """A plan, as those that know its members have it from what their leader says."""
    before = [Member(peer, 1) for peer in sorted(plan.members)]
    decision = Decision(
        2,
        1,
        tuple(member.peer for member in before),
        (1,) * len(before),
        contributors=plan.members,
        weights=plan.weights,
        num_elements=plan.num_elements,
        chunk_elements=plan.chunk_elements,
        codec=plan.result_codec,
    )
    told = DecisionPayload.decode(decision.encode(before)).after(before)
    assert told == decision
    table = table_of(decision, before)
    return read_plan(Plan.decode(write_plan(plan, table).encode()), told, table)


@pytest.mark.parametrize("num", [4, 5, 7, 9])
@pytest.mark.parametrize(
    ("codec", "result_codec", "aggregator"),
    [("f32", "f32", "mean"), ("int8", "f16", "mean"), ("f32", "f32", "mean_of_signs")],
)
async def test_all_members_get_the_mean_of_all(
    num: int, codec: str, result_codec: str, aggregator: str
) -> None:
    async with open_group(num) as group:
        weights = [1.0 + index for index in range(num)]
        plan = plan_of(
            group.ids,
            NUM,
            way=Way.GRID,
            chunk_elements=64,
            weights=weights,
            codec=codec,
            result_codec=result_codec,
            aggregator=aggregator,
        )
        values = vectors(num, NUM)
        outcomes = await reduce_all(group.peers, plan, values)
        assert_equal(outcomes, expected(plan, values))
        rows = torch.stack(values) if aggregator == "mean" else torch.stack(values).sign()
        mean = (torch.tensor(weights)[:, None] * rows).sum(0) / sum(weights)
        assert torch.allclose(expected(plan, values), mean, atol=1e-5 if codec == "f32" else 0.05)


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, list[float], st.DataObject]:
    """Members of each row, reducers of each, elements, elements of a chunk, weights."""
    rows = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    reducers = [draw(st.integers(1, num)) for num in rows]
    num_elements, chunk_elements = draw(st.integers(1, 200)), draw(st.integers(1, 40))
    weights = draw(
        st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=sum(rows), max_size=sum(rows))
    )
    if not any(weights):
        weights[draw(st.integers(0, len(weights) - 1))] = 1.0
    return rows, reducers, num_elements, chunk_elements, weights, draw(st.data())


@given(grids())
@settings(max_examples=60)
def test_any_rows_and_cuts(
    grid: tuple[list[int], list[int], int, int, list[float], st.DataObject],
) -> None:
    sizes, num_reducers, num_elements, chunk_elements, weights, data = grid
    num_chunks = math.ceil(num_elements / chunk_elements)

    async def reduce() -> None:
        async with open_group(sum(sizes)) as group:
            rows, row_reducers, reducers, cuts = [0], [0], list[str](), list[int]()
            for size, reducing in zip(sizes, num_reducers, strict=True):
                row = group.ids[rows[-1] : rows[-1] + size]
                reducers += data.draw(st.permutations(row))[:reducing]
                inner = st.lists(
                    st.integers(0, num_chunks), min_size=reducing - 1, max_size=reducing - 1
                )
                cuts += [0, *sorted(data.draw(inner)), num_chunks]
                rows.append(rows[-1] + size)
                row_reducers.append(len(reducers))
            plan = ReductionPlan(
                reduction=data.draw(st.integers(1, 2**64 - 1)),
                members=tuple(group.ids),
                weights=tuple(weights),
                reducers=tuple(reducers),
                cuts=tuple(cuts),
                num_elements=num_elements,
                chunk_elements=chunk_elements,
                way=Way.GRID,
                rows=tuple(rows),
                row_reducers=tuple(row_reducers),
            )
            assert told_and_read(plan) == plan
            for peer in plan.members:
                row = plan.row_plans[plan.row_of(peer) or 0]
                at_home = [c for c in range(num_chunks) if plan.home_of(c) == peer]
                assert list(plan.chunks_at(peer)) == at_home
                homes = {plan.home_of(chunk) for chunk in row.chunks_of(peer)}
                assert plan.sends_to(peer) == {*row.reducers, *homes} - {peer}
            values = vectors(len(weights), num_elements)
            outcomes = await reduce_all(group.peers, plan, values, timeout=5)
            assert_equal(outcomes, expected(plan, values))

    trio.run(reduce)


# A member has its result, and fails before its last answer has gone out.
@example(num_bytes=1309, dead_at=4, seen_by=1)
@given(
    num_bytes=st.integers(0, 4500),
    dead_at=st.integers(0, 4),
    seen_by=st.integers(0, 4),
)
@settings(max_examples=60)
def test_whoever_survives_a_lost_member_names_it(
    num_bytes: int, dead_at: int, seen_by: int
) -> None:
    async def reduce() -> None:
        async with open_group(5) as group:
            # In a group all streams are open, since leader and members talk.
            plan = plan_of(group.ids, 1, way=Way.EVERYBODY)
            await reduce_all(group.peers, plan, vectors(5, 1))
            dead = group.peers[dead_at]
            first = group.peers[seen_by if seen_by != dead_at else (dead_at + 1) % 5]
            group.network.cut_after(num_bytes, sender=dead.host, receiver=first.host)
            first.host.on_disconnected(
                lambda peer_id: dead.life.cancel() if peer_id == dead.peer_id else None
            )
            plan = plan_of(group.ids, NUM, way=Way.GRID, chunk_elements=64)
            outcomes = [Outcome() for _ in group.peers]
            async with trio.open_nursery() as nursery:
                for peer, own, outcome in zip(group.peers, vectors(5, NUM), outcomes, strict=True):
                    nursery.start_soon(reduce_one, peer, plan, own, outcome, DEADLINE)
            survivors = [each for at, each in enumerate(outcomes) if at != dead_at]
            assert all(outcome.error or outcome.result for outcome in survivors)
            at_once = [each for each in survivors if each.error and each.seconds <= GIVE_UP_GRACE]
            if any(outcome.error for outcome in survivors):
                named = set().union(*(each.error.lost for each in at_once if each.error))
                assert named == {dead.peer_id}
            # Others wait for the row, until the leader that was told stops them.
            assert all(outcome.seconds <= 0.75 * DEADLINE for outcome in survivors)
            assert len({outcome.result.digest for outcome in survivors if outcome.result}) <= 1

    trio.run(reduce, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("silent", range(9))
async def test_a_silent_member_is_named_by_its_row_before_others_name_that(
    silent: int, autojump_clock: MockClock
) -> None:
    async with open_group(9) as group:
        plan = plan_of(group.ids, NUM, way=Way.GRID, chunk_elements=64)
        values = vectors(9, NUM)
        others = [peer for index, peer in enumerate(group.peers) if index != silent]
        own = [vector for index, vector in enumerate(values) if index != silent]
        outcomes = await reduce_all(others, plan, own, timeout=8)
        first = min(outcome.seconds for outcome in outcomes)
        assert first == pytest.approx(4.5, abs=1e-3)
        at_first = [outcome for outcome in outcomes if outcome.seconds == pytest.approx(first)]
        assert at_first
        assert all(outcome.lost == {group.ids[silent]} for outcome in at_first)
        # Who has given up is heard a second later, within a row and across.
        assert all(outcome.error is not None and outcome.seconds <= 6.5 for outcome in outcomes)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("of another row", ErrorCode.POSITION_MISMATCH),
        ("twice", ErrorCode.PROTOCOL_VIOLATION),
        ("short", ErrorCode.SHAPE_MISMATCH),
        ("no number", ErrorCode.NOT_FINITE),
    ],
)
async def test_a_row_that_hands_on_what_is_wrong_is_lost(what: str, code: ErrorCode) -> None:
    async with open_group(4) as group:
        plan = plan_of(group.ids, NUM, way=Way.GRID, codec="int8", chunk_elements=256)
        home = plan.home_of(1)  # in the second row
        by_id = {peer.peer_id: peer for peer in group.peers}
        liar_id = next(peer for peer in plan.row_reducers_of(1) if peer != home)
        if what == "of another row":
            liar_id = next(
                peer
                for peer in plan.members
                if plan.row_of(peer) != plan.row_of(home) and peer != liar_id
            )
        right = torch.ones(256).numpy().tobytes()
        data = {"short": right[:-4], "no number": b"\xff" * len(right)}.get(what, right)
        outcome, codes = Outcome(), list[int]()
        values = dict(zip(group.ids, vectors(4, NUM), strict=True))

        async def send() -> None:
            with pytest.raises(PeerRefusedError) as refused:
                await by_id[liar_id].exchange.request(
                    home, chunk_of(plan, 1, data), TrainingMessage.MEAN, timeout=DEADLINE
                )
            codes.append(refused.value.code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reduce_one, by_id[home], plan, values[home], outcome, DEADLINE)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(1 + (what == "twice")):
                nursery.start_soon(send)
                await trio.testing.wait_all_tasks_blocked()
        assert outcome.lost == {liar_id}
        assert set(codes) - {ENDED} == {code}


async def test_what_cannot_be_put_together_of_rows_is_refused() -> None:
    async with open_group(4) as group:
        plan = plan_of(group.ids, NUM, way=Way.GRID, aggregator="median")
        with pytest.raises(LocalProtocolError, match="median of rows"):
            await group.peers[0].reductions.reduce(plan, vectors(1, NUM)[0], timeout=DEADLINE)
        plan = plan_of(group.ids, 2**21, way=Way.GRID, codec="int4", chunk_elements=2**21)
        with pytest.raises(LocalProtocolError, match="a chunk is 8388608 B"):
            await group.peers[0].reductions.reduce(plan, torch.zeros(2**21), timeout=DEADLINE)
    with pytest.raises(LocalProtocolError, match="median of rows"):
        GroupSettings(way="grid", aggregator="median").encode()


@given(
    st.integers(1, 70),
    st.lists(st.sampled_from([0.0, UNMEASURED, 1e6, 3e7]), min_size=70, max_size=70),
    st.integers(1, 10**8),
    st.sampled_from([1, 256, 4096]),
)
def test_a_plan_has_as_many_rows_as_members_in_each(
    num: int, bandwidths: list[float], num_elements: int, block: int
) -> None:
    peers = [f"peer {number:03d}" for number in range(num)]
    speeds = dict(zip(peers, bandwidths, strict=False))
    plan = make_plan(
        GroupSettings(way="grid", chunk_elements=2**24),
        Shape(num_elements, block),
        leader=peers[0],
        weights=dict.fromkeys(peers, 1.0),
        bandwidths=speeds,
        reduction=7,
    )
    assert told_and_read(plan) == plan
    assert sorted(plan.members) == peers
    can_reduce = sum(speed > 0 for speed in speeds.values())
    if plan.way is Way.GRID:
        sizes = [high - low for low, high in pairwise(plan.rows)]
        assert len(sizes) == math.isqrt(num)
        assert max(sizes) - min(sizes) <= 1
        assert 4 * plan.chunk_elements <= 4 * 2**20
        assert all(speeds[peer] > 0 for peer in plan.reducers)
        for row in plan.row_plans:
            assert [c for peer in row.reducers for c in row.chunks_of(peer)][-1:] == [
                plan.num_chunks - 1
            ]
    else:
        assert num < 4 or can_reduce < math.isqrt(num)
