"""Projection of members to the end of a round, and shares of work by which they finish together."""

from __future__ import annotations

import heapq
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.runs.projection import (
    EVEN_WITHIN,
    Pace,
    Projection,
    project,
    seconds_left,
    share_batches,
)

GOLDEN = [Pace(10, 0.020), Pace(5, 0.030), Pace(1, 0.050)]


def test_a_cap_of_time() -> None:
    found = project(GOLDEN, 9_999, max_seconds=0.101)
    assert found == Projection(0.100, 9_999 - 67, (5, 3, 2), is_capped=True)


def test_a_cap_of_batches() -> None:
    found = project(GOLDEN, 9_999, max_batches=3)
    assert found == Projection(0.060, 9_999 - 41, (3, 2, 1), is_capped=True)


def test_all_samples_are_done() -> None:
    found = project(GOLDEN, 50, max_seconds=0.101)
    assert found == Projection(0.080, 0, (4, 2, 1), is_capped=False)


def test_nothing_is_left_or_there_is_no_time() -> None:
    assert project(GOLDEN, 0) == Projection(0.0, 0, (0, 0, 0), is_capped=False)
    assert project(GOLDEN, 5, max_seconds=0.019) == Projection(0.0, 5, (0, 0, 0), is_capped=True)


def test_what_is_no_pace() -> None:
    for members in ([], [Pace(0, 1.0)], [Pace(1, 0.0)], [Pace(1, float("nan"))]):
        with pytest.raises(ValueError, match=r"needs a member|above 0"):
            project(members, 1)


def test_what_is_left_of_a_work() -> None:
    """At four fifths of what its batches took."""
    assert seconds_left(100, 10, batches_done=4, batch_seconds=5.0) == pytest.approx(24.0)
    assert seconds_left(45, 10, batches_done=4, batch_seconds=5.0) == pytest.approx(2.0)
    assert seconds_left(45, 10, batches_done=5, batch_seconds=5.0) == 0.0
    assert seconds_left(100, 10, batches_done=4, batch_seconds=0.0) == 0.0


millis = st.integers(1, 200)
paces = st.lists(st.tuples(st.integers(1, 40), millis), min_size=1, max_size=6)


@given(paces, st.integers(0, 2_000), st.none() | millis, st.none() | st.integers(0, 20))
def test_it_is_what_a_simulation_batch_by_batch_finds(
    members: list[tuple[int, int]], left: int, max_ms: int | None, max_batches: int | None
) -> None:
    now, done, counts, capped = 0, 0, [0] * len(members), False
    queue = [(span, number) for number, (_, span) in enumerate(members)]
    heapq.heapify(queue)
    while done < left:
        if max(counts) == max_batches or (max_ms is not None and queue[0][0] > max_ms):
            capped = True
            break
        now = queue[0][0]
        while queue[0][0] == now:
            _, number = queue[0]
            done, counts[number] = done + members[number][0], counts[number] + 1
            heapq.heapreplace(queue, (now + members[number][1], number))
    found = project(
        [Pace(size, span / 1000) for size, span in members],
        left,
        max_seconds=None if max_ms is None else max_ms / 1000 + 1e-9,
        max_batches=max_batches,
    )
    assert found == Projection(now / 1000, max(0, left - done), tuple(counts), capped)


speeds = st.lists(st.integers(1, 100_000).map(lambda ms: ms / 1000), min_size=1, max_size=12)


def is_even(seconds: list[float]) -> bool:
    return max(seconds) <= (1 + EVEN_WITHIN) * min(seconds)


@given(speeds, st.integers(0, 3_000))
def test_shares_of_uneven_members_add_up(seconds: list[float], total: int) -> None:
    shares = share_batches(seconds, total)
    assert len(shares) == len(seconds)
    assert min(shares) >= 1
    if not is_even(seconds):
        assert sum(shares) == max(total, len(seconds))


@given(speeds, st.integers(0, 3_000))
def test_nothing_is_gained_by_moving_a_batch(seconds: list[float], total: int) -> None:
    shares = share_batches(seconds, total)
    if is_even(seconds):
        assert len(set(shares)) == 1
        assert 2 * abs(sum(shares) - max(total, len(seconds))) <= len(seconds)
        return
    ends = [share * each for share, each in zip(shares, seconds, strict=True)]
    for number, end in enumerate(ends):
        if shares[number] > 1:
            others = [ends[k] + seconds[k] for k in range(len(ends)) if k != number]
            assert min(others) >= end - 1e-6


@given(speeds, st.integers(0, 3_000))
def test_who_is_faster_does_no_less_and_more_work_takes_nothing_away(
    seconds: list[float], total: int
) -> None:
    shares = share_batches(seconds, total)
    by_speed = sorted(zip(seconds, shares, strict=True), key=lambda pair: pair[0])
    for (fast, more), (slow, less) in pairwise(by_speed):
        assert more >= less or fast == slow
    assert all(b >= a for a, b in zip(shares, share_batches(seconds, total + 1), strict=True))


@given(speeds, st.integers(1, 3_000))
def test_shares_are_in_proportion(seconds: list[float], total: int) -> None:
    shares = share_batches(seconds, total)
    if is_even(seconds) or min(shares) == 1:
        return
    end = max(share * each for share, each in zip(shares, seconds, strict=True))
    for share, each in zip(shares, seconds, strict=True):
        assert end / each - 2 < share <= end / each + 1e-6


def test_speeds_one_one_a_half_a_fifth() -> None:
    shares = share_batches([0.1, 0.1, 0.2, 0.5], 80)
    assert shares == (30, 30, 15, 5)


def test_pieces_of_batches_have_all_finish_together() -> None:
    speeds = [0.1, 0.1, 0.2, 0.5]
    assert share_batches(speeds, 20) == (8, 8, 3, 1)
    shares = share_batches(speeds, 20, num_pieces=4)
    assert shares == (30, 30, 15, 5)
    # With whole batches all wait until 0.8 s, with such pieces until 0.75.
    assert {share * each / 4 for share, each in zip(shares, speeds, strict=True)} == {0.75, 0.625}


@given(speeds, st.integers(0, 3_000), st.sampled_from([1, 2, 4]))
def test_pieces_of_batches_are_batches_of_their_own(
    seconds: list[float], total: int, num_pieces: int
) -> None:
    shares = share_batches(seconds, total, num_pieces=num_pieces)
    if is_even(seconds):
        assert shares == tuple(num_pieces * each for each in share_batches(seconds, total))
    else:
        assert shares == share_batches(seconds, total * num_pieces)


def test_those_that_are_not_known_count_as_the_mean() -> None:
    assert share_batches([None, None, None], 10) == (3, 3, 3)
    assert share_batches([1.0, None, 1.1], 60) == (20, 20, 20)
    # Two batches a second and one in two: one and a quarter a second.
    assert share_batches([0.5, None, 2.0], 15) == (8, 5, 2)
    assert share_batches([], 5) == ()


def test_nearly_equal_members_do_the_same() -> None:
    assert share_batches([1.0, 1.15], 41) == (21, 21)
    assert share_batches([1.0, 1.16], 41) == (22, 19)
    assert share_batches([1.0, 1.0, 1.0], 1) == (1, 1, 1)
