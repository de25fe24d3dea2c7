"""Text on a terminal: what of it stands on the row of the cursor, and what of it may be shown at all."""

from __future__ import annotations

import re
import textwrap
from functools import lru_cache
from typing import Final

__all__ = ["fold", "in_encoding", "last_row", "num_cells", "printable"]

TAB: Final = 8
HANGING: Final = "    "
# Control characters: a model or a peer could steer the terminal with them. Newlines and tabs are text.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PLAIN: Final = str.maketrans({"…": "...", "·": "-", "→": "->", "●": "*", "○": "o", "✗": "x"})


def printable(text: str) -> str:
    """The text with control characters spelt out (`\\x1b`), so that they do nothing."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def in_encoding(text: str, encoding: str | None) -> str:
    """The text with our own few signs spelt in ASCII, where the terminal has no Unicode."""
    if (encoding or "ascii").lower().replace("-", "").startswith("utf"):
        return text
    return text.translate(_PLAIN)


def fold(text: str, width: int) -> str:
    """The text with the lines that are longer than `width` broken between words, the rest of each indented below it.

    A word that is longer than that stays whole: it may be an address or a path.
    """
    return "\n".join(row for line in text.split("\n") for row in _fold(line, width))


def _fold(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip(" "))] + HANGING
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )


def num_cells(row: str, width: int) -> int:
    """Columns that a row takes, at most `width`."""
    column = 0
    for character in row:
        column = _next_column(column, character, width)
    return column


def last_row(line: str, width: int) -> str:
    """Return what of a line without newlines stands on its last row, on a terminal of `width` columns."""
    column, start = 0, 0
    for index, character in enumerate(line):
        if column + _num_cells(character) > width:
            column, start = 0, index
        column = _next_column(column, character, width)
    return line[start:]


def _next_column(column: int, character: str, width: int) -> int:
    if character == "\t":
        return min((column // TAB + 1) * TAB, width - 1)
    return column + _num_cells(character)


@lru_cache(4096)
def _num_cells(character: str) -> int:
    from rich.cells import (
        get_character_cell_size,
    )  # here, not above: an error is told without rich, too

    return get_character_cell_size(character)
