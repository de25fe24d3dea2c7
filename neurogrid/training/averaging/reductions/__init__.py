"""Reductions: vectors of several peers become one, by a plan, with messages of the training protocol."""

from neurogrid.training.averaging.reductions.errors import (
    MembersLostError,
    ResultUnavailableError,
)
from neurogrid.training.averaging.reductions.reductions import MAX_HELD, Reductions
from neurogrid.training.averaging.reductions.result import Result, result_digest

__all__ = [
    "MAX_HELD",
    "MembersLostError",
    "Reductions",
    "Result",
    "ResultUnavailableError",
    "result_digest",
]
