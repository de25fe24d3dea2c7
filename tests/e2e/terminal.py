"""A command on a pseudo-terminal, as somebody has it before them: types, reads, presses Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.e2e.preloaded import DEADLINE, ENVIRONMENT, Popen

__all__ = ["CTRL_C", "CTRL_D", "Terminal", "on_terminal"]

CTRL_C, CTRL_D = "\x03", "\x04"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STYLES = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """What a command has written to it, and what is typed into it. Made by `on_terminal`."""

    def __init__(self, master: int, slave: int, process: Popen) -> None:
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

    def wait_end(self) -> int:
        """Its exit status."""
        status = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return status

    def close(self) -> None:
        """End it, however it is."""
        self.process.kill()
        self.process.wait(DEADLINE)
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
    hidden = ("COLUMNS", "LINES", "NO_COLOR")
    inherited = {name: value for name, value in ENVIRONMENT.items() if name not in hidden}
    process = Popen(
        [sys.executable, "-m", f"neurogrid.cli.commands.{command}", *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**inherited, **environment, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    terminal = Terminal(master, slave, process)
    try:
        yield terminal
    finally:
        terminal.close()
