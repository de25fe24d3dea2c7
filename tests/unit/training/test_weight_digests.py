"""Digests of weights that members tell are compared with the leader's after the same round, whoever is first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.leading.digests import WeightDigests
from neurogrid.training.runs.state import Occupant

A, B = Occupant("a", 1), Occupant("b", 2)


def digest(round_number: int) -> bytes:
    return round_number.to_bytes(32, "big")


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_whoever_is_first_each_round_is_compared_once(leads: list[bool]) -> None:
    digests = WeightDigests()
    for number, is_first in enumerate(leads, 1):
        if is_first:
            assert digests.own(number, digest(number)) == []
        for _ in range(3):  # reports come again and again
            assert not digests.told(A, number, digest(number))
        if not is_first:
            assert digests.own(number, digest(number)) == []
    assert digests.take() == (len(leads), 0)
    assert digests.take() == (0, 0)


def test_other_weights_are_told_of_whoever_is_first() -> None:
    digests = WeightDigests()
    digests.own(1, digest(1))
    assert digests.told(A, 1, digest(9))
    assert not digests.told(A, 1, digest(9))  # it was told of
    assert not digests.told(B, 2, digest(9))
    assert digests.own(2, digest(2)) == [B]
    assert digests.take() == (0, 2)


def test_since_when_members_differ_is_known_until_they_agree_again() -> None:
    digests = WeightDigests()
    for number in (1, 2, 3):
        digests.own(number, digest(number))
        digests.told(A, number, digest(9 if number > 1 else 1))
        digests.told(B, number, digest(number))
    assert digests.differing == {A: 2}
    digests.own(4, digest(4))
    assert digests.differing == {A: 2}  # nothing new is known of it
    digests.told(A, 4, digest(4))
    digests.told(B, 4, digest(9))
    assert digests.differing == {B: 4}
    digests.keep({A})
    assert digests.differing == {}


def test_those_that_left_and_rounds_of_long_ago_are_nothing_to_compare_with() -> None:
    digests = WeightDigests()
    digests.told(A, 1, digest(9))
    digests.keep({B})
    assert digests.own(1, digest(1)) == []
    for number in range(2, 100):
        digests.own(number, digest(number))
    assert not digests.told(B, 1, digest(9))
    assert digests.take() == (0, 0)
