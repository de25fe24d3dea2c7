"""The messages of `/neurogrid/training/1.0.0`, and what is in them. Imports no torch."""

from neurogrid.training.wire.group import (
    DIGEST_BYTES,
    MAX_GROUP_MEMBERS,
    MAX_TOLD_DECISIONS,
    Ballot,
    Candidate,
    Decision,
    Join,
    Joined,
    Lead,
    Leave,
    Member,
    Plan,
    Promise,
    Proposal,
    Status,
)
from neurogrid.training.wire.settings import GroupSettings
from neurogrid.training.wire.types import (
    DEFAULT_TRAINING_LIMITS,
    MAX_CHUNK_BYTES,
    PROTOCOL_TRAINING,
    TrainingLimits,
    TrainingMessage,
    training_table,
)

__all__ = [
    "DEFAULT_TRAINING_LIMITS",
    "DIGEST_BYTES",
    "MAX_CHUNK_BYTES",
    "MAX_GROUP_MEMBERS",
    "MAX_TOLD_DECISIONS",
    "PROTOCOL_TRAINING",
    "Ballot",
    "Candidate",
    "Decision",
    "GroupSettings",
    "Join",
    "Joined",
    "Lead",
    "Leave",
    "Member",
    "Plan",
    "Promise",
    "Proposal",
    "Status",
    "TrainingLimits",
    "TrainingMessage",
    "training_table",
]
