"""Settings of a group, as its first leader set them: the same for all members, for as long as the group is.

Source: protocol_spec/training/groups.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.forms import Form, Map, one_of, optional, text, uint
from neurogrid.p2p.wire.maps import MAX_U32
from neurogrid.training.wire.group import MAX_GROUP_MEMBERS

__all__ = ["GroupSettings"]

_MAX_SECONDS: Final = 7 * 86_400.0
_NAME: Final = text(32, smallest=1)
# Aggregators that, weighted, give of what rows gave what they give of all members.
_OF_ROWS: Final = ("mean", "mean_of_signs")
_SECONDS: Final = Form(
    f"above 0 and at most {_MAX_SECONDS:g} seconds",
    lambda value: type(value) in (int, float) and 0 < value <= _MAX_SECONDS,
    read=float,
    write=float,
)


@dataclass(frozen=True, slots=True)
class GroupSettings(ControlPayload):
    """The settings of a group.

    Attributes:
        min_members: members that the first round waits for, the leader included.
        quorum: contributors that a round needs at least.
        grace: seconds that a round waits, once it has its quorum, for members that are late; and the silence after
            which a member counts as lost.
        attempt_timeout: seconds for one attempt at a round.
        codec: the form of what members send.
        result_codec: the form of the aggregate.
        aggregator: how vectors become one.
        way: `butterfly`, `server` (the leader aggregates all), `everybody`, or `grid`: of four members on rows, whose
            aggregates meet, for groups of many. It takes the aggregators `mean` and `mean_of_signs`.
        chunk_elements: float32 elements of a chunk at most.
        purpose: what the members do with it, as the program that founded the group has it; at most 4,096 characters.
    """

    min_members: int = 2
    quorum: int = 1
    grace: float = 10.0
    attempt_timeout: float = 300.0
    codec: str = "f32"
    result_codec: str = "f32"
    aggregator: str = "mean"
    way: str = "butterfly"
    chunk_elements: int = 262_144
    purpose: str = ""

    _map = Map(
        "the settings of a group",
        {
            "min_members": uint(MAX_GROUP_MEMBERS, smallest=1),
            "quorum": uint(MAX_GROUP_MEMBERS, smallest=1),
            "grace": _SECONDS,
            "attempt_timeout": _SECONDS,
            "codec": _NAME,
            "result_codec": _NAME,
            "aggregator": _NAME,
            "way": one_of({"butterfly", "server", "everybody", "grid"}),
            "chunk_elements": uint(MAX_U32, smallest=1),
            "purpose": optional(text(4096)),
        },
        max_bytes=32 * 1024,
        version=1,
    )

    @property
    def heartbeat(self) -> float:
        """Seconds between two messages of state: some may be lost before the grace is over."""
        return min(1.0, self.grace / 5)

    def _check(self) -> None:
        if self.quorum > MAX_GROUP_MEMBERS or self.attempt_timeout < self.heartbeat:
            raise violation("an attempt would end before a member can have told how it stands")
        if self.way == "grid" and self.aggregator not in _OF_ROWS:
            raise violation(f"in a grid {self.aggregator} of rows is not that of their members")
