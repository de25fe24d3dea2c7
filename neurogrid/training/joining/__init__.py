"""Joining a run: who may take part, on which trial, and who may not any more. Pure: no clock, no socket, no torch.

records          invitations and bans, signed by the leader's identity
bans             those of a run, as anybody keeps them who heard of them
state, machine   applicants, trials and members, and what comes next

Source: protocol_spec/training/joining.md.
"""

from neurogrid.training.joining.bans import MAX_BANS, BanRefusedError, Bans, ban_seconds
from neurogrid.training.joining.machine import FoundRight, JoinMachine
from neurogrid.training.joining.records import (
    MAX_BAN_BYTES,
    MAX_INVITATION_BYTES,
    Ban,
    Invitation,
)
from neurogrid.training.joining.state import (
    Banned,
    Became,
    BeganTrial,
    JoinRules,
    JoinState,
    Member,
    Outcome,
    Refused,
    RefusedFor,
    Spent,
    Trial,
    Waiter,
    Waits,
)

__all__ = [
    # Records
    "Invitation",
    "Ban",
    "MAX_INVITATION_BYTES",
    "MAX_BAN_BYTES",
    "Bans",
    "BanRefusedError",
    "ban_seconds",
    "MAX_BANS",
    # Who takes part
    "JoinMachine",
    "FoundRight",
    "JoinRules",
    "JoinState",
    "Waiter",
    "Trial",
    "Member",
    # What came of it
    "Outcome",
    "Waits",
    "Spent",
    "BeganTrial",
    "Became",
    "Refused",
    "RefusedFor",
    "Banned",
]
