"""Failure of a rank of a process group, as it tells the others when it can do nothing more in it.

Source: protocol_spec/training/process-groups.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.forms import Map, array, line, optional, uint

__all__ = ["MAX_FAILURE_CHARS", "MAX_RANK", "MAX_RANKS", "GroupFailure"]

MAX_FAILURE_CHARS: Final = 1024
MAX_RANKS: Final = 4096
MAX_RANK: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GroupFailure(ControlPayload):
    """Reason for which the sender can do nothing more in the group.

    Attributes:
        reason: in words, for people; decoded, one printable line.
        ranks: that did not do their part, by their numbers in the whole program; none where the sender is why.
    """

    reason: str
    ranks: tuple[int, ...] = ()

    _map = Map(
        "the failure of a process group",
        {
            "reason": line(MAX_FAILURE_CHARS, smallest=1),
            "ranks": optional(array(uint(MAX_RANK), MAX_RANKS)),
        },
    )
