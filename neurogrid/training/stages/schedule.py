"""In which order the members of a stage compute the micro-batches of a step: one forward, one backward. Pure.

A member computes forward until the first gradient may be there, then each micro-batch backward as soon as it can, and
one more forward after each. Where each stage is one member it holds inputs of no more micro-batches than there are
stages from it to the last, and all stages together take as long as if each had computed all of its forwards first. Each
member knows its own order alone, and waits for what an operation needs; in these orders that comes, however late. Times
and tensors are not known here.

Source: protocol_spec/training/stages.md; PipeDream-Flush, arXiv 2006.09503.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "Operation",
    "bubble",
    "forward_only",
    "most_under_way",
    "one_forward_one_backward",
    "window_of",
]


class Operation(NamedTuple):
    """What a stage does at once.

    Attributes:
        is_backward: whether it is a micro-batch's backward, which needs the gradient of the stage after it, or its
            forward, which needs the hidden states of the stage before it.
        number: of the micro-batch, from 0.
    """

    is_backward: bool
    number: int


def one_forward_one_backward(numbers: Sequence[int], window: int) -> tuple[Operation, ...]:
    """The operations of a member of a stage in a step that trains, in order.

    Before the backward of micro-batch m it computes forward those that are its own up to m + window - 1. Windows that
    fall from stage to stage, by the members of each at least, let no member wait for ever.

    Args:
        numbers: of the micro-batches that go through this member, rising.
        window: of `window_of`.
    """
    operations: list[Operation] = []
    ahead = 0
    for number in numbers:
        while ahead < len(numbers) and numbers[ahead] < number + window:
            operations.append(Operation(False, numbers[ahead]))
            ahead += 1
        operations.append(Operation(True, number))
    return tuple(operations)


def window_of(stage: int, widths: Sequence[int]) -> int:
    """How many micro-batches in a row may be under way at a stage, over all of its members.

    Args:
        stage: which one, from 0.
        widths: the number of members of each stage.

    Raises:
        ValueError: there is no such stage.
    """
    if not 0 <= stage < len(widths):
        raise ValueError(f"no order for stage {stage} of {len(widths)}: stages count from 0")
    return sum(widths[stage:])


def forward_only(numbers: Sequence[int]) -> tuple[Operation, ...]:
    """The operations of a member in a step that evaluates, in order.

    Args:
        numbers: of the micro-batches that go through it, rising.
    """
    return tuple(Operation(False, number) for number in numbers)


def most_under_way(numbers: Sequence[int], window: int) -> int:
    """The most micro-batches that a member has computed forward, and not backward yet, at any time.

    Args:
        numbers, window: as for `one_forward_one_backward`.
    """
    most = first = 0
    for last, number in enumerate(numbers):
        while numbers[first] + window <= number:
            first += 1
        most = max(most, last - first + 1)
    return most


def bubble(num_stages: int, num_micro_batches: int) -> float:
    """The share of a step in which a stage waits for others, if all take as long for a micro-batch, from 0 to 1."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)
