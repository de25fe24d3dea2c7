"""Puts the side that trains on a worker's host, where its owner lends it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
import trio

from neurogrid.errors import NeuroGridError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.fleet.local_workers import num_cores
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.quantization import model_fingerprint
from neurogrid.model.stages.device import device_memory, device_name
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.transfer import BlobInfo, BlobSource, StoredBlob
from neurogrid.temporary import temporary_directory
from neurogrid.training.members import MemberService, MemberSettings
from neurogrid.worker.blobs import WorkerBlobs
from neurogrid.worker.settings import WorkerSettings

__all__ = ["keep_layers", "open_training"]

logger = logging.getLogger(__name__)


async def keep_layers(trained: Path, name: str, blobs: WorkerBlobs) -> None:
    """Keep the layers of a checkpoint as a coordinator would send them.

    Args:
        name: of the run that trained it, for the log.
    """
    try:
        checkpoint = await trio.to_thread.run_sync(Checkpoint.open, trained)
        model = model_fingerprint(checkpoint.config, None).hex()  # as coordinators ask for them
        for layer_id in sorted(checkpoint.present_layers):
            stored = await trio.to_thread.run_sync(_stored, checkpoint.layer_blob(layer_id))
            await blobs.keep(stored, model=model, layer_id=layer_id)
    except NeuroGridError as exc:
        # Not every model that can be trained can be served in stages.
        logger.info("the layers of %s are not kept: %s", name, exc)


def _stored(source: BlobSource) -> StoredBlob:
    info = BlobInfo.of_digests(source.digests(), source.num_bytes)
    data = b"".join(bytes(source.chunk(index)) for index in range(info.num_chunks))
    return StoredBlob(info, memoryview(data))


@asynccontextmanager
async def open_training(
    host: Host,
    settings: WorkerSettings,
    device: torch.device,
    name: str,
    protocols: list[Exchange],
    blobs: WorkerBlobs,
) -> AsyncIterator[MemberService | None]:
    """Take part in training runs until the block is left, if the worker's owner lends it to them.

    Args:
        device: that it computes on.
        name: what people call the machine.
        protocols: the one of runs is added.
        blobs: get the layers of what was trained, so that they need not come when it is served here.

    Yields:
        What takes part; None where nothing does.
    """
    if not settings.trains:
        yield None
        return
    is_cpu = device.type == "cpu"
    memory = settings.memory_limit or device_memory(device).free_bytes
    with temporary_directory("neurogrid-slices-") as directory, unwrap_errors():
        member = MemberSettings(
            name=name,
            device=str(device),
            threads=torch.get_num_threads() if is_cpu else 0,
            memory=memory,
            cores=num_cores(),
            gpu="" if is_cpu else device_name(device),
            data=settings.data,
            invitation=settings.invitation,
            price=settings.price,
            storage=shutil.disk_usage(directory).free // 2,
        )

        async def keep(trained: Path, name: str) -> None:
            await keep_layers(trained, name, blobs)

        service = MemberService(host, member, directory, keep=keep if settings.serves else None)
        protocols.append(service.exchange)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.run)
            yield service
            nursery.cancel_scope.cancel()
