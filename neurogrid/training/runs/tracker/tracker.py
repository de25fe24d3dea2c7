"""All of a run in one look: moving means and trends of its figures, agreement on weights, and members with their worth.

    tracked = track(lines, rounds, members, learning)
    tracked.loss.trend.direction, tracked.agreement.differing, tracked.members[0].worth

Pure. It is told lines of metrics.jsonl, what each seat had in the last rounds, and how members stand. Whether the run
learns is the matter of `learning`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from neurogrid.training.runs.learning import LONG, SHORT, Learning, moving_mean
from neurogrid.training.runs.tracker.trend import TrackedTrend, find_trend

__all__ = [
    "DifferingMember",
    "DigestAgreement",
    "MemberShare",
    "MemberWorth",
    "TrackedFigure",
    "TrackedRun",
    "TrackerMember",
    "track",
]


@dataclass(frozen=True, slots=True)
class TrackedFigure:
    """A figure of the run, over its rounds.

    Attributes:
        latest: of the last round that has one; None where none has, or it is not finite.
        short, long: moving means, over some rounds and over many.
        trend: over the last rounds.
    """

    latest: float | None
    short: float | None
    long: float | None
    trend: TrackedTrend


@dataclass(frozen=True, slots=True)
class MemberShare:
    """Samples that the seats of a run had in a round.

    Attributes:
        round: its number.
        samples: that were used by it, by seat; those that had work and are not in the round have 0.
    """

    round: int
    samples: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class TrackerMember:
    """A member, as its leader has it.

    Attributes:
        peer_id: its peer id (base58).
        name: what people call it.
        seat: its number in the run; None while it has none.
        round: the last that is in its weights.
        num_rounds, num_late: that it was in, and that went on without it while it had work.
        num_samples: of its that are in the common weights.
        cosine: of what it learned last to what all learned; None while that is not known.
        differs_since: the round since which it has told other weights than the leader's, each time; None where they
            are the same, or nothing is known.
        gain, advantage: of its last results that others have measured; None where none was.
    """

    peer_id: str
    name: str
    seat: int | None
    round: int = 0
    num_rounds: int = 0
    num_late: int = 0
    num_samples: int = 0
    cosine: float | None = None
    differs_since: int | None = None
    gain: float | None = None
    advantage: float | None = None


@dataclass(frozen=True, slots=True)
class MemberWorth:
    """The worth of a member to the run.

    Attributes:
        worth: the mean share that it had in the last rounds, 0 to 1: a round's mean is weighted by samples, so that is
            what the member counts for. None where it had no work in any of them.
        in_time: the share of rounds in which it had work and was in time, since it took its seat; None for no round.
        num_samples: of its that are in the common weights.
        cosine: of what it learned last to what all learned; None while that is not known.
        agrees: whether it has the leader's weights, as far as it has told.
        gain: by how much each of its last results alone lowers the loss of what another member was given; None where
            that was not measured.
        advantage: by how much more it lowers that of what the member was given itself; None as above.
    """

    peer_id: str
    name: str
    seat: int | None
    worth: float | None
    in_time: float | None
    num_samples: int
    cosine: float | None
    agrees: bool
    gain: float | None = None
    advantage: float | None = None


@dataclass(frozen=True, slots=True)
class DifferingMember:
    """A member that has other weights than the leader.

    Attributes:
        since_round: the first round after which it told them; it has not told the leader's since then.
        round: the last that is in its weights.
    """

    peer_id: str
    name: str
    since_round: int
    round: int


@dataclass(frozen=True, slots=True)
class DigestAgreement:
    """Whether members have the same weights.

    Attributes:
        rate: the share of those who have told, the leader among them, whose weights are those of most after the same
            round; None where nobody has told.
        num_members: that have told, the leader among them.
        differing: members that have others than the leader, by how long.
    """

    rate: float | None
    num_members: int
    differing: tuple[DifferingMember, ...]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run in one look.

    Attributes:
        loss: of what was trained on, per token.
        eval_loss: of what is held out, over the rounds that were evaluated.
        tokens_per_second: of all members together, from one line of figures to the next.
        gradient_norm: the mean over members, before clipping.
        agreement: on weights.
        members: those with a seat first, by how much they are worth.
        num_shares: rounds that a worth is of.
        learning: whether the run learns.
    """

    loss: TrackedFigure
    eval_loss: TrackedFigure
    tokens_per_second: TrackedFigure
    gradient_norm: TrackedFigure
    agreement: DigestAgreement
    members: tuple[MemberWorth, ...]
    num_shares: int
    learning: Learning


def track(
    lines: Sequence[Mapping[str, float]],
    losses: Sequence[float],
    shares: Sequence[MemberShare],
    members: Sequence[TrackerMember],
    learning: Learning,
) -> TrackedRun:
    """Look at a run.

    Args:
        lines: of metrics.jsonl, oldest first.
        losses: of its rounds, oldest first, also those that are not finite.
        shares: of its last rounds.
        members: that are there.
        learning: as `judge_learning` judges it.
    """
    differing = sorted(
        (
            DifferingMember(each.peer_id, each.name, each.differs_since, each.round)
            for each in members
            if each.differs_since is not None
        ),
        key=lambda each: (each.since_round, each.peer_id),
    )
    agreement = DigestAgreement(
        learning.hash_agreement_rate, learning.num_members, tuple(differing)
    )
    worths = sorted(
        (_worth_of(each, shares) for each in members),
        key=lambda each: (each.seat is None, -(each.worth or 0.0), each.seat or 0, each.peer_id),
    )
    return TrackedRun(
        loss=_figure(losses),
        eval_loss=_figure(_all_of(lines, "eval_loss")),
        tokens_per_second=_figure(_rates(lines)),
        gradient_norm=_figure(_all_of(lines, "gradient_norm")),
        agreement=agreement,
        members=tuple(worths),
        num_shares=len(shares),
        learning=learning,
    )


def _all_of(lines: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


def _rates(lines: Sequence[Mapping[str, float]]) -> list[float]:
    """Tokens a second; lines that were written at once are one."""
    told = [
        (line["seconds"], line["tokens"]) for line in lines if {"seconds", "tokens"} <= line.keys()
    ]
    ends = [(at, tokens) for at, tokens in dict(told).items()]
    return [
        (later - before) / (at - began)
        for (began, before), (at, later) in pairwise(ends)
        if at > began
        and later >= before  # a leader that went on from a checkpoint has taken some back
    ]


def _figure(figures: Sequence[float]) -> TrackedFigure:
    known = [figure for figure in figures if math.isfinite(figure)]
    is_known = bool(figures) and math.isfinite(figures[-1])
    return TrackedFigure(
        latest=figures[-1] if is_known else None,
        short=moving_mean(known, SHORT),
        long=moving_mean(known, LONG),
        trend=find_trend(figures),
    )


def _worth_of(member: TrackerMember, shares: Sequence[MemberShare]) -> MemberWorth:
    found = [
        share.samples[member.seat] / total if (total := sum(share.samples.values())) else 0.0
        for share in shares
        if member.seat is not None and member.seat in share.samples
    ]
    num_rounds = member.num_rounds + member.num_late
    return MemberWorth(
        member.peer_id,
        member.name,
        member.seat,
        worth=math.fsum(found) / len(found) if found else None,
        in_time=member.num_rounds / num_rounds if num_rounds else None,
        num_samples=member.num_samples,
        cosine=member.cosine,
        agrees=member.differs_since is None,
        gain=member.gain,
        advantage=member.advantage,
    )
