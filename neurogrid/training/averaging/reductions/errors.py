"""The errors of reductions."""

from __future__ import annotations

from collections.abc import Mapping

from neurogrid.errors import NeuroGridError, TransportError

__all__ = ["MembersLostError", "ResultUnavailableError"]


class MembersLostError(NeuroGridError):
    """A reduction ended without a result, since some of its peers were lost.

    Attributes:
        lost: peer id to reason: its stream is gone, it refused, it sent what is wrong, or it was silent until the end.
            One's own peer id stands here where one's own values are at fault.
        gave_up: peer id to what it said: peers that ended the reduction before, which may be because of another peer
            that they have lost. They are not lost.
    """

    retryable = True

    def __init__(self, lost: Mapping[str, str], gave_up: Mapping[str, str]) -> None:
        self.lost = dict(lost)
        self.gave_up = dict(gave_up)
        words = [f"lost {peer_id}: {reason}" for peer_id, reason in lost.items()]
        words += [f"{peer_id} gave up: {text}" for peer_id, text in gave_up.items()]
        super().__init__("the reduction has no result: " + "; ".join(words))


class ResultUnavailableError(TransportError):
    """None of several peers gave the whole result of a reduction. `failures` says why not, by peer id."""

    def __init__(self, message: str, *, failures: Mapping[str, str]) -> None:
        super().__init__(message)
        self.failures = dict(failures)
