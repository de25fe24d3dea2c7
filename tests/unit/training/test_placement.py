"""Members of stages: each stage has one, whoever was there stays, and nobody is in two."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.stages.placement import fill, place

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
