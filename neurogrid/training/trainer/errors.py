"""Errors of a trainer, by what the caller can do about them."""

from __future__ import annotations

from neurogrid.errors import NeuroGridError

__all__ = ["BatchError", "TrainerDiedError", "TrainerError"]


class TrainerError(NeuroGridError):
    """The trainer could not do what it was asked for, and is there for the next call; the text says why."""


class BatchError(TrainerError):
    """A slice is not what this model can learn from; the text names it. The weights are as before the call."""


class TrainerDiedError(NeuroGridError):
    """The trainer's process has ended, or was given up in the middle of a call: `Trainer.restart` makes another.

    Attributes:
        are_weights_torn: it ended while it wrote `Trainer.weights`, which are then some old and some new; else they
            are as before the call.
    """

    def __init__(self, message: str, *, are_weights_torn: bool = False) -> None:
        super().__init__(message)
        self.are_weights_torn = are_weights_torn
