"""Plans cover each layer once, contiguous, within memory, on as few workers as hold them."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import CapacityError, ConfigurationError
from neurogrid.planner import LayerSize, ModelSize, PeerCapacity, PlannedStage, make_plan

MIB = 1024**2


def plan_stages(
    layers: list[LayerSize], peers: list[PeerCapacity], *, num_stages: int | None = None
) -> list[PlannedStage]:
    return list(make_plan(ModelSize(tuple(layers)), peers, num_stages=num_stages).stages)


def layers_of(*sizes: int) -> list[LayerSize]:
    return [LayerSize(size) for size in sizes]


def peers_of(*free: int) -> list[PeerCapacity]:
    return [PeerCapacity(f"peer{index}", size) for index, size in enumerate(free)]


LAYERS = st.lists(
    st.builds(LayerSize, st.integers(0, 100), st.integers(0, 20)), min_size=1, max_size=8
)
PEERS = st.lists(st.integers(0, 300), min_size=1, max_size=6).map(lambda free: peers_of(*free))


def check(stages: list[PlannedStage], layers: list[LayerSize], peers: list[PeerCapacity]) -> None:
    """What holds for every plan."""
    usable = {peer.peer_id: peer.usable_bytes() for peer in peers}
    assert [stage.start for stage in stages] == [0, *(stage.stop for stage in stages[:-1])]
    assert stages[-1].stop == len(layers)
    assert all(stage.start < stage.stop for stage in stages)
    assert len({stage.peer_id for stage in stages}) == len(stages)
    for stage in stages:
        taken = sum(layer.total_bytes for layer in layers[stage.start : stage.stop])
        assert stage.num_bytes == taken <= usable[stage.peer_id]


def fits(layers: list[LayerSize], peers: list[PeerCapacity], count: int) -> bool:
    """Whether some choice of `count` peers in some order holds the layers: by trying all."""

    def place(start: int, rest: tuple[PeerCapacity, ...]) -> bool:
        if not rest:
            return start == len(layers)
        taken = 0
        for stop in range(start + 1, len(layers) + 1):
            taken += layers[stop - 1].total_bytes
            if taken > rest[0].usable_bytes():
                return False
            if place(stop, rest[1:]):
                return True
        return False

    return any(place(0, order) for order in permutations(peers, count))


@given(layers=LAYERS, peers=PEERS)
@settings(max_examples=120, deadline=None)
def test_a_plan_is_right_and_as_short_as_can_be(
    layers: list[LayerSize], peers: list[PeerCapacity]
) -> None:
    shortest = next(
        (n for n in range(1, min(len(peers), len(layers)) + 1) if fits(layers, peers, n)), None
    )
    if shortest is None:
        with pytest.raises(CapacityError) as caught:
            plan_stages(layers, peers)
        needed, available = caught.value.needed, caught.value.available
        assert needed == sum(layer.total_bytes for layer in layers)
        assert f"{needed:,} B needed, {available:,} B available" in str(caught.value)
        return
    stages = plan_stages(layers, peers)
    check(stages, layers, peers)
    assert len(stages) == shortest


@given(layers=LAYERS, peers=PEERS, count=st.integers(1, 9))
@settings(max_examples=120, deadline=None)
def test_a_plan_has_as_many_stages_as_were_asked_for(
    layers: list[LayerSize], peers: list[PeerCapacity], count: int
) -> None:
    try:
        stages = plan_stages(layers, peers, num_stages=count)
    except ConfigurationError:
        assert count > min(len(layers), len(peers))
        return
    except CapacityError:
        assert not fits(layers, peers, count)
        return
    check(stages, layers, peers)
    assert len(stages) == count


def test_a_stage_may_have_to_end_before_what_its_worker_could_take() -> None:
    layers, peers = layers_of(2, 0, 2, 0, 2, 1, 1), peers_of(0, 5, 0, 5, 4, 5)
    stages = plan_stages(layers, peers, num_stages=6)
    check(stages, layers, peers)
    assert len(stages) == 6


@given(layers=LAYERS, peers=PEERS)
@settings(max_examples=100, deadline=None)
def test_the_order_of_the_workers_makes_no_difference(
    layers: list[LayerSize], peers: list[PeerCapacity]
) -> None:
    def outcome(order: list[PeerCapacity]) -> object:
        try:
            return plan_stages(layers, order)
        except CapacityError as exc:
            return str(exc)

    assert outcome(peers) == outcome(peers[::-1])


def test_equal_workers_get_equal_shares() -> None:
    stages = plan_stages(layers_of(*[10] * 6), peers_of(1000, 1000, 1000), num_stages=3)
    assert [(stage.start, stage.stop) for stage in stages] == [(0, 2), (2, 4), (4, 6)]


def test_a_roomier_worker_gets_more_layers() -> None:
    stages = plan_stages(layers_of(*[100] * 6), peers_of(300, 600), num_stages=2)
    taken = {stage.peer_id: stage.stop - stage.start for stage in stages}
    assert taken == {"peer0": 2, "peer1": 4}


def test_one_worker_is_enough_where_it_holds_all() -> None:
    stages = plan_stages(layers_of(*[10] * 6), peers_of(50, 1000, 900))
    assert stages == [PlannedStage("peer1", 0, 6, 60)]


def test_a_large_layer_in_the_middle_goes_to_the_roomiest() -> None:
    stages = plan_stages(layers_of(10, 80, 10), peers_of(12, 90, 12))
    assert [stage.peer_id for stage in stages][1] == "peer1"


def test_the_one_order_of_many_workers_in_which_they_fit() -> None:
    layers = layers_of(11, 80, 11, 11, 11)
    stages = plan_stages(layers, peers_of(14, 14, 14, 14, 95))
    assert stages[1].peer_id == "peer4"
    assert len(stages) == 5


def test_caches_count() -> None:
    layers = [LayerSize(50, 50)] * 2
    with pytest.raises(CapacityError, match="200 B needed, 180 B available on 1 worker "):
        plan_stages(layers, peers_of(200))
    assert len(plan_stages(layers, peers_of(112, 112))) == 2


def test_a_part_of_the_memory_stays_free_for_work() -> None:
    with pytest.raises(CapacityError, match="100 B needed, 90 B available"):
        plan_stages(layers_of(100), peers_of(100))


def test_a_layer_that_fits_nowhere_is_named_as_the_reason() -> None:
    says = "one layer alone takes 104,857,600 B, and the roomiest has 9,437,184 B"
    with pytest.raises(CapacityError, match=says):
        plan_stages(layers_of(MIB, 100 * MIB), peers_of(10 * MIB, 10 * MIB))


def test_too_little_memory_says_what_to_do() -> None:
    says = r"available on 2 workers \(add workers, give them more memory, lower --max-seq-len or --max-sessions, or "
    with pytest.raises(CapacityError, match=says):
        plan_stages(layers_of(*[5 * MIB] * 8), peers_of(10 * MIB, 10 * MIB))


def test_more_stages_than_layers_or_workers() -> None:
    with pytest.raises(ConfigurationError, match="3 stages were asked for, and the model has 2"):
        plan_stages(layers_of(1, 1), peers_of(10, 10, 10), num_stages=3)
    with pytest.raises(ConfigurationError, match="2 stages were asked for, and there are 1 work"):
        plan_stages(layers_of(1, 1), peers_of(10), num_stages=2)


def test_nobody_to_plan_for() -> None:
    with pytest.raises(ConfigurationError, match="there is no worker"):
        plan_stages(layers_of(1), [])


def test_many_layers_on_many_workers() -> None:
    layers, peers = layers_of(*[100] * 128), peers_of(*range(800, 1440, 20))
    stages = plan_stages(layers, peers)
    check(stages, layers, peers)
    assert len(stages) < len(peers)
