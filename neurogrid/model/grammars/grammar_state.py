"""State of a sequence in a grammar: the tokens that may come next, given those before.

V = vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Grammar", "GrammarState"]


class Grammar:
    """A grammar that is compiled for a tokenizer. Made by `GrammarCompiler.compile`; sequences share it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def begin(self) -> GrammarState:
        """The state of a sequence that has no token yet."""
        return GrammarState(self._matcher.deep_copy())


class GrammarState:
    """The state of one sequence. What it allows depends on the tokens that it was advanced by, and on nothing else."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether the sequence may end here."""
        return bool(self._matcher.is_accepting())

    def allowed(self) -> torch.Tensor:
        """The tokens that may come next: [vocab] of bool. Those that end a sequence are among them where it may end.

        Raises:
            ConfigurationError: the grammar has come to a bound of its library.
        """
        bias = self._matcher.compute_logit_bias()
        self._check()
        return torch.frombuffer(bytearray(bias), dtype=torch.uint8) > 0

    def advance(self, token_id: int) -> None:
        """Go on by a token that is allowed.

        Raises:
            ConfigurationError: it is not, or the grammar has come to a bound of its library.
        """
        self._matcher.consume_token(token_id)
        self._check()

    def roll_back(self, num_tokens: int) -> None:
        """Take back the last tokens that it was advanced by."""
        self._matcher.rollback(num_tokens)
        self._check()

    def copy(self) -> GrammarState:
        """The same state, for another sequence that began as this one."""
        return GrammarState(self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigurationError(
                f"the answer's grammar could not go on: {told_error(self._matcher.get_error())}"
            )


def told_error(error: str) -> str:
    """Shorten an error of the library to one line, without what the grammar looks like."""
    lines = [line.strip() for line in error.partition("<state>")[0].splitlines()]
    return " ".join(line for line in lines if line)[:300] or "no reason is given"
