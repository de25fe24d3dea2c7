"""Routes of micro-batches: to the shortest queue, of each stage for itself."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.stages.routing import lanes_of, routes

paces = st.lists(
    st.lists(st.none() | st.floats(0.01, 10), min_size=1, max_size=5), min_size=1, max_size=4
)


@given(st.integers(1, 40), paces)
def test_nobody_would_be_waited_for_less_if_it_had_gone_elsewhere(
    num: int, paces: list[list[float | None]]
) -> None:
    found = routes(num, paces)
    lanes = [lanes_of(found, number, len(paces)) for number in range(num)]
    for stage, members in enumerate(paces):
        known = [pace for pace in members if pace is not None]
        typical = sum(known) / len(known) if known else 1.0
        seconds = [pace or typical for pace in members]
        counts = Counter(route[stage] for route in lanes)
        assert counts.keys() <= set(range(len(members)))
        longest = max(counts[lane] * seconds[lane] for lane in counts)
        for lane in range(len(members)):
            # One more would make the step as long as it is, or longer.
            assert (counts[lane] + 1) * seconds[lane] >= longest * (1 - 1e-9)


def test_members_that_are_as_fast_take_turns() -> None:
    found = routes(6, [[None], [0.5, 0.5], [1.0, None, 1.0]])
    assert [lanes_of(found, number, 3) for number in range(6)] == [
        (0, 0, 0),
        (0, 1, 1),
        (0, 0, 2),
        (0, 1, 0),
        (0, 0, 1),
        (0, 1, 2),
    ]


def test_a_member_that_would_only_be_waited_for_has_none() -> None:
    found = routes(8, [[0.1, 5.0]])
    assert set(found) == {0}
    # Of a slower one a share.
    assert Counter(routes(8, [[0.1, 0.3]])) == {0: 6, 1: 2}


def test_without_routes_all_go_to_the_first() -> None:
    assert lanes_of(b"", 3, 4) == (0, 0, 0, 0)
