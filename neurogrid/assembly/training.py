"""Puts the side that trains on a worker's host, where its owner lends it."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
import trio

from neurogrid.exception_groups import unwrap_errors
from neurogrid.model.stages.device import device_memory, device_name
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.temporary import temporary_directory
from neurogrid.training.members import MemberService, MemberSettings
from neurogrid.worker.settings import WorkerSettings

__all__ = ["open_training"]


@asynccontextmanager
async def open_training(
    host: Host,
    settings: WorkerSettings,
    device: torch.device,
    name: str,
    protocols: list[Exchange],
) -> AsyncIterator[MemberService | None]:
    """Take part in training runs until the block is left, if the worker's owner lends it to them.

    Args:
        device: that it computes on.
        name: what people call the machine.
        protocols: the one of runs is added.

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
            cores=len(os.sched_getaffinity(0)),
            gpu="" if is_cpu else device_name(device),
            storage=shutil.disk_usage(directory).free // 2,
        )
        service = MemberService(host, member, directory)
        protocols.append(service.exchange)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.run)
            yield service
            nursery.cancel_scope.cancel()
