"""Entry points of the installed commands. What a signal does is settled before anything slow is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

from neurogrid.cli.signals import SIGNALS, end_process, ending_at_once, status_of

__all__ = ["coordinator", "leave", "neurogrid", "worker"]


def neurogrid() -> NoReturn:
    """Run `neurogrid`."""
    _run("neurogrid.cli.commands.main")


def coordinator() -> NoReturn:
    """Run `neurogrid-coordinator`."""
    _run("neurogrid.cli.commands.coordinator")


def worker() -> NoReturn:
    """Run `neurogrid-worker`."""
    _run("neurogrid.cli.commands.worker")


def _run(module: str) -> NoReturn:
    with ending_at_once():
        main: Callable[[], int] = import_module(module).main
        leave(main())


def leave(status: int) -> NoReturn:
    """End the process with this status; at once where a signal asked for it."""
    if status in map(status_of, SIGNALS):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        end_process(status)
    raise SystemExit(status)
