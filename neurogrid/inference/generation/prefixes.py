"""Tokens that two sequences share, and how much of one that was computed the other can begin with.

Pure functions. A session's caches depend on its tokens alone, so that a session that begins with the same tokens may
go on from there. How far the caches of a family can be cut back is `StageCache.shortest_cut`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["MIN_REUSED", "first_calls", "reusable", "shared_length"]

# Tokens below which nothing is won: beginning with another session costs what opening one costs.
MIN_REUSED = 8

_BLOCK = 256


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    longest = min(len(one), len(other))
    length = 0
    # Whole blocks are compared by the interpreter, which is quick; to it a list is no tuple, whatever is in them.
    while length < longest and (
        list(one[length : length + _BLOCK]) == list(other[length : length + _BLOCK])
    ):
        length += _BLOCK
    length = min(length, longest)
    while length < longest and one[length] == other[length]:
        length += 1
    return length


def reusable(
    computed: Sequence[int],
    calls: Sequence[int],
    wanted: Sequence[int],
    *,
    shortest_cut: Callable[[int], int],
    replays: bool,
) -> int:
    """Number of the tokens `computed`, which are in a session's caches, that `wanted` can begin with; 0 for none.

    One token at least of `wanted` is left: what it gives is asked for.

    Args:
        calls: tokens of each forward pass that computed them, in order.
        shortest_cut: the fewest tokens that caches of so many can be cut back to.
        replays: whether calls must be repeatable as they were: then it is cut where one ended.
    """
    length = min(shared_length(computed, wanted), len(wanted) - 1)
    if length == len(computed):
        return length
    if replays:
        length = sum(first_calls(calls, length))
    return length if length >= max(shortest_cut(len(computed)), MIN_REUSED) else 0


def first_calls(calls: Sequence[int], length: int) -> list[int]:
    """The calls that end within the first `length` tokens."""
    first: list[int] = []
    end = 0
    for num_tokens in calls:
        end += num_tokens
        if end > length:
            break
        first.append(num_tokens)
    return first
