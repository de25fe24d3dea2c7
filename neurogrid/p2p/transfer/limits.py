"""Bounds of transfers: what peers may have under way here, what is kept of what they left, and for how long.

The size of a chunk and of a blob is bounded in `wire.limits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["DEFAULT_TRANSFER_LIMITS", "TransferLimits"]

MIB = 1024 * 1024
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Numbers are counts, bytes and seconds as their names say."""

    # Transfers that come in from one peer, and from all. A coordinator of ours has two under way.
    max_transfers_per_peer: int = 8
    max_transfers: int = 64
    # Offers of one peer that are being decided; each holds up to 2 MiB of digests.
    max_offers_per_peer: int = 16
    # Announced bytes of the transfers that come in, from one peer and from all: what they may grow to. Two
    # layers of a 70B model in bfloat16 are 3.4 GiB. A program that expects larger blobs says so.
    max_bytes_per_peer: int = 4 * GIB
    max_bytes: int = 8 * GIB
    # Blobs that are being sent to one peer because it asked, and to all. Each has ten chunks in memory.
    max_served_per_peer: int = 4
    max_served: int = 32
    # A transfer without a new chunk for this long is given up: a peer that is there sends one a second even over
    # the slowest useful link (1 MiB at 8 Mbit/s).
    silence_timeout: float = 60.0
    # What is kept of unfinished blobs in memory, for a peer that offers them again: as many as one peer may have
    # under way twice over, the two half layers of that 70B model, and as long as a restart with a new attempt
    # takes.
    max_idle_blobs: int = 16
    max_idle_bytes: int = 2 * GIB
    idle_timeout: float = 600.0
    # The same for those on disk, which outlive this process: what was cut on a Friday goes on on Monday.
    max_partial_files: int = 64
    max_partial_file_bytes: int = 64 * GIB
    partial_file_age: float = 7 * 86_400.0
    # Chunks that are hashed at once. BLAKE3 runs at 1 to 5 GB/s a core, so that few cores keep up with any
    # network; more would take them from the computation.
    hash_threads: int = 4
    # Transfers that ended well, kept so that late chunks of theirs are not called wrong.
    max_remembered: int = 256


DEFAULT_TRANSFER_LIMITS: Final = TransferLimits()
"""The limits of `Transfers` and `DirectoryStore` unless told otherwise."""
