"""Keeps a panel at the bottom of the terminal, and draws it again when it would look different."""

from __future__ import annotations

import select
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment

from neurogrid.cli.terminal.panel.view import View, draw
from neurogrid.cli.terminal.queued_stream import QueuedStream
from neurogrid.cli.terminal.screen import Screen

__all__ = ["open_panel"]

INTERVAL: Final = 0.5  # seconds between two looks
# What the terminal writes behind the panel when it is ended: if that took another row, the panel's top would stay.
ECHO: Final = "^C"


@asynccontextmanager
async def open_panel(screen: Screen, look: Callable[[], View]) -> AsyncIterator[None]:
    """Show what `look` gives until the block is left; its last state stays on the terminal.

    Only where `screen.is_live`. What else is said meanwhile stands above.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_show, screen, look)
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()


async def _show(screen: Screen, look: Callable[[], View]) -> None:
    console = screen.console
    while True:
        panel = _Panel(console)
        with Live(
            console=console,
            auto_refresh=False,
            # Anything printed to the same terminal would tear it; a pipe gets what is printed.
            redirect_stdout=screen.is_shared,
            vertical_overflow="crop",
        ) as live:
            try:
                while not panel.is_resized:
                    # A terminal that was stopped (Ctrl-S) or does not keep up is not to stop the command.
                    if _takes_more(console):
                        panel.update(live, look())
                    await trio.sleep(INTERVAL)
            finally:
                if not panel.is_resized and _takes_more(console):
                    panel.update(live, look())
        panel.take_back()


def _takes_more(console: Console) -> bool:
    if isinstance(console.file, QueuedStream) and console.file.is_behind:
        return False
    return bool(select.select([], [console.file], [], 0)[1])


class _Panel:
    """The panel as it was drawn last, on a terminal of one size."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._size = console.size
        self._view: View | None = None
        self._lines: list[list[Segment]] = []

    @property
    def is_resized(self) -> bool:
        """Whether the terminal has another size now: then what was drawn has moved."""
        return self._console.size != self._size

    def update(self, live: Live, view: View) -> None:
        """Draw it, if it would look different."""
        if view == self._view:
            return
        self._view = view
        console, (width, height) = self._console, self._size
        drawn = draw(view, width=width - len(ECHO), height=height, encoding=console.encoding)
        self._lines = console.render_lines(drawn, pad=False)
        live.update(_Lines(self._lines), refresh=True)

    def take_back(self) -> None:
        """Remove it after it was resized; the cursor stands below it."""
        drawn = max((Segment.get_line_length(line) for line in self._lines), default=0)
        # A narrower terminal has broken each line.
        num_rows = len(self._lines) * max(-(-drawn // self._console.width), 1)
        self._console.file.write(f"\x1b[{num_rows}A\r\x1b[J")
        self._console.file.flush()


class _Lines:
    """Lines that have been rendered, for rich."""

    def __init__(self, lines: list[list[Segment]]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self._lines:
            yield from line
            yield Segment.line()
