"""Rounds: a group decides on one thing after another, and each member learns the same."""

from neurogrid.training.averaging.rounds.actions import (
    Action,
    Decided,
    Fetch,
    Reduce,
    Removed,
    Send,
    Stop,
)
from neurogrid.training.averaging.rounds.machine import GroupMachine, Message
from neurogrid.training.averaging.rounds.plans import UNMEASURED, Shape

__all__ = [
    "UNMEASURED",
    "Action",
    "Decided",
    "Fetch",
    "GroupMachine",
    "Message",
    "Reduce",
    "Removed",
    "Send",
    "Shape",
    "Stop",
]
