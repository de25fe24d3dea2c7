"""How much of what was computed somebody else can begin with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.inference.generation.prefixes import MIN_REUSED, first_calls, reusable, shared_length

TOKENS = st.lists(st.integers(0, 2), max_size=600)
LONG = list(range(40))


def anywhere(length: int) -> int:
    return 0


def nowhere(length: int) -> int:
    return length


@given(TOKENS, TOKENS, TOKENS)
def test_shared_length_is_what_a_loop_counts(
    shared: list[int], one: list[int], other: list[int]
) -> None:
    one, other = shared + one, shared + other
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    assert shared_length(one, other) == shared_length(other, one) == count >= len(shared)


def test_all_of_it_can_be_gone_on_from_and_a_part_where_caches_can_be_cut() -> None:
    for replays in (False, True):
        for cut in (anywhere, nowhere):
            assert (
                reusable(LONG, [30, *[1] * 10], [*LONG, 7], shortest_cut=cut, replays=replays) == 40
            )
    changed = [*LONG[:35], 99, 99]
    assert reusable(LONG, [40], changed, shortest_cut=anywhere, replays=False) == 35
    assert reusable(LONG, [40], changed, shortest_cut=nowhere, replays=False) == 0
    assert (
        reusable(LONG, [40], LONG[: MIN_REUSED - 1] + [99], shortest_cut=anywhere, replays=False)
        == 0
    )


def test_one_token_is_left_to_compute() -> None:
    assert reusable(LONG, [40], LONG, shortest_cut=anywhere, replays=False) == 39
    assert reusable(LONG, [40], LONG, shortest_cut=nowhere, replays=False) == 0


def test_calls_that_are_to_be_repeated_are_not_cut() -> None:
    calls = [30, 1, 1, 4, 4]
    assert first_calls(calls, 31) == [30, 1]
    assert first_calls(calls, 29) == []
    assert first_calls(calls, 40) == calls
    for length, expected in ((40, 36), (36, 36), (35, 32), (31, 31), (29, 0)):
        wanted = [*LONG[:length], 99]
        got = reusable(LONG, calls, wanted, shortest_cut=anywhere, replays=True)
        assert got == (expected if length < 40 else 40)
