"""SIGINT and SIGTERM: a command ends within a second of one, and some seconds later if it has farewells to say.

Three things see to that. Until trio runs, and while libraries are imported, the process ends on the spot: there is
nothing to put in order. Then a signal is handed to a task, which ends the command in order. What does not come to that
task, or to that end, in time (a thread reads a model, an import takes the whole loop) is not waited for: a watchdog in
a thread of its own ends the process.

The status is 128 and the signal's number, as shells have it. The terminal is left as it was found.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, NoReturn

from neurogrid.temporary import remove_temporary_directories

__all__ = ["SIGNALS", "Watchdog", "end_process", "ending_at_once", "on_signals", "status_of"]

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR: Final = b"\x1b[?25h"
_ORDER: Final = struct.Struct("=Bd")

# As it was when the command began; None where standard input is no terminal.
_terminal: list[Any] | None = None


def status_of(signum: int) -> int:
    """The exit status of a command that a signal ended."""
    return 128 + signum


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `handler` at each of `SIGNALS` while the block runs. In the main thread."""
    _remember_terminal()
    before = {signum: signal.signal(signum, handler) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process at a signal, without a word, while the block runs."""
    with on_signals(lambda signum, frame: end_process(status_of(signum))):
        yield


def end_process(status: int) -> NoReturn:
    """End the process now: no task, no thread and no `finally` is waited for.

    The terminal is put in order, and temporary directories are removed.
    """
    with suppress(
        OSError, ValueError, termios.error
    ):  # a stream that is closed, or a terminal that is gone
        # A process in the background is not to be stopped for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
        if _terminal is not None and sys.__stdin__ is not None:
            termios.tcsetattr(sys.__stdin__.fileno(), termios.TCSANOW, _terminal)
    with suppress(OSError, ValueError):
        stderr = sys.__stderr__.fileno() if sys.__stderr__ is not None else -1
        # One that is stopped (Ctrl-S) takes nothing.
        if os.isatty(stderr) and select.select([], [stderr], [], 0)[1]:
            os.write(stderr, SHOW_CURSOR)
    remove_temporary_directories()
    os._exit(status)


class Watchdog:
    """Ends the process when its time is over, in a thread of its own. A context manager.

    `arm` may be called in a signal handler: it takes no lock.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def arm(self, status: int, seconds: float) -> None:
        """End the process with this status after so many seconds; the earliest of several times counts."""
        os.write(self._write, _ORDER.pack(status, seconds))

    def _run(self) -> None:
        deadline, status = float("inf"), 0
        while True:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([self._read], [], [], left if left < 1e6 else None)[0]:
                end_process(status)
            order = os.read(self._read, _ORDER.size)
            if not order:
                return
            told, seconds = _ORDER.unpack(order)
            if time.monotonic() + seconds < deadline:
                deadline, status = time.monotonic() + seconds, told


def _remember_terminal() -> None:
    global _terminal
    if _terminal is None and sys.__stdin__ is not None:
        with suppress(OSError, ValueError, termios.error):
            _terminal = termios.tcgetattr(sys.__stdin__.fileno())
