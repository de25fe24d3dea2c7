"""State of a run at one moment, as its leader gives it to whoever shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from neurogrid.training.runs.machine import Rules
from neurogrid.training.runs.state import RunState
from neurogrid.training.wire.runs import Report, StageReport

__all__ = ["CheckLook", "ChecksLook", "LeaderLook", "PeerLook", "StageLook", "WorthLook"]


@dataclass(frozen=True, slots=True)
class PeerLook:
    """A worker, as its leader has it at the moment.

    Attributes:
        seat: that it has, or that is reserved for it.
        is_connected: whether it can be reached.
        report: its last; None for none.
        lease_seconds: until its lease ends; None where it has none.
    """

    peer_id: str
    name: str
    seat: int | None
    is_connected: bool
    report: Report | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    lease_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class StageLook:
    """A member of a stage of the chain, as the leader arranged it last.

    Attributes:
        peer_id: of the member.
        number: of the stage, from 1: several members may be one.
        start, stop: its layers.
        report: its last, of this chain; None for none.
        waited: the share of its last step in which it waited for others, 0 to 1; None while it is not known.
    """

    peer_id: str
    number: int
    start: int
    stop: int
    report: StageReport | None = None
    waited: float | None = None


@dataclass(frozen=True, slots=True)
class CheckLook:
    """Something that came of a claim which was looked at.

    Attributes:
        at: Unix time.
        round: of the claim, or of the run when a trial was over.
        seat: of the member that it is about.
        kind: `accused` while others are to judge, `ejected`, `silent` where it gave nothing, `undecided`; of one that
            was on trial `admitted`, `refused` or `banned`.
        text: for people.
    """

    at: float
    round: int
    seat: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class WorthLook:
    """Worth of a member's results, as others have measured it.

    Attributes:
        seat: of the member.
        num: its results that were measured.
        gain: by how much each of the last ones alone lowers the loss of what another member was given, in the mean.
        advantage: by how much more it lowers that of what the member was given itself.
        is_watched: whether it stands out among the members, so that its claims are looked at sooner.
    """

    seat: int
    num: int
    gain: float
    advantage: float
    is_watched: bool


@dataclass(frozen=True, slots=True)
class ChecksLook:
    """Audits of claims, and measured worths of results, since this leader began.

    Attributes:
        num_made, num_held: claims that drawn members told of, and those that held.
        num_open: accusations about which others are to judge yet.
        num_trials: members, and peers that wait, on trial.
        last: what came of it, oldest first: the last 40.
        worths: what results of members were measured to be worth, by seat; empty where that is not measured.
    """

    num_made: int = 0
    num_held: int = 0
    num_open: int = 0
    num_trials: int = 0
    last: tuple[CheckLook, ...] = ()
    worths: tuple[WorthLook, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaderLook:
    """A leader at the moment.

    Attributes:
        seconds: that the run has taken.
        num_parameters: that are trained.
        digest: of the common weights that the leader has, after round `applied`.
        sent_bytes: of the leader's averaging.
        stages: of a chain, by stage and lane; empty before it was arranged, and where members have whole models.
        waits: what a chain does not go on without; empty where it goes on.
        differing: members that have other weights than the leader, by peer id: since which round.
        checks: what members compute again; None in a run that has none.
    """

    peer_id: str
    state: RunState
    rules: Rules
    peers: Sequence[PeerLook]
    seconds: float = 0.0
    num_parameters: int = 0
    applied: int = 0
    digest: bytes = b""
    sent_bytes: int = 0
    stages: Sequence[StageLook] = ()
    waits: str = ""
    differing: Mapping[str, int] = field(default_factory=dict)
    checks: ChecksLook | None = None
