"""A member's part in a run at one moment, as plain data: for the panel of its worker."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PartStatus"]


@dataclass(frozen=True, slots=True)
class PartStatus:
    """A member's part in a run.

    Attributes:
        run: what the run is called.
        leader: peer id of its leader.
        seat: its number in the run.
        state, reason: as its report says them.
        round: the last that is in its weights.
        batches_done, batches: of the work at hand.
        tokens_per_second: while it computes; None while it is not known.
        loss: over its last work; None before that.
        num_samples: that it has trained on since it joined.
        memory_bytes: that its trainer has taken at most.
        micro_batch: samples that it computes at once; 0 while it is not known.
        held_slices: slices of the data that it has.
        sent_bytes, received_bytes: of its averaging since it joined.
    """

    run: str
    leader: str
    seat: int
    state: str
    reason: str
    round: int
    batches_done: int
    batches: int
    tokens_per_second: float | None
    loss: float | None
    num_samples: int
    memory_bytes: int
    micro_batch: int
    held_slices: int
    sent_bytes: int
    received_bytes: int
