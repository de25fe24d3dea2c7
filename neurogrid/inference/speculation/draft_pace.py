"""Length of a draft: decided token by token, by how sure the draft model is, and by what came of that before.

A pure machine: no clock, no torch. What was drafted and not proposed is evidence, too: whether it came is seen.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from neurogrid.inference.speculation.acceptance import PassCosts

__all__ = ["DraftPace"]

# Probabilities that a draft model gives its token, from which on it is another class of evidence; and what is thought
# of each class before anything was seen, as if from so many tokens.
_CLASSES: Final = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
_BEFORE: Final = (0.2, 0.35, 0.5, 0.65, 0.8, 0.88, 0.95)
_WEIGHT: Final = 4.0
_KEPT: Final = 0.96
# What a drafted token takes, as a part of a pass, before that was measured, by a draft of so many tokens.
_USUAL_DRAFT: Final = 0.1
_FIRST_DRAFT: Final = 2
_SMOOTHING: Final = 1 / 8
# Drafts that do not pay are left alone for so many tokens, then for twice as many.
_MIN_REST: Final = 8
_MAX_REST: Final = 256


class DraftPace:
    """The drafts for one generation.

    Args:
        costs: of the passes that look at them.
    """

    def __init__(self, costs: PassCosts) -> None:
        self._costs = costs
        self._hits = [_WEIGHT * rate for rate in _BEFORE]
        self._seen = [_WEIGHT] * len(_BEFORE)
        # Tokens for the price of a pass of one, as they came of late.
        self._worth = 1.2
        self._rest, self._pause = 0, _MIN_REST
        self._drafted: list[
            tuple[int, float]
        ] = []  # of which it is not known yet whether they come
        self._num_drafted = self._num_right = 0
        # Of the draft that is being written: its bound, the most that it gives for its price, and with how many tokens.
        self._most = self._length = 0
        self._chance = self._tokens = self._best = 1.0

    @property
    def price(self) -> float:
        """Price of each drafted token, in the draft model and in the pass, as a part of a pass of one token."""
        draft = self._costs.draft
        return self._costs.row + (_USUAL_DRAFT if draft is None else draft)

    @property
    def worth(self) -> float:
        """Worth of drafts of late: tokens for the price of a pass of one; 1 while none are written."""
        return 1.0 if self._rest else self._worth

    def begins(self, most: int, *, least_gain: float) -> bool:
        """Whether to draft now, tokens of which so many may be proposed.

        Args:
            least_gain: what has to come of it, as tokens for the price of a pass of one; 1 or more.
        """
        if self._drafted and self._num_drafted:
            self._judge()
        self._begin(most, least_gain)
        return most > 0 and self._rest == 0 and self._worth >= least_gain - 0.1

    def goes_on(self, token_id: int, probability: float) -> bool:
        """A token was drafted, with this probability; whether to draft another behind it."""
        self._drafted.append((token_id, probability))
        self._chance *= self._rate(probability)
        self._tokens += self._chance
        number = len(self._drafted)
        gain = self._tokens / (1 + self.price * number)
        if gain > self._best:
            self._best, self._length = gain, number
        # The next one is right with this chance at best.
        return number < self._most and self._chance > self.price * max(gain, 1.0)

    def drafted(self, seconds: float) -> list[int]:
        """The draft is done, one token or more, and took so long; gives those to propose, if any pay."""
        self._costs.drafted(len(self._drafted), seconds)
        self._num_drafted = len(self._drafted)
        return [token_id for token_id, _ in self._drafted[: self._length]]

    def came(self, token_id: int) -> None:
        """A token was chosen."""
        if self._rest:
            self._rest -= 1
        if not self._drafted:
            return
        expected, probability = self._drafted.pop(0)
        is_right, at = expected == token_id, bisect_right(_CLASSES, probability)
        self._hits[at] = self._hits[at] * _KEPT + is_right
        self._seen[at] = self._seen[at] * _KEPT + 1.0
        self._num_right += is_right
        if not is_right:
            self._drafted.clear()
        if not self._drafted:
            self._judge()

    def _begin(self, most: int, least_gain: float) -> None:
        self._drafted.clear()
        self._most = most if self._costs.draft is not None else min(most, _FIRST_DRAFT)
        self._chance = self._tokens = 1.0
        self._best, self._length = least_gain, 0
        self._num_drafted = self._num_right = 0

    def _judge(self) -> None:
        """All that came of a draft is known."""
        gain = (1 + self._num_right) / (1 + self.price * self._num_drafted)
        self._worth += _SMOOTHING * (gain - self._worth)
        if self._worth >= 1.0:
            self._pause = _MIN_REST
            return
        self._rest, self._pause = self._pause, min(2 * self._pause, _MAX_REST)
        self._worth = 1.0  # one more try after that

    def _rate(self, probability: float) -> float:
        at = bisect_right(_CLASSES, probability)
        return self._hits[at] / self._seen[at]
