"""Plans follow the world with few bytes, and say why they are as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import CapacityError
from neurogrid.planner import (
    KeptLayers,
    LayerSize,
    Link,
    Links,
    ModelSize,
    PeerCapacity,
    PeerSpeed,
    Plan,
    PlannedStage,
    explain,
    make_plan,
    replan,
)

LAYER = LayerSize(100)
MODEL = ModelSize((LAYER,) * 8)


def peer(name: str, free: int = 500, rate: float = 100.0) -> PeerCapacity:
    return PeerCapacity(name, free, PeerSpeed(rate))


def placed(plan: Plan, peers: Sequence[PeerCapacity]) -> list[PeerCapacity]:
    """The peers with what they hold once the plan is in place."""
    parts = {item.peer_id: range(item.start, item.stop) for item in (*plan.stages, *plan.replicas)}
    return [replace(item, held=frozenset(parts.get(item.peer_id, ()))) for item in peers]


def without(peers: Sequence[PeerCapacity], name: str) -> list[PeerCapacity]:
    return [item for item in peers if item.peer_id != name]


def test_nothing_changes_where_nothing_has_changed() -> None:
    peers = [peer("a"), peer("b"), peer("c")]
    plan = make_plan(MODEL, peers)
    result = replan(plan, MODEL, placed(plan, peers))
    assert result.plan == plan
    assert (result.moved_bytes, result.is_required) == (0, False)


def test_a_replica_takes_the_place_of_a_peer_that_left() -> None:
    peers = [peer("a"), peer("b"), peer("c")]
    plan = make_plan(MODEL, peers)
    standby = plan.replicas[0]
    lost = next(stage for stage in plan.stages if stage.start == standby.start)
    result = replan(plan, MODEL, without(placed(plan, peers), lost.peer_id))
    assert result.is_required
    assert result.moved_bytes == 0
    assert result.plan.generation == plan.generation + 1
    assert result.plan.stage_of(standby.peer_id) == replace(lost, peer_id=standby.peer_id)
    assert f"layers {lost.start} to {lost.stop - 1}" in result.reason


def test_a_spare_peer_is_sent_what_was_lost_and_no_more() -> None:
    stages = (PlannedStage("a", 0, 4, 400), PlannedStage("b", 4, 8, 400))
    peers = placed(Plan(stages), [peer("b"), peer("c")])
    result = replan(Plan(stages), MODEL, peers)
    assert result.moved_bytes == 400
    assert [stage.peer_id for stage in result.plan.stages] == ["c", "b"]


def test_the_rest_spreads_out_where_no_peer_can_take_a_whole_stage() -> None:
    peers = [peer("a", 700), peer("b", 700), peer("c", 220), peer("d", 220)]
    plan = make_plan(MODEL, peers, num_stages=2)
    result = replan(plan, MODEL, without(placed(plan, peers), "a"))
    assert result.plan.stages[-1].stop == 8
    assert {stage.peer_id for stage in result.plan.stages} == {"b", "c", "d"}
    assert result.moved_bytes <= 400 + 100


def test_no_plan_without_memory() -> None:
    peers = [peer("a"), peer("b")]
    plan = make_plan(MODEL, peers)
    with pytest.raises(CapacityError, match="800 B needed, 450 B available"):
        replan(plan, MODEL, without(placed(plan, peers), "a"))


def test_a_peer_that_is_no_better_becomes_a_replica() -> None:
    peers = [peer("a"), peer("b")]
    plan = make_plan(MODEL, peers)
    result = replan(plan, MODEL, [*placed(plan, peers), peer("c")])
    assert result.plan.stages == plan.stages
    assert result.plan.generation == plan.generation
    assert result.plan.replica_of("c")


def test_a_much_better_peer_is_worth_it() -> None:
    peers = [peer("a"), peer("b")]
    plan = make_plan(MODEL, peers)
    joined = [*placed(plan, peers), peer("gpu", 5000, 1e6)]
    result = replan(plan, MODEL, joined)
    assert [stage.peer_id for stage in result.plan.stages] == ["gpu"]
    assert (result.moved_bytes, result.is_required) == (800, False)
    # Its way there does not pay where a byte takes long.
    slow = replan(plan, MODEL, joined, send_rate=0.1)
    assert slow.plan.stages == plan.stages
    assert "not worth it" in slow.reason


def test_drift_moves_layers_once_it_is_large() -> None:
    peers = [peer("a", 2000), peer("b", 2000)]
    plan = make_plan(MODEL, peers, num_stages=2)
    drifted = placed(plan, [peer("a", 2000, 90.0), peer("b", 2000)])
    assert replan(plan, MODEL, drifted, num_stages=2).plan.stages == plan.stages
    slow = placed(plan, [peer("a", 2000, 25.0), peer("b", 2000)])
    result = replan(plan, MODEL, slow, num_stages=2)
    taken = {stage.peer_id: stage.stop - stage.start for stage in result.plan.stages}
    assert taken["a"] < taken["b"]


def test_running_sessions_keep_their_layers() -> None:
    peers = [peer("a", 560), peer("b", 560)]
    plan = make_plan(MODEL, peers, num_stages=2)
    slow = placed(plan, [peer("a", 560, 25.0), peer("b", 560)])
    assert replan(plan, MODEL, slow).plan.stages != plan.stages
    # Each has room for one more layer than it has: b cannot take all that a should give away.
    stages = {stage.peer_id: KeptLayers(stage.start, stage.stop) for stage in plan.stages}
    kept = [replace(item, kept=stages[item.peer_id]) for item in slow]
    assert kept[0].kept == KeptLayers(0, 4)
    for stage in replan(plan, MODEL, kept).plan.stages:
        before = plan.stage_of(stage.peer_id)
        assert before is not None
        both = range(min(stage.start, before.start), max(stage.stop, before.stop))
        assert 100 * len(both) <= 560 * 0.9


@given(
    sizes=st.lists(st.integers(150, 1000), min_size=2, max_size=6),
    rates=st.lists(st.sampled_from([10.0, 40.0, 100.0]), min_size=6, max_size=6),
    gone=st.integers(0, 5),
)
@settings(max_examples=100, deadline=None)
def test_what_is_replanned_is_a_plan(sizes: list[int], rates: list[float], gone: int) -> None:
    peers = [peer(f"p{i}", size, rates[i]) for i, size in enumerate(sizes)]
    try:
        plan = make_plan(MODEL, peers)
    except CapacityError:
        return
    left = without(placed(plan, peers), f"p{gone}")
    try:
        result = replan(plan, MODEL, left)
    except CapacityError:
        with pytest.raises(CapacityError):
            make_plan(MODEL, left)
        return
    stages = result.plan.stages
    assert [stage.start for stage in stages] == [0, *(stage.stop for stage in stages[:-1])]
    assert stages[-1].stop == 8
    usable = {item.peer_id: item.usable_bytes() for item in left}
    for item in (*stages, *result.plan.replicas):
        assert item.num_bytes == 100 * (item.stop - item.start) <= usable[item.peer_id]
    held = {item.peer_id: item.held for item in left}
    moved = sum(100 * len(set(range(s.start, s.stop)) - held[s.peer_id]) for s in stages)
    assert result.moved_bytes == moved
    fresh = make_plan(MODEL, left)
    afresh = sum(100 * len(set(range(s.start, s.stop)) - held[s.peer_id]) for s in fresh.stages)
    assert moved <= afresh


def test_a_plan_explains_itself() -> None:
    model = ModelSize(
        (LayerSize(100, 20),) * 4, workspace_bytes=10, activation_bytes=8, ends_seconds=0.5
    )
    # Usable: 440, 440, 350, 98.
    peers = [peer("a"), peer("b"), peer("c", 400), peer("d", 120)]
    links = Links({"a": Link(0.25), "b": Link(0.25), "c": Link(3.0)})
    plan = make_plan(model, peers, links, num_stages=2)
    told = explain(plan, model, peers, links)
    first, second, replica, unused = told.peers
    assert (first.peer_id, first.stage, first.layers) == ("a", 1, (0, 2))
    assert (first.weight_bytes, first.cache_bytes, first.workspace_bytes) == (200, 40, 10)
    assert (first.spare_bytes, first.missing_bytes, first.reason) == (200, 200, "")
    # Two layers of 100 bytes at 100 bytes a second, after the way from the coordinator.
    assert first.step_seconds == pytest.approx(2.25)
    assert second.step_seconds == pytest.approx(2.5)
    assert told.tokens_per_second == pytest.approx(1 / (2.25 + 2.5 + 0.25 + 0.5))
    assert told.peak_tokens_per_second == pytest.approx(1 / 2.5)
    assert (replica.peer_id, replica.stage) == ("c", None)
    assert replica.reason == "stands by for stage 2"
    assert (unused.peer_id, unused.layers) == ("d", None)
    assert unused.reason == "too little memory: 98 B usable, and one layer takes 120 B"


def test_without_speeds_nobody_promises_tokens() -> None:
    peers = [PeerCapacity("a", 500), PeerCapacity("b", 500)]
    told = explain(make_plan(MODEL, peers), MODEL, peers)
    assert told.tokens_per_second is None
    assert [report.step_seconds for report in told.peers] == [None, None]


def test_what_stands_by_stays() -> None:
    peers = [peer("a"), peer("b"), peer("c"), peer("d")]
    plan = make_plan(MODEL, peers)
    first, second = plan.replicas
    # The other way round than they would be placed.
    crossed = (replace(first, peer_id=second.peer_id), replace(second, peer_id=first.peer_id))
    current = replace(plan, replicas=crossed)
    assert replan(current, MODEL, placed(current, peers)).plan == current
