"""Numbers of `/neurogrid/training/1.0.0`: its protocol id, its messages, and how large each may be.

Headers, Hello, Error and credit are those of `/neurogrid/tensor/1.1.0`. In the header of a message that has no map as
its Data stand the chunk (LayerID) and the reduction (SeqID) that it belongs to.

Source: protocol_spec/training/messages.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from neurogrid.p2p.wire import OF_THE_STREAM, Answers, MessageCode, MessageTable, Traits

__all__ = [
    "DEFAULT_TRAINING_LIMITS",
    "MAX_CHUNK_BYTES",
    "PROTOCOL_TRAINING",
    "TrainingLimits",
    "TrainingMessage",
    "training_table",
]

KIB = 1024
MIB = 1024 * KIB

PROTOCOL_TRAINING: Final = "/neurogrid/training/1.0.0"
"""The protocol id of groups that average."""

MAX_CHUNK_BYTES: Final = 4 * MIB
"""Bytes of an encoded chunk: some milliseconds of a fast network, a second of a slow one."""


@dataclass(frozen=True, slots=True)
class TrainingLimits:
    """The largest Data accepted, in bytes, for each kind of message."""

    # An encoded chunk.
    chunk: int = MAX_CHUNK_BYTES
    # A digest of 32 bytes for each chunk of a vector: 16 TiB of float32 in chunks of 4 MiB.
    digests: int = 128 * MIB
    # The digest that a chunk, or the digests of all chunks, are asked for by.
    digest: int = 32
    # A tensor between two ranks.
    post: int = 256 * MIB
    # 1,024 members, whom a decision and a proposal name five times, take half of it.
    control: int = MIB
    acknowledgement: int = 0


DEFAULT_TRAINING_LIMITS: Final = TrainingLimits()
"""Limits that every peer of 1.0.0 must accept."""


class TrainingMessage(MessageCode, limits=DEFAULT_TRAINING_LIMITS):
    """The first byte of a header."""

    # Of a group: between its leader and its members.
    JOIN = 0x40, Traits(is_request=True)
    JOINED = 0x41, Traits(answers=Answers.REQUEST)
    STATUS = 0x42, Traits()
    LEAD = 0x43, Traits()
    CANDIDATE = 0x44, Traits()
    PROMISE = 0x45, Traits()
    LEAVE = 0x46, Traits()
    # Of a reduction: between its members and its reducers.
    CHUNK = 0x48, Traits("chunk", is_request=True, is_credited=True)
    MEAN = 0x49, Traits("chunk", answers=Answers.REQUEST)
    FETCH = 0x4A, Traits("digest", is_request=True)
    PIECE = 0x4B, Traits("chunk", answers=Answers.REQUEST)
    FETCH_DIGESTS = 0x4C, Traits("digest", is_request=True)
    DIGESTS = 0x4D, Traits("digests", answers=Answers.REQUEST)
    # What a newcomer needs besides: the vectors themselves are fetched as results are.
    STATE = 0x4E, Traits("acknowledgement", is_request=True)
    STATE_INFO = 0x4F, Traits(answers=Answers.REQUEST)
    # Between two ranks of a process group.
    POST = 0x50, Traits("post", is_credited=True)
    # Of the store in which ranks find each other: between any of them and the first.
    ASK_STORE = 0x51, Traits(is_request=True)
    STORED = 0x52, Traits(answers=Answers.REQUEST)
    # From a rank of a process group that can do nothing more in it, to the others.
    FAILED = 0x53, Traits()


def training_table(limits: TrainingLimits = DEFAULT_TRAINING_LIMITS) -> MessageTable:
    """The messages that may stand on a stream of training."""
    return MessageTable(PROTOCOL_TRAINING, (*TrainingMessage, *OF_THE_STREAM), limits)
