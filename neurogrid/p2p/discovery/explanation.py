"""Attempts to find peers, what answered, what did not and why: as data, and as a table to print."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from neurogrid.errors import ConfigurationError, NeuroGridError, PeerRefusedError
from neurogrid.p2p.discovery.sighting import Attempt

__all__ = ["Attempts", "Explanation", "dial_outcome"]

# What a source tried last; a coordinator of some dozens of peers tries less.
MAX_ATTEMPTS_OF_SOURCE = 256
MAX_CELL = 240  # characters

NO_DIALLED_ADDRESS = "no address of it that can be dialled is known"

_NO_ROUTE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL})


@dataclass(frozen=True)
class Explanation:
    """All attempts to find peers; `str` makes a table of them.

    Attributes:
        attempts: grouped by source, in the order in which they were first made.
    """

    attempts: tuple[Attempt, ...]

    def __str__(self) -> str:
        rows = [("source", "tried", "", "outcome")]
        for attempt in self.attempts:
            mark = "+" if attempt.is_good else "-"
            rows.append((attempt.source, attempt.what, mark, attempt.outcome or "under way"))
        cells = [[_printable(cell) for cell in row] for row in rows]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        return "\n".join(
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
            ).rstrip()
            for row in cells
        )


class Attempts:
    """The latest attempts of each source, one for each thing that is tried."""

    def __init__(self) -> None:
        self._by_source: dict[str, OrderedDict[str, Attempt]] = {}

    def put(self, attempt: Attempt) -> None:
        """Note an attempt, or what came of it."""
        attempts = self._by_source.setdefault(attempt.source, OrderedDict())
        attempts[attempt.what] = attempt
        if len(attempts) > MAX_ATTEMPTS_OF_SOURCE:
            attempts.popitem(last=False)

    def get(self, source: str, what: str) -> Attempt | None:
        """Return this attempt as it is noted; None if it is not."""
        attempts = self._by_source.get(source)
        return None if attempts is None else attempts.get(what)

    def has(self, source: str) -> bool:
        """Whether a source has tried anything."""
        return source in self._by_source

    def __iter__(self) -> Iterator[Attempt]:
        for attempts in self._by_source.values():
            yield from attempts.values()


def dial_outcome(error: NeuroGridError) -> str:
    """Return the reason why a dial failed: a few words that are the same for each kind, then the error's own."""
    return f"{_kind(error)}: {error}"


def _kind(error: NeuroGridError) -> str:
    if isinstance(error, ConfigurationError):
        return "no common transport"
    if isinstance(error, PeerRefusedError):
        return "refused"
    for number in _error_numbers(error):
        if number == errno.ECONNREFUSED:
            return "refused"
        if number in _NO_ROUTE:
            return "no route"
        if number == errno.ETIMEDOUT:
            return "no answer"
    text = str(error)
    if "another peer lives there" in text:
        return "wrong key"
    if NO_DIALLED_ADDRESS in text:
        return "no common transport"
    return "no answer" if "no answer" in text else "failed"


def _error_numbers(error: BaseException) -> Iterator[int]:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
            continue
        if isinstance(cause, OSError) and cause.errno is not None:
            yield cause.errno
        cause = cause.__cause__


def _printable(text: str) -> str:
    """Shorten a text to one printable line, whatever a stranger wrote into it."""
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown if len(shown) <= MAX_CELL else f"{shown[: MAX_CELL - 1]}…"
