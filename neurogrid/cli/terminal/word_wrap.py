"""Text that comes bit by bit, broken into rows between its words: a terminal would break inside of them.

Line breaks are put in, nothing is left out: without them the text is what it was. What is kept back is the word that
is being written, since it may still become too long for the row; one that is longer than any row goes out as it comes,
and the terminal breaks it. Characters of scripts that are written without spaces are words of their own.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Final

from neurogrid.cli.terminal.text_rows import last_row, num_cells

__all__ = ["WordWrap"]

# What is kept back of a word that takes no columns: combining characters without end.
MAX_WORD_CHARS: Final = 1024
# What opens and what closes: no break behind the one, nor before the other.
_OPENING: Final = frozenset({"Ps", "Pi"})
_LETTERS: Final = frozenset({"L", "N"})


class WordWrap:
    """Row that the cursor of a terminal is on, and the word that may not fit behind it.

    Attributes:
        row: what stands on the row of the cursor.
    """

    def __init__(self) -> None:
        self.row = ""
        self._word = ""
        self._before = ""  # of a word that goes out as it comes, its last character

    @property
    def is_clean(self) -> bool:
        """Whether the cursor is at the beginning of a row, and nothing is kept back."""
        return not self.row and not self._word

    def push(self, text: str, width: int) -> str:
        """Return what is to be written to a terminal of so many columns, now that this has come."""
        self.row = last_row(self.row, width)
        out = []
        for character in text:
            if character in "\n \t":
                out += [self._end_word(width), self._put_space(character, width)]
            else:
                before = self._word[-1:] or self._before
                if before and _may_break(before, character):
                    out.append(self._end_word(width))
                out.append(self._extend_word(character, width))
        return "".join(out)

    def _put_space(self, character: str, width: int) -> str:
        if character == "\n":
            self.row = ""
            return character
        is_full = num_cells(self.row, width) >= width
        self.row = character if is_full else self.row + character
        return "\n" + character if is_full else character

    def _extend_word(self, character: str, width: int) -> str:
        if self._before:
            self._before = character
            self.row = last_row(self.row + character, width)
            return character
        self._word += character
        if len(self._word) <= MAX_WORD_CHARS and num_cells(self._word, width) <= width:
            return ""
        out = self._end_word(width)
        self._before = character
        return out

    def _end_word(self, width: int) -> str:
        word, self._word, self._before = self._word, "", ""
        if not word:
            return ""
        # One column less: the space behind a word is to stand on its row.
        fits = num_cells(self.row, width) + num_cells(word, width) < width
        if fits or not self.row:
            self.row = last_row(self.row + word, width)
            return word
        self.row = last_row(word, width)
        return "\n" + word


@lru_cache(4096)
def _may_break(before: str, after: str) -> bool:
    """Whether a row may end between two characters of which none is a space."""
    first, second = unicodedata.category(before), unicodedata.category(after)
    if first in _OPENING or not (second[0] in _LETTERS or second in _OPENING):
        return False
    return _is_wide(before) or (_is_wide(after) and second == "Lo")


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"
