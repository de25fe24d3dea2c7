"""Rows share a forward as long as padding them takes less than reading the weights again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.model.caches.row_groups import group_rows, zone_of


def _bytes(lengths: list[int], groups: list[list[int]], weight_bytes: int) -> int:
    padding = sum(max(lengths[i] for i in g) * len(g) - sum(lengths[i] for i in g) for g in groups)
    return len(groups) * weight_bytes + padding


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    st.integers(1, 5000),
    st.integers(1, 6),
    st.lists(st.integers(1, 1000), max_size=2),
)
def test_every_row_once_and_no_worse_than_together_or_alone(
    lengths: list[int], weight_bytes: int, max_rows: int, bounds: list[int]
) -> None:
    groups = group_rows(
        lengths, weight_bytes=weight_bytes, token_bytes=1, max_rows=max_rows, bounds=bounds
    )
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(0 < len(group) <= max_rows for group in groups)
    for group in groups:
        assert len({zone_of(lengths[i], bounds) for i in group}) == 1
    spent = _bytes(lengths, groups, weight_bytes)
    assert spent <= len(lengths) * weight_bytes
    if not bounds and len(lengths) <= max_rows:
        assert spent <= _bytes(lengths, [list(range(len(lengths)))], weight_bytes)


def test_one_long_row_does_not_make_many_short_ones_long() -> None:
    lengths = [10, 4000, 12, 11]
    apart = group_rows(lengths, weight_bytes=1000, token_bytes=1, max_rows=8)
    assert apart == [[1], [2, 3, 0]]
    # Where weights outweigh that, all go together.
    together = group_rows(lengths, weight_bytes=100_000, token_bytes=1, max_rows=8)
    assert together == [[1, 2, 3, 0]]


def test_rows_do_not_straddle_a_bound() -> None:
    groups = group_rows([15, 16, 3], weight_bytes=1000, token_bytes=1, max_rows=8, bounds=(16,))
    assert sorted(map(sorted, groups)) == [[0, 2], [1]]
