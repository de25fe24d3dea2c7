"""The checkpoints of a training run, one after the other, for a server that follows it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from neurogrid.cli.options.model import run_of
from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.run_directory import RunDirectory

if TYPE_CHECKING:
    from neurogrid.cli.terminal.screen import Screen

__all__ = ["ServedRun"]

_LOOK: Final = 1.0
# Times that a checkpoint may be removed while it is taken.
_ATTEMPTS: Final = 5
_PREFIX: Final = ".served-"
# Several models of one server may be of one run.
_numbers = count(1)


class ServedRun:
    """A run whose newest checkpoint is served.

    Args:
        run: where it is kept.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._served: Path | None = None

    @classmethod
    def of(cls, model: object, *, follows: bool) -> ServedRun | None:
        """The run that the options name; None where they name a model.

        Raises:
            ConfigurationError: there is none to be followed.
        """
        run = run_of(model) if isinstance(model, Path) else None
        if run is None and follows:
            raise ConfigurationError(
                "--follow is for the directory of a training run, as in neurogrid serve runs/NAME --follow"
            )
        return cls(run) if run is not None else None

    async def wait_first(self, screen: Screen) -> None:
        """Wait until there is a checkpoint at all.

        Raises:
            ConfigurationError: those that there are cannot be reached.
        """
        self._run.check_checkpoints()
        if self._run.latest_checkpoint() is None:
            screen.say(f"waiting for the first checkpoint of the training run in {self._run.path}")
        await self.wait_newer()

    async def wait_newer(self) -> None:
        """Wait until there is another checkpoint than the one that was taken last."""
        while self._run.latest_checkpoint() in (None, self._served):
            await trio.sleep(_LOOK)

    @contextmanager
    def take(self) -> Iterator[Path]:
        """The newest checkpoint, which stays while the block runs, though the run may remove it.

        Raises:
            ConfigurationError: it cannot be read.
        """
        # Beside the checkpoints, which may be on another disk: what is there is linked.
        _sweep(self._run.checkpoints)
        folder = self._run.checkpoints / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        try:
            yield self._link(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _link(self, folder: Path) -> Path:
        error: OSError | None = None
        for _ in range(_ATTEMPTS):
            shutil.rmtree(folder, ignore_errors=True)
            checkpoint = self._run.latest_checkpoint()
            if checkpoint is None:
                continue
            place = folder / checkpoint.name
            try:
                place.mkdir(parents=True)
                for path in checkpoint.iterdir():
                    if path.is_file():
                        os.link(path, place / path.name)
            except OSError as exc:
                error = exc
                continue
            self._served = checkpoint
            return place
        raise ConfigurationError(
            f"the newest checkpoint in {self._run.checkpoints} cannot be taken: {error or 'it is not there'}"
        )


def _sweep(path: Path) -> None:
    """Remove what servers have left that were killed."""
    for folder in path.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isascii() and pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)
