"""The state of one stream of Yamux, and of one write that waits on it."""

from __future__ import annotations

from collections import deque
from typing import Any

from neurogrid.p2p.link.frames import INITIAL_WINDOW
from neurogrid.p2p.link.inbox import Inbox

__all__ = ["Loan", "Outgoing", "StreamState"]


class Loan:
    """A reader's memory, to be written to as bytes arrive.

    Attributes:
        memory: all of it.
        filled: bytes of it that have arrived.
        wants_all: whether nothing need be told before it is full.
    """

    __slots__ = ("filled", "memory", "wants_all")

    def __init__(self, memory: memoryview, *, wants_all: bool) -> None:
        self.memory = memory
        self.filled = 0
        self.wants_all = wants_all

    @property
    def free(self) -> memoryview:
        """The memory that can still be written to."""
        return self.memory[self.filled :]


class Outgoing:
    """One write, queued on a stream. Its memory is the writer's until `is_over`.

    Attributes:
        data: all bytes of the write.
        at: how many of them have become frames.
        is_over: whether the memory is free again: all became frames, or the stream was reset.
        is_sent: whether all became frames.
        owner: for the driver.
    """

    __slots__ = ("at", "data", "is_over", "is_sent", "owner")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0
        self.is_over = False
        self.is_sent = False
        self.owner: Any = None


class StreamState:
    """One stream. To be read by the driver, and changed by the state machine alone.

    Attributes:
        stream_id: odd if the dialler of the connection opened it.
        is_ours: whether we opened it.
        inbox: bytes that arrived and were not read.
        fin_wanted: we finish after what is queued.
        fin_sent: we have finished.
        fin_received: the peer has finished.
        was_reset: either side gave the stream up; nothing more can be sent or read.
        reset_by_peer: it was the peer.
        is_discarding: nobody reads any more; what arrives is dropped.
        owner: for the driver.
    """

    __slots__ = (
        "ack_pending",
        "age",
        "consumed",
        "credit",
        "credited_at",
        "fin_received",
        "fin_sent",
        "fin_wanted",
        "inbox",
        "is_acknowledged",
        "is_discarding",
        "is_ours",
        "is_ready",
        "is_scheduled",
        "loan",
        "outbox",
        "owner",
        "recv_window",
        "reset_by_peer",
        "send_window",
        "stream_id",
        "syn_pending",
        "was_reset",
        "window",
    )

    def __init__(self, stream_id: int, *, is_ours: bool) -> None:
        self.stream_id = stream_id
        self.is_ours = is_ours
        self.owner: Any = None

        # What the peer lets us send; what we let it send; how large we have made its window.
        self.send_window = INITIAL_WINDOW
        self.recv_window = INITIAL_WINDOW
        self.window = INITIAL_WINDOW
        # Read and not yet credited; credited, the frame is still to be sent.
        self.consumed = 0
        self.credit = 0
        self.credited_at = float("-inf")  # when credit was last given, by the state machine's clock

        self.inbox = Inbox()
        self.loan: Loan | None = None
        self.outbox: deque[Outgoing] = deque()

        self.syn_pending = is_ours
        self.ack_pending = False
        self.is_acknowledged = False
        self.fin_wanted = False
        self.fin_sent = False
        self.fin_received = False
        self.was_reset = False
        self.reset_by_peer = False
        self.is_discarding = False
        self.age = 0  # sweeps since it was closed here alone

        self.is_ready = False  # in the ring of streams with data to send
        self.is_scheduled = False  # in the queue of streams with a flag or credit to send
