"""Members of stages: each stage has one, whoever was there stays, and nobody is in two."""

from __future__ import annotations

from itertools import combinations, permutations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.stages.placement import contacts, fill, place, place_apart

PEERS = "abcdefghij"


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[list[str]], list[str], int]:
    """Stages of before, who is here, and how many stages there are to be."""
    order = draw(st.permutations(PEERS))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), min_size=1, max_size=5)))
    before = [list(order[start:stop]) for start, stop in zip([0, *cuts], cuts, strict=False)]
    usable = draw(st.lists(st.sampled_from(PEERS), min_size=1, unique=True))
    return before, usable, draw(st.integers(1, len(usable)))


@given(histories())
def test_each_stage_has_members_and_nobody_moves_without_need(
    history: tuple[list[list[str]], list[str], int],
) -> None:
    before, usable, num_stages = history
    stages = place(before, usable, num_stages)
    members = [peer for stage in stages for peer in stage]
    assert len(stages) == num_stages
    assert all(stages)
    assert len(set(members)) == len(members)
    assert set(members) <= set(usable)
    kept = [[peer for peer in stage if peer in usable] for stage in before[:num_stages]]
    free = set(usable) - {peer for stage in kept for peer in stage}
    missing = num_stages - sum(bool(stage) for stage in kept)
    moved = sum(peer not in stages[index] for index, stage in enumerate(kept) for peer in stage)
    assert moved == max(missing - len(free), 0)


@given(histories(), st.integers(1, 4), st.sets(st.sampled_from(PEERS)), st.data())
def test_who_is_free_comes_where_there_is_most_to_do(
    history: tuple[list[list[str]], list[str], int],
    most: int,
    small: set[str],
    data: st.DataObject,
) -> None:
    before, usable, num_stages = history
    stages = place(before, usable, num_stages)
    sizes = [data.draw(st.integers(1, 9)) for _ in stages]
    found = fill(stages, usable, most, lambda peer, index: peer not in small, sizes)
    for stage, filled in zip(stages, found, strict=True):
        assert filled[: len(stage)] == stage
        assert len(filled) <= max(most, len(stage))
        assert not set(filled[len(stage) :]) & small
    members = [peer for stage in found for peer in stage]
    assert len(set(members)) == len(members)
    left = set(usable) - set(members) - small
    assert not left or all(len(stage) >= most for stage in found)


def test_the_larger_stage_gets_the_first_one() -> None:
    stages = fill((("a",), ("b",)), "abcde", 3, lambda peer, index: True, [2, 3])
    assert stages == (("a", "d"), ("b", "c", "e"))


@given(histories(), st.sets(st.sampled_from(sorted(combinations(PEERS, 2))), max_size=6))
def test_those_that_cannot_reach_each_other_need_not(
    history: tuple[list[list[str]], list[str], int], lost: set[tuple[str, str]]
) -> None:
    before, usable, num_stages = history

    def are_apart(peer: str, other: str) -> bool:
        return tuple(sorted((peer, other))) in lost

    stages = place_apart(before, usable, min(num_stages, 5), are_apart)
    if stages is None:
        ways = permutations(usable, min(num_stages, 5))
        assert all(
            any(are_apart(*pair) for pair in contacts([(peer,) for peer in way])) for way in ways
        )
        return
    assert len(stages) == min(num_stages, 5)
    assert all(stages)
    assert not any(are_apart(*pair) for pair in contacts(stages))
    members = [peer for stage in stages for peer in stage]
    assert len(set(members)) == len(members)
    assert set(members) <= set(usable)
    if not lost:
        kept = [{peer for peer in stage if peer in usable} for stage in before[: len(stages)]]
        assert all(not old or old & set(stage) for old, stage in zip(kept, stages, strict=False))


def test_a_spare_comes_between_or_others_change_places() -> None:
    def are_apart(peer: str, other: str) -> bool:
        return {peer, other} == {"a", "b"}

    before = [["a"], ["b"], ["c"], ["d"]]
    assert place_apart(before, "abcds", 4, are_apart) == (("a",), ("s",), ("c",), ("d",))
    assert place_apart(before, "abcd", 4, are_apart) == (("a",), ("c",), ("b",), ("d",))
    assert place_apart([[], ["a"], ["b", "c"]], "abc", 3, lambda *_: False) == (
        ("c",),
        ("a",),
        ("b",),
    )
    assert place_apart([["a"], ["b"]], "ab", 2, are_apart) is None
    assert place_apart([["a", "c"], ["b"]], "abc", 2, are_apart) == (("c",), ("b",))
    assert fill(
        (("a",), ("c",), ("d",), ("e",)), "b", 2, lambda *_: True, [9, 1, 2, 9], are_apart
    ) == ((("a",), ("c",), ("d", "b"), ("e",)))


def test_ends_that_have_nothing_tied_need_not_reach_each_other() -> None:
    def are_apart(peer: str, other: str) -> bool:
        return {peer, other} == {"a", "b"}

    def given(is_tied: bool) -> list[object]:
        ends = (("a",), ("c",), ("d",))
        return [
            place_apart([["a"], ["b"], ["c"]], "abc", 3, are_apart, is_tied=is_tied),
            fill(ends, "b", 2, lambda *_: True, [9, 9, 1], are_apart, is_tied=is_tied),
            ("a", "d") in contacts(ends, is_tied=is_tied),
        ]

    assert given(is_tied=True) == [None, ends_of("d"), True]
    assert given(is_tied=False) == [(("a",), ("c",), ("b",)), ends_of("d", "b"), False]


def ends_of(*last: str) -> tuple[tuple[str, ...], ...]:
    """Three stages, of which the last has these members."""
    return ("a",), ("c",), last
