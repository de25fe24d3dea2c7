"""Numbers of `/neurogrid/run/1.0.0`: its protocol id, its messages, and how large each may be.

Headers, Hello, Error and credit are those of `/neurogrid/tensor/1.1.0`, and so are the messages by which blobs travel:
slices, manifests and checkpoints are blobs.

Source: protocol_spec/training/runs.md, stages.md, witnessed.md and terms.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from neurogrid.p2p.wire import (
    OF_THE_STREAM,
    Answers,
    MessageCode,
    MessageTable,
    MessageType,
    Traits,
)

__all__ = ["DEFAULT_RUN_LIMITS", "PROTOCOL_RUN", "RunLimits", "RunMessage", "run_table"]

MIB = 1024 * 1024

PROTOCOL_RUN: Final = "/neurogrid/run/1.0.0"
"""The protocol id of runs: a leader, its members, and nodes that have data."""

_OF_TRANSFERS: Final = frozenset(
    {
        MessageType.TRANSFER_OFFER,
        MessageType.TRANSFER_ACCEPT,
        MessageType.TRANSFER_REQUEST,
        MessageType.WEIGHTS,
        MessageType.WEIGHTS_ACK,
    }
)


_TENSOR: Final = Traits("activation", is_credited=True, is_tensor=True)


@dataclass(frozen=True, slots=True)
class RunLimits:
    """The largest Data accepted, in bytes, for each kind of message of a run's own."""

    # A config of 1 MiB and a run file of 64 KiB.
    start: int = 2 * MIB
    # Four works of 4,096 ranges each, 65,536 slices, or 4,096 pieces of state take a third to a half of it.
    control: int = MIB
    # A tensor between stages, with its envelope: 8,192 tokens of hidden size 8,192 in float32.
    activation: int = 256 * MIB
    # 128 members with 4 KiB of addresses and 64 KiB of ranges of samples each, and a thousand pieces.
    epoch: int = 16 * MIB


DEFAULT_RUN_LIMITS: Final = RunLimits()
"""Limits that every peer of 1.0.0 must accept."""


class RunMessage(MessageCode, limits=DEFAULT_RUN_LIMITS):
    """The first byte of a header."""

    # A leader looks for members, and keeps them.
    ASK = 0x60, Traits(is_request=True)
    OFFER = 0x61, Traits(answers=Answers.REQUEST)
    START = 0x62, Traits("start", is_request=True)
    STARTED = 0x63, Traits(answers=Answers.REQUEST)
    RENEW = 0x64, Traits(is_request=True)
    RENEWED = 0x65, Traits(answers=Answers.REQUEST)
    # What is to be done, and what was.
    ORDER = 0x66, Traits()
    REPORT = 0x67, Traits()
    DISMISS = 0x68, Traits()
    # A node that has the data.
    HOLD = 0x69, Traits(is_request=True)
    HELD = 0x6A, Traits(answers=Answers.REQUEST)
    # A chain of stages: who is one, and how it stands.
    STAGE = 0x70, Traits()
    STAGE_REPORT = 0x71, Traits()
    # A step through the chain: its batch, what stages send each other, and what becomes of the gradients.
    STEP = 0x72, Traits()
    TOKENS = 0x73, _TENSOR
    LABELS = 0x74, _TENSOR
    HIDDEN = 0x75, _TENSOR
    GRADIENT = 0x76, _TENSOR
    TIED = 0x77, _TENSOR
    STEP_DONE = 0x78, Traits()
    APPLY = 0x79, Traits()
    APPLIED = 0x7A, Traits()
    # Several chains average what they have learned.
    AVERAGE = 0x7B, Traits()
    AVERAGED = 0x7C, Traits()
    COMMIT = 0x7D, Traits()
    COMMITTED = 0x7E, Traits()
    # A witnessed run: where it is, what members have come to, and what witnesses have of that.
    EPOCH = 0x80, Traits("epoch")
    COMMITMENT = 0x81, Traits()
    WITNESS = 0x82, Traits()
    HEALTH = 0x83, Traits()
    EPOCH_REPORT = 0x84, Traits()
    # Some members compute again what others have claimed.
    FINDING = 0x86, Traits()
    EVIDENCE = 0x87, Traits()
    # And some measure what others' results are worth.
    MEASURE = 0x88, Traits()
    # A deputy copies the journal, and leads when its leader is dead.
    FOLLOW = 0x90, Traits(is_request=True)
    FOLLOWED = 0x91, Traits("start", answers=Answers.REQUEST)
    LINES = 0x92, Traits(is_request=True)
    COPIED = 0x93, Traits(answers=Answers.REQUEST)
    APPOINT = 0x94, Traits(is_request=True)
    APPOINTED = 0x95, Traits(answers=Answers.REQUEST)
    CLAIM = 0x96, Traits(is_request=True)
    CLAIMED = 0x97, Traits(answers=Answers.REQUEST)


def run_table(limits: RunLimits = DEFAULT_RUN_LIMITS) -> MessageTable:
    """The messages that may stand on a stream of a run: its own, those of the stream, those of transfers."""
    return MessageTable(PROTOCOL_RUN, (*RunMessage, *OF_THE_STREAM, *_OF_TRANSFERS), limits)
