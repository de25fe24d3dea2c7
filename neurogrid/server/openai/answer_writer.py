"""The text of an answer as it grows, cut before a stop string, and the tokens that it is made of.

A stop string may begin in one token and end in another, and no part of it is to be seen: so much of the text's end as
could be the beginning of one is held back until it is known. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from neurogrid.inference.generation.sampling import GeneratedToken, Logprobs
from neurogrid.model.files.tokenizer import Tokenizer

__all__ = [
    "AnswerWriter",
    "CallPiece",
    "FinishReason",
    "Piece",
    "WrittenToken",
    "held_back",
    "written_prompt",
]

FinishReason = Literal["stop", "length", "tool_calls"]

# Tokens before one that decide what it decodes to: those of a character that is not complete, and one more.
CONTEXT_TOKENS = 4
# JSON has no infinity; OpenAI's API says this instead.
MIN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class WrittenToken:
    """A token with its log probability, and the likeliest in its place.

    Attributes:
        text: what it adds to the text before it.
        offset: characters of the answer before it.
        logprob: None for the first token of a prompt, before which there is nothing.
    """

    text: str
    offset: int
    logprob: float | None
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The piece that a call of a tool grows by.

    Attributes:
        index: of the call in its answer.
        call_id, name: with the first piece alone.
        arguments: of their JSON text.
    """

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """The piece that an answer grows by.

    Attributes:
        tokens: those whose text is given out with it, where log probabilities were asked for.
        finish_reason: None for all but the last.
        reasoning: what the model thinks, and is no text of the answer.
        calls: of tools, in their order.
        stops: where stop strings begin, in characters since the beginning, of which a reader is to find out whether
            they are in the text of the answer.
    """

    text: str
    tokens: tuple[WrittenToken, ...] = ()
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    stops: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.text or self.tokens or self.finish_reason or self.reasoning or self.calls)


class AnswerWriter:
    """Takes the tokens of one answer.

    Args:
        prompt: what was before them.
        stop: strings before which the text ends; none is empty.
        min_tokens: a stop string that is there whole after so many tokens, or before, is text like other text.
        kept: special tokens that are text all the same, by what they are written as.
        is_read: a reader takes what is given out, and ends the text before a stop string; where they begin is given
            out with it.

    Attributes:
        num_tokens: that were taken, an end-of-sequence token included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        kept: Mapping[int, str] | None = None,
        is_read: bool = False,
    ) -> None:
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._is_read = is_read
        self._num_unstopped = 0  # characters that were decoded when no stop string counted yet, or when all were found
        self._text = tokenizer.stream(kept)
        self._recent = list(prompt[-CONTEXT_TOKENS:])
        self._length = 0  # characters that were decoded
        self._held = ""  # the last of them, which were not given out
        self._waiting: list[tuple[WrittenToken, int]] = []  # with where the token's text ends

    def push(self, token: GeneratedToken) -> Piece:
        """Take in a token; return what can be given out now. Nothing is pushed after a finish reason."""
        self.num_tokens += 1
        offset = self._length
        # An end-of-sequence token is no text, whatever the tokenizer thinks of it.
        is_text = token.finish_reason != "stop"
        text = self._text.push(token.token_id) if is_text else ""
        if token.finish_reason is not None:
            text += self._text.finish()
        self._length += len(text)
        self._held += text
        if self.num_tokens <= self._min_tokens:
            self._num_unstopped = self._length
        if is_text:
            if token.logprobs is not None:
                self._waiting.append((self._written(token, offset), self._length))
            self._recent = [*self._recent, token.token_id][-CONTEXT_TOKENS:]

        stops = self._new_stops()
        if stops and not self._is_read:
            end = stops[0]
            told = (written for written, _ in self._waiting if written.offset < end)
            return Piece(self._held[: end - self._num_given], tuple(told), "stop")
        num_held = 0 if token.finish_reason else held_back(self._held, self._stop)
        if stops:
            # The reader decides once it has all before one: no longer string is waited for there.
            num_held = min(num_held, self._length - stops[0])
        given = self._held[: len(self._held) - num_held]
        self._held = self._held[len(given) :]
        tokens = self._take(self._length - num_held)
        return Piece(given, tokens, token.finish_reason, stops=tuple(stops))

    @property
    def _num_given(self) -> int:
        """Number of characters that were given out."""
        return self._length - len(self._held)

    def _new_stops(self) -> list[int]:
        """Places at which stop strings begin that were not whole before."""
        first_end = self._num_unstopped - self._num_given + 1
        found: set[int] = set()
        for stop in self._stop:
            at = self._held.find(stop, max(first_end - len(stop), 0))
            while at >= 0:
                found.add(self._num_given + at)
                at = self._held.find(stop, at + 1)
        self._num_unstopped = self._length
        return sorted(found)

    def _take(self, end: int) -> tuple[WrittenToken, ...]:
        """The tokens whose text ends at `end` or before."""
        taken = [written for written, stop in self._waiting if stop <= end]
        self._waiting = self._waiting[len(taken) :]
        return tuple(taken)

    def _written(self, token: GeneratedToken, offset: int) -> WrittenToken:
        assert token.logprobs is not None

        def text_of(token_id: int) -> str:
            return self._tokenizer.token_text(token_id, after=self._recent)

        return WrittenToken(
            text_of(token.token_id),
            offset,
            _finite(token.logprobs.chosen),
            tuple((text_of(other), _finite(value)) for other, value in token.logprobs.top),
        )


def written_prompt(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[Logprobs | None]
) -> tuple[WrittenToken, ...]:
    """The tokens of a prompt, as those of an answer that begins with it. Takes long for a long one.

    Args:
        logprobs: of each token; None for one before which there is nothing.
    """
    written: list[WrittenToken] = []
    text, length = tokenizer.stream(), 0
    for place, (token_id, told) in enumerate(zip(prompt, logprobs, strict=True)):
        before = prompt[max(place - CONTEXT_TOKENS, 0) : place]
        own = tokenizer.token_text(token_id, after=before)
        if told is None:
            written.append(WrittenToken(own, length, None, ()))
        else:
            top = tuple(
                (tokenizer.token_text(other, after=before), _finite(value))
                for other, value in told.top
            )
            written.append(WrittenToken(own, length, _finite(told.chosen), top))
        length += len(text.push(token_id))
    return tuple(written)


def held_back(text: str, stop: Sequence[str]) -> int:
    """Number of characters at the end of `text` that could be the beginning of one of `stop`, but not all of it."""
    longest = max(map(len, stop), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(len(string) > length and string.startswith(end) for string in stop):
            return length
    return 0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else MIN_LOGPROB
