"""Shapes of answers of the two APIs: `chat.completion` and `text_completion`, whole and in events.

https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping

from neurogrid.server.errors import APIError
from neurogrid.server.openai.answer import SERVER_SENT, Usage
from neurogrid.server.openai.answer_writer import CallPiece, Piece, WrittenToken

__all__ = ["ChatShape", "CompletionShape", "dump"]

# JSON need not escape them, and clients that split events into lines by Unicode's rules break at them.
_LINE_ENDS = "\x85\u2028\u2029"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class _Shape:
    framing = SERVER_SENT
    prefix: str
    kind: str  # of the whole
    event_kind: str

    def __init__(self, model: str, *, with_logprobs: bool, with_usage: bool) -> None:
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._with_logprobs = with_logprobs
        # Where the usage comes at the end, every event before it says that it has none.
        self._no_usage: dict[str, object] = {"usage": None} if with_usage else {}

    def usage_event(self, usage: Usage) -> bytes:
        return dump(
            {**self._head, "object": self.event_kind, "choices": [], "usage": usage.as_json()}
        )

    def error_event(self, error: APIError) -> bytes:
        return error.json()

    def _event(self, choice: dict[str, object]) -> bytes:
        return dump(
            {**self._head, "object": self.event_kind, "choices": [choice], **self._no_usage}
        )

    def _whole(self, choices: list[dict[str, object]], usage: Usage) -> bytes:
        return dump(
            {**self._head, "object": self.kind, "choices": choices, "usage": usage.as_json()}
        )


class ChatShape(_Shape):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    def begin(self, index: int) -> bytes:
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def event(self, index: int, piece: Piece) -> bytes:
        delta: dict[str, object] = {}
        if piece.reasoning:
            delta |= _reasoning(piece.reasoning)
        if piece.text or (piece.tokens and not (piece.reasoning or piece.calls)):
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        return self._delta(index, delta, logprobs, piece.finish_reason)

    def whole(self, answers: list[list[Piece]], usage: Usage) -> bytes:
        choices: list[dict[str, object]] = [
            {
                "index": index,
                "message": _message(pieces),
                "logprobs": self._logprobs(_tokens(pieces)) if self._with_logprobs else None,
                "finish_reason": pieces[-1].finish_reason,
            }
            for index, pieces in enumerate(answers)
        ]
        return self._whole(choices, usage)

    def _delta(
        self, index: int, delta: Mapping[str, object], logprobs: object, finish_reason: object
    ) -> bytes:
        return self._event(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        )

    def _logprobs(self, tokens: Iterable[WrittenToken]) -> dict[str, object]:
        return {
            "content": [
                {
                    **_told(token.text, token.logprob),
                    "top_logprobs": [_told(text, logprob) for text, logprob in token.top],
                }
                for token in tokens
            ],
            "refusal": None,
        }


class CompletionShape(_Shape):
    """`/v1/completions`."""

    prefix = "cmpl"
    kind = "text_completion"
    event_kind = "text_completion"

    def begin(self, index: int) -> None:
        return None

    def event(self, index: int, piece: Piece) -> bytes:
        return self._event(self._choice(index, [piece]))

    def whole(self, answers: list[list[Piece]], usage: Usage) -> bytes:
        return self._whole([self._choice(*numbered) for numbered in enumerate(answers)], usage)

    def _choice(self, index: int, pieces: list[Piece]) -> dict[str, object]:
        return {
            "index": index,
            "text": _text(pieces),
            "logprobs": self._logprobs(list(_tokens(pieces))) if self._with_logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
        }

    def _logprobs(self, tokens: list[WrittenToken]) -> dict[str, object]:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            # The token itself is among them, also where it is not one of the likeliest.
            "top_logprobs": [
                None if token.logprob is None else {**dict(token.top), token.text: token.logprob}
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }


def _message(pieces: list[Piece]) -> dict[str, object]:
    """A message of a chat. It says nothing of tools and thoughts where there are none."""
    told = [call for piece in pieces for call in piece.calls]
    calls = [
        {
            "id": first.call_id,
            "type": "function",
            "function": {
                "name": first.name,
                "arguments": "".join(call.arguments for call in told if call.index == first.index),
            },
        }
        for first in told
        if first.call_id is not None
    ]
    text, reasoning = _text(pieces), "".join(piece.reasoning for piece in pieces)
    message: dict[str, object] = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
    }
    if reasoning:
        message |= _reasoning(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _reasoning(text: str) -> dict[str, object]:
    # The name that most programs look for, and the one that vLLM has since.
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(call: CallPiece) -> dict[str, object]:
    function: dict[str, object] = {"arguments": call.arguments}
    if call.call_id is None:
        return {"index": call.index, "function": function}
    function = {"name": call.name, **function}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _text(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _tokens(pieces: Iterable[Piece]) -> Iterable[WrittenToken]:
    return (token for piece in pieces for token in piece.tokens)


def _told(text: str, logprob: float | None) -> dict[str, object]:
    # A part of a character has bytes, which its text does not tell.
    data = None if _REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": data}


def dump(value: object) -> bytes:
    """JSON without a line end in it, of Unicode's either."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in _LINE_ENDS:
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode()
