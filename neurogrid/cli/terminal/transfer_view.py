"""View of weights on their way: for each worker how much has come, how fast, and how long it will take yet.

Bars where somebody watches, a line now and then on a pipe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import (
    Progress as ProgressBar,
)

from neurogrid.planner import format_bytes

__all__ = ["TransferView", "format_bytes", "part_of"]

# Between two lines about one worker, on a pipe. Seconds.
LINE_INTERVAL: Final = 5.0


def part_of(num_bytes: float, whole: float) -> str:
    """A part of a number of bytes, in the unit of the whole: `0.3/12.3 GB`."""
    part, told = format_bytes(num_bytes), format_bytes(whole)
    number, _, unit = told.partition(" ")
    if part.endswith(f" {unit}"):
        return f"{part.partition(' ')[0]}/{told}"
    if whole < num_bytes or num_bytes / whole * float(number) < 0.05:
        return f"{part}/{told}"
    return f"{num_bytes * float(number) / whole:.1f}/{told}"


@dataclass
class _Worker:
    """One worker's layers.

    Attributes:
        total: bytes that have to come to it.
        done: those that have come.
        began: when its first bytes were about to go, on the clock of the view; when it was planned, until then.
        has_begun: whether they were.
        line_at: when the next line about it is due.
    """

    name: str
    total: int
    began: float
    line_at: float
    done: int = 0
    has_begun: bool = False
    task: TaskID | None = None


class TransferView:
    """The transfers to all workers. Its maker stops it.

    Args:
        say: writes a line.
        console: where to draw bars; None to write lines.
        clock: seconds, rising.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        console: Console | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._bar: ProgressBar | None = None
        if console is not None:
            self._bar = ProgressBar(
                TextColumn("  weights {task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._bar.start()

    def stop(self) -> None:
        """Take the bars down."""
        if self._bar is not None:
            self._bar.stop()

    def plan(self, peer_id: str, name: str, num_bytes: int) -> None:
        """So many bytes are to come to a worker."""
        now = self._clock()
        worker = self._workers[peer_id] = _Worker(name, num_bytes, now, now + LINE_INTERVAL)
        if self._bar is not None:
            worker.task = self._bar.add_task(f"to {name}", total=num_bytes, start=False)

    def begin(self, peer_id: str) -> None:
        """Bytes are about to go: what a worker did before it could take any is not their rate."""
        worker = self._workers[peer_id]
        if not worker.has_begun:
            worker.has_begun, worker.began = True, self._clock()
            worker.line_at = worker.began + LINE_INTERVAL
            if self._bar is not None and worker.task is not None:
                self._bar.start_task(worker.task)

    def came(self, peer_id: str, num_bytes: int) -> None:
        """So many more have come, from whomever."""
        worker = self._workers[peer_id]
        worker.done += num_bytes
        if self._bar is not None and worker.task is not None:
            self._bar.advance(worker.task, num_bytes)
        else:
            self._write(worker)

    def was_there(self, peer_id: str, num_bytes: int) -> None:
        """So many need not come. They say nothing of how fast the others do."""
        worker = self._workers[peer_id]
        worker.total -= num_bytes
        if self._bar is not None and worker.task is not None:
            self._bar.update(worker.task, total=worker.total)

    def _write(self, worker: _Worker) -> None:
        now = self._clock()
        is_done = worker.done >= worker.total
        if not is_done and now < worker.line_at:
            return
        worker.line_at = now + LINE_INTERVAL
        seconds = max(now - worker.began, 1e-9)
        rate = worker.done / seconds
        if is_done:
            text = f"all of {format_bytes(worker.total)} in {seconds:.1f} s, {format_bytes(rate)}/s"
        else:
            left = math.ceil((worker.total - worker.done) / rate)
            text = (
                f"{format_bytes(worker.done)} of {format_bytes(worker.total)}, {format_bytes(rate)}/s, "
                f"{left // 60}:{left % 60:02} left"
            )
        self._say(f"  weights to {worker.name}: {text}")
