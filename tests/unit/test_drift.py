"""Who is slower than it said: found by what it takes, compared with the others, and only if that lasts."""

from __future__ import annotations

from neurogrid.fleet.speeds.drift import (
    MIN_STEPS,
    NUM_LOOKS,
    DriftWatch,
    drifts,
    how_fast,
    with_drifts,
)
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.planner import LayerSize, ModelSize, PeerSpeed

STAGE = 0.001
SIZE = ModelSize(tuple(LayerSize(100) for _ in range(8)), stage_seconds=STAGE)
SPEED = PeerSpeed(100_000.0)
LAYER = 0.001  # seconds: a hundred bytes at that speed
MANY = 2 * MIN_STEPS


def steps(factor: float, num_layers: int = 4, count: int = MANY) -> list[tuple[int, float]]:
    return [(num_layers, factor * (STAGE + num_layers * LAYER))] * count


def found(**members: list[tuple[int, float]]) -> dict[str, float]:
    return {p: round(f, 6) for p, f in drifts(dict.fromkeys(members, SPEED), members, SIZE).items()}


def test_only_what_sets_a_member_apart_counts() -> None:
    assert found(a=steps(0.9), b=steps(1.5), c=steps(1.2)) == {"a": 0.75, "b": 1.25, "c": 1.0}
    # All are slower: a long context, or a busy machine.
    assert found(a=steps(5), b=steps(5)) == {"a": 1.0, "b": 1.0}
    assert found(a=steps(1), b=steps(6)) == {"a": 1.0, "b": 6.0}
    # A speed that nobody told, and steps too few to say anything.
    assert found(a=steps(1), b=steps(6, count=MIN_STEPS - 1)) == {}
    assert drifts({"a": SPEED}, {"a": steps(1), "b": steps(6)}, SIZE) == {}


def test_a_member_with_few_layers_is_none_the_slower_for_what_every_stage_costs() -> None:
    assert found(a=steps(1, num_layers=1), b=steps(1, num_layers=7)) == {"a": 1.0, "b": 1.0}
    # Nor one whose layers changed meanwhile.
    mixed = steps(3, num_layers=1) + steps(3, num_layers=6)
    assert found(a=steps(1), b=mixed) == {"a": 1.0, "b": 3.0}


def test_a_process_that_is_stopped_now_and_then_is_slow_and_one_long_stop_is_not() -> None:
    (fast,) = steps(1, count=1)
    stopped = (fast[0], 46 * fast[1])
    assert 9 < found(a=steps(1), b=([fast] * 4 + [stopped]) * 40)["b"] < 11
    once = [fast] * MANY
    once[20] = (fast[0], 1000 * fast[1])
    assert found(a=steps(1), b=once)["b"] == 1.0


def test_one_look_decides_nothing_and_what_wavers_is_no_news() -> None:
    watch = DriftWatch()
    for _ in range(NUM_LOOKS):
        assert watch.look({"a": 1.0, "b": 3.0}) == []
        assert watch.look({"a": 1.0, "b": 1.5}) == []
    told = [watch.look({"a": 1.0, "b": 3.0}) for _ in range(NUM_LOOKS)]
    assert told == [[]] * (NUM_LOOKS - 1) + [["b"]]
    assert watch.known == {"b": 3.0}
    for factor in (2.0, 5.0, 1.6, 3.0) * NUM_LOOKS:
        assert watch.look({"a": 1.0, "b": factor}) == []
    # Far slower still.
    told = [watch.look({"b": 9.0}) for _ in range(NUM_LOOKS)]
    assert told[-1] == ["b"]
    assert watch.known == {"b": 9.0}
    # A look at which nothing was seen of it says nothing.
    assert watch.look({}) == []
    assert watch.known == {"b": 9.0}


def test_who_is_as_fast_as_it_said_again_is_believed() -> None:
    watch = DriftWatch()
    for _ in range(NUM_LOOKS):
        watch.look({"a": 1.0, "b": 2.2})
    told = [watch.look({"a": 1.0, "b": 1.3}) for _ in range(NUM_LOOKS)]
    assert told[-1] == ["b"]
    assert watch.known == {}
    for _ in range(NUM_LOOKS):
        watch.look({"b": 0.2})
    assert watch.known == {"b": 0.2}
    watch.forget("b")
    assert watch.known == {}


def test_what_is_said_of_it() -> None:
    assert how_fast(3.14) == "computes 3.1 times slower than it said, compared with the others"
    assert how_fast(0.25) == "computes 4.0 times faster than it said, compared with the others"
    assert how_fast(1.0) == "computes as fast as it said again"
    info = WorkerInfo("a", "cpu", 0, "", memory_known=True, held_layers=())
    assert [i.slowness for i in with_drifts([info], {"a": 2.5})] == [2.5]
    assert [i.slowness for i in with_drifts([info], {})] == [1.0]
