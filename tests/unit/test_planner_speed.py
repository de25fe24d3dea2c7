"""The slowest stage is as fast as can be, peers keep what they hold, and spare peers stand by with whole stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations

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
    make_plan,
    search,
)
from neurogrid.planner.fewer_moves import MOVE_TOLERANCE
from neurogrid.planner.problem import Problem

# What bisections leave open, and rounding.
CLOSE = 1.005

World = tuple[ModelSize, list[PeerCapacity], Links]
SPEEDS = st.none() | st.builds(
    PeerSpeed, st.sampled_from([1.0, 2.0, 7.0, 10.0]), st.sampled_from([0.0, 3.0])
)
LAYERS = st.lists(
    st.builds(LayerSize, st.integers(1, 40), st.integers(0, 9), st.none() | st.integers(1, 20)),
    min_size=1,
    max_size=6,
)


@st.composite
def worlds(draw: st.DrawFn, max_peers: int = 4) -> World:
    layers = draw(LAYERS)
    if draw(st.booleans()):
        layers = layers[:1] * len(layers)
    num_peers = draw(st.integers(1, max_peers))
    peers = [
        PeerCapacity(f"peer{i}", draw(st.integers(20, 250)), draw(SPEEDS)) for i in range(num_peers)
    ]
    latency = st.sampled_from([0.0, 1.0, 30.0])
    links = Links()
    if draw(st.booleans()):
        links = Links({peer.peer_id: Link(draw(latency), 5.0) for peer in peers})
    if draw(st.booleans()):
        between = {(a.peer_id, b.peer_id): Link(draw(latency)) for a, b in permutations(peers, 2)}
        links = replace(links, peers=between)
    return ModelSize(tuple(layers), draw(st.integers(0, 10)), 10), peers, links


def splits(problem: Problem, num_stages: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every choice of peers, in every order, with every cut, that fits."""
    layers = problem.num_layers
    for order in permutations(range(len(problem.peers)), num_stages):
        for inner in combinations(range(1, layers), num_stages - 1):
            ends = (0, *inner, layers)
            if all(problem.fits(p, a, b) for p, (a, b) in zip(order, pairwise(ends), strict=True)):
                yield order, ends


def slowest(problem: Problem, order: Sequence[int], ends: Sequence[int]) -> float:
    previous = [None, *order[:-1]]
    stages = zip(previous, order, pairwise(ends), strict=True)
    return max(problem.seconds(before, peer, a, b) for before, peer, (a, b) in stages)


def slowest_of(problem: Problem, plan: Plan) -> float:
    index_of = {peer.peer_id: index for index, peer in enumerate(problem.peers)}
    order = [index_of[stage.peer_id] for stage in plan.stages]
    return slowest(problem, order, [0, *(stage.stop for stage in plan.stages)])


def check(problem: Problem, plan: Plan) -> None:
    """What holds for every plan: all layers once, in order, within memory; replicas of whole stages."""
    index_of = {peer.peer_id: index for index, peer in enumerate(problem.peers)}
    assert [stage.start for stage in plan.stages] == [0, *(s.stop for s in plan.stages[:-1])]
    assert plan.stages[-1].stop == problem.num_layers
    starts = {stage.start for stage in plan.stages}
    stops = {stage.stop for stage in plan.stages}
    assert all(replica.start in starts and replica.stop in stops for replica in plan.replicas)
    used = [*plan.stages, *plan.replicas]
    assert len({item.peer_id for item in used}) == len(used)
    for item in used:
        assert item.start < item.stop
        assert problem.fits(index_of[item.peer_id], item.start, item.stop)
        assert item.num_bytes == problem.num_bytes(item.start, item.stop)
    for peer in problem.peers:
        if not plan.stage_of(peer.peer_id) and not plan.replica_of(peer.peer_id):
            index = index_of[peer.peer_id]
            assert not any(problem.fits(index, s.start, s.stop) for s in plan.stages)


@given(world=worlds())
@settings(max_examples=120, deadline=None)
def test_fewest_stages_and_the_fastest_of_those(world: World) -> None:
    problem = Problem(*world)
    most = min(len(problem.peers), problem.num_layers)
    shortest = next((k for k in range(1, most + 1) if any(splits(problem, k))), None)
    if shortest is None:
        with pytest.raises(CapacityError):
            make_plan(*world)
        return
    plan = make_plan(*world)
    check(problem, plan)
    assert len(plan.stages) == shortest
    fastest = min(slowest(problem, order, ends) for order, ends in splits(problem, shortest))
    assert slowest_of(problem, plan) <= fastest * CLOSE


