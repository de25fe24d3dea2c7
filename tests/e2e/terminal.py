"""A command on a pseudo-terminal, as somebody has it before them: types, reads, presses Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import runpy
import signal
import struct
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess

from tests.e2e.commands import PRELOADED
from tests.e2e.support import DEADLINE, ENVIRONMENT

__all__ = ["CTRL_C", "CTRL_D", "Terminal", "on_terminal"]

CTRL_C, CTRL_D = "\x03", "\x04"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STYLES = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """What a command has written to it, and what is typed into it. Made by `on_terminal`."""

    def __init__(self, master: int, slave: int, process: BaseProcess) -> None:
        self.process = process
        self._master = master
        # Kept open until the command has it: a terminal that nobody has open is at its end.
        self._slave: int | None = slave
        self._written = ""
        self._seen = 0
        self._changed = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # which is the end
            while data := os.read(self._master, 65536):
                self._let_go()
                with self._changed:
                    self._written += data.decode(errors="replace")
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _let_go(self) -> None:
        slave, self._slave = self._slave, None
        if slave is not None:
            os.close(slave)

    @property
    def written(self) -> str:
        """All that was written, escape codes included."""
        return self._written

    @property
    def text(self) -> str:
        """The same without escape codes."""
        return ESCAPES.sub("", self._written).replace("\r\n", "\n")

    def wait(self, part: str) -> str:
        """Wait for `part` in what comes from here on; returns what came before it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or part in self.text[self._seen :], DEADLINE
            )
            new = self.text[self._seen :]
            assert part in new, self.text
            self._seen += new.index(part) + len(part)
            return new[: new.index(part)]

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._master, text.encode())

    def wait_end(self) -> int | None:
        """Its exit status."""
        self.process.join(DEADLINE)
        self._reader.join(DEADLINE)
        return self.process.exitcode

    def close(self) -> None:
        """End it, however it is."""
        self.process.kill()
        self.process.join(DEADLINE)
        self._let_go()
        self._reader.join(DEADLINE)
        os.close(self._master)


@contextmanager
def on_terminal(
    command: str, *args: str, columns: int = 100, rows: int = 30, **environment: str
) -> Iterator[Terminal]:
    """Run a command on a terminal of its own, which controls it, until the block is left."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = PRELOADED.Process(
        target=_run_on, args=(os.ttyname(slave), command, args, {**ENVIRONMENT, **environment})
    )
    process.start()
    terminal = Terminal(master, slave, process)
    try:
        yield terminal
    finally:
        terminal.close()


def _run_on(terminal: str, command: str, args: Sequence[str], environment: dict[str, str]) -> None:
    os.setsid()
    # A shell gives it back to what it starts in the foreground, whoever ignores it here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The first terminal that the leader of a session opens is the one that controls it.
    file = os.open(terminal, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(file, descriptor)
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        os.environ.pop(name, None)
    os.environ.update(environment, TERM="xterm-256color")
    sys.stdin = os.fdopen(0, encoding="utf-8")
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape")
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace")
    sys.argv = [command, *args]
    runpy.run_module(f"neurogrid.cli.commands.{command}", run_name="__main__")
