"""Lines side by side: each is a plan of the whole model, on peers that no other has; training takes its bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import CapacityError, ConfigurationError
from neurogrid.planner import (
    LayerSize,
    ModelSize,
    PeerCapacity,
    Plan,
    explain,
    make_lines,
    make_plan,
    replan,
)
from tests.unit.test_planner import LAYERS, PEERS, check, peers_of


@given(layers=LAYERS, peers=PEERS, num_lines=st.none() | st.integers(1, 4))
def test_each_line_is_a_plan_on_peers_of_its_own(
    layers: list[LayerSize], peers: list[PeerCapacity], num_lines: int | None
) -> None:
    model = ModelSize(tuple(layers))
    try:
        lines = make_lines(model, peers, num_lines=num_lines)
    except CapacityError:
        if num_lines is None or num_lines == 1:
            with pytest.raises(CapacityError):
                make_plan(model, peers)
        else:
            with pytest.raises(CapacityError):
                make_lines(model, peers, num_lines=num_lines)
            assert len(_as_many_as_fit(model, peers)) < num_lines
        return
    assert len(lines) == (num_lines or len(lines)) >= 1
    busy = [part.peer_id for line in lines for part in (*line.stages, *line.replicas)]
    assert len(set(busy)) == len(busy)
    for line in lines:
        check(list(line.stages), layers, peers)
        own = [peer for peer in peers if peer.peer_id in {s.peer_id for s in line.stages}]
        assert not replan(line, model, own).is_required
    if num_lines is None:
        left = [peer for peer in peers if not any(line.stage_of(peer.peer_id) for line in lines)]
        if left:
            with pytest.raises(CapacityError):
                make_plan(model, left)


def _as_many_as_fit(model: ModelSize, peers: list[PeerCapacity]) -> tuple[Plan, ...]:
    try:
        return make_lines(model, peers)
    except CapacityError:
        return ()


def test_one_line_is_the_plan() -> None:
    model = ModelSize((LayerSize(40), LayerSize(40)))
    peers = peers_of(60, 60, 60)
    assert make_lines(model, peers, num_lines=1) == (make_plan(model, peers),)


def test_spares_stand_by() -> None:
    model = ModelSize((LayerSize(40), LayerSize(40)))
    lines = make_lines(model, peers_of(100, 100, 50), num_lines=2)
    assert [len(line.stages) for line in lines] == [1, 1]
    # Too little for the stage of either.
    assert [line.replicas for line in lines] == [(), ()]
    first, second = make_lines(model, peers_of(100, 100, 100), num_lines=2)
    assert [replica.peer_id for replica in first.replicas] == ["peer2"]
    assert second.replicas == ()


def test_lines_that_do_not_fit_are_counted() -> None:
    model = ModelSize((LayerSize(40), LayerSize(40)))
    with pytest.raises(CapacityError, match=r"^1 of 2 lines fit"):
        make_lines(model, peers_of(100, 50), num_lines=2)
    with pytest.raises(CapacityError, match=r"^1 of 3 lines fit, and 0 workers are left"):
        make_lines(model, peers_of(100), num_lines=3)
    with pytest.raises(ConfigurationError, match="0 lines"):
        make_lines(model, peers_of(100), num_lines=0)


def test_training_takes_memory() -> None:
    served = ModelSize((LayerSize(40, 5), LayerSize(40, 5)))
    trained = ModelSize(
        (LayerSize(40, optimizer_bytes=480, backward_bytes=20), LayerSize(40, 0, None, 480, 20))
    )
    peers = peers_of(700, 700)
    assert len(make_plan(served, peers).stages) == 1
    plan = make_plan(trained, peers)
    assert [stage.num_bytes for stage in plan.stages] == [540, 540]
    report = explain(plan, trained, peers).peers[0]
    assert (report.weight_bytes, report.cache_bytes, report.training_bytes) == (40, 0, 500)
