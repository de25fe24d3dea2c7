"""Who has which piece of the model among replicas that are cut otherwise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.stages.holdings import Cut, Holding, holdings_of, state_pieces
from neurogrid.training.stages.reduction_plans import reduction_plan


def test_a_machine_beside_a_chain() -> None:
    cuts = [Cut(("whole",), (0, 4), 8.0), Cut(("a", "b"), (0, 1, 4), 16.0)]
    assert holdings_of(cuts) == (
        Holding(0, ("layer.0", "first"), ("whole", "a"), (8.0, 16.0)),
        Holding(1, ("layer.1", "layer.2", "layer.3", "last"), ("whole", "b"), (8.0, 16.0)),
        Holding(2, ("tied",), ("whole", "a", "b"), (8.0, 16.0, 0.0)),
    )


def test_a_machine_alone() -> None:
    pieces = ("layer.0", "layer.1", "first", "tied", "last")
    assert holdings_of([Cut(("a",), (0, 2), 1.0)]) == (Holding(0, pieces, ("a",), (1.0,)),)


def test_stages_give_the_pieces_that_are_their_own() -> None:
    found = [state_pieces((0, 1, 3, 4), index) for index in range(3)]
    assert found == [("layer.0", "first"), ("layer.1", "layer.2"), ("layer.3", "last")]
    assert state_pieces((0, 2), 0) == ("layer.0", "layer.1", "first", "last")


def test_the_plan_has_the_weights_and_those_who_can_be_dialled() -> None:
    (one, *_) = holdings_of([Cut(("a",), (0, 2), 3.0), Cut(("b",), (0, 2), 5.0)])
    plan = reduction_plan(
        bytes(16),
        0,
        7,
        0,
        one.number,
        members=one.members,
        reducers=["b"],
        num_elements=10_000,
        codec="f16",
        weights=one.weights,
    )
    assert (plan.members, plan.weights, plan.reducers) == (("a", "b"), (3.0, 5.0), ("b",))
    assert (plan.codec, plan.result_codec) == ("f16", "f16")


@st.composite
def cuts(draw: st.DrawFn) -> list[Cut]:
    num_layers = draw(st.integers(1, 6))
    found = []
    for number in range(draw(st.integers(1, 4))):
        inner = draw(st.sets(st.integers(1, num_layers - 1))) if num_layers > 1 else set()
        bounds = (0, *sorted(inner), num_layers)
        peers = tuple(f"{number}.{stage}" for stage in range(len(bounds) - 1))
        found.append(Cut(peers, bounds, float(draw(st.integers(0, 3)))))
    return found


@given(cuts())
def test_each_replica_counts_once_for_each_piece(replicas: list[Cut]) -> None:
    holdings = holdings_of(replicas)
    pieces = [piece for each in holdings for piece in each.pieces]
    num_layers = replicas[0].bounds[-1]
    assert sorted(pieces) == sorted(
        [*(f"layer.{n}" for n in range(num_layers)), "first", "tied", "last"]
    )
    for each in holdings:
        assert len(set(each.members)) == len(each.members) == len(each.weights)
        for replica in replicas:
            counted = [
                weight
                for peer, weight in zip(each.members, each.weights, strict=True)
                if peer in replica.peers
            ]
            assert sum(counted) == replica.weight
    for replica in replicas:
        for start, stop, peer in zip(
            replica.bounds, replica.bounds[1:], replica.peers, strict=False
        ):
            own = {piece for each in holdings if peer in each.members for piece in each.pieces}
            assert {f"layer.{n}" for n in range(start, stop)} <= own
