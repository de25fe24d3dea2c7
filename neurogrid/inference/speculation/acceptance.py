"""Probability that the next proposed tokens are accepted, by what was seen, and how many of them pay.

A pure machine: no clock, no torch. Each token that comes is evidence, be it proposed or not: what would have been
proposed in its place is known all the same. So nothing is tried out at the cost of a reader, and text that repeats
itself again is noticed while nothing is proposed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, TypeAlias

__all__ = ["LEAST_GAIN", "Acceptance", "PassCosts", "length_that_pays"]

# Tokens a pass and its price have to be better by so much than a pass of one token: estimates are not exact.
LEAST_GAIN: Final = 1.1

# Tokens that came as expected, from which on it is another class of evidence; and what is thought of each class before
# anything was seen, as if from so many tokens.
_CLASSES: Final = (1, 2, 3, 4, 6, 9, 17)
_BEFORE: Final = (0.1, 0.25, 0.45, 0.6, 0.75, 0.85, 0.9)
_WEIGHT: Final = 2.0
# What was seen counts less with each further token of its class: about the last dozen matter.
_KEPT: Final = 0.92

# Of the time of a pass of one token, what each further one adds, before that was measured: as on a CPU in float32.
_USUAL_ROW: Final = 0.15
# Prices that nothing is proposed at would stay for ever: with each pass of one token they are so much the usual ones.
_FORGETTING: Final = 1 / 256
# A pass that took longer than so many others is not measured: something else happened.
_OUTLIER: Final = 8.0
_SMOOTHING: Final = 1 / 8
# Where passes of one length alone were seen, nothing is taken to be `several`: as if it counted as much as passes whose
# numbers of tokens have this variance.
_UNDECIDED: Final = 0.25


class Acceptance:
    """Rates at which expected tokens came, by how many tokens had come as expected before them."""

    def __init__(self) -> None:
        self._hits = [_WEIGHT * rate for rate in _BEFORE]
        self._seen = [_WEIGHT] * len(_BEFORE)

    def saw(self, num_matched: int, came: bool) -> None:
        """A token was expected after so many that matched, 1 or more; did it come?"""
        at = _class_of(num_matched)
        self._hits[at] = self._hits[at] * _KEPT + came
        self._seen[at] = self._seen[at] * _KEPT + 1.0

    def rate(self, num_matched: int) -> float:
        """Probability that an expected token comes after so many that matched, 1 or more."""
        at = _class_of(num_matched)
        return self._hits[at] / self._seen[at]


# Sums over passes with n further tokens: of 1, n and n^2, and of what they cost more, once and times n.
_Sums: TypeAlias = tuple[float, float, float, float, float]


def _sums_of(further: int, more: float) -> _Sums:
    return 1.0, further, further**2, more, further * more


def _mixed(one: _Sums, share: float, other: _Sums, other_share: float) -> _Sums:
    a, b, c, d, e = (share * x + other_share * y for x, y in zip(one, other, strict=True))
    return a, b, c, d, e


# As if of a pass with 1 further token, and of one with 8.
_USUAL: Final = _mixed(_sums_of(1, _USUAL_ROW), 1.0, _sums_of(8, 8 * _USUAL_ROW), 1.0)


class PassCosts:
    """Costs of a pass of several tokens, and of drafting, relative to a pass of one. Times are given.

    A pass of one token is prepared while that is chosen; one of several is not, which costs the more of a pass the
    shorter it is. So n further tokens are taken to cost `several` + `row` n: least squares over what was seen, of which
    the earlier counts less.

    Attributes:
        several: what a pass of more than one token costs more, however many they are.
        row: what each further token costs more.
    """

    def __init__(self) -> None:
        self._one: float | None = None
        self._draft: float | None = None
        self.several, self.row = 0.0, _USUAL_ROW
        self._sums = _USUAL

    @property
    def draft(self) -> float | None:
        """Price of a token of the draft model, as a part of a pass of one; None before both were measured."""
        return None if self._one is None or self._draft is None else self._draft / self._one

    def took(self, num_tokens: int, seconds: float) -> None:
        """A pass of so many tokens took so long, alone on its way."""
        one = self._one
        if num_tokens == 1:
            if one is None:
                self._one = seconds
            elif seconds < _OUTLIER * one:
                self._one = one + _SMOOTHING * (seconds - one)
            self._sums = _mixed(self._sums, 1 - _FORGETTING, _USUAL, _FORGETTING)
            self._settle()
        elif one and seconds < _OUTLIER * one * num_tokens:
            further = num_tokens - 1
            more = min(max(seconds / one - 1, 0.0), 2.0 * further)
            self._sums = _mixed(self._sums, 1 - _SMOOTHING, _sums_of(further, more), 1.0)
            self._settle()

    def _settle(self) -> None:
        ones, n, square, more, product = self._sums
        n, square, more, product = n / ones, square / ones, more / ones, product / ones
        each = product / square
        row = (product - n * more + _UNDECIDED * each) / (max(square - n**2, 0.0) + _UNDECIDED)
        if more < row * n:  # nothing is left for `several`
            row = each
        self.row = min(max(row, 0.0), 1.0)
        self.several = max(more - self.row * n, 0.0)

    def drafted(self, num_tokens: int, seconds: float) -> None:
        """A draft model took so long for so many tokens, one or more."""
        each = seconds / num_tokens
        before = self._draft
        self._draft = each if before is None else before + _SMOOTHING * (each - before)

    def price(self, seconds: float) -> float:
        """Price of so much time: passes of one token that take as long; none before one was measured."""
        return 0.0 if self._one is None else seconds / self._one


def length_that_pays(rates: Sequence[float], costs: PassCosts, *, least_gain: float) -> int:
    """Number of tokens to propose: that which gives the most tokens for the price of their pass; 0 where none pay.

    Args:
        rates: how likely each proposed token is to be accepted, if those before it were.
        least_gain: what has to come of it, as tokens for the price of a pass of one; 1 or more.
    """
    tokens, chance = 1.0, 1.0
    best, length = least_gain, 0
    for number, rate in enumerate(rates, 1):
        chance *= rate
        tokens += chance
        gain = tokens / (1.0 + costs.several + costs.row * number)
        if gain > best:
            best, length = gain, number
    return length


def _class_of(num_matched: int) -> int:
    return max(bisect_right(_CLASSES, num_matched) - 1, 0)
