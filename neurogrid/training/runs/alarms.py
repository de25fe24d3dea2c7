"""Alarms, by name, of a run that may not learn: one that computes and learns nothing must not look healthy.

    alarms = find_alarms(losses, members, waiting=Waiting(round=12, seconds=340.0, usual_seconds=20.0))

Pure. An alarm says what was seen and what people do about it; it changes nothing in the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Final

__all__ = ["Accused", "Alarm", "AlarmKind", "MemberFacts", "Waiting", "apart_from", "find_alarms"]

NUM_FLAT: Final = 20
"""Losses, one a round, over which a loss that does not fall is called flat."""

# Of the lowest moving mean: so much above it, a loss is called diverging.
_DIVERGED: Final = 0.1
# Times what losses differ from one round to the next: the same, where that is more.
_NOISE: Final = 3.0
# Of the latest loss: how much it counts in the moving mean.
_LATEST: Final = 0.3
# Below the others' median: so far off is apart. Of the others' median of samples: with fewer than that a member is too
# noisy to be beside them, and has too little of the aggregate.
_APART: Final = 0.3
_COMPARABLE: Final = 0.6
# Rounds in a row that went on without a member that had work.
_NUM_LATE: Final = 3
# Rounds in a row in which a member was odd: one may be chance of few samples, or a learning rate that begins at 0.
_NUM_ODD: Final = 3
# A round that is open this many times as long as they usually are, and for so many seconds at least.
_SLOW: Final = 5.0
_SLOW_SECONDS: Final = 30.0
_ZERO: Final = 1e-12
# Libraries whose versions decide what comes of the same samples. Those that make tokens are none of them: data are
# tokens, made before the run.
_DECIDE_BITS: Final = ("neurogrid", "torch", "transformers")


class AlarmKind(StrEnum):
    """The name of an alarm."""

    FLAT_LOSS = "flat_loss"
    DIVERGING_LOSS = "diverging_loss"
    MEMBER_APART = "member_apart"
    ZERO_GRADIENTS = "zero_gradients"
    TARGET_NOT_REACHED = "target_not_reached"
    VERSIONS_DIFFER = "versions_differ"
    CHEATING = "cheating"


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that makes it doubtful that a run learns.

    Attributes:
        text: one line: what was seen, and what to do.
        seat: of the member that it is about; None for the run.
    """

    kind: AlarmKind
    text: str
    seat: int | None = None


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """Facts about a member, by which alarms are found.

    Attributes:
        name: what people call it.
        gradient_norm, difference_norm: of its last batch, and of what it contributed last; None for none yet.
        cosine: between that and the aggregate; None for none yet.
        versions: of what it computes with, by library.
        num_samples: that it had in the last round with its contribution; None for none yet.
        late_in_a_row: of the last rounds, how many went on without it while it had work.
        apart_in_a_row, still_in_a_row: of the last rounds for which it told its figures, in how many it was among
            `apart_from`, and contributed a difference of zero.
    """

    seat: int
    name: str
    gradient_norm: float | None = None
    difference_norm: float | None = None
    cosine: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    late_in_a_row: int = 0
    apart_in_a_row: int = 0
    still_in_a_row: int = 0
    num_samples: int | None = None

    @property
    def is_still(self) -> bool:
        """Whether what it contributed last was a difference of zero."""
        return self.difference_norm is not None and self.difference_norm < _ZERO


@dataclass(frozen=True, slots=True)
class Accused:
    """A member of which others say that it did not compute what it claims, or that it accuses falsely.

    Attributes:
        seat: that it has or had.
        text: what was found, and what became of it; one line.
    """

    seat: int
    text: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """The round that is open.

    Attributes:
        round: its number.
        seconds: since the one before was decided.
        usual_seconds: the median of the last ones; 0 while there is none.
        names: of those that it waits for.
    """

    round: int
    seconds: float
    usual_seconds: float
    names: tuple[str, ...] = ()


def find_alarms(
    losses: Sequence[float],
    members: Sequence[MemberFacts],
    *,
    waiting: Waiting | None = None,
    accused: Sequence[Accused] = (),
) -> tuple[Alarm, ...]:
    """The alarms of a run as it stands.

    Args:
        losses: of its rounds, one a round that trained, oldest first.
        members: those that take part.
        waiting: for the round that is open; None while none is.
        accused: of late, or about whom others are to judge yet.
    """
    found = [_of_loss(losses), *_of_gradients(members), *_of_cosines(members)]
    found += [*_of_targets(members, waiting), *_of_versions(members)]
    latest = {each.seat: each for each in accused}
    found += [Alarm(AlarmKind.CHEATING, each.text, each.seat) for each in latest.values()]
    return tuple(alarm for alarm in found if alarm is not None)


