"""View of a download from a hub: how much has come, how fast, and how long it will take yet.

A bar where somebody watches, a line now and then on a pipe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as ProgressBar
from rich.status import Status

from neurogrid.cli.terminal.screen import Screen
from neurogrid.cli.terminal.transfer_view import part_of
from neurogrid.hub.download import DownloadProgress
from neurogrid.planner import format_bytes

__all__ = ["DownloadView"]

# Between two lines, on a pipe. Seconds.
LINE_INTERVAL: Final = 10.0


class DownloadView(DownloadProgress):
    """One download; a context manager, so that what moves is always taken down.

    Args:
        name: of the model.
        clock: seconds, rising.
    """

    def __init__(
        self, screen: Screen, name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._screen = screen
        self._name = name
        self._clock = clock
        self._status: Status | None = None
        self._bar: ProgressBar | None = None
        self._total = 0
        self._there = 0
        self._there_before = 0
        self._began = clock()
        self._line_at = 0.0
        self._is_fetching = False

    def __enter__(self) -> DownloadView:
        if self._screen.is_live:
            self._spin(f"looking for {self._name}")
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._stop()
        if self._is_fetching and kind is not None and issubclass(kind, trio.Cancelled):
            self._screen.say(
                f"stopped with {part_of(self._there, self._total)} of {self._name} here; the next time it goes on "
                "from there",
                event="download_stopped",
                there=self._there,
            )
        elif self._is_fetching and kind is None:
            seconds = max(self._clock() - self._began, 1e-9)
            came = self._total - self._there_before
            self._screen.say(
                f"{self._name}: {format_bytes(came)} came in {seconds:.1f} s ({format_bytes(came / seconds)}/s)",
                event="downloaded",
                num_bytes=came,
            )

    def waiting(self) -> None:
        what = f"another process fetches {self._name}: waiting for it"
        if self._screen.is_live:
            self._spin(what)
        else:
            self._screen.say(what, event="download_waiting")

    def found(self, total: int, there: int, num_files: int, folder: Path) -> None:
        self._stop()
        self._total, self._there, self._there_before = total, there, there
        self._began = self._clock()
        self._line_at = self._began + LINE_INTERVAL
        if not num_files:
            return
        self._is_fetching = True
        held = f" ({format_bytes(there)} are there)" if there else ""
        self._screen.say(
            f"fetching {self._name}: {format_bytes(total - there)} in {num_files} file{'s' * (num_files != 1)}{held}, "
            f"to {folder}",
            event="download_found",
            total=total,
            there=there,
            folder=str(folder),
        )
        if self._screen.is_live:
            self._bar = ProgressBar(
                TextColumn("  fetched"),  # no name: they are long, and the line above has it
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=self._screen.console,
                transient=True,
            )
            self._bar.add_task(self._name, total=total, completed=there)
            self._bar.start()

    def came(self, there: int) -> None:
        self._there = there
        if self._bar is not None:
            (task,) = self._bar.task_ids
            self._bar.update(task, completed=there)
            return
        now = self._clock()
        if now < self._line_at:
            return
        self._line_at = now + LINE_INTERVAL
        rate = max((there - self._there_before) / max(now - self._began, 1e-9), 1.0)
        left = round((self._total - there) / rate)
        self._screen.say(
            f"  {self._name}: {part_of(there, self._total)}, {format_bytes(rate)}/s, {_span(left)} left",
            event="downloading",
            total=self._total,
            there=there,
        )

    def silent(self, reason: str, seconds: float) -> None:
        self._screen.say(
            f"nothing comes ({reason}): asking again in {seconds:g} s",
            level=logging.WARNING,
            event="download_silent",
        )

    def _spin(self, what: str) -> None:
        self._stop()
        self._status = self._screen.spinner(what)
        self._status.start()

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _span(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
