"""A worker as its leader counts on it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import trio

from neurogrid.fleet.remote_worker import RemoteWorker
from neurogrid.fleet.step_times import StepTimes
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.p2p.wire import GPUInfo

__all__ = ["Member"]


@dataclass(eq=False)
class Member:
    """One worker, from when it joins until it is lost. A worker that comes back is another member.

    Attributes:
        worker: how it is spoken to.
        info: what it said of itself.
        layers: those that it has confirmed; empty while they are placed.
        assigned: those that it was given last, or is being given.
        is_configured: it took the model's config.
        is_leaving: it wants to go.
        num_sessions: those that go through it.
        rests_until: trio's time before which it is asked for nothing; it has refused.
        is_placing: layers are on their way to it.
        is_cut: its connection was lost meanwhile, and may come back.
        is_short: it had less memory for us than was planned with, or said so unasked: others share it.
        is_preparing: it is being told the model's config, to stand by.
        lock: held while it is configured and given layers.
        times: what it took for the steps of sessions.
    """

    worker: RemoteWorker
    info: WorkerInfo
    layers: range = range(0)
    assigned: range = range(0)
    is_configured: bool = False
    is_leaving: bool = False
    num_sessions: int = 0
    rests_until: float = 0.0
    is_placing: bool = False
    is_cut: bool = False
    is_preparing: bool = False
    is_short: bool = False
    lock: trio.Lock = field(default_factory=trio.Lock)
    times: StepTimes = field(default_factory=StepTimes)

    @property
    def peer_id(self) -> str:
        """Its peer id (base58)."""
        return self.worker.peer_id

    @property
    def current_info(self) -> WorkerInfo:
        """The info that it gave, with the layers that it has by now."""
        if not self.layers:
            return self.info
        return replace(self.info, model_layers=frozenset(self.layers))

    def holds(self, layers: range) -> bool:
        """Whether it is ready for all of these layers."""
        return (
            bool(self.layers)
            and not self.is_cut
            and self.layers.start <= layers.start
            and layers.stop <= self.layers.stop
        )

    @property
    def is_resting(self) -> bool:
        """Whether it is asked for nothing for now."""
        return self.rests_until > trio.current_time()

    def has_memory(self, memory: GPUInfo) -> None:
        """Note what memory it says that there is for us."""
        free_bytes = max(memory.total_bytes - memory.used_bytes, 0)
        self.info = replace(
            self.info, free_bytes=free_bytes, total_bytes=memory.total_bytes, memory_known=True
        )

    def rest(self, seconds: float) -> None:
        """Leave it alone for a while."""
        self.rests_until = trio.current_time() + seconds
