"""A child process that computes, as its owner has it: orders go in and answers come out, one after the other.

What it computes is its program's. It ends with its owner, and what it says on stderr is logged.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import trio

from neurogrid.errors import NeuroGridError
from neurogrid.fork_server import running_fork_server
from neurogrid.training.trainer.errors import TrainerError
from neurogrid.training.trainer.forked import ForkedProcess, start_forked
from neurogrid.training.trainer.frames import LENGTH_BYTES, pack, parse_length, unpack

__all__ = ["Child", "ChildEnded"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT: Final = 5.0  # seconds
MAX_LINE_BYTES: Final = 64 * 1024
# That a pipe has room for, where the system lets it: a tensor of some 100 KiB comes in one piece then.
_PIPE_BYTES: Final = 1024**2
# Lines of what a process said that an error repeats, and characters of each.
_NUM_LAST_WORDS: Final = 3
_MAX_WORD_CHARS: Final = 300


class ChildEnded(NeuroGridError):
    """The process has ended; the text says how, and its last words."""


class _NoFrameError(Exception):
    """The child wrote something that is no answer; the text says what it is."""


class Child:
    """A process that runs a program of this package, or none.

    Args:
        what: it is, for people.
        module: its program.
        errors: that it may answer with; any other is a `TrainerError`.
        nursery: its words are logged there.
    """

    def __init__(
        self,
        what: str,
        module: str,
        errors: tuple[type[NeuroGridError], ...],
        nursery: trio.Nursery,
    ) -> None:
        self._what, self._module, self._nursery = what, module, nursery
        self._errors = {each.__name__: each for each in errors}
        self._process: trio.Process | ForkedProcess | None = None
        self._words: deque[str] = deque(maxlen=_NUM_LAST_WORDS)
        self._said = trio.Event()  # all that the process had to say

    @property
    def pid(self) -> int | None:
        """The process's number; None where there is none."""
        return None if self._process is None else self._process.pid

    async def start(self, *, threads: int) -> None:
        """Start the process: forked, where this one has a fork server. There is none.

        Args:
            threads: of torch; 0 for its own choice.
        """
        self._words.clear()
        self._said = trio.Event()
        if (server := running_fork_server()) is not None:
            try:
                self._process = await start_forked(server, self._module, threads=threads)
            except OSError as exc:
                logger.warning("the %s is not forked, but started anew: %s", self._what, exc)
        if self._process is None:
            self._process = await trio.lowlevel.open_process(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(threads),
                # Ctrl-C is for its owner, which ends it.
                start_new_session=True,
            )
        for pipe in (self._process.stdin, self._process.stdout):
            _widen(pipe)
        self._nursery.start_soon(self._log_words, self._process, self._said)

    async def exchange(
        self, order: dict[str, Any], on_progress: Callable[[list[dict[str, Any]]], None]
    ) -> dict[str, Any]:
        """The answer to an order. One at a time.

        Args:
            on_progress: is given what the process tells before the answer.

        Raises:
            ChildEnded: there is no process, or it ended.
            NeuroGridError: what it answered with.
        """
        process = self._process
        if process is None:
            raise ChildEnded(f"the {self._what}'s process has ended")
        assert process.stdin is not None
        parts = pack(order)
        try:
            for part in parts:
                await process.stdin.send_all(part)
            while "progress" in (told := await _receive(process)):
                on_progress(told["progress"])
        except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError) as exc:
            raise await self._ended(process) from exc
        except _NoFrameError as exc:
            await self.end()
            raise ChildEnded(
                f"the {self._what}'s process was ended, as it wrote {exc} to its standard output: a library that "
                "prints there when it is imported has to be told not to"
            ) from exc
        except BaseException:  # half an answer is left behind
            await self.end()
            raise
        if "error" in told:
            raise self._errors.get(told["error"], TrainerError)(told["text"])
        return told

    async def end(self) -> None:
        """End the process, if it runs, and close its pipes."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            with trio.move_on_after(STOP_TIMEOUT):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
            await process.stdout.aclose()

    async def _ended(self, process: trio.Process | ForkedProcess) -> ChildEnded:
        with trio.move_on_after(STOP_TIMEOUT):  # with a status of its own, before its input ends
            await process.wait()
        await self.end()
        with trio.move_on_after(STOP_TIMEOUT):
            await self._said.wait()
        status = process.returncode or 0
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        words = " | ".join(self._words)
        said = f"; its last words: {words}" if words else ""
        return ChildEnded(f"the {self._what}'s process {how}{said}")

    async def _log_words(self, process: trio.Process | ForkedProcess, said: trio.Event) -> None:
        """Log what the process says, each line as it comes, until it ends."""
        assert process.stderr is not None
        buffer = b""
        async with process.stderr as stderr:
            async for data in stderr:
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._log_line(line)
                if len(buffer) > MAX_LINE_BYTES:
                    self._log_line(buffer)
                    buffer = b""
        if buffer:
            self._log_line(buffer)
        said.set()

    def _log_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text.strip("^ "):
            self._words.append(text[:_MAX_WORD_CHARS])
            logger.warning("%s: %s", self._what, text)


def _environment(threads: int) -> dict[str, str]:
    # What this process imports, that one has to find.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    environment["HF_HUB_OFFLINE"] = "1"
    return environment


def _widen(pipe: object) -> None:
    """Give a pipe more room, where the system can, and has not given its user too much already."""
    assert isinstance(pipe, trio.lowlevel.FdStream)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


async def _receive(process: trio.Process | ForkedProcess) -> dict[str, Any]:
    """Receive the next frame, and unpack it."""
    prefix = await _receive_bytes(process, bytearray(LENGTH_BYTES))
    try:
        told, long = unpack(await _receive_bytes(process, bytearray(parse_length(prefix))))
    except ValueError as exc:
        raise _NoFrameError(f"{bytes(prefix)!r} and more, {exc}") from exc
    for each in long:
        await _receive_bytes(process, each)
    return told


async def _receive_bytes(process: trio.Process | ForkedProcess, room: bytearray) -> bytearray:
    """Fill `room`, without a copy in between as trio's streams have it."""
    stream, left = process.stdout, memoryview(room)
    while left:
        assert isinstance(stream, trio.lowlevel.FdStream)
        if stream.fileno() < 0:
            raise trio.ClosedResourceError
        try:
            num_bytes = os.readv(stream.fileno(), [left])
        except BlockingIOError:
            await trio.lowlevel.wait_readable(stream.fileno())
            continue
        if not num_bytes:
            raise EOFError
        left = left[num_bytes:]
    return room
