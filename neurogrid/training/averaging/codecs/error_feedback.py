"""Error feedback: what a form of the wire lost is added to what is encoded next (Seide and others, 2014).

What was lost is kept at the commit of a round only. Until then the round may be tried again, and gives the same bytes;
a round that failed leaves nothing behind.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from neurogrid.training.averaging.codecs.codec import Codec

__all__ = ["ErrorFeedback", "Pending"]

Pending: TypeAlias = list[tuple[int, torch.Tensor]]
"""Errors of spans, float32, by the element that each begins with."""


class ErrorFeedback:
    """The error of one member's encodings of a vector, or of one of the parts that are averaged in turn.

    Holds the vector twice between `encode` and `commit`, else once.

    Args:
        codec: the form of the wire.
        state: what was lost so far, float32 [n]; taken over, and written to. Zeros to begin with.
        decay: what of it is kept at a commit, above 0 and at most 1: 0.95 in SparseLoCo.
    """

    def __init__(self, codec: Codec, state: torch.Tensor, *, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"a decay of {decay}: above 0 and at most 1 is wanted")
        self.codec = codec
        self.decay = decay
        self._state = state
        self._pending: Pending = []

    @property
    def state(self) -> torch.Tensor:
        """The error up to the last commit, float32 [n]: for a checkpoint."""
        return self._state

    def encode(self, values: torch.Tensor, start: int = 0) -> memoryview:
        """The bytes of `values` and what was lost of them before.

        Args:
            values: float32 [m], contiguous, on the CPU; not written to.
            start: the element of the vector that they begin with, a multiple of the codec's block.

        Raises:
            NotFiniteError: as `Codec.encode`; nothing is pending of these values then.
        """
        return self._encode(values, start)[1]

    def due(self, values: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The same before it is encoded, float32 [m]: for a group, which encodes what it is given by its own codec.

        Args and errors: as of `encode`.
        """
        return self._encode(values, start)[0]

    def _encode(self, values: torch.Tensor, start: int) -> tuple[torch.Tensor, memoryview]:
        due = values + self._state[start : start + len(values)]
        data = self.codec.encode(due)
        lost = due - self.codec.decode(data, len(due))
        self._pending = [
            (at, each)
            for at, each in self._pending
            if at + len(each) <= start or start + len(due) <= at
        ]
        self._pending.append((start, lost))
        return due, data

    def commit(self, pending: Pending | None = None) -> None:
        """Keep what was lost since the last commit: the round was applied.

        Args:
            pending: what was set aside, where that is the round that was applied.
        """
        for start, lost in self._pending if pending is None else pending:
            torch.mul(lost, self.decay, out=self._state[start : start + len(lost)])
        self._pending.clear()

    def set_aside(self) -> Pending:
        """Return what was lost since the last commit, of a round that may be applied later: pending no more."""
        pending, self._pending = self._pending, []
        return pending

    def roll_back(self) -> None:
        """Forget what was lost since the last commit: the round was not applied."""
        self._pending.clear()
