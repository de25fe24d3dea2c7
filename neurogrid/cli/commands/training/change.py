"""`neurogrid train change`: what a run goes by from its next step on, and whether it is paused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from neurogrid.cli.options.common import ExitStatus, add_output_options
from neurogrid.cli.signals import ending_at_once
from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.cli.terminal.screen import Screen
    from neurogrid.training.runs.entries import Entry
    from neurogrid.training.runs.run_directory import RunDirectory
    from neurogrid.training.runs.run_file import RunFile

__all__ = ["add_change_options", "change"]


def add_change_options(parser: argparse.ArgumentParser) -> None:
    """The options of `neurogrid train change`."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="where the run is kept: runs/NAME"
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="KEY=VALUE",
        help="a key of the run file with its section, and its new value: inner.lr=1e-4; or, of a witnessed run, pause "
        "or go-on",
    )
    add_output_options(parser)


async def change(options: argparse.Namespace, screen: Screen) -> int:
    """Check what is wanted, write it for the leader, and print it; returns the exit status."""
    from neurogrid.training.runs.changes import changed_run, changes_text, values_of, words_of
    from neurogrid.training.runs.run_directory import RunDirectory, read_changes

    with ending_at_once():
        directory = RunDirectory(options.directory)
        run = directory.read_run()
        if options.words in (["pause"], ["go-on"]):
            _pause(directory, run, screen, is_wanted=options.words == ["pause"])
            return ExitStatus.OK
        wanted = values_of(options.words)
        now = _as_changed(directory, run)
        # What was wanted before and is not taken in yet stays.
        told = {**words_of(read_changes(directory.changes)), **wanted}
        changed = changed_run(now, told)
        directory.write_changes(changes_text(changed, told))
        for line in changes_text(changed, wanted).splitlines():
            if line:
                screen.print(line)
        what = "step" if run.rounds_are_steps else "round"
        screen.say(f"its leader takes that in before the next {what}, or with --resume")
    return ExitStatus.OK


def _pause(directory: RunDirectory, run: RunFile, screen: Screen, *, is_wanted: bool) -> None:
    """Have a run paused, or go on.

    Raises:
        ConfigurationError: it is none that can be, or has ended.
    """
    if not run.is_witnessed:
        raise ConfigurationError(
            f'{directory.path}: only a run with [outer] method = "distro" is paused; others are stopped, and go on '
            "with --resume"
        )
    _as_changed(directory, run)  # it has not ended
    try:
        if is_wanted:
            directory.pause.touch()
        else:
            directory.pause.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigurationError(f"{directory.pause}: {exc.strerror or exc}") from exc
    what = "stops where it is" if is_wanted else "goes on"
    screen.say(f"the run {what} within a second, or once its leader is started again with --resume")


def _as_changed(directory: RunDirectory, run: RunFile) -> RunFile:
    """The run file with what was changed before.

    Raises:
        ConfigurationError: the run has ended, or its journal is not sound.
    """
    from neurogrid.training.runs.changes import Changes, changed_run
    from neurogrid.training.runs.entries import EndEntry, ResumedEntry
    from neurogrid.training.runs.journal import read_journal

    entries: list[Entry] = []
    if directory.has_begun:
        entries = [recorded.entry for recorded in read_journal(directory.journal)]
    ended = ""
    for entry in entries:
        if isinstance(entry, EndEntry | ResumedEntry):
            ended = entry.reason if isinstance(entry, EndEntry) else ""
    if ended:
        raise ConfigurationError(
            f"{directory.path} has ended: {ended}. To train further, begin another run with "
            f'[model] config = "{directory.checkpoints}/latest"'
        )
    return changed_run(run, Changes.of(entries).last)
