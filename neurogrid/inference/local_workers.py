"""Worker processes on the coordinator's own machine, for as long as it runs.

Each gets a free port, an equal share of the memory and of the cores, and ends when its standard
input does: also when the coordinator is killed. What it says is logged here, under its number.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from neurogrid.errors import ConfigurationError, TransportError
from neurogrid.exception_groups import unwrap_errors

__all__ = ["start_local_workers"]

logger = logging.getLogger(__name__)

# Importing torch and transformers takes 3 s on an idle machine, and several do it at once.
START_TIMEOUT = 120.0  # seconds
STOP_TIMEOUT = 5.0  # seconds
MAX_LOCAL_WORKERS = 64
MAX_LINE_BYTES = 64 * 1024


@asynccontextmanager
async def start_local_workers(
    count: int,
    *,
    memory_bytes: int,
    max_seq_len: int,
    name: str = "",
    listen: str = "/ip4/127.0.0.1/tcp/0",
    credentials: Sequence[Sequence[str]] = (),
) -> AsyncIterator[list[str]]:
    """Start `count` workers and yield their full multiaddrs once all are ready.

    Args:
        memory_bytes: for all of them together.
        max_seq_len: tokens, handed to each.
        name: of this machine, handed to each.
        listen: the multiaddr at which each of them listens, on a free port.
        credentials: what each is told besides (`credentials_of_local_workers`); empty where everybody is admitted.

    Raises:
        ConfigurationError: the count is out of range.
        TransportError: one did not start; its own words are in the log.
    """
    if not 0 < count <= MAX_LOCAL_WORKERS:
        raise ConfigurationError(f"--local-workers takes 1 to {MAX_LOCAL_WORKERS}, not {count}")
    threads = max((os.cpu_count() or 1) // count, 1)
    command = [
        *(sys.executable, "-m", "neurogrid.cli.worker"),
        *("--listen", listen, "--disable-mdns", "--stop-on-stdin-eof", "--log-level", "warning"),
        "--json-logs",
        "--no-cache",  # the model is on this machine's disk already
        *("--memory-limit", str(memory_bytes // count), "--max-seq-len", str(max_seq_len)),
        f"--name={name}",  # in one word: it may begin with a dash
    ]
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    processes: list[trio.Process] = []
    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            try:
                for number, own in enumerate(credentials or [()] * count, 1):
                    process = await trio.lowlevel.open_process(
                        [*command, *own],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        env=environment,
                        # Ctrl-C is for the coordinator, which ends its workers when it ends.
                        start_new_session=True,
                    )
                    processes.append(process)
                    nursery.start_soon(_log_words, process, number)
                yield await _read_addresses(processes)
            finally:
                with trio.CancelScope(shield=True):
                    async with trio.open_nursery() as stopping:
                        for process in processes:
                            stopping.start_soon(_stop, process)


async def _read_addresses(processes: Sequence[trio.Process]) -> list[str]:
    addresses = [""] * len(processes)

    async def read_address(index: int) -> None:
        addresses[index] = await _first_line(processes[index])

    with trio.move_on_after(START_TIMEOUT) as scope, unwrap_errors():
        async with trio.open_nursery() as nursery:
            for index in range(len(processes)):
                nursery.start_soon(read_address, index)
    if scope.cancelled_caught:
        raise TransportError(f"a local worker was not ready within {START_TIMEOUT:g} s")
    return addresses


async def _first_line(process: trio.Process) -> str:
    assert process.stdout is not None
    line = b""
    while b"\n" not in line:
        data = await process.stdout.receive_some(4096)
        if not data:
            status = await process.wait()
            raise TransportError(f"a local worker ended with status {status} before it was ready")
        line += data
    return line.split(b"\n")[0].decode()


async def _log_words(process: trio.Process, number: int) -> None:
    """Log what a worker says, each line as it comes, until it ends."""
    assert process.stderr is not None
    buffer = b""
    async with process.stderr as stderr:
        async for data in stderr:
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                _log_line(line, number)
            if len(buffer) > MAX_LINE_BYTES:
                _log_line(buffer, number)
                buffer = b""
    if buffer:
        _log_line(buffer, number)


def _log_line(line: bytes, number: int) -> None:
    """A line of `--json-logs`, or whatever else came to stderr."""
    try:
        told = json.loads(line)
        level = logging.getLevelNamesMapping()[told["level"].upper()]
        text = "\n".join(filter(None, [told["message"], told.get("exception")]))
    except (ValueError, KeyError, TypeError, AttributeError):
        level, text = logging.WARNING, line.decode(errors="replace")
    logger.log(level, "local worker %d: %s", number, text, extra={"local_worker": number})


async def _stop(process: trio.Process) -> None:
    process.terminate()
    with trio.move_on_after(STOP_TIMEOUT) as scope:
        await process.wait()
    if scope.cancelled_caught:
        process.kill()
        await process.wait()
    for stream in filter(None, (process.stdin, process.stdout)):
        await stream.aclose()
