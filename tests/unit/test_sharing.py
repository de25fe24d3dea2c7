"""Memory divided between models: all weights before anybody's second session, and never more than there is."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import CapacityError
from neurogrid.planner import (
    Division,
    LayerSize,
    ModelSize,
    PeerCapacity,
    Room,
    SharedLayer,
    SharedModel,
    divide,
    make_plan,
    taken_bytes,
)

ROOMS = st.lists(st.tuples(st.integers(0, 5000), st.booleans()), min_size=1, max_size=5).map(
    lambda each: [
        # The coordinator's own is one at most.
        Room(f"w{index}", free, is_last=is_last and index == 0)
        for index, (free, is_last) in enumerate(each)
    ]
)
LAYERS = st.lists(
    st.builds(SharedLayer, st.integers(1, 400), st.integers(0, 60)), min_size=1, max_size=8
).map(tuple)
MODELS = st.lists(
    st.builds(
        SharedModel,
        name=st.just(""),
        layers=LAYERS,
        workspace_bytes=st.integers(0, 50),
        max_sessions=st.integers(1, 40),
        asked=st.floats(0, 1e6),
        num_stages=st.none() | st.integers(1, 3),
    ),
    min_size=1,
    max_size=4,
).map(
    lambda each: [
        SharedModel(**{**vars(model), "name": f"m{index}"}) for index, model in enumerate(each)
    ]
)


def uniform(name: str, *, fixed: int, session: int = 0, count: int = 4, **more: int) -> SharedModel:
    return SharedModel(name, (SharedLayer(fixed, session),) * count, **more)


@given(MODELS, ROOMS)
def test_no_worker_gives_more_than_it_has_and_each_model_has_a_plan(
    models: list[SharedModel], rooms: list[Room]
) -> None:
    try:
        division = divide(models, rooms)
    except CapacityError:
        return
    taken: Counter[str] = Counter()
    for by_peer in division.packed.values():
        taken.update(by_peer)
    for room in rooms:
        assert taken[room.peer_id] <= max(room.free_bytes, 0)
    for model in models:
        number = division.num_sessions[model.name]
        assert 1 <= number <= model.max_sessions
        planned_within(model, number, division, rooms)


def planned_within(
    model: SharedModel, num_sessions: int, division: Division, rooms: list[Room]
) -> None:
    """The planner finds a plan over what the others leave."""
    left = division.left_for(model.name, rooms)
    layers = tuple(LayerSize(layer) for layer in model.layer_bytes(num_sessions))
    size = ModelSize(layers, workspace_bytes=model.workspace_bytes)
    peers = [PeerCapacity(peer_id, max(num_bytes, 0)) for peer_id, num_bytes in left.items()]
    plan = make_plan(size, peers, num_stages=model.num_stages)
    for stage in plan.stages:
        assert taken_bytes(stage.num_bytes, model.workspace_bytes) <= left[stage.peer_id] + 2


@given(MODELS, ROOMS, st.randoms(use_true_random=False))
def test_the_order_in_which_they_are_named_is_nothing(
    models: list[SharedModel], rooms: list[Room], random: object
) -> None:
    def outcome(models: list[SharedModel], rooms: list[Room]) -> object:
        try:
            found = divide(models, rooms)
        except CapacityError:
            return None
        return found.num_sessions, found.packed

    shuffled, other_rooms = list(models), list(rooms)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    random.shuffle(other_rooms)  # type: ignore[attr-defined]
    assert outcome(models, rooms) == outcome(shuffled, other_rooms)


def test_weights_of_all_come_before_the_second_session_of_any() -> None:
    one = uniform("one", fixed=100, session=50, max_sessions=8)
    other = uniform("other", fixed=100, session=50, max_sessions=8)
    room = [Room("w", taken_bytes(600, 0) + taken_bytes(600, 0))]
    assert divide([one, other], room).num_sessions == {"one": 1, "other": 1}
    with pytest.raises(CapacityError, match="one needs 668 B and other needs 668 B"):
        divide([one, other], [Room("w", room[0].free_bytes - 1)])


def test_what_is_left_goes_to_what_was_asked() -> None:
    one = uniform("one", fixed=10, session=10, max_sessions=16, asked=9000)
    other = uniform("other", fixed=10, session=10, max_sessions=16, asked=3000)
    sessions = divide([one, other], [Room("w", 700)]).num_sessions
    assert sessions["one"] > 2 * sessions["other"]
    even = [uniform(name, fixed=10, session=10, max_sessions=16) for name in ("one", "other")]
    counts = divide(even, [Room("w", 700)]).num_sessions
    assert abs(counts["one"] - counts["other"]) <= 1


def test_where_all_fit_nobody_gets_less_than_it_wants() -> None:
    models = [uniform(name, fixed=10, session=1, max_sessions=4) for name in ("a", "b", "c")]
    assert set(divide(models, [Room("w", 10_000)]).num_sessions.values()) == {4}


@pytest.mark.parametrize(
    ("fixed", "most", "least"),
    [
        ((100, 100, 100, 100, 100), 300, 200),
        ((50, 50, 50, 400), 400, 150),
        ((100, 100, 100, 100, 100), 400, 100),
        ((300, 50, 50), 350, 50),
    ],
    ids=["an odd number", "a large last one", "unlike machines", "a large first one"],
)
def test_a_number_of_stages_has_a_packing_where_it_has_a_plan(
    fixed: tuple[int, ...], most: int, least: int
) -> None:
    """Whichever of the two machines is named first, and whichever part of the model is the larger one."""
    model = SharedModel("m", tuple(map(SharedLayer, fixed)), num_stages=2)
    rooms = [Room("w1", taken_bytes(least, 0)), Room("w2", taken_bytes(most, 0))]
    division = divide([model], rooms)
    assert sum(division.packed["m"].values()) <= sum(room.free_bytes for room in rooms)
    assert set(division.packed["m"]) == {"w1", "w2"}
    planned_within(model, 1, division, rooms)
    with pytest.raises(CapacityError):
        divide([model], [Room("w1", rooms[0].free_bytes - 1), rooms[1]])


def test_a_model_lies_on_as_few_workers_as_will_do_and_here_last() -> None:
    model = uniform("m", fixed=100)
    workers = [Room("w1", 500), Room("w2", 900), Room("here", 10_000, is_last=True)]
    assert list(divide([model], workers).packed["m"]) == ["w1"]
    bigger = uniform("m", fixed=300)
    assert set(divide([bigger], workers).packed["m"]) == {"w1", "w2"} or set(
        divide([bigger], workers).packed["m"]
    ) == {"here"}
    assert list(divide([uniform("m", fixed=900)], workers).packed["m"]) == ["here"]


def test_layers_that_are_to_be_here_are_here() -> None:
    model = SharedModel("m", (SharedLayer(100),) * 4, num_local_layers=1)
    rooms = [Room("w", 400), Room("here", 200, is_last=True)]
    assert divide([model], rooms).packed["m"] == {
        "here": taken_bytes(100, 0),
        "w": taken_bytes(300, 0),
    }
    with pytest.raises(CapacityError):
        divide([model], rooms[:1])
