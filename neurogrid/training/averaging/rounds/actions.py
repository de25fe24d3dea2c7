"""Actions that a member's machine wants done: messages, reductions, and what its owner is told."""

from __future__ import annotations

from dataclasses import dataclass

from neurogrid.training.averaging.plan import ReductionPlan
from neurogrid.training.wire import Candidate, Decision, Lead, Leave, Promise, Status

__all__ = ["Action", "Decided", "Fetch", "Reduce", "Removed", "Send", "Stop"]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer; it may be lost."""

    to: str
    message: Lead | Status | Candidate | Promise | Leave


@dataclass(frozen=True, slots=True)
class Reduce:
    """Carry out a reduction, with what was contributed if the plan names this member, and tell its outcome.

    `reduced` or `failed` of the machine wants to be called with the reduction of `plan`.
    """

    plan: ReductionPlan


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the aggregate of a decision that is proposed, from those that hold it.

    `reduced` or `failed` of the machine wants to be called with `token`.
    """

    token: int
    decision: Decision
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Give up a reduction or a fetch: nobody waits for it any more."""

    token: int


@dataclass(frozen=True, slots=True)
class Decided:
    """The group has decided; decisions come in order.

    Attributes:
        decision: what.
        has_contributed: whether the vector of this member is in its aggregate.
    """

    decision: Decision
    has_contributed: bool


@dataclass(frozen=True, slots=True)
class Removed:
    """This member is none any more: it was silent for too long, or has left. Nothing comes after this."""

    reason: str


Action = Send | Reduce | Fetch | Stop | Decided | Removed
