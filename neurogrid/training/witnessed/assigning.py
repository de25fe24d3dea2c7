"""Assigning the batches of a round to its trainers. Pure.

Source: protocol_spec/training/witnessed.md, "Assignment".
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["assign"]


def assign(
    trainers: Sequence[int], first_batch: int, num_batches: int
) -> dict[int, tuple[int, int]]:
    """The first batch and the number of batches of each seat that has any, in the order of the trainers.

    Batches are consecutive; no trainer has more than one more than another, and the first have the more.

    Args:
        trainers: seats in the committee's order.
        first_batch: of the round, counted over the run.
        num_batches: of the round, all trainers together.
    """
    found = {}
    for place, seat in enumerate(trainers):
        share, rest = divmod(num_batches, len(trainers))
        number = share + (place < rest)
        if number:
            found[seat] = first_batch, number
            first_batch += number
    return found
