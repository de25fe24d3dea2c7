"""Ask the workers now and then what memory they have, and see how long the answer takes.

For display alone: a worker that does not answer here is not lost. A session that needs it finds out by an error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import trio

from neurogrid.errors import NeuroGridError
from neurogrid.fleet.member import Member
from neurogrid.fleet.placing.fleet import Fleet
from neurogrid.fleet.progress import FleetProgress

__all__ = ["watch_workers"]

# A question takes some hundred bytes; a hundred workers are asked twenty times a second then.
INTERVAL: Final = 5.0  # seconds
MAX_AT_ONCE: Final = 16


async def watch_workers(
    fleet: Fleet, progress: FleetProgress, *, interval: float = INTERVAL
) -> None:
    """Tell `progress` what each worker says, every `interval` seconds; runs until cancelled."""
    limiter = trio.CapacityLimiter(MAX_AT_ONCE)

    async def ask(member: Member) -> None:
        async with limiter:
            if member.is_placing:
                return
            started = trio.current_time()
            try:
                memory = await member.worker.memory()
            except NeuroGridError:
                return
            if not member.times.is_slow:
                member.times.suspicion = ""  # it is there, after all
            latency = (trio.current_time() - started) / 2
            if member in fleet.members:
                free_bytes = max(memory.total_bytes - memory.used_bytes, 0)
                progress.described(
                    replace(
                        member.info,
                        free_bytes=free_bytes,
                        total_bytes=memory.total_bytes,
                        memory_known=True,
                        latency=latency,
                    )
                )

    while True:
        async with trio.open_nursery() as nursery:
            for member in fleet.members:
                nursery.start_soon(ask, member)
        await trio.sleep(interval)
