"""Members become replicas of both kinds, by what they have room for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.stages.cutting import StageSizes
from neurogrid.training.stages.replica_cuts import cut_replicas

SIZES = StageSizes((10, 10, 10, 10), 5, 5, 5)


def peers_of(rooms: dict[str, int], *, most: int = 4, stages: int = 3) -> list[tuple[str, ...]]:
    return [cut.peers for cut in cut_replicas(rooms, SIZES, most=most, stages=stages)]


def test_whoever_has_room_for_all_is_one_alone_and_others_are_as_few_as_will_do() -> None:
    rooms = {"a": 26, "whole": 45, "b": 25, "any": 0, "c": 15, "d": 15, "e": 20, "f": 15}
    assert peers_of(rooms) == [("any",), ("whole",), ("a", "b"), ("d", "e", "c")]


def test_no_more_than_are_wanted() -> None:
    assert peers_of({"a": 0, "b": 0, "c": 0}, most=2) == [("a",), ("b",)]
    assert peers_of({"a": 0}, most=0) == []


def test_those_that_have_too_little_stand_by() -> None:
    assert peers_of({"a": 25}) == []
    assert peers_of({"a": 15, "b": 15, "c": 15, "d": 15}) == []
    assert peers_of({"a": 15, "b": 15, "c": 15, "d": 15}, stages=4) == [("a", "b", "c", "d")]


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 60), max_size=8),
    st.integers(0, 4),
    st.integers(1, 5),
)
def test_each_fits_and_nobody_is_in_two(rooms: dict[str, int], most: int, stages: int) -> None:
    found = cut_replicas(rooms, SIZES, most=most, stages=stages)
    assert len(found) <= most
    peers = [peer for each in found for peer in each.peers]
    assert len(set(peers)) == len(peers)
    for each in found:
        assert len(each.peers) <= stages
        assert (each.bounds[0], each.bounds[-1]) == (0, 4)
        for peer, start, stop in zip(each.peers, each.bounds, each.bounds[1:], strict=False):
            assert not rooms[peer] or SIZES.needed(start, stop) <= rooms[peer]


def test_two_that_cannot_reach_each_other_are_no_neighbours() -> None:
    rooms = {"a": 29, "b": 28, "c": 27, "d": 26}

    def cut(*pairs: str) -> list[tuple[str, ...]]:
        lost = {frozenset(pair) for pair in pairs}
        found = cut_replicas(
            rooms, SIZES, most=4, stages=3, are_apart=lambda one, other: {one, other} in lost
        )
        return [each.peers for each in found]

    assert cut() == [("a", "b"), ("c", "d")]
    assert cut("ab") == [("a", "c"), ("b", "d")]
    # There is no other way: it counts for nothing.
    assert cut("ab", "ac", "ad", "bc", "bd", "cd") == [("a", "b"), ("c", "d")]


def test_ends_that_have_nothing_tied_need_not_reach_each_other() -> None:
    rooms = dict.fromkeys("abc", 21)

    def cut(is_tied: bool) -> list[tuple[str, ...]]:
        found = cut_replicas(
            rooms,
            SIZES,
            most=4,
            stages=3,
            are_apart=lambda one, other: {one, other} == {"a", "b"},
            is_tied=is_tied,
        )
        return [each.peers for each in found]

    assert cut(is_tied=False) == [("a", "c", "b")]
    # Each of three would have to reach both others: it counts for nothing.
    assert cut(is_tied=True) == [("a", "b", "c")]
