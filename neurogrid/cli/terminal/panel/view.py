"""A panel as plain data, and how it is drawn: pure functions, so that what is seen can be tested.

Columns give way where the terminal is narrow, rows and events where it is low. Nothing is told by colour alone.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from neurogrid.cli.terminal.text_rows import in_encoding, printable

__all__ = ["Cell", "Column", "Note", "View", "bar", "draw", "short_ids", "span", "spark"]

MAX_WIDTH: Final = 150
# Rows of notes: as many as there is room for between the two; and of one of them.
MAX_NOTE_ROWS: Final = 8
MIN_NOTE_ROWS: Final = 3
MAX_ROWS_PER_NOTE: Final = 3
# Rows that belong to none of the parts: borders, head of the table, two lines between.
FRAME_ROWS: Final = 5
NO_BREAK: Final = "\N{NO-BREAK SPACE}"
# Of Ed25519 keys, in base 58.
_PEER_ID: Final = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
BLOCKS: Final = "▁▂▃▄▅▆▇█"

Cell = str | tuple[str, str]
"""A text, or a text and its style."""


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        min_width: of the terminal, for it to be shown.
        share: of what the columns without a share leave; it is cut where that is too little.
    """

    name: str
    is_number: bool = False
    min_width: int = 0
    share: int | None = None


@dataclass(frozen=True)
class Note:
    """Something that happened.

    Attributes:
        time: of the day.
    """

    time: str
    text: str
    style: str = ""


@dataclass(frozen=True)
class View:
    """All that a panel says.

    Attributes:
        state: how things are, in a word or two.
        figures: what stands below the table: groups, each of which begins a line, of whole phrases.
        notes: oldest first; the last ones are shown.
        foot: on the lower border.
    """

    title: str
    state: str
    state_style: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    figures: tuple[tuple[str, ...], ...]
    notes: tuple[Note, ...]
    foot: str


def draw(view: View, *, width: int, height: int, encoding: str = "utf-8") -> RenderableType:
    """The panel for a terminal of that many columns and rows."""
    letters = _Letters(encoding)
    width = min(width, MAX_WIDTH)
    inner = max(width - 4, 10)
    figures = [line for group in view.figures for line in _lines_of(group, letters, inner)]
    room = max(height - 1 - FRAME_ROWS - len(figures), MIN_NOTE_ROWS + 2)
    note_rows = max(min(MAX_NOTE_ROWS, room - len(view.rows)), MIN_NOTE_ROWS)
    notes = _notes(view.notes, letters, inner, note_rows)
    rows = view.rows[: room - len(notes)]
    if len(rows) < len(view.rows):
        rows = rows[:-1]

    parts: list[RenderableType] = []
    if rows:
        parts.append(_table(view.columns, rows, letters, width))
    if len(rows) < len(view.rows):
        parts.append(letters.text(f"and {len(view.rows) - len(rows)} more", "dim"))
    if figures:
        parts += [Text()] * bool(parts)
        parts += [letters.text(line) for line in figures]
    if notes:
        parts += [Text()] * bool(parts)
        parts += notes
    state = letters.text(view.state, view.state_style)
    state.truncate(max(width // 2, 8), overflow=letters.overflow)
    title = letters.text(view.title, "bold")
    title.truncate(max(width - state.cell_len - 8, 8), overflow=letters.overflow)
    return Panel(
        Group(*parts),
        title=Text.assemble(title, "  ", state),
        title_align="left",
        subtitle=letters.text(view.foot) if view.foot else None,
        subtitle_align="left",
        box=box.ROUNDED if letters.has_unicode else box.ASCII,
        border_style="dim",
        width=width,
    )


class _Letters:
    """Texts that a terminal of an encoding can show."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self.has_unicode = in_encoding("…", encoding) == "…"
        self.overflow: Literal["ellipsis", "crop"] = "ellipsis" if self.has_unicode else "crop"

    def shown(self, text: str) -> str:
        return in_encoding(printable(text).replace("\n", " "), self._encoding)

    def text(self, text: str, style: str = "") -> Text:
        return Text(self.shown(text), style=style, no_wrap=True, overflow=self.overflow)


def _lines_of(figures: Sequence[str], letters: _Letters, width: int) -> list[str]:
    """Lines that end between figures, not within one."""
    kept = f"{NO_BREAK}· ".join(figure.replace(" ", NO_BREAK) for figure in figures)
    return [line.replace(NO_BREAK, " ") for line in textwrap.wrap(letters.shown(kept), width)]


def _table(
    columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]], letters: _Letters, width: int
) -> Table:
    shown = [index for index, column in enumerate(columns) if width >= column.min_width]
    table = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="dim")
    for index in shown:
        column = columns[index]
        table.add_column(
            letters.text(column.name),
            justify="right" if column.is_number else "left",
            no_wrap=True,
            ratio=column.share,
        )
    for row in rows:
        cells = [row[index] for index in shown]
        table.add_row(
            *(
                letters.text(cell) if isinstance(cell, str) else letters.text(*cell)
                for cell in cells
            )
        )
    return table


def _notes(notes: Sequence[Note], letters: _Letters, width: int, num_rows: int) -> list[Text]:
    """The last notes, whole ones, in so many rows."""
    found: list[Text] = []
    for note in reversed(notes):
        gap = " " * (len(note.time) + 1)
        lines = textwrap.wrap(letters.shown(note.text), max(width - len(gap), 10))
        if len(lines) > MAX_ROWS_PER_NOTE:
            lines = lines[:MAX_ROWS_PER_NOTE]
            lines[-1] += letters.shown(" …")
        first = Text.assemble((f"{note.time} ", "dim"), (lines[0] if lines else "", note.style))
        shown = [first, *(letters.text(gap + line, note.style) for line in lines[1:])]
        if len(found) + len(shown) > num_rows:
            break
        found = shown + found
    for line in found:
        line.no_wrap, line.overflow = True, letters.overflow
    return found


def short_ids(text: str) -> str:
    """The text with only the ends of peer ids, which tell them apart."""
    return _PEER_ID.sub(lambda found: f"…{found[0][-8:]}", text)


def bar(part: float, *, cells: int = 10) -> str:
    """Return a progress bar of `cells` columns and two brackets; `part` is the share that is done, 0 to 1."""
    filled = round(min(max(part, 0.0), 1.0) * cells)
    return "[" + "#" * filled + "." * (cells - filled) + "]"


def span(seconds: float) -> str:
    """A time: seconds below a minute, then minutes, since what is below makes no difference any more."""
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{int(seconds)} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def spark(values: Sequence[float], encoding: str = "utf-8") -> str:
    """A small curve; empty where it would be flat at zero, or has no signs for it."""
    top = max(values, default=0.0)
    if top <= 0 or in_encoding("…", encoding) != "…":
        return ""
    return "".join(BLOCKS[min(int(value / top * len(BLOCKS)), len(BLOCKS) - 1)] for value in values)
