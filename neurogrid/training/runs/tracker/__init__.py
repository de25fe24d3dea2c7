"""The tracker of a run: where its figures go, who has other weights than the rest, and what each member is worth to it.

tracker          all of that, of what is known at a moment
trend            whether figures fall, rise or stay, as far as their noise lets anybody say
"""

from neurogrid.training.runs.tracker.tracker import (
    DifferingMember,
    DigestAgreement,
    MemberShare,
    MemberWorth,
    TrackedFigure,
    TrackedRun,
    TrackerMember,
    track,
)
from neurogrid.training.runs.tracker.trend import (
    CONFIDENCE,
    NUM_LEAST,
    NUM_TRACKED,
    Direction,
    TrackedTrend,
    find_trend,
)

__all__ = [
    "CONFIDENCE",
    "NUM_LEAST",
    "NUM_TRACKED",
    "DifferingMember",
    "DigestAgreement",
    "Direction",
    "MemberShare",
    "MemberWorth",
    "TrackedFigure",
    "TrackedRun",
    "TrackedTrend",
    "TrackerMember",
    "find_trend",
    "track",
]
