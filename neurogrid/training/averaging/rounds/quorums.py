"""Quorums: the members that it takes to decide, and to take over from a leader.

Any set that decides and any set that takes over have a member in common, so a leader that takes over hears of what may
have been decided. The two need not be of one size: few are enough to decide, so that a group goes on when half of it is
lost at once, and the more it takes to replace a leader.

Source: Howard, Malkhi, Spiegelman, "Flexible Paxos: quorum intersection revisited", 2016.
"""

from __future__ import annotations

__all__ = ["num_to_decide", "num_to_lead"]


def num_to_decide(num_members: int) -> int:
    """The least number of members that must have accepted what is decided, the leader among them if it computes."""
    return (num_members + 1) // 2


def num_to_lead(num_members: int) -> int:
    """The least number of members that must have promised to follow a new leader, itself among them."""
    return num_members - num_to_decide(num_members) + 1
