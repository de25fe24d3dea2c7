"""Events that the Yamux state machine tells its driver. All are the peer's doing, but for one reset."""

from __future__ import annotations

from dataclasses import dataclass

from neurogrid.p2p.link.stream_state import StreamState

__all__ = [
    "DataReceived",
    "Event",
    "GoAwayReceived",
    "PongReceived",
    "StreamAcknowledged",
    "StreamFinished",
    "StreamOpened",
    "StreamReset",
]


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The peer opened a stream; it waits for `accept` or `reset`."""

    stream: StreamState


@dataclass(frozen=True, slots=True)
class StreamAcknowledged:
    """The peer has taken a stream of ours."""

    stream: StreamState


@dataclass(frozen=True, slots=True)
class DataReceived:
    """Bytes have arrived on a stream, and are in its inbox or in its reader's memory."""

    stream: StreamState


@dataclass(frozen=True, slots=True)
class StreamFinished:
    """The peer will send nothing more on a stream."""

    stream: StreamState


@dataclass(frozen=True, slots=True)
class StreamReset:
    """A stream is given up: by the peer, or by us because its unread bytes were too many."""

    stream: StreamState


@dataclass(frozen=True, slots=True)
class PongReceived:
    """The peer answered a ping."""

    value: int


@dataclass(frozen=True, slots=True)
class GoAwayReceived:
    """The peer accepts no further streams; with a code other than 0, it gave up the connection."""

    code: int


Event = (
    StreamOpened
    | StreamAcknowledged
    | DataReceived
    | StreamFinished
    | StreamReset
    | PongReceived
    | GoAwayReceived
)
