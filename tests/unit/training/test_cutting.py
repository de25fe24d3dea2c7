"""Where a model is cut into stages: against all cuts that there are, and what is said when there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.training.stages.cutting import StageSizes, cut_layers

BYTES = st.integers(0, 100)
SIZES = st.builds(
    StageSizes,
    st.lists(BYTES, min_size=1, max_size=8).map(tuple),
    first=BYTES,
    last=BYTES,
    alone=BYTES,
    fewest_last=st.integers(1, 2),
)


def sizes_of(layers: Sequence[int], first: int = 0, last: int = 0) -> StageSizes:
    """Sizes in which a stage that is both ends has both."""
    return StageSizes(tuple(layers), first, last, alone=first + last)


def cuts(num_layers: int, num_stages: int, fewest_last: int = 1) -> Iterator[tuple[int, ...]]:
    """All ways to cut so many layers."""
    for inner in combinations(range(1, num_layers - fewest_last + 1), num_stages - 1):
        yield (0, *inner, num_layers)


def needed(sizes: StageSizes, bounds: Sequence[int]) -> list[int]:
    return [sizes.needed(start, stop) for start, stop in pairwise(bounds)]


def fits(sizes: StageSizes, bounds: Sequence[int], room: Sequence[int]) -> bool:
    return all(
        not offered or need <= offered
        for need, offered in zip(needed(sizes, bounds), room, strict=True)
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[StageSizes, list[int]]:
    """A model, and members of which some are too small for it, or lend without a limit."""
    sizes = draw(SIZES)
    num_stages = draw(st.integers(1, max(1, len(sizes.layers) - sizes.fewest_last + 1)))
    most = sizes.needed(0, len(sizes.layers))
    offered = st.one_of(st.just(0), st.integers(1, max(most, 1)))
    return sizes, draw(st.lists(offered, min_size=num_stages, max_size=num_stages))


@given(problems())
def test_the_largest_stage_is_as_small_as_in_any_cut_that_fits(
    problem: tuple[StageSizes, list[int]],
) -> None:
    sizes, room = problem
    num_layers = len(sizes.layers)
    possible = [
        cut for cut in cuts(num_layers, len(room), sizes.fewest_last) if fits(sizes, cut, room)
    ]
    if not possible:
        with pytest.raises(ConfigurationError, match="does not fit"):
            cut_layers(sizes, room)
        return
    bounds = cut_layers(sizes, room)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, num_layers, len(room) + 1)
    assert all(start < stop for start, stop in pairwise(bounds))
    assert fits(sizes, bounds, room)
    assert max(needed(sizes, bounds)) == min(max(needed(sizes, cut)) for cut in possible)
    # The same whenever it is asked for.
    assert cut_layers(sizes, room) == bounds


def test_ends_count_with_the_stages_that_have_them() -> None:
    layers = (10,) * 8
    assert cut_layers(sizes_of(layers), (0, 0)) == (0, 4, 8)
    assert cut_layers(sizes_of(layers, 40, 0), (0, 0)) == (0, 2, 8)
    assert cut_layers(sizes_of(layers, 0, 40), (0, 0)) == (0, 6, 8)
    bounds = cut_layers(sizes_of(layers, 40, 40), (0, 0, 0, 0))
    # Neither of the two has a second layer: it would be the largest.
    assert (bounds[1], bounds[-2]) == (1, 7)
    whole = sizes_of(layers, 40, 30)
    assert cut_layers(whole, (0,)) == (0, 8)
    assert whole.needed(0, 8) == 150


@pytest.mark.parametrize(
    ("layers", "bounds"),
    [((1, 1, 1, 1, 1), (0, 2, 5)), ((50, 1, 1, 1), (0, 1, 2, 4)), ((1, 1, 1, 50), (0, 1, 3, 4))],
)
def test_of_cuts_that_are_as_good_the_stages_before_have_the_least(
    layers: tuple[int, ...], bounds: tuple[int, ...]
) -> None:
    assert cut_layers(sizes_of(layers), (0,) * (len(bounds) - 1)) == bounds


def test_a_small_member_gets_what_fits_and_others_the_rest() -> None:
    sizes = sizes_of((40,) * 8)
    assert cut_layers(sizes, (40, 0)) == (0, 1, 8)
    assert cut_layers(sizes, (0, 79)) == (0, 7, 8)
    assert cut_layers(sizes, (80, 80, 1000)) == (0, 2, 4, 8)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="2 layers cannot be cut into 3 stages: lower"):
        cut_layers(sizes_of((1, 1)), (0, 0, 0))
    sizes = StageSizes((1, 1, 1), 0, 0, 0, fewest_last=2)
    assert cut_layers(sizes, (0, 0)) == (0, 1, 3)
    with pytest.raises(
        ConfigurationError, match="3 stages, the last of which has 2 layers at least: lower"
    ):
        cut_layers(sizes, (0, 0, 0))
    assert cut_layers(StageSizes((1,), 0, 0, 0, fewest_last=2), (0,)) == (0, 1)


def test_what_is_missing_is_said_in_bytes() -> None:
    """In all, what there is, and what the largest layer takes."""
    sizes = sizes_of((4_000, 12_000, 4_000), first=2_000, last=2_000)
    with pytest.raises(ConfigurationError) as failed:
        cut_layers(sizes, (9_000, 14_999))
    assert re.findall(r"[\d,]*\d", str(failed.value)) == ["2", "24,000", "23,999", "12,000"]
    # They lend enough together, and none has room for the largest layer.
    with pytest.raises(ConfigurationError, match="too small for a layer of 12,000"):
        cut_layers(sizes, (11_999, 11_999, 11_999))
    assert cut_layers(sizes, (6_000, 12_000, 6_000)) == (0, 1, 2, 3)


def test_a_layer_that_an_end_makes_too_large_is_no_stage_of_its_own() -> None:
    sizes = sizes_of((10, 10, 10), first=100)
    with pytest.raises(ConfigurationError, match="does not fit into 2 stages"):
        cut_layers(sizes, (109, 1000))
    assert cut_layers(sizes, (110, 20)) == (0, 1, 3)
