"""A worker that tells another digest of its weights from a round on, as one whose memory is faulty would.

Run as a program with the options of `neurogrid-worker`.
"""

from __future__ import annotations

import hashlib
import sys

from neurogrid.cli.commands.worker import main
from neurogrid.training.runs.outer_state import OuterState

FIRST_ROUND = 5
_digest = OuterState.digest


def digest(state: OuterState) -> bytes:
    """That of the weights, and of others from a round on."""
    told = _digest(state)
    return told if state.round < FIRST_ROUND else hashlib.sha256(told).digest()


if __name__ == "__main__":
    OuterState.digest = digest  # type: ignore[method-assign]
    sys.exit(main())
