"""In which order a stage computes the micro-batches of a step: one forward, one backward.

A stage computes forward until the first gradient may be there, then each micro-batch backward as soon as it can, and
one more forward after each. So it holds inputs of no more micro-batches than there are stages from it to the last, and
all stages together take as long as if each had computed all of its forwards first. Each stage knows its own order
alone, and waits for what an operation needs; in these orders that comes, however late. Times and tensors are not known
here.

Source: protocol_spec/training/stages.md; PipeDream-Flush, arXiv 2006.09503.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Operation", "bubble", "forward_only", "most_under_way", "one_forward_one_backward"]


class Operation(NamedTuple):
    """What a stage does at once.

    Attributes:
        is_backward: whether it is a micro-batch's backward, which needs the gradient of the stage after it, or its
            forward, which needs the hidden states of the stage before it.
        number: of the micro-batch, from 0.
    """

    is_backward: bool
    number: int


def one_forward_one_backward(
    stage: int, num_stages: int, num_micro_batches: int
) -> tuple[Operation, ...]:
    """The operations of a stage in a step that trains, in order.

    Args:
        stage: which one, from 0.
        num_stages: in the chain.
        num_micro_batches: of the step, at least 1.

    Raises:
        ValueError: there is no such stage, or no micro-batch.
    """
    ahead = most_under_way(stage, num_stages, num_micro_batches) - 1
    operations = [Operation(False, number) for number in range(ahead)]
    for number in range(num_micro_batches):
        if ahead + number < num_micro_batches:
            operations.append(Operation(False, ahead + number))
        operations.append(Operation(True, number))
    return tuple(operations)


def forward_only(num_micro_batches: int) -> tuple[Operation, ...]:
    """The operations of each stage in a step that evaluates, in order."""
    return tuple(Operation(False, number) for number in range(num_micro_batches))


def most_under_way(stage: int, num_stages: int, num_micro_batches: int) -> int:
    """The most micro-batches that a stage has computed forward, and not backward yet, at any time.

    So the hidden states that wait at the stage after it are no more, nor are the gradients that wait at it.

    Raises:
        ValueError: there is no such stage, or no micro-batch.
    """
    if not 0 <= stage < num_stages or num_micro_batches < 1:
        raise ValueError(
            f"no order for stage {stage} of {num_stages} with {num_micro_batches} micro-batches: "
            "stages count from 0, and a step has one micro-batch at least"
        )
    return min(num_stages - stage, num_micro_batches)


def bubble(num_stages: int, num_micro_batches: int) -> float:
    """The share of a step in which a stage waits for others, if all take as long for a micro-batch, from 0 to 1."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)
