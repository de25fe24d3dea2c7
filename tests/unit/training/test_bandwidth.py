"""The bandwidth of a member, from what has gone by in moments of its rounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.averaging.groups.bandwidth import BandwidthMeter

CHUNK = 100_000
MOMENT = 0.1


class Round:
    """Chunks that go by in moments of one round after another, of two peers."""

    def __init__(self) -> None:
        self.meter = BandwidthMeter()
        self._now, self._sent, self._received = 0.0, 0, 0

    def end(self, *moments: tuple[int, int]) -> float | None:
        """A round of such moments: chunks sent in each, and received. The estimate after it."""
        for sent, received in moments:
            self._now += MOMENT
            self._sent += sent
            self._received += received
            self.meter.look(
                self._now,
                (self._sent, self._sent * CHUNK),
                (self._received, self._received * CHUNK),
                num_peers=2,
            )
        self.meter.end_round()
        return self.meter.bandwidth


def speed(num_chunks: int) -> float:
    """Bytes a second in both directions together, of whole chunks that went by in a moment in each."""
    return 2 * num_chunks * CHUNK / MOMENT


def test_nothing_is_known_before_anything_went_by() -> None:
    assert Round().end((0, 0)) is None


def test_the_busiest_moment_of_a_round_counts_less_a_message_of_each_peer() -> None:
    assert Round().end((5, 5), (12, 12), (7, 7)) == pytest.approx(speed(10))


def test_the_slower_direction_counts() -> None:
    """Buffers take much at once, whatever the line does."""
    assert Round().end((40, 2), (0, 8)) == pytest.approx(speed(6))


def test_a_moment_in_which_little_went_by_says_nothing() -> None:
    assert Round().end((2, 2), (1, 2)) is None


def test_more_is_taken_at_once_and_less_by_and_by() -> None:
    rounds = Round()
    assert rounds.end((12, 12)) == pytest.approx(speed(10))
    assert rounds.end((7, 7)) == pytest.approx(0.9 * speed(10))
    assert rounds.end((22, 22)) == pytest.approx(speed(20))


def test_an_estimate_of_which_no_round_says_anything_is_forgotten() -> None:
    """It may be why: whoever was measured low once is given little, and has no moment that would show more."""
    rounds = Round()
    assert rounds.end((4, 4)) == pytest.approx(speed(2))
    for _ in range(7):
        assert rounds.end((2, 2)) == pytest.approx(speed(2))
    assert rounds.end((2, 2)) is None
    assert rounds.end((12, 12)) == pytest.approx(speed(10))  # as after the first round


def test_silent_rounds_count_in_turn() -> None:
    rounds = Round()
    for _ in range(3):
        assert rounds.end((4, 4)) == pytest.approx(speed(2))
        for _ in range(7):
            assert rounds.end((2, 2)) == pytest.approx(speed(2))


@given(st.lists(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=5)))
def test_no_estimate_is_more_than_what_went_by(told: Sequence[Sequence[tuple[int, int]]]) -> None:
    rounds, most = Round(), 0
    for moments in told:
        most = max([most, *(max(moment) for moment in moments)])
        bandwidth = rounds.end(*moments)
        assert bandwidth is None or 0 < bandwidth <= speed(most)
