"""A worker that says it has another torch, and whose first contribution is not finite, as of a faulty machine.

Run as a program with the options of `neurogrid-worker`.
"""

from __future__ import annotations

import sys
from itertools import count

from torch import Tensor

from neurogrid.cli.commands.worker import main
from neurogrid.training.members import service
from neurogrid.training.runs.outer_state import OuterState

OLD_TORCH = "0.1"
_versions = service.versions
_contribution = OuterState.contribution
_calls = count()


def versions() -> tuple[tuple[str, str], ...]:
    """Those of this machine, but for torch."""
    return tuple((name, OLD_TORCH if name == "torch" else told) for name, told in _versions())


def contribution(state: OuterState) -> Tensor:
    """What was learned, but for the first time."""
    vector = _contribution(state)
    return vector if next(_calls) else vector.fill_(float("nan"))


if __name__ == "__main__":
    service.versions = versions
    OuterState.contribution = contribution  # type: ignore[method-assign]
    sys.exit(main())
