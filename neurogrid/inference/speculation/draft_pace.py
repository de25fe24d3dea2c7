"""Length of a draft: decided token by token, by how sure the draft model is, and by what came of that before.

A pure machine: no clock, no torch. What was drafted and not proposed is evidence, too: whether it came is seen.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from neurogrid.inference.speculation.acceptance import PassCosts

__all__ = ["DraftPace", "DraftRecord"]

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
# Or for so many for each pass that a draft cost: what is tried costs a thirtieth at most.
_REST_FOR_A_PASS: Final = 32
# And after a generation for which they cost more than they saved, its prompt counted, which the draft model reads, too.
_MIN_LONG_REST: Final = 256
_MAX_LONG_REST: Final = 4096


class DraftRecord:
    """Record of what came of the drafts of one draft model, in all generations.

    The first draft of a generation reads its prompt: a model that does not pay is not tried anew in each.

    Attributes:
        worth: tokens for the price of a pass of one, as they came of late.
        rest: tokens until the next draft.
        pause: tokens to rest for where drafts do not pay.
        long_pause: tokens to rest for after a generation that they cost more than they saved.
    """

    def __init__(self) -> None:
        self._hits = [_WEIGHT * rate for rate in _BEFORE]
        self._seen = [_WEIGHT] * len(_BEFORE)
        self.worth = 1.2
        self.rest, self.pause = 0, _MIN_REST
        self.long_pause = _MIN_LONG_REST

    def rate(self, probability: float) -> float:
        """Chance that a token comes to which the draft model gave this probability."""
        at = bisect_right(_CLASSES, probability)
        return self._hits[at] / self._seen[at]

    def saw(self, probability: float, is_right: bool) -> None:
        """A token of this probability came, or another."""
        at = bisect_right(_CLASSES, probability)
        self._hits[at] = self._hits[at] * _KEPT + is_right
        self._seen[at] = self._seen[at] * _KEPT + 1.0

    def gained(self, gain: float, *, saved: float) -> None:
        """A draft brought so many tokens for the price of a pass of one.

        Args:
            saved: passes that it saved, below 0 for those that it cost, what it caught up with among them.
        """
        self.worth += _SMOOTHING * (gain - self.worth)
        if self.worth >= 1.0:
            self.pause = _MIN_REST
            return
        self.rest = min(max(self.pause, int(-saved * _REST_FOR_A_PASS)), _MAX_LONG_REST)
        self.pause = min(2 * self.pause, _MAX_REST)
        self.worth = 1.0  # one more try after that

    def saved(self, passes: float) -> None:
        """A generation is over for which drafts saved passes of one token, or cost so many: below 0."""
        if passes >= 0.0:
            self.long_pause = _MIN_LONG_REST
            return
        self.rest = max(self.rest, self.long_pause)
        self.long_pause = min(4 * self.long_pause, _MAX_LONG_REST)


class DraftPace:
    """The drafts for one generation.

    Args:
        costs: of the passes that look at them.
        record: of the draft model.
    """

    def __init__(self, costs: PassCosts, record: DraftRecord) -> None:
        self._costs, self._record = costs, record
        self._drafted: list[
            tuple[int, float]
        ] = []  # of which it is not known yet whether they come
        self._num_drafted = self._num_right = 0
        self._saved = 0.0  # passes, by all drafts: what they took is taken off
        self._cost = 0.0  # of the last draft, in passes
        # Of the draft that is being written: its bound, the most that it gives for its price, and with how many tokens.
        self._most = self._length = 0
        self._chance = self._tokens = self._best = 1.0

    @property
    def price(self) -> float:
        """Price of each drafted token, in the draft model and in the pass, as a part of a pass of one token.

        A pass of several costs `PassCosts.several` besides.
        """
        draft = self._costs.draft
        return self._costs.row + (_USUAL_DRAFT if draft is None else draft)

    @property
    def worth(self) -> float:
        """Worth of drafts of late: tokens for the price of a pass of one; 1 while none are written."""
        return 1.0 if self._record.rest else self._record.worth

    def begins(self, most: int, *, least_gain: float) -> bool:
        """Whether to draft now, tokens of which so many may be proposed.

        Args:
            least_gain: what has to come of it, as tokens for the price of a pass of one; 1 or more.
        """
        self._judge()
        self._begin(most, least_gain)
        record = self._record
        return most > 0 and record.rest == 0 and record.worth >= least_gain - 0.1

    def goes_on(self, token_id: int, probability: float) -> bool:
        """A token was drafted, with this probability; whether to draft another behind it."""
        self._drafted.append((token_id, probability))
        self._chance *= self._record.rate(probability)
        self._tokens += self._chance
        number = len(self._drafted)
        gain = self._tokens / (1 + self._costs.several + self.price * number)
        if gain > self._best:
            self._best, self._length = gain, number
        # The next one is right with this chance at best.
        return number < self._most and self._chance > self.price * max(gain, 1.0)

    def drafted(self, seconds: float, *, caught_up: float = 0.0) -> list[int]:
        """The draft is done, one token or more, and took so long; gives those to propose, if any pay.

        Args:
            caught_up: seconds that it took before, to read what it had not written: of the first one, a prompt.
        """
        self._costs.drafted(len(self._drafted), seconds)
        self._cost = self._costs.price(seconds + caught_up)
        self._num_drafted = len(self._drafted)
        return [token_id for token_id, _ in self._drafted[: self._length]]

    def came(self, token_id: int) -> None:
        """A token was chosen."""
        self._record.rest = max(self._record.rest - 1, 0)
        if not self._drafted:
            return
        expected, probability = self._drafted.pop(0)
        is_right = expected == token_id
        self._record.saw(probability, is_right)
        self._num_right += is_right
        if not is_right:
            self._drafted.clear()
        if not self._drafted:
            self._judge()

    def close(self) -> None:
        """The generation is over."""
        self._judge()
        if self._saved:
            self._record.saved(self._saved)

    def _begin(self, most: int, least_gain: float) -> None:
        self._drafted.clear()
        self._most = most if self._costs.draft is not None else min(most, _FIRST_DRAFT)
        self._chance = self._tokens = 1.0
        self._best, self._length = least_gain, 0
        self._num_drafted = self._num_right = 0

    def _judge(self) -> None:
        """Nothing more will come of the last draft."""
        if not self._num_drafted:
            return
        costs, length = self._costs, self._length
        price = costs.several + self.price * self._num_drafted
        saved = -self._cost
        if length:
            saved += min(self._num_right, length) - costs.several - costs.row * length
        self._saved += saved
        self._record.gained((1 + self._num_right) / (1 + price), saved=saved)
        self._num_drafted = 0
