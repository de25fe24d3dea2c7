"""Worker processes on the coordinator's own machine, for as long as it runs.

Each gets a free port, an equal share of the memory and of the cores, and ends when its standard
input does: also when the coordinator is killed. What it says is logged here, under its number. One that ends by
itself is started again with its identity, at its address, so that peers that keep a connection to it find it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from neurogrid.errors import ConfigurationError, TransportError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.fleet.progress import FleetProgress

__all__ = ["num_cores", "start_local_workers"]

logger = logging.getLogger(__name__)

# Importing torch and transformers takes 3 s on an idle machine, and several do it at once.
START_TIMEOUT = 120.0  # seconds
STOP_TIMEOUT = 5.0  # seconds
MAX_LOCAL_WORKERS = 64
MAX_LINE_BYTES = 64 * 1024
# One that ends again and again does so for a reason that starting it does not mend. Seconds.
MAX_RESTARTS = 5
RESTART_WINDOW = 600.0
# Until the first restart; twice as long before each that follows within the window.
RESTART_BACKOFF = 1.0


@asynccontextmanager
async def start_local_workers(
    count: int,
    *,
    memory_bytes: int,
    max_seq_len: int,
    name: str = "",
    credentials: Sequence[Sequence[str]],
    listen: str = "/ip4/127.0.0.1/tcp/0",
    num_threads: int | None = None,
    progress: FleetProgress | None = None,
    options: Sequence[str] = (),
) -> AsyncIterator[list[str]]:
    """Start `count` workers and yield their full multiaddrs once all are ready.

    One that ends by itself afterwards is started again where it was, up to `MAX_RESTARTS` times in `RESTART_WINDOW`.

    Args:
        memory_bytes: for all of them together.
        max_seq_len: tokens, handed to each.
        name: of this machine, handed to each.
        credentials: what each is told besides, its identity at least (`credentials_of_local_workers`).
        listen: the multiaddr at which each of them listens, on a free port.
        num_threads: for all of them together; None for what OMP_NUM_THREADS gives each, or one for each core.
        progress: is told when one has ended.
        options: of their command line, besides.

    Raises:
        ConfigurationError: the count is out of range.
        TransportError: one did not start; its own words are in the log.
    """
    if not 0 < count <= MAX_LOCAL_WORKERS:
        raise ConfigurationError(f"--local-workers takes 1 to {MAX_LOCAL_WORKERS}, not {count}")
    command = [
        *(sys.executable, "-m", "neurogrid.cli.commands.worker"),
        *("--disable-mdns", "--stop-on-stdin-eof", "--log-level", "warning", "--json-logs"),
        "--no-cache",  # the model is on this machine's disk already
        *("--memory-limit", str(memory_bytes // count), "--max-seq-len", str(max_seq_len)),
        f"--name={name}",  # in one word: it may begin with a dash
        *_threads_of_each(count, num_threads),
        *options,
    ]
    workers = [
        _LocalWorker(number, [*command, *own], listen, progress or FleetProgress())
        for number, own in enumerate(credentials, 1)
    ]
    with unwrap_errors():
        async with trio.open_nursery() as words:
            try:
                await _start_all(workers, words)
                async with trio.open_nursery() as keeping:
                    for worker in workers:
                        keeping.start_soon(worker.keep, words)
                    yield [worker.address for worker in workers]
                    keeping.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True):
                    async with trio.open_nursery() as stopping:
                        for worker in workers:
                            stopping.start_soon(worker.stop)


def _threads_of_each(count: int, num_threads: int | None) -> tuple[str, ...]:
    """The option that gives each of `count` workers its share; none where the environment says how many."""
    if num_threads is None:
        if "OMP_NUM_THREADS" in os.environ:
            return ()
        num_threads = num_cores()
    return ("--threads", str(max(num_threads // count, 1)))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    may_use = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(may_use(0)) if may_use else os.cpu_count() or 1


async def _start_all(workers: Sequence[_LocalWorker], words: trio.Nursery) -> None:
    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            for worker in workers:
                nursery.start_soon(worker.start, words)


class _LocalWorker:
    """Worker on this machine, and the process that it is now.

    Attributes:
        number: from 1.
        address: its full multiaddr; empty until it is ready for the first time.
    """

    def __init__(
        self, number: int, command: Sequence[str], listen: str, progress: FleetProgress
    ) -> None:
        self.number = number
        self.address = ""
        self._command = command
        self._listen = listen
        self._progress = progress
        self._process: trio.Process | None = None

    async def start(self, words: trio.Nursery) -> None:
        """Run its process, and wait until it is ready.

        Args:
            words: where it is listened to.

        Raises:
            TransportError: it ended before it was, or was not in time.
        """
        process = self._process = await trio.lowlevel.open_process(
            [*self._command, "--listen", self._listen],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for the coordinator, which ends its workers when it ends.
            start_new_session=True,
        )
        words.start_soon(_log_words, process, self.number)
        with trio.move_on_after(START_TIMEOUT) as scope:
            self.address = await _first_line(process)
            # Peers that know it know it there.
            self._listen = self.address.partition("/p2p/")[0]
        if scope.cancelled_caught:
            raise TransportError(f"a local worker was not ready within {START_TIMEOUT:g} s")

    async def keep(self, words: trio.Nursery) -> None:
        """Start it again whenever it ends, until it has ended too often; `words` as for `start`."""
        restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        assert self._process is not None
        how = _how_it_ended(await self._process.wait())
        while not (
            len(restarts) == MAX_RESTARTS and trio.current_time() - restarts[0] < RESTART_WINDOW
        ):
            now = trio.current_time()
            recent = sum(now - at < RESTART_WINDOW for at in restarts)
            delay = RESTART_BACKOFF * 2**recent
            logger.warning("local worker %d %s: starting it again in %g s", self.number, how, delay)
            self._progress.local_worker_ended(self.number, how, delay)
            await trio.sleep(delay)
            restarts.append(trio.current_time())
            await self.stop()  # its pipes
            try:
                await self.start(words)
            except (TransportError, OSError) as exc:
                await self.stop()  # it may run, and say nothing
                how = f"did not start: {exc}"
                continue
            logger.warning("local worker %d is there again", self.number)
            how = _how_it_ended(await self._process.wait())
        logger.error(
            "local worker %d %s, and was started again %d times within %g s: it stays away. Start this command again "
            "when the cause is found",
            *(self.number, how, MAX_RESTARTS, RESTART_WINDOW),
        )
        self._progress.local_worker_ended(self.number, how, None)

    async def stop(self) -> None:
        """End its process, if it runs, and close its pipes."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with trio.move_on_after(STOP_TIMEOUT) as scope:
            await process.wait()
        if scope.cancelled_caught:
            process.kill()
            await process.wait()
        for stream in filter(None, (process.stdin, process.stdout)):
            await stream.aclose()


def _how_it_ended(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


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
