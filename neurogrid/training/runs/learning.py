"""Whether a run learns: moving means of its loss, their trend, and whether the members have the same weights.

Pure. The words are those of people who ask "is it actually training?": verified, trend, agreement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["LONG", "SHORT", "Learning", "Trend", "judge_learning", "moving_mean"]

SHORT: Final = 0.3
"""Weight of the latest figure in a moving mean over some rounds."""

LONG: Final = 0.05
"""Weight of the latest figure in a moving mean over many rounds."""

# Losses below which nothing is said about a trend.
_NUM_KNOWN: Final = 4
# Of the long mean: a smaller difference of the two is no trend.
_STABLE: Final = 0.005


class Trend(StrEnum):
    """The direction of the loss."""

    UNKNOWN = "unknown"
    IMPROVING = "improving"
    STABLE = "stable"
    WORSENING = "worsening"


@dataclass(frozen=True, slots=True)
class Learning:
    """Whether a run learns, and why that is said.

    Attributes:
        training_verified: the loss is lower than it was at the beginning, it does not rise, and all members that have
            the newest round have the same weights.
        reason: one line.
        loss_trend: of the short moving mean against the long one.
        first_loss: the mean of the first rounds; None while there are none.
        loss: a moving mean over some rounds.
        long_loss: the same over many.
        hash_agreement_rate: share of the members whose weights have the digest that most have after the same round, and
            have not been found to be others.
        num_members: that it was taken of.
        sync_success_rate: of all that members had to contribute to the last rounds, the share that came in time.
    """

    training_verified: bool
    reason: str
    loss_trend: Trend
    first_loss: float | None
    loss: float | None
    long_loss: float | None
    hash_agreement_rate: float | None
    num_members: int
    sync_success_rate: float | None


def judge_learning(
    losses: Sequence[float],
    digests: Mapping[str, tuple[int, bytes]],
    *,
    differing: Collection[str] = (),
    num_in_time: int = 0,
    num_late: int = 0,
) -> Learning:
    """Judge a run.

    Args:
        losses: of its rounds, oldest first.
        digests: of each member, by peer id, the leader among them: the last round that is in its weights, and their
            digest.
        differing: members that have told other weights than the leader's, and not the leader's since, by peer id.
        num_in_time, num_late: contributions to the last rounds.
    """
    agreement = _agreement(digests, differing)
    in_all = num_in_time + num_late
    known = losses[:_NUM_KNOWN]
    first = sum(loss / len(known) for loss in known) if known else None
    short, long = moving_mean(losses, SHORT), moving_mean(losses, LONG)
    trend = _trend(losses, short, long)
    reason = _doubt(losses, first, short, trend, agreement)
    return Learning(
        training_verified=not reason,
        reason=reason or f"the loss has gone from {first:.4g} to {short:.4g}",
        loss_trend=trend,
        first_loss=first,
        loss=short,
        long_loss=long,
        hash_agreement_rate=agreement,
        num_members=len(digests),
        sync_success_rate=num_in_time / in_all if in_all else None,
    )


def _doubt(
    losses: Sequence[float],
    first: float | None,
    short: float | None,
    trend: Trend,
    agreement: float | None,
) -> str:
    """The reason why it cannot be said that the run learns; empty where it can."""
    if first is None or short is None or len(losses) < _NUM_KNOWN:
        return f"{len(losses)} rounds have a loss, {_NUM_KNOWN} are needed to judge"
    if not (math.isfinite(short) and math.isfinite(first)):
        return "the loss is not finite"
    if agreement is not None and agreement < 1:
        return f"{agreement:.0%} of the members have the same weights: the others have drifted"
    if trend is Trend.WORSENING:
        return f"the loss rises, to {short:.4g}"
    if short >= first:
        return f"the loss is not lower than at the beginning: {first:.4g}, now {short:.4g}"
    return ""


def _agreement(
    digests: Mapping[str, tuple[int, bytes]], differing: Collection[str]
) -> float | None:
    """Members may be a round apart; those after the same round must have the same digest.

    Of a member that differed, nothing is believed until it was compared again: alone after its round it would agree.
    """
    if not digests:
        return None
    by_round: dict[int, Counter[bytes]] = {}
    for number, digest in (told for peer, told in digests.items() if peer not in differing):
        by_round.setdefault(number, Counter())[digest] += 1
    return sum(max(counts.values()) for counts in by_round.values()) / len(digests)


def moving_mean(figures: Sequence[float], latest: float) -> float | None:
    """A mean in which each figure counts `latest` of what those before count; even over the first few."""
    mean = None
    for number, figure in enumerate(figures, 1):
        mean = figure if mean is None else mean + max(latest, 1 / number) * (figure - mean)
    return mean


def _trend(losses: Sequence[float], short: float | None, long: float | None) -> Trend:
    if short is None or long is None or len(losses) < _NUM_KNOWN:
        return Trend.UNKNOWN
    if not math.isfinite(short):
        return Trend.WORSENING
    difference = (short - long) / max(abs(long), 1e-9)
    if abs(difference) < _STABLE:
        return Trend.STABLE
    return Trend.IMPROVING if difference < 0 else Trend.WORSENING
