"""A worker that counts for more than it was given, from its third contribution on.

Run as a program with the options of `neurogrid-worker`.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

from neurogrid.cli.commands.worker import main
from neurogrid.training.averaging.groups import Group

_average = Group.average
_calls = count(1)


async def average(group: Group, vector: Any, *, weight: float = 1.0, timeout: float) -> Any:
    """As it is told, and then with a thousand samples more."""
    greed = 1000.0 if next(_calls) >= 3 else 0.0
    return await _average(group, vector, weight=weight + greed, timeout=timeout)


if __name__ == "__main__":
    Group.average = average  # type: ignore[method-assign]
    sys.exit(main())
