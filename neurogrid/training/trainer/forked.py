"""A program of ours in a process that the fork server makes: at once, sharing what that has imported.

It has pipes for its standard input, output and errors, as a process has that is started anew, and ends with the owner
of its socket. Its owner has it as a `ForkedProcess`, with the methods of `trio.Process` that a `Child` needs.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import trio

from neurogrid.fork_server import EVENT, ForkServer, Function

__all__ = ["ForkedProcess", "run_program", "start_forked"]

_NUM_PIPES: Final = 3
# What is said of a process whose end nobody has seen.
_UNKNOWN: Final = -signal.SIGKILL


class ForkedProcess:
    """A process that the fork server has made. Made by `start_forked`.

    Attributes:
        pid: its number.
        stdin, stdout, stderr: its pipes.
        returncode: how it ended, as `subprocess` has it; None before that is known.
    """

    def __init__(self, own: trio.SocketStream, pid: int, pipes: Sequence[int]) -> None:
        self._own, self._lock = own, trio.Lock()
        self.pid = pid
        self.stdin, self.stdout, self.stderr = map(trio.lowlevel.FdStream, pipes)
        self.returncode: int | None = None

    async def wait(self) -> int:
        """Wait until it has ended: its `returncode`."""
        async with self._lock:
            if self.returncode is None:
                told = await _event(self._own)
                self.returncode = _UNKNOWN if told is None else told
                with trio.CancelScope(shield=True):
                    await self._own.aclose()
        return self.returncode

    def kill(self) -> None:
        """Have it killed; `wait` until it is."""
        if self.returncode is None:
            with contextlib.suppress(OSError):
                self._own.socket.shutdown(socket.SHUT_WR)


async def start_forked(server: ForkServer, module: str, *, threads: int) -> ForkedProcess:
    """Have `module` run, by its function `main`, in a process of its own.

    Args:
        threads: of torch; 0 for as many as this process has.

    Raises:
        OSError: the fork server has ended, or could fork no other.
    """
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    ours_err, theirs_err = os.pipe()
    ours, theirs = (ours_in, ours_out, ours_err), (theirs_in, theirs_out, theirs_err)
    try:
        function = Function(
            f"{__name__}:{run_program.__name__}",
            imports=(module,),
            arguments={"module": module, "threads": threads},
            is_told_of=True,
        )
        plain = server.new_child(function, theirs)
    except BaseException:
        for number in ours:
            os.close(number)
        raise
    finally:
        for number in theirs:
            os.close(number)
    own = trio.SocketStream(trio.socket.from_stdlib_socket(plain))
    try:
        pid = await _event(own)
        if pid is None:
            raise OSError("the process that forks others has ended, or has no room for one more")
    except BaseException:
        for number in ours:
            os.close(number)
        with trio.CancelScope(shield=True):
            await own.aclose()
        raise
    return ForkedProcess(own, pid, ours)


async def _event(own: trio.SocketStream) -> int | None:
    """The next number that the fork server tells; None where it has ended."""
    data = b""
    with contextlib.suppress(trio.BrokenResourceError):
        while len(data) < EVENT.size and (more := await own.receive_some(EVENT.size - len(data))):
            data += more
    return EVENT.unpack(data)[0] if len(data) == EVENT.size else None


def run_program(
    own: socket.socket, descriptors: Sequence[int], *, module: str, threads: int
) -> None:
    """Run a program's `main` with these descriptors as its standard input, output and errors: what the child does.

    Args:
        own: its end is seen to by the fork server.
    """
    assert len(descriptors) == _NUM_PIPES
    own.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = io.TextIOWrapper(io.FileIO(0), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(
        io.FileIO(2, "w"), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
    # As in a process that was started anew: the fork server ignores these, and says nothing.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    logging.root.handlers.clear()
    logging.disable(logging.NOTSET)
    try:
        main = importlib.import_module(module).main
        if threads:
            import torch

            torch.set_num_threads(threads)
        main()
    except Exception:
        traceback.print_exc()
        raise
