"""Witnessed runs as a pure machine: no clock, no socket, no torch.

phases            where a run stands: rules, members, state
events            what happens to it, also as JSON for a journal
machine           `tick`: what happened makes a state of the state before; `due`: when to tick again
selection, assigning    who trains, audits and witnesses in a round, and on which batches
commitments       what members sign: what they computed, what they have
filters, merkle   how a witness says in few bytes what it has
judging           what witnesses come to: who was there, what all apply
results           a result as bytes
"""

from neurogrid.training.witnessed.assigning import assign
from neurogrid.training.witnessed.commitments import (
    Commitment,
    WitnessProof,
    filter_salt,
    seat_item,
)
from neurogrid.training.witnessed.events import (
    Admitted,
    Checkpointed,
    Committed,
    Eject,
    Event,
    Gone,
    Joined,
    Left,
    Pause,
    Refused,
    Resume,
    Stop,
    Trial,
    Unhealthy,
    Warm,
    Witnessed,
    event_json,
    event_of,
)
from neurogrid.training.witnessed.filters import BloomFilter
from neurogrid.training.witnessed.judging import Parts, parts_of
from neurogrid.training.witnessed.machine import due, tick
from neurogrid.training.witnessed.merkle import MerklePath, merkle_path, merkle_root
from neurogrid.training.witnessed.phases import (
    EpochEnd,
    EpochMember,
    EpochPhase,
    EpochRules,
    EpochState,
    Health,
)
from neurogrid.training.witnessed.results import ResultPlan
from neurogrid.training.witnessed.selection import committee, order, quorum, witnesses

__all__ = [
    "Admitted",
    "BloomFilter",
    "Checkpointed",
    "Commitment",
    "Committed",
    "Eject",
    "EpochEnd",
    "EpochMember",
    "EpochPhase",
    "EpochRules",
    "EpochState",
    "Event",
    "Gone",
    "Health",
    "Joined",
    "Left",
    "MerklePath",
    "Parts",
    "Pause",
    "Refused",
    "ResultPlan",
    "Resume",
    "Stop",
    "Trial",
    "Unhealthy",
    "Warm",
    "WitnessProof",
    "Witnessed",
    "assign",
    "committee",
    "due",
    "event_json",
    "event_of",
    "filter_salt",
    "merkle_path",
    "merkle_root",
    "order",
    "parts_of",
    "quorum",
    "seat_item",
    "tick",
    "witnesses",
]
