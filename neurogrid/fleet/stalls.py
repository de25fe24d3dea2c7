"""A watch over the weights on their way to one worker: says when nothing comes any more, and when it goes on.

It ends nothing: deadlines are those of the transfer (`remote_worker.Timeouts`).
"""

from __future__ import annotations

import math
from typing import Final

import trio

from neurogrid.fleet.progress import FleetProgress
from neurogrid.fleet.remote_worker import TransferReports
from neurogrid.renewed_event import RenewedEvent

__all__ = ["STALLED_AFTER", "StallWatch"]

# Seconds without a byte: a chunk of 1 MiB over the slowest useful link (8 Mbit/s) takes one.
STALLED_AFTER: Final = 10.0


class StallWatch:
    """The watch over one transfer, between the reports of it and the progress.

    Args:
        num_bytes: that the worker is to have.
    """

    def __init__(self, progress: FleetProgress, peer_id: str, num_bytes: int) -> None:
        self._progress = progress
        self._peer_id = peer_id
        self._missing = num_bytes
        self._last_at = math.inf
        self._moved = RenewedEvent()

    @property
    def reports(self) -> TransferReports:
        """Reports that are watched here, and passed on."""
        return TransferReports(
            begun=self._begun, sent=self._sent, held=self._held, passed_on=self._passed_on
        )

    async def run(self) -> None:
        """Watch; runs until cancelled."""
        while True:
            moved = self._moved.next
            with trio.move_on_at(self._last_at + STALLED_AFTER) as scope:
                await moved.wait()
            if not scope.cancelled_caught:
                continue
            stopped_at = self._last_at
            self._progress.transfer_stalled(self._peer_id, STALLED_AFTER)
            await moved.wait()
            self._progress.transfer_resumed(self._peer_id, trio.current_time() - stopped_at)

    def _begun(self) -> None:
        self._move(0)
        self._progress.transfer_begun(self._peer_id)

    def _sent(self, num_bytes: int) -> None:
        self._move(num_bytes)
        self._progress.transferred(self._peer_id, num_bytes)

    def _held(self, num_bytes: int) -> None:
        self._move(num_bytes)
        self._progress.already_held(self._peer_id, num_bytes)

    def _passed_on(self, num_bytes: int) -> None:
        self._move(num_bytes)
        self._progress.passed_on(self._peer_id, num_bytes)

    def _move(self, num_bytes: int) -> None:
        self._missing -= num_bytes
        # With the last byte it is the worker's to load what it has: nothing is to come.
        self._last_at = trio.current_time() if self._missing > 0 else math.inf
        self._moved.set()
