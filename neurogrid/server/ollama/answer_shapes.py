"""Answers of Ollama's API: objects with `message` or `response`, one a line in a stream, the last with counts.

https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from neurogrid.server.errors import APIError
from neurogrid.server.openai.answer import Framing, Usage
from neurogrid.server.openai.answer_shapes import dump
from neurogrid.server.openai.answer_writer import Piece, WrittenToken
from neurogrid.server.openai.tools.call_object import read_json

__all__ = ["OllamaShape", "now"]

LINES: Final = Framing(b"application/x-ndjson", after=b"\n")


def now() -> str:
    """This moment, in UTC, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaShape:
    """Shape of one request's answer; durations count from when this is made.

    Args:
        model: as the request names it.
        kind: `chat` or `generate`.
    """

    framing = LINES

    def __init__(self, model: str, kind: str) -> None:
        self._model = model
        self._kind = kind
        self._made = time.monotonic_ns()
        self._reason = ""
        self._calls: dict[int, tuple[str, list[str]]] = {}

    def begin(self, index: int) -> None:
        return None

    def event(self, index: int, piece: Piece) -> bytes | None:
        self._take(piece)
        calls = self._complete(is_last=piece.finish_reason is not None)
        if not (piece.reasoning or calls or piece.text or piece.tokens):
            return None
        answer = self._object(piece.text, piece.tokens, piece.reasoning, calls, done=False)
        return dump(answer)

    def usage_event(self, usage: Usage) -> bytes:
        return dump({**self._object("", (), done=True), **self._counts(usage)})

    def error_event(self, error: APIError) -> bytes:
        return json.dumps(error.ollama_body).encode()

    def whole(self, answers: list[list[Piece]], usage: Usage) -> bytes:
        (pieces,) = answers
        for piece in pieces:
            self._take(piece)
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        reasoning = "".join(piece.reasoning for piece in pieces)
        calls = self._complete(is_last=True)
        answer = self._object(text, tokens, reasoning, calls, done=True)
        return dump({**answer, **self._counts(usage)})

    def empty(self, reason: str) -> bytes:
        """The answer to a request without a prompt."""
        return dump({**self._object("", (), done=True), "done_reason": reason})

    def _take(self, piece: Piece) -> None:
        self._reason = piece.finish_reason or self._reason
        for call in piece.calls:
            _, parts = self._calls.setdefault(call.index, (call.name or "", []))
            parts.append(call.arguments)

    def _complete(self, *, is_last: bool) -> list[dict[str, object]]:
        """The calls that are whole by now and were not told yet: Ollama tells no parts of them."""
        whole = sorted(self._calls) if is_last else sorted(self._calls)[:-1]
        told: list[dict[str, object]] = []
        for index in whole:
            name, parts = self._calls.pop(index)
            is_cut = self._reason == "length" and index == whole[-1]
            try:
                arguments = read_json("".join(parts) or ("" if is_cut else "{}"))
            except ValueError:
                continue  # the answer ended within it, and says so: `length`; or it is nothing that could be told
            told.append({"function": {"index": index, "name": name, "arguments": arguments}})
        return told

    def _object(
        self,
        text: str,
        tokens: Iterable[WrittenToken],
        reasoning: str = "",
        calls: Sequence[Mapping[str, object]] = (),
        *,
        done: bool,
    ) -> dict[str, object]:
        answer: dict[str, object] = {"model": self._model, "created_at": now()}
        thinking = {"thinking": reasoning} if reasoning else {}
        if self._kind == "chat":
            message: dict[str, object] = {"role": "assistant", "content": text, **thinking}
            if calls:
                message["tool_calls"] = calls
            answer["message"] = message
        else:
            answer |= {"response": text, **thinking}
        if logprobs := [_told(token) for token in tokens]:
            answer["logprobs"] = logprobs
        return {**answer, "done": done}

    def _counts(self, usage: Usage) -> dict[str, object]:
        """Fields that the last object has besides. Durations in nanoseconds."""
        return {
            "done_reason": "stop" if self._reason == "tool_calls" else self._reason,
            "total_duration": time.monotonic_ns() - self._made,
            "load_duration": 0,  # layers are on the workers before anything is asked
            "prompt_eval_count": usage.num_prompt_tokens,
            "prompt_eval_duration": usage.first_at - self._made,
            "eval_count": usage.num_new_tokens,
            "eval_duration": usage.last_at - usage.first_at,
        }


def _told(token: WrittenToken) -> dict[str, object]:
    def one(text: str, logprob: float | None) -> dict[str, object]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        **one(token.text, token.logprob),
        "top_logprobs": [one(text, logprob) for text, logprob in token.top],
    }
