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
from neurogrid.training.averaging.rounds.machine import GroupMachine, Message, read_decisions
from neurogrid.training.averaging.rounds.plans import UNMEASURED, Shape
from neurogrid.training.averaging.rounds.quorums import num_to_decide, num_to_lead

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
    "num_to_decide",
    "num_to_lead",
    "read_decisions",
]
