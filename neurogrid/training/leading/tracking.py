"""Figures of a run for the trackers that its run file names, by the interface that `accelerate` has to them.

A tracker may be slow, or reach nobody: it works in a thread of its own, and one that fails is left out. metrics.jsonl
has all that they are told.
"""

from __future__ import annotations

import json
import logging
import math
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from neurogrid.errors import ConfigurationError
from neurogrid.training.leading.progress import QuietProgress
from neurogrid.training.runs.run_file import RunFile

__all__ = ["Tracking", "make_trackers", "open_tracking"]

logger = logging.getLogger(__name__)

# Lines that may wait for trackers; what comes on top of them is in metrics.jsonl alone.
_MAX_WAITING: Final = 256
# Seconds at the end of a run for what waits.
_FINISH_TIMEOUT: Final = 30.0


def make_trackers(run: RunFile, directory: Path) -> dict[str, Any]:
    """Make and start the trackers that a run file names, by their names.

    Args:
        directory: for those that keep files.

    Raises:
        ConfigurationError: a package is missing; says which.
    """
    names = run.track.to
    if not names:
        return {}
    wanted = f"[track] to = {json.dumps(names)}"
    try:
        from accelerate import PartialState, tracking
    except ImportError as exc:
        raise ConfigurationError(
            f"{wanted} needs the package accelerate: pip install -r packaging/requirements/training.txt (in the "
            "source), or leave [track] out"
        ) from exc
    available = {str(getattr(each, "value", each)) for each in tracking.get_available_trackers()}
    if missing := [name for name in names if name not in available]:
        raise ConfigurationError(
            f"{wanted} needs what is not installed here: pip install {' '.join(missing)}, or take it out"
        )
    PartialState(cpu=True)  # its trackers ask which process this is: the only one
    made = {}
    for name in names:
        kind = tracking.LOGGER_TYPE_TO_CLASS[name]
        if name == "mlflow":
            tracker = kind(experiment_name=run.name, logging_dir=str(directory))
        elif kind.requires_logging_directory:
            tracker = kind(run.name, logging_dir=str(directory))
        else:
            tracker = kind(run.name)
        tracker.main_process_only = (
            False  # there is one leader, and it is no process of accelerate's
        )
        if (start := getattr(tracker, "start", None)) is not None:  # before, making it did so
            start()
        tracker.store_init_configuration(_settings_of(run))
        made[name] = tracker
    return made


class Tracking(QuietProgress):
    """Tells trackers the figures of a run. Keep `run` running.

    Args:
        trackers: that have been started, by name.
        warn: is told which one is left out, and why.
    """

    def __init__(self, trackers: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self._trackers, self._warn = dict(trackers), warn
        self._send, self._receive = trio.open_memory_channel[dict[str, float]](_MAX_WAITING)
        self._is_behind = False

    def metrics(self, figures: Mapping[str, float]) -> None:
        """Pass figures on, if trackers keep up."""
        try:
            self._send.send_nowait(dict(figures))
            self._is_behind = False
        except trio.WouldBlock:
            if not self._is_behind:
                self._is_behind = True
                self._warn("trackers do not keep up: they are not told all figures")

    def close(self) -> None:
        """End the figures: `run` tells trackers those that wait, finishes them, and returns."""
        self._send.close()

    async def run(self) -> None:
        """Tell trackers what comes, until it is closed; then finish them."""
        async for figures in self._receive:
            values = {name: value for name, value in figures.items() if math.isfinite(value)}
            step = int(values.get("step", 0))
            await self._each("log", values, step=step)
        await self._each("finish")

    async def _each(self, method: str, *args: object, **kwargs: object) -> None:
        """Call a method of every tracker."""
        run_sync: Any = trio.to_thread.run_sync  # its stubs lack `abandon_on_cancel`
        for name, tracker in list(self._trackers.items()):
            try:
                call = partial(getattr(tracker, method), *args, **kwargs)
                await run_sync(call, abandon_on_cancel=True)
            except (
                Exception
            ) as exc:  # of a library that may raise anything: a run does not end for its sake
                logger.exception("the tracker %s failed", name)
                del self._trackers[name]
                self._warn(f"{name} gets no more figures, it failed: {exc}. metrics.jsonl has them")


@asynccontextmanager
async def open_tracking(
    run: RunFile, directory: Path, warn: Callable[[str], None]
) -> AsyncIterator[Tracking]:
    """Track a run until the block is left, as its run file says; nowhere where that names nothing.

    Args:
        directory: for trackers that keep files.
        warn: is told what fails.

    Raises:
        ConfigurationError: as `make_trackers`.
    """
    trackers = await trio.to_thread.run_sync(make_trackers, run, directory)
    tracking, is_finished = Tracking(trackers, warn), trio.Event()

    async def work() -> None:
        await tracking.run()
        is_finished.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        yield tracking
        tracking.close()
        with trio.move_on_after(_FINISH_TIMEOUT):
            await is_finished.wait()
        nursery.cancel_scope.cancel()


def _settings_of(run: RunFile) -> dict[str, str | int | float | bool]:
    """A run file as trackers keep settings: flat, in plain values."""
    found: dict[str, str | int | float | bool] = {}
    for title, section in tomllib.loads(run.text()).items():
        for key, value in section.items() if isinstance(section, dict) else [("", section)]:
            name = f"{title}.{key}" if key else title
            found[name] = value if isinstance(value, str | int | float) else str(value)
    return found
