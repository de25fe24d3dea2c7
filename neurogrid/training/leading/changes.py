"""Changes that somebody wants of a run that goes on: a file in its directory, written by `neurogrid train change`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from neurogrid.errors import ConfigurationError
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.runs.changes import changed_run, differing, told, words_of
from neurogrid.training.runs.entries import ChangedEntry
from neurogrid.training.runs.machine import RunMachine
from neurogrid.training.runs.run_directory import read_changes
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.state import Phase

__all__ = ["WantedChanges"]


class WantedChanges:
    """Changes that a machine is to take in: those that are due, and what a file says that is not so yet.

    Args:
        path: of the file, which need not be there.
        run: the run file.
        machine: of the run.
        progress: is told what is changed, and what is wrong with the file.
        cut: what people are told of works of so many samples; empty for nothing.
    """

    def __init__(
        self,
        path: Path,
        run: RunFile,
        machine: RunMachine,
        progress: LeaderProgress,
        cut: Callable[[int], str] = lambda num_samples: "",
    ) -> None:
        self._path, self._run, self._machine, self._progress = path, run, machine, progress
        self._cut = cut
        self._seen: tuple[int, ...] = ()

    def take(self) -> bool:
        """Take in what there is, where the run is between two rounds; whether something was changed."""
        found = self._machine.change_due()
        try:
            if (entry := self._take_wanted()) is not None:
                found.append(entry)
        except ConfigurationError as exc:
            self._progress.warn(f"{self._path} changes nothing: {exc}")
        for each in found:
            self._progress.say(told(each, self._run))
        rules = self._machine.rules
        if found and (cut := self._cut(rules.steps * rules.batch_samples)):
            self._progress.warn(cut)
        return bool(found)

    def _take_wanted(self) -> ChangedEntry | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        seen = stat.st_mtime_ns, stat.st_size, stat.st_ino
        if seen == self._seen:
            return None
        self._seen = seen
        state = self._machine.state
        before = changed_run(self._run, state.changes.last)
        changes = differing(before, changed_run(before, words_of(read_changes(self._path))))
        if not changes:
            return None
        if state.phase not in (Phase.WAITING, Phase.TRAINING):
            raise ConfigurationError("the run is at its end")
        self._machine.check({**state.changes.last, **dict(changes)})
        return self._machine.change(changes)
