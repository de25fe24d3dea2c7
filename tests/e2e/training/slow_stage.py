"""A worker whose stage becomes slow after a while: each of its operations takes a tenth of a second more.

Run as a program with the options of `neurogrid-worker`.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

import trio

from neurogrid.cli.commands.worker import main
from neurogrid.training.stages.stage_process import StageProcess

_QUICK_OPERATIONS = 250
_call = StageProcess._call
_calls = count()


async def call(
    process: StageProcess, order: str, *note: Any, **arguments: object
) -> dict[str, Any]:
    """What it is asked for, and then slowly."""
    if next(_calls) > _QUICK_OPERATIONS:
        await trio.sleep(0.1)
    return await _call(process, order, *note, **arguments)


if __name__ == "__main__":
    StageProcess._call = call  # type: ignore[method-assign]
    sys.exit(main())
