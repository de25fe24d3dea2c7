"""Shape of llama.cpp's answers of `/infill`: an object, or events of which the last has counts and times.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md, "POST /completion", "Response format"
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from neurogrid.server.errors import APIError
from neurogrid.server.openai.answer import Framing, Usage
from neurogrid.server.openai.answer_shapes import dump
from neurogrid.server.openai.answer_writer import Piece

__all__ = ["InfillShape"]

# Without the [DONE] that ends OpenAI's streams.
EVENTS: Final = Framing(b"text/event-stream; charset=utf-8", before=b"data: ", after=b"\n\n")


class InfillShape:
    """Shape of one request's answer; times count from when this is made.

    Args:
        fields: of the last object these alone, an inner one's as `timings/prompt_n`; None for all.
        tells: whether what is generated is told; else the prompt was to be read alone.
    """

    framing = EVENTS

    def __init__(self, model: str, *, fields: Sequence[str] | None, tells: bool) -> None:
        self._model = model
        self._fields = fields
        self._tells = tells
        self._made = time.monotonic_ns()
        self._reason = ""
        self._has_new_line = False

    def begin(self, index: int) -> None:
        return None

    def event(self, index: int, piece: Piece) -> bytes | None:
        self._take(piece)
        if not (piece.text and self._tells):
            return None
        return dump({"index": 0, "content": piece.text, "tokens": [], "stop": False, "id_slot": -1})

    def usage_event(self, usage: Usage) -> bytes:
        return dump(self._last("", usage))

    def error_event(self, error: APIError) -> bytes:
        return error.json()

    def whole(self, answers: list[list[Piece]], usage: Usage) -> bytes:
        (pieces,) = answers
        for piece in pieces:
            self._take(piece)
        return dump(self._last("".join(piece.text for piece in pieces), usage))

    def _take(self, piece: Piece) -> None:
        self._reason = piece.finish_reason or self._reason
        self._has_new_line = self._has_new_line or "\n" in piece.text

    def _last(self, text: str, usage: Usage) -> dict[str, Any]:
        now = time.monotonic_ns()
        num_new = usage.num_new_tokens if self._tells else 0
        num_read = usage.num_prompt_tokens - usage.num_reused_tokens
        first_at = usage.first_at or now
        answer: dict[str, Any] = {
            "index": 0,
            "content": text if self._tells else "",
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": num_new,
            "tokens_evaluated": usage.num_prompt_tokens,
            "tokens_cached": usage.num_prompt_tokens + num_new,
            "has_new_line": self._has_new_line and self._tells,
            "truncated": False,
            # Whether a token of the model or a string of the request ended it is not told apart.
            "stop_type": "eos" if self._reason == "stop" and self._tells else "limit",
            "timings": {
                **_times("prompt", num_read, first_at - self._made),
                **_times("predicted", num_new, max(usage.last_at, first_at) - first_at),
            },
        }
        if self._fields is None:
            return answer
        picked = {name: _inner(answer, name) for name in self._fields}
        return {name: value for name, value in picked.items() if value is not None}


def _times(name: str, num_tokens: int, nanoseconds: int) -> dict[str, float]:
    milliseconds = nanoseconds / 1e6
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / max(num_tokens, 1),
        f"{name}_per_second": num_tokens / max(milliseconds / 1e3, 1e-9),
    }


def _inner(answer: Any, name: str) -> Any:
    for part in name.split("/"):
        answer = answer.get(part) if isinstance(answer, dict) else None
    return answer
