"""Puts together what `--verify` needs: room on the workers, and the coordinator's own computation of any layers.

The latter is a worker in this process, like the coordinator's own stage (`local_stage`), with an identity of its own
that nobody else knows. It is given a few layers at a time, out of the memory-mapped checkpoint, so that a coordinator
whose model lies on many machines can compute all of it again, if slowly.

T = tokens, D = hidden size.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import torch
import trio

from neurogrid.assembly.local_stage import MEMORY_FRACTION, LocalWorker, open_local_worker
from neurogrid.assembly.planned_fleet import PlannedFleet
from neurogrid.errors import ConfigurationError
from neurogrid.fleet.placing.placer import Placer, open_placer
from neurogrid.fleet.remote_worker import Timeouts, TransferReports
from neurogrid.fleet.step_times import StepTimes
from neurogrid.inference.board.progress import Progress
from neurogrid.inference.generation.cache_room import CacheRoom
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.verification.bands import band
from neurogrid.inference.verification.computing import OwnLayers, compute_on
from neurogrid.inference.verification.suspicion import Suspicion
from neurogrid.inference.verification.verifier import (
    ROOM_INTERVAL,
    ROOM_PATIENCE,
    Verification,
)
from neurogrid.model.adapters import AdapterSource
from neurogrid.model.stages.device import device_memory, select_device
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.planner import PlannedStage

__all__ = ["make_verification", "require_room"]

# Weights that the coordinator's own computation has in memory at once; one layer, if that is larger. Bytes.
OWN_BYTES: Final = 1024**3


def make_verification(
    planned: PlannedFleet,
    routing: Routing,
    room: CacheRoom,
    *,
    share: float,
    timeouts: Timeouts,
    progress: Progress,
) -> Verification:
    """The verification of a coordinator, to be run (`Verification.run`).

    Args:
        room: on the workers.
        share: of sessions.
    """
    model = planned.model
    is_mixture = any(cost.step_bytes is not None for cost in model.costs)
    return Verification(
        planned.fleet,
        routing,
        partial(_room_for, room),
        partial(_open_own, planned, timeouts),
        coordinator_id=planned.protocol.host.peer_id,
        max_piece=model.max_piece,
        greatest=partial(
            band,
            model.dtype,
            is_quantized=model.quantization is not None,
            is_mixture=is_mixture,
            has_coded_caches=model.has_coded_caches,
        ),
        suspicion=Suspicion(share),
        progress=progress,
    )


def require_room(model: LoadedModel) -> None:
    """Check that this machine can compute any layer by itself, which decides where two workers differ.

    Raises:
        ConfigurationError: it cannot.
    """
    needed = max(cost.weight_bytes + cost.cache_bytes(model.max_seq_len) for cost in model.costs)
    free = int(device_memory(select_device(None)).free_bytes * MEMORY_FRACTION)
    if needed > free:
        raise ConfigurationError(
            "--verify computes layers on this machine where no other worker holds them, or two differ: the largest "
            f"layer and its cache take {needed / 1e6:.0f} MB here, and {free / 1e6:.0f} MB are free. Leave --verify "
            "out, free memory, or give a shorter --max-seq-len"
        )


@asynccontextmanager
async def _room_for(room: CacheRoom, max_length: int) -> AsyncIterator[bool]:
    """Room for a session, if there is some within a while that no generation waits for: that of kept ones, too."""
    reservation = None
    with trio.move_on_after(ROOM_PATIENCE):
        while room.num_waiting:
            await trio.sleep(ROOM_INTERVAL)
        reservation = await room.reserve(max_length)
    try:
        yield reservation is not None
    finally:
        if reservation is not None:
            room.give_back(reservation)


@asynccontextmanager
async def _open_own(planned: PlannedFleet, timeouts: Timeouts) -> AsyncIterator[OwnLayers]:
    """The coordinator's own computation, until the block is left."""
    model = planned.model
    async with open_local_worker(
        model,
        planned.adapters,
        Identity.generate(),
        name="",
        max_sessions=1,
        timeouts=timeouts,
    ) as worker:
        placer = await open_placer(
            model,
            worker.protocol.host,
            max_sessions=1,
            skip_weight_transfer=False,
            cache=None,
        )
        yield _OwnLayers(model, worker, placer)


class _OwnLayers(OwnLayers):
    """See `OwnLayers`. One computation at a time."""

    def __init__(self, model: LoadedModel, worker: LocalWorker, placer: Placer) -> None:
        self._model = model
        self._worker = worker
        self._placer = placer
        self._routing = Routing(worker.protocol, "star")
        self._is_configured = False
        self._held = range(0)

    async def compute(
        self, layers: range, hidden_BTD: torch.Tensor, adapter: AdapterSource | None
    ) -> torch.Tensor:
        for part in self._parts(layers):
            if self._held != part:
                await self._place(part)
            planned = PlannedStage(self._worker.peer_id, part.start, part.stop, 0)
            stage = PipelineStage(planned, self._worker, StepTimes())
            hidden_BTD = await compute_on(
                stage, self._routing, hidden_BTD, max_piece=self._model.max_piece, adapter=adapter
            )
        return hidden_BTD

    def _parts(self, layers: range) -> list[range]:
        """Layers that are in memory together."""
        parts: list[range] = []
        num_bytes = 0
        for layer in layers:
            weight_bytes = self._model.costs[layer].weight_bytes
            if parts and num_bytes + weight_bytes <= OWN_BYTES:
                parts[-1] = range(parts[-1].start, layer + 1)
            else:
                parts.append(range(layer, layer + 1))
                num_bytes = 0
            num_bytes += weight_bytes
        return parts

    async def _place(self, part: range) -> None:
        self._held = range(0)
        await self._placer.place(
            self._worker,
            part,
            TransferReports(_nothing, _ignore, _ignore, _ignore),
            is_configured=self._is_configured,
        )
        self._is_configured, self._held = True, part


def _nothing() -> None:
    """Do nothing: nobody watches layers that come from here."""


def _ignore(num_bytes: int) -> None:
    """Do nothing with a number of bytes."""
