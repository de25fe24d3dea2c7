"""Errors of a group, as the owner of a member gets them."""

from __future__ import annotations

from neurogrid.errors import NeuroGridError

__all__ = ["GroupError", "NotAMemberError", "RoundTimeout"]


class GroupError(NeuroGridError):
    """A group, or what one asked of it, has failed."""


class NotAMemberError(GroupError):
    """This peer is no member any more, or never was; it may join again, and fetch what it missed."""


class RoundTimeout(GroupError):
    """A round was not decided in time.

    Attributes:
        round: the round.
        waits_for: peer ids that it waits for, as far as is known here.
    """

    def __init__(self, round_: int, seconds: float, waits_for: tuple[str, ...]) -> None:
        # A round of vectors that all weigh nothing, of members that made no sample, has no mean.
        unknown = "a leader, enough of its members, or one of them whose vector weighs more than 0"
        super().__init__(
            f"round {round_} was not decided within {seconds:g} s: it waits for {', '.join(waits_for) or unknown}"
        )
        self.round = round_
        self.waits_for = waits_for
