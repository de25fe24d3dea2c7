"""The coordinator's own stage: a worker in its process, reached without a socket.

It is a worker like the others: config, assignment, sessions and batches are served by the same code, over a network in
memory. Its layers come from the coordinator's own checkpoint, one after the other out of the memory-mapped file, and
its activations are handed over as they lie in memory.

When it is used (`LocalLayers`): never; for exactly so many layers, the first; or when it is needed. Needed means that
the workers alone cannot hold the model, or that the coordinator has a GPU and the plan with it is expected to be
`MIN_SPEED_UP` times as fast. A coordinator whose workers will do is not made to compute: it has the embedding, the
head and the sampling of every session, on what may be a small machine.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Final

import torch

from neurogrid.assembly.plan_request import LocalLayers
from neurogrid.assembly.worker import Worker
from neurogrid.errors import (
    CapacityError,
    ConfigurationError,
    PeerRefusedError,
    RequestRefusedError,
)
from neurogrid.fleet.placing.fleet import Fleet
from neurogrid.fleet.remote_worker import (
    Placement,
    RemoteWorker,
    Timeouts,
    TransferReports,
)
from neurogrid.fleet.spread import Spread
from neurogrid.inference.generation.adapters import ServedAdapters
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.pipeline.chain import AskedAlone
from neurogrid.inference.pipeline.remote_v11 import RemoteWorkerV11
from neurogrid.inference.sessions.service import SessionService
from neurogrid.model.stages.device import (
    avoid_planned_attention,
    device_memory,
    device_name,
    select_device,
)
from neurogrid.node.roles import WORKER_TAKES, authorise
from neurogrid.node.torch_thread import TorchThread
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.tensor.protocol import Protocol
from neurogrid.p2p.transfer import Transfers
from neurogrid.p2p.wire import PROTOCOL_V11
from neurogrid.worker.settings import WorkerSettings
from neurogrid.worker.state import WorkerState

__all__ = ["MEMORY_FRACTION", "LocalWorker", "enlist_with_local", "open_local_worker"]

logger = logging.getLogger(__name__)

# Of the device's free memory, what the stage may take: the rest is the coordinator's own, and the machine's.
MEMORY_FRACTION: Final = 0.8
# How much faster the plan with a GPU here has to be: estimates are off by half as much.
MIN_SPEED_UP: Final = 1.5


class LocalWorker(RemoteWorkerV11, AskedAlone):
    """A worker in this process, as its coordinator speaks to it. Made by `open_local_worker`."""

    def __init__(
        self, protocol: Protocol, peer_id: str, timeouts: Timeouts, sessions: SessionService
    ) -> None:
        super().__init__(protocol, peer_id, timeouts)
        self._sessions = sessions

    async def place(self, placement: Placement, reports: TransferReports) -> None:
        # Nobody else can fetch from it, nor it from others.
        alone = replace(placement, spread=Spread(lambda peer_id: ()))
        await super().place(alone, reports)

    async def forward(
        self,
        session_id: int,
        hidden_BTD: torch.Tensor,
        *,
        start: int,
        stop: int,
        position: int,
        batch: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, int | None]:
        owner = self.protocol.host.peer_id
        try:
            return await self._sessions.activations.extend(
                session_id, owner, hidden_BTD, position=position, batch=batch
            )
        except RequestRefusedError as exc:
            text = str(exc)
            raise PeerRefusedError(text, code=exc.code, text=text) from exc


@asynccontextmanager
async def open_local_worker(
    model: LoadedModel,
    adapters: ServedAdapters,
    identity: Identity,
    *,
    name: str,
    max_sessions: int,
    timeouts: Timeouts,
    memory_bytes: int | None = None,
) -> AsyncIterator[LocalWorker]:
    """Run a worker for `model` in this process until the block is left; it holds nothing yet.

    Args:
        adapters: whose parts it asks for, as any worker does.
        identity: the coordinator's, whose peer id it has.
        name: what this machine is called.
        max_sessions: sessions at once that it may be asked to set memory aside for.
        memory_bytes: that it may take; None for its part of what is free.
    """
    device = select_device(None)
    avoid_planned_attention(device)
    if memory_bytes is None:
        memory_bytes = int(device_memory(device).free_bytes * MEMORY_FRACTION)
    settings = WorkerSettings(
        memory_limit=memory_bytes,
        max_seq_len=model.max_seq_len,
        max_sessions=max(max_sessions, WorkerSettings.max_sessions),
        session_ttl=float("inf"),  # their owner is in the same process
        says_at=logging.DEBUG,  # the coordinator, which it is part of, says what is to be known
    )
    with TorchThread() as torch_thread:
        async with (
            open_memory_network() as network,
            network.open_host(identity=identity) as host,
            network.open_host() as caller,
        ):
            protocol = Protocol(host, role="worker", name=name, versions=(PROTOCOL_V11,))
            authorise(protocol, WORKER_TAKES)
            state = WorkerState(settings, protocol, device, torch_thread)
            state.checkpoint = model.checkpoint
            described = f"this machine: {device_name(device)}"
            worker = Worker(state, protocol, name=described, machine=name)
            worker.start()
            asking = Protocol(caller, role="coordinator", versions=(PROTOCOL_V11,))
            Transfers(asking, adapters)
            await caller.connect(host.addresses[0])
            await asking.open(host.peer_id)
            yield LocalWorker(asking, host.peer_id, timeouts, worker.sessions)


async def enlist_with_local(
    stack: AsyncExitStack,
    fleet: Fleet,
    workers: Sequence[RemoteWorker],
    model: LoadedModel,
    adapters: ServedAdapters,
    identity: Identity,
    *,
    name: str,
    local_layers: LocalLayers,
    max_sessions: int,
    timeouts: Timeouts,
    memory_bytes: int | None = None,
) -> str:
    """Enlist the workers, and the coordinator's own stage if it is to have one; says why it has, or has not.

    Args:
        stack: runs the stage, once there is one.
        name: what this machine is called.
        memory_bytes: as for `open_local_worker`.

    Raises:
        CapacityError, ConfigurationError, NoRouteError: as `Fleet.enlist`.
    """

    here = open_local_worker(
        model,
        adapters,
        identity,
        name=name,
        max_sessions=max_sessions,
        timeouts=timeouts,
        memory_bytes=memory_bytes,
    )
    with_local = replace(fleet.planning, local_id=identity.peer_id)
    if local_layers == "none":
        await fleet.enlist(workers)
        return "this machine computes no layer (--local-layers none)"
    if local_layers != "auto":
        fleet.planning = replace(with_local, num_local_layers=local_layers)
        await fleet.enlist([*workers, await stack.enter_async_context(here)])
        return f"this machine computes {local_layers} of the layers, as asked for"
    try:
        await fleet.enlist(workers)
    except (CapacityError, ConfigurationError) as exc:
        if workers and isinstance(exc, ConfigurationError):
            raise
        fleet.planning = with_local
        await fleet.enlist([await stack.enter_async_context(here)])
        if not workers:
            return "this machine computes all layers: there is no worker"
        return f"this machine computes, too: without it, {exc}"
    if select_device(None).type == "cpu":
        return "this machine computes no layer: the workers have room for all of them"
    infos = list(fleet.infos.values())
    async with AsyncExitStack() as trial:
        local = await trial.enter_async_context(here)
        before = with_local.rate(fleet.limited(infos))
        after = with_local.rate(fleet.limited([*infos, *await fleet.describe([local])]))
        if before is None or after is None or after < MIN_SPEED_UP * before:
            return "this machine computes no layer: that would not be much faster"
        fleet.planning = with_local
        await fleet.enlist([local])
        stack.push_async_exit(trial.pop_all())
    return f"this machine computes, too: {after:.1f} tokens/s are expected instead of {before:.1f}"
