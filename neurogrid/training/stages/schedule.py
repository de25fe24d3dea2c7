"""Order in which the members of a stage compute the micro-batches of a step: one forward, one backward. Pure.

A member computes forward until the first gradient may be there, then each micro-batch backward as soon as it can, and
one more forward after each. Where each stage is one member it holds inputs of no more micro-batches than there are
stages from it to the last, and all stages together take as long as if each had computed all of its forwards first. Each
member knows its own order alone, and waits for what an operation needs; in these orders that comes, however late. Times
and tensors are not known here.

Source: protocol_spec/training/stages.md; PipeDream-Flush, arXiv 2006.09503.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

__all__ = [
    "Operation",
    "Progress",
    "bubble",
    "bubble_of_members",
    "forward_only",
    "most_under_way",
    "one_forward_one_backward",
    "progress_of",
    "window_of",
]

# What a micro-batch takes backward, where it takes one forward. Where each stage is one member it does not matter.
_BACKWARD: Final = 2.0


class Operation(NamedTuple):
    """Operation of a stage: the forward or the backward of one micro-batch.

    Attributes:
        is_backward: whether it is a micro-batch's backward, which needs the gradient of the stage after it, or its
            forward, which needs the hidden states of the stage before it.
        number: of the micro-batch, from 0.
    """

    is_backward: bool
    number: int


class Progress(NamedTuple):
    """Progress of a member with a step, in micro-batches.

    Attributes:
        micro_batches: that go through it.
        done: of those, that it has computed backward, or in an evaluation forward.
        under_way: of those, that it has computed forward and not backward yet.
    """

    micro_batches: int = 0
    done: int = 0
    under_way: int = 0


def progress_of(operations: Sequence[Operation], num_done: int) -> Progress:
    """Return the progress of a member that has done the first of its operations.

    Args:
        operations: of the step, in order.
        num_done: of those.
    """
    num = len({each.number for each in operations})
    backward = sum(each.is_backward for each in operations[:num_done])
    if len(operations) == num:  # nothing comes back
        return Progress(num, num_done, 0)
    return Progress(num, backward, num_done - 2 * backward)


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
    """Return the window of a stage: the micro-batches in a row that may be under way there, over all of its members.

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


def bubble_of_members(
    stages: Sequence[Sequence[Sequence[int]]],
) -> float:
    """The share of a step in which members wait for others, if each computes as long as every other, from 0 to 1.

    For a micro-batch a member takes the longer, the fewer it has. Where each stage is one member that is `bubble`; a
    member that has none of the step does not count.

    Args:
        stages: the members of each, and of each member the micro-batches that go through it, rising; each micro-batch
            goes through one member of each stage.
    """
    widths = [len(members) for members in stages]
    ends: dict[tuple[int, Operation], float] = {}
    busy = [
        _Busy(index, deque(one_forward_one_backward(numbers, window_of(index, widths))), numbers)
        for index, members in enumerate(stages)
        for numbers in members
        if numbers
    ]
    left = busy
    while left:
        for each in left:
            each.go_on(ends, len(stages) - 1)
        left = [each for each in left if each.operations]
    return 1 - 1 / max((each.time for each in busy), default=1.0)


class _Busy:
    """A member that computes as soon as it can, for a time of 1 in all."""

    def __init__(self, index: int, operations: deque[Operation], numbers: Sequence[int]) -> None:
        self.index, self.operations, self.time = index, operations, 0.0
        self._unit = 1 / (len(numbers) * (1 + _BACKWARD))

    def go_on(self, ends: dict[tuple[int, Operation], float], last: int) -> None:
        """Compute all for which there is what it needs; note when each operation of a stage ended."""
        while self.operations:
            operation = self.operations[0]
            begun = self._needed(ends, operation, last)
            if begun is None:
                return
            self.operations.popleft()
            takes = self._unit * (_BACKWARD if operation.is_backward else 1.0)
            self.time = max(self.time, begun) + takes
            ends[self.index, operation] = self.time

    def _needed(
        self, ends: Mapping[tuple[int, Operation], float], operation: Operation, last: int
    ) -> float | None:
        """Return the time at which the input of an operation is there; None while that is not known."""
        of = self.index + 1 if operation.is_backward else self.index - 1
        return ends.get((of, operation)) if 0 <= of <= last else 0.0
