"""A command whose reader has gone (`neurogrid-coordinator --help | head -1`) ends as other commands do: without a word.

Python ignores SIGPIPE, which ends other programs, and gets an error from the next write instead; it may come as late as
from the flush at the interpreter's end, where nobody can catch it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from functools import wraps
from typing import Final, Protocol

__all__ = ["PIPE_STATUS", "ends_with_its_reader"]

PIPE_STATUS: Final = 128 + signal.SIGPIPE
"""The status that a shell gives a program that SIGPIPE ended."""


class Main(Protocol):
    """A command: takes its arguments, or those of the process, and returns its status."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def ends_with_its_reader(main: Main) -> Main:
    """Make `main` return `PIPE_STATUS`, and nothing be said, where the reader of our stdout has gone."""

    @wraps(main)
    def wrapped(argv: Sequence[str] | None = None) -> int:
        try:
            try:
                return main(argv)
            finally:
                if sys.stdout is not None:  # it was closed before we began
                    sys.stdout.flush()
        except BrokenPipeError:
            # What is in the buffer yet would be written at the end of the interpreter, and fail again.
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), sys.stdout.fileno())
            return PIPE_STATUS

    return wrapped