def _of_loss(losses: Sequence[float]) -> Alarm | None:
    if losses and not math.isfinite(losses[-1]):
        return Alarm(
            AlarmKind.DIVERGING_LOSS,
            f"the loss is {losses[-1]}: the weights are lost, go back to the last checkpoint with a smaller [inner] lr",
        )
    losses = [loss for loss in losses if math.isfinite(loss)]
    means = _moving_means(losses)
    if len(means) >= 5:
        lowest = min(means)
        # Between neighbours, in the median: what rises lately does not count for noise.
        steps = [abs(later - loss) for loss, later in pairwise(losses[-NUM_FLAT:])]
        noise = _NOISE * median(steps)
        is_rising = means[-1] > means[-3] > means[-5]
        if is_rising and means[-1] > lowest + max(_DIVERGED * abs(lowest), noise):
            return Alarm(
                AlarmKind.DIVERGING_LOSS,
                f"the loss rises: its moving mean was {lowest:.4g} and is {means[-1]:.4g}; try a smaller [inner] lr, "
                "or a longer warmup",
            )
    if len(losses) < NUM_FLAT:
        return None
    last = losses[-NUM_FLAT:]
    early, late = last[: NUM_FLAT // 2], last[NUM_FLAT // 2 :]
    # The fall that could as well be chance.
    chance = math.hypot(stdev(early), stdev(late)) / math.sqrt(len(late))
    if fmean(early) - fmean(late) <= chance:
        return Alarm(
            AlarmKind.FLAT_LOSS,
            f"the loss does not fall: {fmean(early):.4g} and then {fmean(late):.4g} on average over the last "
            f"{NUM_FLAT} rounds; the run has learned what it can, or [inner] lr is too small or too large",
        )
    return None


def _moving_means(losses: Sequence[float]) -> list[float]:
    means: list[float] = []
    for loss in losses:
        means.append(loss if not means else means[-1] + _LATEST * (loss - means[-1]))
    return means


def apart_from(members: Sequence[MemberFacts]) -> dict[int, float | None]:
    """The seats of members whose last differences point elsewhere, and the median of the others' cosines.

    None where there is no other that has one.
    """
    known = [(member, member.cosine) for member in members if member.cosine is not None]
    found = {}
    for member, cosine in known:
        others = [other for each, other in known if each is not member]
        is_below = len(others) >= 2 and cosine < median(others) - _APART
        if cosine < 0 or (is_below and _is_comparable(member, members)):
            found[member.seat] = median(others) if others else None
    return found


def _is_comparable(member: MemberFacts, members: Sequence[MemberFacts]) -> bool:
    """Whether a member had about as many samples as the others, where that is known of all."""
    others = [each.num_samples for each in members if each is not member and each.num_samples]
    if member.num_samples is None or not others:
        return True
    return member.num_samples >= _COMPARABLE * median(others)


def _of_gradients(members: Sequence[MemberFacts]) -> list[Alarm]:
    found = []
    for member in members:
        zero = None
        if member.gradient_norm is not None and member.gradient_norm < _ZERO:
            zero = "gradient"
        elif member.is_still and member.still_in_a_row >= _NUM_ODD:
            zero = "difference to the common weights"
        if zero is not None:
            found.append(
                Alarm(
                    AlarmKind.ZERO_GRADIENTS,
                    f"{member.name} learns nothing: its {zero} is zero; are all its labels masked, or all weights "
                    "frozen?",
                    member.seat,
                )
            )
    return found


def _of_cosines(members: Sequence[MemberFacts]) -> list[Alarm]:
    found = []
    apart = apart_from(members)
    for member in members:
        if member.cosine is None or member.seat not in apart:
            continue
        if member.apart_in_a_row >= _NUM_ODD:
            others = apart[member.seat]
            beside = f", the others {others:.2f}" if others is not None else ""
            found.append(
                Alarm(
                    AlarmKind.MEMBER_APART,
                    f"{member.name} is apart for {member.apart_in_a_row} rounds: the cosine of what it learned to what "
                    f"all learned is {member.cosine:.2f}{beside}; are its data, its versions and its machine sound?",
                    member.seat,
                )
            )
    return found


def _of_targets(members: Sequence[MemberFacts], waiting: Waiting | None) -> list[Alarm]:
    found = [
        Alarm(
            AlarmKind.TARGET_NOT_REACHED,
            f"{member.name} was late in the last {member.late_in_a_row} rounds: it does not get through its batches in "
            "time; give it less with [outer] projected, or more time with grace",
            member.seat,
        )
        for member in members
        if member.late_in_a_row >= _NUM_LATE
    ]
    if waiting is not None and waiting.usual_seconds > 0:
        longest = max(_SLOW * waiting.usual_seconds, _SLOW_SECONDS)
        if waiting.seconds > longest:
            whom = f", for {', '.join(waiting.names)}" if waiting.names else ""
            found.append(
                Alarm(
                    AlarmKind.TARGET_NOT_REACHED,
                    f"round {waiting.round} has been waited for {waiting.seconds:.0f} s{whom}; a round takes "
                    f"{waiting.usual_seconds:.1f} s",
                )
            )
    return found


def _of_versions(members: Sequence[MemberFacts]) -> list[Alarm]:
    usual = {}
    for library in _DECIDE_BITS:
        told = [each.versions[library] for each in members if library in each.versions]
        if told:
            # Of two that are as many, the one that sorts later is taken for what all should have.
            usual[library] = max(Counter(told).items(), key=lambda item: (item[1], item[0]))[0]
    found = []
    for member in members:
        others = [
            f"{library} {member.versions[library]} where most have {version}"
            for library, version in usual.items()
            if member.versions.get(library, version) != version
        ]
        if others:
            found.append(
                Alarm(
                    AlarmKind.VERSIONS_DIFFER,
                    f"{member.name} has {', and '.join(others)}: the same batch may give other bits there, or another "
                    "model, and a resumed run may differ; install what the others have",
                    member.seat,
                )
            )
    return found
