"""Peers that were asked for blobs in vain: those that lied are asked no more, others not for a while."""

from __future__ import annotations

from typing import Final

import trio

from neurogrid.errors import NeuroGridError, PeerRefusedError, RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode

__all__ = ["PassedOver"]

# One that could not be reached, was silent or busy, is left alone for this long. Seconds.
PAUSE: Final = 60.0
# Peers that are remembered as of no use: far more than a cluster has.
MAX_REMEMBERED: Final = 1024


class PassedOver:
    """Peers that are not to be asked for a blob at the moment, while others may have it."""

    def __init__(self) -> None:
        # When each may be asked again, trio's clock; infinity for one that lied.
        self._not_before: dict[str, float] = {}

    def __contains__(self, peer_id: object) -> bool:
        return trio.current_time() < self._not_before.get(str(peer_id), 0.0)

    def has_lied(self, peer_id: str) -> bool:
        """Whether a peer has sent something else than what it was asked for."""
        return self._not_before.get(peer_id) == float("inf")

    def blame(self, peer_id: str, error: NeuroGridError, *, pause: float = PAUSE) -> float:
        """Pass a peer over for what it did, or did not.

        Args:
            pause: seconds, where it has not lied.

        Returns:
            Seconds for which it is passed over: 0 where it has the blob no longer, and others it may have; infinity
            where it lied.
        """
        if isinstance(error, PeerRefusedError) and error.code == ErrorCode.BLOB_UNKNOWN:
            return 0.0
        lied = isinstance(error, RemoteProtocolError) and error.code in (
            ErrorCode.HASH_MISMATCH,
            ErrorCode.TRANSFER_INVALID,
        )
        lasts = float("inf") if lied else pause
        self._not_before.pop(peer_id, None)
        self._not_before[peer_id] = trio.current_time() + lasts
        if len(self._not_before) > MAX_REMEMBERED:
            del self._not_before[next(iter(self._not_before))]
        return lasts
