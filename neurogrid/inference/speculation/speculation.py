"""Speculation of a coordinator, and the proposals for one generation.

A proposal changes no token: the model chooses each, from the logits that it would have had. It pays where tokens are
right often enough for what it takes to look at several at once; how many that are is decided anew before each pass.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Literal, Protocol

import trio

from neurogrid.inference.speculation.acceptance import LEAST_GAIN, PassCosts
from neurogrid.inference.speculation.draft_pace import DraftPace, DraftRecord
from neurogrid.inference.speculation.prompt_lookup import PromptLookup

__all__ = [
    "MAX_PROPOSED",
    "SPECULATIONS",
    "Draft",
    "Drafts",
    "Proposer",
    "Speculation",
    "SpeculationMode",
]

SpeculationMode = Literal["auto", "lookup", "off"]
SPECULATIONS: Final[tuple[SpeculationMode, ...]] = ("auto", "lookup", "off")

# Of one pass. A stage that goes back forgets 64 at most, and few texts give more.
MAX_PROPOSED: Final = 16
# Prompts from which on their n-grams are gathered in a thread: 2 us for each token.
_LONG_PROMPT: Final = 2048


class Draft(Protocol):
    """Draft of one generation: the tokens that a draft model writes for it."""

    @property
    def worth(self) -> float:
        """Worth of the draft of late: tokens for the price of a pass of one; 1 while it writes none."""

    def came(self, token_id: int) -> None:
        """A token was chosen, proposed or not."""

    async def propose(self, tokens: Sequence[int], most: int, *, least_gain: float) -> list[int]:
        """The tokens to propose behind `tokens`, at most `most`; none where they would not pay."""

    def close(self) -> None:
        """The generation is over."""


class Drafts(Protocol):
    """A draft model."""

    def draft(self, pace: DraftPace) -> Draft | None:
        """A draft for one more generation; None where there are as many as may be."""


class Speculation:
    """The speculation of one coordinator.

    Args:
        needs_same_bits: only on workers where a token gets the same bits beside others as alone.
        drafts: what writes ahead where the text does not repeat itself; None for nothing.
    """

    def __init__(self, *, needs_same_bits: bool, drafts: Drafts | None = None) -> None:
        self.needs_same_bits = needs_same_bits
        self.costs = PassCosts()
        self._drafts, self._record = drafts, DraftRecord()

    @asynccontextmanager
    async def proposer(self, token_ids: Sequence[int]) -> AsyncIterator[Proposer]:
        """Yield the proposer for one generation, whose prompt is `token_ids`; its draft is closed with the block."""
        if len(token_ids) < _LONG_PROMPT:
            lookup = PromptLookup(token_ids)
        else:
            lookup = await trio.to_thread.run_sync(PromptLookup, token_ids)
        draft = (
            None
            if self._drafts is None
            else self._drafts.draft(DraftPace(self.costs, self._record))
        )
        try:
            yield Proposer(lookup, self.costs, draft)
        finally:
            if draft is not None:
                draft.close()


class Proposer:
    """Proposals for one generation. Made by `Speculation.proposer`."""

    def __init__(self, lookup: PromptLookup, costs: PassCosts, draft: Draft | None = None) -> None:
        self._lookup = lookup
        self._costs = costs
        self._draft = draft

    def add(self, token_id: int) -> None:
        """A token was chosen, proposed or not."""
        self._lookup.add(token_id)
        if self._draft is not None:
            self._draft.came(token_id)

    async def propose(self, tokens: Sequence[int], room: int, *, num_sessions: int) -> list[int]:
        """The tokens to propose behind the last one; none where they would not pay.

        Args:
            tokens: all that there are.
            room: how many there may be.
            num_sessions: that decode now, this one included. They share passes, which one with a proposal does not.
        """
        most = min(room, MAX_PROPOSED)
        least_gain = max(LEAST_GAIN, float(num_sessions))
        draft = self._draft
        # Text that is found has to be better than what a draft would give.
        worth = least_gain if draft is None else max(least_gain, draft.worth)
        found = self._lookup.propose(most, self._costs, least_gain=worth)
        if found or draft is None or most < 1:
            return found
        return await draft.propose(tokens, most, least_gain=least_gain)

    def took(self, num_tokens: int, seconds: float, *, num_sessions: int) -> None:
        """A pass of so many tokens took so long."""
        if num_sessions <= 1:
            self._costs.took(num_tokens, seconds)
