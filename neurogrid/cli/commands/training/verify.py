"""`neurogrid train verify`: whether the journal of a run is whole, and what the run came to by it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from neurogrid.cli.options.common import ExitStatus, add_output_options
from neurogrid.cli.signals import ending_at_once

if TYPE_CHECKING:
    from neurogrid.cli.terminal.screen import Screen
    from neurogrid.training.runs.entries import Entry
    from neurogrid.training.runs.run_file import RunFile

__all__ = ["add_verify_options", "verify"]

_RUN_SYNC: Final[Any] = trio.to_thread.run_sync  # its stubs lack `abandon_on_cancel`


def add_verify_options(parser: argparse.ArgumentParser) -> None:
    """The options of `neurogrid train verify`."""
    parser.add_argument(
        "journal",
        type=Path,
        metavar="JOURNAL",
        help="where the run is kept: runs/NAME; or its journal, wherever that was copied to",
    )
    parser.add_argument(
        "--json", action="store_true", help="print what was found as one object of JSON"
    )
    add_output_options(parser)


def _fault(run: RunFile | None, run_id: bytes, entries: Sequence[Entry]) -> str:
    """Fault of the epochs of a witnessed run, empty if there is none. Imports torch, which other runs do not need."""
    from neurogrid.training.checks import fault_of_epochs

    return fault_of_epochs(run, run_id, entries)


async def verify(options: argparse.Namespace, screen: Screen) -> int:
    """Print what a journal proves; returns the exit status, 1 where it is not whole.

    Raises:
        ConfigurationError: there is none, or it cannot be read.
    """
    with ending_at_once():
        from neurogrid.training.runs.verdict import verify_journal
    verdict = await _RUN_SYNC(verify_journal, options.journal, _fault, abandon_on_cancel=True)
    if options.json:
        screen.print(json.dumps(verdict.json()))
    else:
        for name, value in verdict.rows():
            screen.print(f"{name:<12} {value}")
    return ExitStatus.OK if verdict.is_whole else ExitStatus.FAILURE