@given(world=worlds(max_peers=5))
@settings(max_examples=60, deadline=None)
def test_never_slower_than_the_even_split(world: World) -> None:
    problem = Problem(*world)
    for count in range(1, min(len(problem.peers), problem.num_layers) + 1):
        ends = [problem.num_layers * i // count for i in range(count + 1)]
        even = [
            slowest(problem, order, ends)
            for order in permutations(range(len(problem.peers)), count)
            if all(problem.fits(p, a, b) for p, (a, b) in zip(order, pairwise(ends), strict=True))
        ]
        if even:
            plan = make_plan(*world, num_stages=count)
            check(problem, plan)
            assert slowest_of(problem, plan) <= min(even) * CLOSE


@given(world=worlds(max_peers=6), data=st.data())
@settings(max_examples=80, deadline=None)
def test_the_order_of_the_peers_makes_no_difference(world: World, data: st.DataObject) -> None:
    model, peers, links = world
    held = st.frozensets(st.integers(0, len(model.layers) - 1))
    peers = [replace(peer, held=data.draw(held)) for peer in peers]

    def outcome(order: Sequence[PeerCapacity]) -> object:
        try:
            return make_plan(model, order, links)
        except CapacityError as exc:
            return str(exc)

    assert outcome(peers) == outcome(data.draw(st.permutations(peers)))


@given(world=worlds(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_what_is_held_is_kept_where_that_costs_little(world: World, data: st.DataObject) -> None:
    model, peers, links = world
    held = st.frozensets(st.integers(0, len(model.layers) - 1))
    problem = Problem(model, [replace(p, held=data.draw(held)) for p in peers], links)
    try:
        plan = make_plan(model, problem.peers, links)
    except CapacityError:
        return
    check(problem, plan)
    count = len(plan.stages)
    fastest = min(slowest(problem, order, ends) for order, ends in splits(problem, count))
    assert slowest_of(problem, plan) <= fastest * (1 + MOVE_TOLERANCE) * CLOSE

    def sent(order: Sequence[int], ends: Sequence[int]) -> int:
        parts = zip(order, pairwise(ends), strict=True)
        return sum(problem.missing_bytes(peer, a, b) for peer, (a, b) in parts)

    index_of = {peer.peer_id: index for index, peer in enumerate(problem.peers)}
    ours = sent([index_of[s.peer_id] for s in plan.stages], [0, *(s.stop for s in plan.stages)])
    limit = fastest * (1 + MOVE_TOLERANCE)
    near = (split for split in splits(problem, count) if slowest(problem, *split) <= limit)
    assert ours <= min(sent(*split) for split in near)


@given(world=worlds(max_peers=6))
@settings(max_examples=60, deadline=None)
def test_the_local_search_stays_within_the_rules(world: World) -> None:
    """What is done for many different peers, held against what is done for few."""
    problem = Problem(*world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "MAX_STATES", 0)
        try:
            plan = make_plan(*world)
        except CapacityError:
            return
    check(problem, plan)
    order = tuple(range(len(plan.stages)))
    ends = [problem.num_layers * i // len(order) for i in range(len(order) + 1)]
    if all(problem.fits(p, a, b) for p, (a, b) in zip(order, pairwise(ends), strict=True)):
        assert slowest_of(problem, plan) <= slowest(problem, order, ends) * CLOSE


LAYER = LayerSize(100)


def test_a_faster_peer_gets_more_layers() -> None:
    peers = [
        PeerCapacity("slow", 10_000, PeerSpeed(100.0)),
        PeerCapacity("fast", 10_000, PeerSpeed(300.0)),
    ]
    plan = make_plan(ModelSize((LAYER,) * 8), peers, num_stages=2)
    taken = {stage.peer_id: stage.stop - stage.start for stage in plan.stages}
    assert taken == {"slow": 2, "fast": 6}


def test_a_peer_far_away_is_left_out() -> None:
    peers = [PeerCapacity(f"peer{i}", 500, PeerSpeed(100.0)) for i in range(3)]
    links = Links({"peer0": Link(0.001), "peer1": Link(5.0), "peer2": Link(0.001)})
    plan = make_plan(ModelSize((LAYER,) * 8), peers, links)
    assert {stage.peer_id for stage in plan.stages} == {"peer0", "peer2"}
    assert plan.replica_of("peer1")


def test_neighbours_that_are_near_each_other_follow_each_other() -> None:
    peers = [PeerCapacity(name, 250, PeerSpeed(100.0)) for name in ("a1", "b1", "a2", "b2")]
    near = {("a1", "a2"), ("a2", "a1"), ("b1", "b2"), ("b2", "b1")}
    between = {
        (a.peer_id, b.peer_id): Link(0.0 if (a.peer_id, b.peer_id) in near else 3.0)
        for a, b in permutations(peers, 2)
    }
    plan = make_plan(ModelSize((LAYER,) * 8), peers, Links(peers=between))
    sites = [stage.peer_id[0] for stage in plan.stages]
    assert sites in (["a", "a", "b", "b"], ["b", "b", "a", "a"])


def test_peers_that_hold_layers_get_them_again() -> None:
    peers = [
        PeerCapacity("a", 700, held=frozenset({4, 5, 6, 7})),
        PeerCapacity("b", 700),
        PeerCapacity("c", 700, held=frozenset({0, 1, 2, 3})),
    ]
    plan = make_plan(ModelSize((LAYER,) * 8), peers)
    assert [(s.peer_id, s.start, s.stop) for s in plan.stages] == [("c", 0, 4), ("a", 4, 8)]
    assert [(r.peer_id, r.start, r.stop) for r in plan.replicas] == [("b", 0, 4)]


def test_spare_peers_stand_by_with_the_stage_that_has_fewest_replicas() -> None:
    sizes = {"large1": 700, "large2": 700, "spare1": 600, "spare2": 600, "small": 200}
    peers = [PeerCapacity(name, size) for name, size in sizes.items()]
    plan = make_plan(ModelSize((LAYER,) * 10), peers)
    assert {stage.peer_id for stage in plan.stages} == {"large1", "large2"}
    assert sorted((r.start, r.stop) for r in plan.replicas) == [
        (s.start, s.stop) for s in plan.stages
    ]
    assert plan.replica_of("small") is None


def test_a_roomy_spare_stands_by_with_several_stages() -> None:
    peers = [PeerCapacity(f"peer{i}", 350, PeerSpeed(9.0)) for i in range(4)]
    # Roomy, and so slow that no stage is wanted of it.
    peers.append(PeerCapacity("spare", 700, PeerSpeed(0.1)))
    plan = make_plan(ModelSize((LAYER,) * 12), peers, num_stages=4)
    assert [(r.peer_id, r.stop - r.start) for r in plan.replicas] == [("spare", 6)]


def test_layers_of_an_older_plan_take_room_until_they_are_drained() -> None:
    model = ModelSize((LayerSize(100, 10),) * 4)
    # The same layers are there once.
    same = PeerCapacity("a", 489, kept=KeptLayers(0, 4))
    assert make_plan(model, [same]).stages[0].num_bytes == 440
    peers = [PeerCapacity("a", 300, kept=KeptLayers(0, 2)), PeerCapacity("b", 300)]
    plan = make_plan(model, peers)
    assert [(s.peer_id, s.start, s.stop) for s in plan.stages] == [("a", 0, 2), ("b", 2, 4)]
    with pytest.raises(CapacityError, match="no cut between layers"):
        make_plan(model, [peers[0], replace(peers[1], kept=KeptLayers(0, 2))])


def test_a_mixture_reads_less_than_it_holds() -> None:
    dense, mixture = LayerSize(100), LayerSize(400, step_bytes=100)
    peers = [PeerCapacity(name, 10_000, PeerSpeed(100.0)) for name in ("a", "b")]
    plan = make_plan(ModelSize((dense, dense, mixture, mixture)), peers, num_stages=2)
    assert [(s.start, s.stop) for s in plan.stages] == [(0, 2), (2, 4)]


def test_fifty_peers_and_a_hundred_layers() -> None:
    layers = tuple(LayerSize(90 + index % 7) for index in range(100))
    peers = [
        PeerCapacity(f"peer{i}", 300 + 7 * (i % 20), PeerSpeed(50.0 + i % 13)) for i in range(50)
    ]
    links = Links({peer.peer_id: Link(0.01 + 0.001 * (i % 9)) for i, peer in enumerate(peers)})
    problem = Problem(ModelSize(layers), peers, links)
    plan = make_plan(ModelSize(layers), peers, links)
    check(problem, plan)
    held = {stage.peer_id: frozenset(range(stage.start, stage.stop)) for stage in plan.stages}
    again = [replace(peer, held=held.get(peer.peer_id, frozenset())) for peer in peers]
    assert make_plan(ModelSize(layers), again, links).stages == plan.stages
