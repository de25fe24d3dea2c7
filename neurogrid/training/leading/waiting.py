"""Waiting for members: said as it is, and not for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio

from neurogrid.errors import NoRouteError
from neurogrid.training.leading.settings import NodeProgress
from neurogrid.training.runs.machine import RunMachine
from neurogrid.training.runs.state import Phase

__all__ = ["watch_members"]

# Between two looks, in seconds.
_PAUSE: Final = 1.0


async def watch_members(
    machine: RunMachine,
    progress: NodeProgress,
    refusals: Callable[[], Sequence[str]] = tuple,
    *,
    wait: float,
    num_here: Callable[[], int] | None = None,
) -> None:
    """Say how many members the run waits for, whenever it has too few, until the run is about to end.

    Args:
        refusals: gives why those that are here take no part, a line for each.
        wait: seconds, at most, that it waits each time.
        num_here: gives how many members there are; None for those that have seats.

    Raises:
        NoRouteError: there were too few for so long.
    """
    state, wanted = machine.state, machine.rules.min_members
    since, said = trio.current_time(), -1
    while state.phase in (Phase.WAITING, Phase.TRAINING):
        count = len(state.occupied()) if num_here is None else num_here()
        if count >= wanted:
            since, said = trio.current_time(), -1
        elif trio.current_time() - since >= wait:
            here = refusals()
            others = f". These are here and take no part: {'; '.join(here)}" if here else ""
            raise NoRouteError(
                f"the run has {count} of {wanted} members after {wait:g} s: have more join with its ticket. --resume "
                f"goes on with it, --wait waits longer, and [members] min says how many there have to be{others}"
            )
        elif count != said:
            progress.say(f"waiting for members: {count} of {wanted} are here")
            said = count
        await trio.sleep(_PAUSE)
