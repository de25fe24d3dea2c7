"""Imports that take seconds, made when it is known that they are needed."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from importlib import import_module

from neurogrid.cli.signals import ending_at_once
from neurogrid.cli.terminal.screen import Screen

__all__ = ["import_libraries"]


def import_libraries(screen: Screen, *names: str) -> None:
    """Import modules of ours that bring torch and transformers, and what these make for good.

    The screen shows it where something can move: it may take longer than all that follows.

    They make 400,000 objects, all to stay. Python looks for garbage among them several times on the way, which is a
    fifth of the time, and would go on to whenever the process has grown: it is told to leave them out.

    The process whose children train, and try other people's data, is forked now, with all that and little else.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        # At a signal there is nothing to put in order yet, and nobody else could see to it meanwhile.
        with ending_at_once(), screen.spinner("loading torch") if screen.is_live else nullcontext():
            for name in names:
                import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
    from neurogrid.fork_server import start_fork_server

    start_fork_server(in_any_thread=True)  # trio's, which wait for work
