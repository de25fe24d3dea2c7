"""Bounds of the protocol layer: what one peer, and all peers together, may occupy, and for how long.

What a message may hold is bounded in `wire.limits`; what a connection may, below in the host. Past each bound
the peer waits, is refused, or loses its stream; `Exchange` says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Bounds", "DEFAULT_BOUNDS"]

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Bounds:
    """Numbers are counts, bytes and seconds as their names say.

    Raises:
        ValueError: a peer that is alone could not have `max_bytes_per_peer`, since no peer has more than what it leaves
            to others; messages would wait for room that never comes.
    """

    # One is enough; a second comes about when both sides open at once. More is a peer that plays tricks.
    max_streams_per_peer: int = 4
    # Streams of 1.0.0 carry one message each: a Go coordinator opens one for each chunk of 1 MiB.
    max_v10_streams_per_peer: int = 256
    # Requests of one peer that are served at once. A stage computes one at a time anyway.
    max_running_per_peer: int = 64
    # Requests of all peers that are served at once.
    max_running: int = 512
    # Requests of one peer that wait for their turn; hundreds of sessions with one step each fit.
    max_waiting_per_peer: int = 1024
    # Requests to one peer, and to all, that wait for an answer.
    max_pending_per_peer: int = 1024
    max_pending: int = 16 * 1024
    # Answers that came before anybody asked for them, kept for each peer.
    max_early_bytes_per_peer: int = 256 * MIB
    # Data of activations and weights that a peer may have under way to our handlers. At 1 GB/s and 20 ms of
    # round trip 20 MB are under way; the next power of two, doubled for a handler that takes as long.
    credit_window: int = 64 * MIB
    # Data of messages that are being received or served, of one peer and of all: what handlers may hold by their
    # credit (a window and one of the largest messages), and two of the largest answers beside it. No peer holds more
    # than what is left to others (`ByteBudget`).
    max_bytes_per_peer: int = 1024 * MIB
    max_bytes: int = 4096 * MIB
    # Below this a message is not worth counting: one read brings it whole.
    small_message: int = 64 * KIB
    # Errors that we owe a peer that reads none of them.
    max_owed: int = 1024
    # Errors in a row that end no request of ours: what a transfer that was refused had under way, and more.
    max_stray_errors: int = 1024
    # How long a message may wait for room, for its header, and for its first byte after that, and at least
    # how fast it must then come: half a megabit is the slowest link that is of any use.
    room_timeout: float = 60.0
    silence_timeout: float = 60.0
    min_rate: float = 64.0 * KIB
    hello_timeout: float = 15.0
    # 1.0.0: dealing with a message, whose end confirms it, may mean loading a layer.
    confirm_timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.max_bytes < 2 * self.max_bytes_per_peer:
            raise ValueError(
                f"max_bytes is at least twice max_bytes_per_peer, {self.max_bytes_per_peer}, not {self.max_bytes}"
            )

    def message_deadline(self, num_bytes: int) -> float:
        """Seconds that a message may take until more comes than the `num_bytes` bytes that have come."""
        return self.silence_timeout + num_bytes / self.min_rate


DEFAULT_BOUNDS: Final = Bounds()
"""Bounds of a `Protocol` unless told otherwise."""
