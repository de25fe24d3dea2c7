"""Requests that are being served or wait for their turn: bounded by peer and in total, fair.

Each peer has a queue of its own; when there is room, peers take turns. Knows neither messages nor streams: a job
is an async function without arguments that raises nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from neurogrid.p2p.streams.bounds import Bounds

__all__ = ["Serving"]


Run: TypeAlias = Callable[[], Awaitable[None]]
OnDone: TypeAlias = Callable[[], None]


class Serving:
    """Runs jobs in tasks that `spawn(function, *args)` starts: `Host.start_soon`."""

    def __init__(self, spawn: Callable[..., None], bounds: Bounds) -> None:
        self._spawn = spawn
        self._bounds = bounds
        self._running: dict[str, int] = {}
        self._num_running = 0
        # In the order of their turns; a peer is here while it has jobs that wait.
        self._waiting: dict[str, deque[tuple[Run, OnDone]]] = {}

    @property
    def num_running(self) -> int:
        """Jobs that run now, of all peers."""
        return self._num_running

    def num_waiting(self, peer_id: str) -> int:
        """Jobs of a peer that wait for their turn."""
        return len(self._waiting.get(peer_id, ()))

    def submit(self, peer_id: str, run: Run, on_done: OnDone) -> bool:
        """Run a job now or in its turn; False when the peer has too many waiting.

        `on_done` is called once when the job has ended or was dropped, not when it was not taken.
        """
        if not self._waiting and self._has_room(peer_id):
            self._start(peer_id, run, on_done)
            return True
        if self.num_waiting(peer_id) >= self._bounds.max_waiting_per_peer:
            return False
        self._waiting.setdefault(peer_id, deque()).append((run, on_done))
        self._start_some()
        return True

    def forget(self, peer_id: str) -> None:
        """Drop the jobs of a peer that wait. A job that runs goes on."""
        for _, on_done in self._waiting.pop(peer_id, ()):
            on_done()

    def _start_some(self) -> None:
        while (peer_id := self._whose_turn()) is not None:
            queue = self._waiting.pop(peer_id)
            run, on_done = queue.popleft()
            if queue:  # a peer that had a turn goes to the end of the row
                self._waiting[peer_id] = queue
            self._start(peer_id, run, on_done)

    def _whose_turn(self) -> str | None:
        return next(filter(self._has_room, self._waiting), None)

    def _has_room(self, peer_id: str) -> bool:
        return (
            self._running.get(peer_id, 0) < self._bounds.max_running_per_peer
            and self._num_running < self._bounds.max_running
        )

    def _start(self, peer_id: str, run: Run, on_done: OnDone) -> None:
        self._running[peer_id] = self._running.get(peer_id, 0) + 1
        self._num_running += 1
        self._spawn(self._run, peer_id, run, on_done)

    async def _run(self, peer_id: str, run: Run, on_done: OnDone) -> None:
        try:
            await run()
        finally:
            self._num_running -= 1
            self._running[peer_id] -= 1
            if not self._running[peer_id]:
                del self._running[peer_id]
            on_done()
            self._start_some()
