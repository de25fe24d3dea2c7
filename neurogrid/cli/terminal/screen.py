"""Output of a command: the completion to stdout, all that is said to stderr, so that neither tears the other.

Where both are one terminal, what is said while a completion stands half written on the row of the cursor takes that
row, and the row is written again below. A terminal gets line breaks between words where its rows end; on a pipe stdout
gets the text and nothing else.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Final, TextIO, cast

from neurogrid.cli.terminal.queued_stream import QueuedStream
from neurogrid.cli.terminal.text_rows import fold, in_encoding, last_row, num_cells, printable
from neurogrid.cli.terminal.word_wrap import WordWrap

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

__all__ = ["Screen"]

DEFAULT_WIDTH: Final = 80
# Seconds that a command waits at its end for what it said to be seen.
FINISH_TIMEOUT: Final = 1.0


class Screen:
    """stdout and stderr of a command. Its methods may be called in any thread.

    Args:
        formatter: makes an object of each line, for `--json-logs`; None to write lines for people.

    Attributes:
        with_names: puts beside the peer ids of a line for people what their machines are called, once that is known.
    """

    def __init__(self, formatter: logging.Formatter | None = None) -> None:
        self._formatter = formatter
        self._lock = threading.RLock()
        self._wrap = WordWrap()
        self._typed: Callable[[], str] | None = None
        self.with_names: Callable[[str], str] = str
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.isatty():
            # What the terminal's encoding has not is shown as ?; a pipe gets the text or an error.
            sys.stdout.reconfigure(errors="replace")

    @property
    def is_json(self) -> bool:
        """Whether every line on stderr is a JSON object."""
        return self._formatter is not None

    @cached_property
    def console(self) -> Console:
        """stderr, for rich."""
        from rich.console import Console  # here, not above: --help does without

        # More than the standard asks: no escape codes for style at all, not only none for colour.
        if os.environ.get("NO_COLOR"):
            return Console(stderr=True, color_system=None)
        return Console(stderr=True)

    @property
    def is_terminal(self) -> bool:
        """Whether somebody reads stderr where it appears, and it is kept nowhere."""
        return not self.is_json and sys.stderr.isatty()

    @property
    def is_live(self) -> bool:
        """Whether something that moves can be drawn on stderr."""
        return self.is_terminal and not self.console.is_dumb_terminal

    def spinner(self, what: str) -> Status:
        """Make what moves on stderr, where something can, while this takes its time; to be started and stopped."""
        is_plain = self.console.options.ascii_only
        dots, spinner = ("...", "line") if is_plain else ("…", "dots")
        return self.console.status(f"{what} {dots}", spinner=spinner)

    @cached_property
    def is_shared(self) -> bool:
        """Whether stdout and stderr are the same terminal."""
        try:
            names = {os.ttyname(stream.fileno()) for stream in (sys.stdout, sys.stderr)}
            return len(names) == 1
        except OSError:
            return False

    @cached_property
    def _wraps(self) -> bool:
        """Whether somebody reads stdout where it appears."""
        return sys.stdout.isatty()

    def write(self, text: str) -> None:
        """Write some more of the completion to stdout; on a terminal the last word waits for its end."""
        with self._lock:
            if self._wraps:
                text = self._wrap.push(printable(text), _width(sys.stdout))
            sys.stdout.write(text)
            sys.stdout.flush()

    def print(self, text: str) -> None:
        """Write a line to stdout, of a command that writes no completion; to a terminal as far as it is printable."""
        if self._wraps:
            text = printable(text)
        if self.is_shared:
            # With what is said, so that neither overtakes the other.
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
        else:
            print(text, flush=True)

    def say(
        self, text: str, *, level: int = logging.INFO, whole: bool = False, **fields: object
    ) -> None:
        """Say something on stderr, on lines of its own.

        Args:
            whole: it is to be copied, so that no terminal gets a line break in it.
            fields: what the text tells, for programs; they stand in the JSON object.
        """
        if self._formatter is not None:
            record = logging.makeLogRecord(
                {**fields, "name": "neurogrid", "msg": text, "levelno": level}
            )
            record.levelname = logging.getLevelName(level)
            text = self._formatter.format(record)
        self.show(text, whole=whole)

    def show(self, text: str, *, whole: bool = False) -> None:
        """Write finished lines to stderr; a terminal gets them broken between words, unless they stay `whole`."""
        text = printable(text if self.is_json else self.with_names(text))
        with self._lock:
            if sys.stderr.isatty():
                text = in_encoding(text, sys.stderr.encoding)
                if not (whole or self.is_json):
                    text = fold(text, _width(sys.stderr))
            row = self._clear_row() if self.is_shared else ""
            if "console" in vars(self):  # then something may move there, which makes room
                self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)
            else:
                sys.stderr.write(text + "\n")
                sys.stderr.flush()
            if row:
                sys.stdout.write(row)
                sys.stdout.flush()

    @contextmanager
    def never_waiting(self) -> Iterator[None]:
        """Nobody waits for stderr while the block runs: it is for commands that serve others."""
        direct = sys.stderr
        # It was closed before we began, or takes everything at once.
        if direct is None or _is_file(direct):
            yield
            return
        stream = QueuedStream(direct, self._lost)
        stream.start()
        sys.stderr = cast(TextIO, stream)
        try:
            yield
        finally:
            if stream.finish(FINISH_TIMEOUT):
                sys.stderr = direct

    def _lost(self, num_lines: int) -> str:
        text = f"{num_lines} lines were not shown: nobody took them"
        if self._formatter is not None:
            record = {"name": "neurogrid", "msg": text, "levelno": logging.WARNING}
            made = logging.makeLogRecord({**record, "levelname": "WARNING", "num_lines": num_lines})
            text = self._formatter.format(made)
        return f"{text}\n"

    def ask(self, prompt: str) -> None:
        """Show on stderr that somebody is to type, where stdout goes elsewhere."""
        sys.stderr.write(prompt)
        sys.stderr.flush()

    def end_line(self) -> None:
        """Move the cursor of the terminal to the beginning of a row, if the completion has not."""
        with self._lock:
            if not self._wrap.is_clean:
                self.write("\n")

    @contextmanager
    def ending_line(self) -> Iterator[None]:
        """The same, however the block ends."""
        try:
            yield
        finally:
            self.end_line()

    @contextmanager
    def reading(self, typed: Callable[[], str]) -> Iterator[None]:
        """Keep typed text on the screen within the block: `typed` gives the prompt and what stands behind it so far."""
        self._typed = typed
        try:
            yield
        finally:
            self._typed = None

    def _clear_row(self) -> str:
        """Make the row of the cursor empty; returns what is to be written there again."""
        width = _width(sys.stdout)
        typed = self._typed
        row = self._wrap.row if typed is None else last_row(typed().rpartition("\n")[2], width)
        taken = num_cells(row, width)
        if not taken:
            return ""
        if taken >= width:  # it is full, and the next character would begin another
            sys.stdout.write("\n")
            self._wrap.row = row = ""
        else:
            sys.stdout.write(f"\r{' ' * taken}\r")
        sys.stdout.flush()
        return row


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except OSError:
        return DEFAULT_WIDTH


def _is_file(stream: TextIO) -> bool:
    return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
