"""Prompt lookup: what followed the last tokens when they stood in the sequence before is expected to follow again.

Text that is edited, quoted or filled into a form repeats itself over long stretches. The place that is read from is
kept as long as what comes is what stands there; where it is not, a place close by is looked for at which it goes on, as
after an edit, and the latest at which the last tokens, three at most, stood before. A pure machine.

Source: Saxena 2023, "Prompt Lookup Decoding" (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from neurogrid.inference.speculation.acceptance import Acceptance, PassCosts, length_that_pays

__all__ = ["MAX_NGRAM", "PromptLookup"]

# Tokens by which a place is looked up.
MAX_NGRAM: Final = 3
# After so many tokens of a place it is taken up again where it was left for another token, or so many tokens on: what
# was edited there is short. That it is near is worth as much as a token more that matches.
_MANY: Final = 6
_NEAR: Final = 16
# Tokens before a place of which it is known whether they match: of more nothing follows.
_MAX_MATCHED: Final = 32


class PromptLookup:
    """The tokens of one sequence, and what is expected to come next.

    Args:
        tokens: those that are there already.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        # For each n-gram that something follows, where that stands; the latest.
        self._behind: dict[tuple[int, ...], int] = {}
        self._acceptance = Acceptance()
        self._place: int | None = None  # of the token that is expected
        self._num_matched = 0  # tokens before it that are the last of the sequence
        self._left: int | None = None  # the place of a token in whose stead another came
        for token_id in tokens:
            self._append(token_id)
        self._look_up()

    def add(self, token_id: int) -> None:
        """The next token has come."""
        came = self._place is not None and self._tokens[self._place] == token_id
        if self._place is not None:
            self._acceptance.saw(self._num_matched, came)
        self._append(token_id)
        if came and self._place is not None:
            self._place += 1
            self._num_matched = min(self._num_matched + 1, _MAX_MATCHED)
        else:
            if self._num_matched >= _MANY:
                self._left = self._place
            self._place, self._num_matched = None, 0
        # Where few tokens match there may be a place where more do.
        if self._num_matched < MAX_NGRAM:
            self._look_up()

    def propose(self, most: int, costs: PassCosts, *, least_gain: float) -> list[int]:
        """The tokens to propose, `most` at most; none where none are expected, or none pay.

        Args:
            costs, least_gain: see `length_that_pays`.
        """
        place = self._place
        if place is None or most < 1:
            return []
        rates = [self._acceptance.rate(self._num_matched + i) for i in range(most)]
        proposed: list[int] = []
        for at in range(place, place + length_that_pays(rates, costs, least_gain=least_gain)):
            # What repeats itself up to its end goes on repeating itself.
            beyond = at - len(self._tokens)
            proposed.append(self._tokens[at] if beyond < 0 else proposed[beyond])
        return proposed

    def _append(self, token_id: int) -> None:
        tokens, at = self._tokens, len(self._tokens)
        tokens.append(token_id)
        for length in range(1, min(MAX_NGRAM, at) + 1):
            self._behind[tuple(tokens[at - length : at])] = at

    def _look_up(self) -> None:
        """Find the place before which most of the last tokens stand, if more do than where it is now."""
        tokens = self._tokens
        if self._num_matched == 0 and self._left is not None:
            # What was edited goes on near where it was left.
            for near in range(self._left + 1, min(self._left + _NEAR, len(tokens))):
                if tokens[near - 1] == tokens[-1]:
                    self._place, self._num_matched = near, self._matching(near) + 1
                    break
        for length in range(min(MAX_NGRAM, len(tokens)), self._num_matched, -1):
            place = self._behind.get(tuple(tokens[-length:]))
            if place is not None:
                self._place, self._num_matched = place, self._matching(place)
                return

    def _matching(self, place: int) -> int:
        """Number of the last tokens that stand before `place`, too."""
        tokens, length = self._tokens, 0
        while (
            length < min(place, _MAX_MATCHED)
            and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]
        ):
            length += 1
        return length
