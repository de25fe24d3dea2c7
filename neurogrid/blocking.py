"""Coordinator and worker for programs that are not on trio: scripts, notebooks, threads, asyncio.

    with blocking.open_coordinator(CoordinatorSettings(local_workers=2)) as coordinator:
        for piece in coordinator.stream("A function definition"):
            print(piece, end="", flush=True)

A trio loop runs in a thread underneath, until the block is left. Everything may be called from any thread, from many
at once; sessions of several threads share forward passes. Settings, results and errors are those of `neurogrid`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import torch

import neurogrid.assembly.coordinator
import neurogrid.assembly.worker
import neurogrid.inference.generation.coordinator
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.inference.board.status import ClusterStatus
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.stages.device import DeviceMemory
from neurogrid.p2p.blocking.trio_thread import TrioThread, fail_after
from neurogrid.p2p.blocking.twins import Blocking, iterating_twin, shown_as, twin
from neurogrid.p2p.exchange.counters import TrafficCounters
from neurogrid.planner import PlannedStage
from neurogrid.worker.state import WeightSource

__all__ = ["Coordinator", "Worker", "fail_after", "open_coordinator", "open_worker"]

AsyncCoordinator = neurogrid.inference.generation.coordinator.Coordinator
AsyncWorker = neurogrid.assembly.worker.Worker
P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B", bound=Blocking[Any])

# Seconds for leaving: local workers end, and what came is written to disk.
CLOSE_TIMEOUT: Final = 60.0


class Coordinator(Blocking[AsyncCoordinator]):
    """A coordinator whose workers are ready, in a thread. Made by `open_coordinator`.

    An iteration over `stream` or `generate` that is left early, by `break` or an exception, ends its session on all
    workers. Ctrl-C ends the call that the main thread waits in. `with fail_after(seconds)` gives calls a deadline.
    """

    @property
    def model(self) -> LoadedModel:
        """The loaded model, with its tokenizer."""
        return self._inner.model

    @property
    def stages(self) -> tuple[PlannedStage, ...]:
        """The stages of the current plan, in order."""
        return self._thread.call_sync(lambda: self._inner.stages)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers, by what each said of itself."""
        return self._thread.call_sync(lambda: self._inner.workers)

    @property
    def counters(self) -> TrafficCounters:
        """Messages and bytes by peer, type and direction, up to now: a copy."""
        return self._thread.call_sync(lambda: copy.deepcopy(self._inner.counters))

    @property
    def peer_id(self) -> str:
        """The coordinator's peer id (base58)."""
        return self._inner.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs that a worker can dial."""
        return self._thread.call_sync(lambda: self._inner.addresses)

    @property
    def why_not_ready(self) -> str | None:
        """Layers that no worker is ready for, and why; None where a token could be generated now."""
        return self._thread.call_sync(lambda: self._inner.why_not_ready)

    def status(self) -> ClusterStatus:
        """The state of the cluster at this moment: workers, stages, rates, requests, failures, events."""
        return self._thread.call_sync(self._inner.status)

    @property
    def cache_bytes(self) -> tuple[int, int]:
        """Memory for KV caches on all workers: set aside for sessions that are open, and all there is."""
        return self._thread.call_sync(lambda: self._inner.cache_bytes)

    stream = iterating_twin(AsyncCoordinator.stream)
    complete = twin(AsyncCoordinator.complete)
    generate = iterating_twin(AsyncCoordinator.generate)
    generate_tokens = iterating_twin(AsyncCoordinator.generate_tokens)
    read_prompt = twin(AsyncCoordinator.read_prompt)
    embed = twin(AsyncCoordinator.embed)


class Worker(Blocking[AsyncWorker]):
    """A worker that runs, in a thread. Made by `open_worker`."""

    @property
    def peer_id(self) -> str:
        """The worker's peer id (base58)."""
        return self._inner.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs that a coordinator can dial."""
        return self._thread.call_sync(lambda: self._inner.addresses)

    @property
    def held_layers(self) -> tuple[int, ...]:
        """Layers in memory."""
        return self._thread.call_sync(lambda: self._inner.held_layers)

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return self._inner.device

    @property
    def memory(self) -> DeviceMemory:
        """Memory of the device, or the limit; what layers held here take counts as free."""
        return self._thread.call_sync(lambda: self._inner.memory)

    @property
    def received_bytes(self) -> Mapping[WeightSource, int]:
        """Weights of the layers that were loaded since the start, by where they came from."""
        return self._thread.call_sync(lambda: dict(self._inner.received_bytes))

    drain = twin(AsyncWorker.drain)


def _in_thread(
    opener: Callable[P, AbstractAsyncContextManager[A]],
    face: Callable[[TrioThread[Any], A], B],
    name: str,
) -> Callable[P, AbstractContextManager[B]]:
    """Turn what opens something under trio into what opens it in a thread."""

    @functools.wraps(opener)
    @contextmanager
    def open_in_thread(*args: P.args, **kwargs: P.kwargs) -> Iterator[B]:
        with TrioThread(
            partial(opener, *args, **kwargs),
            name=f"neurogrid {name}",
            what=name,
            close_timeout=CLOSE_TIMEOUT,
        ) as thread:
            yield face(thread, thread.resource)

    return shown_as(open_in_thread, opener, gives=f"AbstractContextManager[{name.capitalize()}]")


open_coordinator = _in_thread(
    neurogrid.assembly.coordinator.open_coordinator, Coordinator, "coordinator"
)
"""`neurogrid.open_coordinator` for a `with` block: the same arguments and errors. It gives a `Coordinator`."""

open_worker = _in_thread(neurogrid.assembly.worker.open_worker, Worker, "worker")
"""`neurogrid.open_worker` for a `with` block: the same arguments and errors. It gives a `Worker`."""
