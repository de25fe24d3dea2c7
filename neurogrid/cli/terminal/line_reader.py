"""Lines that somebody types, or that come by a pipe; trio goes on while they are waited for.

On a terminal they are edited, and those of before come back with the arrow keys (readline). There Ctrl-C empties the
line.
"""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import trio

from neurogrid.cli.terminal.screen import Screen
from neurogrid.errors import ConfigurationError

__all__ = ["LineReader", "in_leavable_thread", "open_lines"]

T = TypeVar("T")

MAX_LINE_BYTES: Final = 1024 * 1024
MAX_HISTORY: Final = 1000
READ_SIZE: Final = 65536
# Indices of termios' attributes, and what stands for "no key".
LOCAL_MODES, CONTROL_KEYS, NO_KEY = 3, 6, b"\x00"


async def in_leavable_thread(call: Callable[[], T]) -> T:
    """Return what `call` returns, called in a thread; cancelled, the call is left to itself."""
    run_sync: Any = trio.to_thread.run_sync  # its stubs lack `abandon_on_cancel`
    result: T = await run_sync(call, abandon_on_cancel=True)
    return result


class LineReader:
    """Reads standard input by lines. Made by `open_lines`.

    Attributes:
        is_interactive: somebody types, and sees the answers in the same terminal.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._pending = b""
        self._is_over = False
        self._input = sys.stdin.fileno()
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()

    async def read(self, prompt: str) -> str | None:
        """The next line, without its end; None when no more come.

        Args:
            prompt: shown where somebody types.

        Raises:
            ConfigurationError: it is not UTF-8, or longer than any model's context.
        """
        if self.is_interactive:
            return await in_leavable_thread(lambda: self._read_typed(prompt))
        if sys.stdin.isatty():
            self._screen.ask(prompt)
        while b"\n" not in self._pending and not self._is_over:
            # Not `sys.stdin`: a thread that is left would hold its lock, and with it the end of the process.
            data = await in_leavable_thread(lambda: os.read(self._input, READ_SIZE))
            self._pending += data
            self._is_over = not data
            if len(self._pending) > MAX_LINE_BYTES + READ_SIZE:
                break
        line, newline, self._pending = self._pending.partition(b"\n")
        if not line and not newline:
            return None
        if len(line) > MAX_LINE_BYTES:
            raise ConfigurationError(f"a line on standard input has more than {MAX_LINE_BYTES:,} B")
        try:
            return line.decode().removesuffix("\r")
        except UnicodeDecodeError as exc:
            raise ConfigurationError("a line on standard input is not UTF-8 text") from exc

    def _read_typed(self, prompt: str) -> str | None:
        import readline

        try:
            with (
                _without_interrupt(self._input),
                self._screen.reading(lambda: prompt + readline.get_line_buffer()),
            ):
                return input(prompt)
        except EOFError:
            self._screen.say("")
            return None
        except UnicodeDecodeError as exc:
            raise ConfigurationError("what was typed is not UTF-8 text") from exc


@contextmanager
def open_lines(screen: Screen) -> Iterator[LineReader]:
    """Read standard input until the block is left; the terminal is then as it was, even if a line is awaited."""
    reader = LineReader(screen)
    if not reader.is_interactive:
        yield reader
        return
    import readline

    readline.set_history_length(MAX_HISTORY)
    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind ^C ed-kill-line")
    else:
        readline.parse_and_bind('"\\C-c": kill-whole-line')
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    changed = termios.tcgetattr(file)
    # What is typed while nobody reads stays what it is for the next line: made into lines by the terminal, a Ctrl-D
    # would be lost on the way.
    changed[LOCAL_MODES] &= ~termios.ICANON
    changed[CONTROL_KEYS][termios.VMIN], changed[CONTROL_KEYS][termios.VTIME] = 1, 0
    termios.tcsetattr(file, termios.TCSANOW, changed)
    try:
        yield reader
    finally:
        termios.tcsetattr(file, termios.TCSANOW, before)


@contextmanager
def _without_interrupt(file: int) -> Iterator[None]:
    """Ctrl-C is a key like others: no signal would wake the thread that reads."""
    before = termios.tcgetattr(file)
    changed: list[Any] = termios.tcgetattr(file)
    changed[CONTROL_KEYS][termios.VINTR] = NO_KEY
    termios.tcsetattr(file, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSANOW, before)
