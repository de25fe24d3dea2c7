"""How the Responses API writes an answer: a response with items; streamed, each step as an event with a number.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, Final

from neurogrid.server.errors import APIError
from neurogrid.server.openai.answer import Framing, Usage
from neurogrid.server.openai.answer_shapes import dump
from neurogrid.server.openai.answer_writer import Piece
from neurogrid.server.openai.request_reader import CompletionRequest

__all__ = ["ResponseShape"]

# The name of each event stands before its data: events are framed where they are made.
EVENTS: Final = Framing(b"text/event-stream; charset=utf-8")


class ResponseShape:
    """Of one request.

    Args:
        body: of the request, checked: some of it is told again.
    """

    framing = EVENTS

    def __init__(self, model: str, body: Mapping[str, Any], request: CompletionRequest) -> None:
        self._item_id = f"msg_{secrets.token_hex(24)}"
        self._number = 0
        self._text: list[str] = []
        self._reason: str | None = None
        sampling = request.choices[0].sampling
        self._response: dict[str, object] = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.get("user"),
        }

    def begin(self, index: int) -> bytes:
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return b"".join(
            (
                self._event("response.created", response=self._response),
                self._event("response.in_progress", response=self._response),
                self._event(
                    "response.output_item.added",
                    output_index=0,
                    item={**self._item("in_progress"), "content": []},
                ),
                self._event("response.content_part.added", **where, part=self._part("")),
            )
        )

    def event(self, index: int, piece: Piece) -> bytes | None:
        self._take(piece)
        if not piece.text:
            return None
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event("response.output_text.delta", **where, delta=piece.text, logprobs=[])

    def usage_event(self, usage: Usage) -> bytes:
        text, status = "".join(self._text), self._status()
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return b"".join(
            (
                self._event("response.output_text.done", **where, text=text, logprobs=[]),
                self._event("response.content_part.done", **where, part=self._part(text)),
                self._event("response.output_item.done", output_index=0, item=self._item(status)),
                self._event(f"response.{status}", response=self._finished(usage)),
            )
        )

    def error_event(self, error: APIError) -> bytes:
        code = error.code or "server_error"
        failed = {
            **self._response,
            "status": "failed",
            "output": [self._item("incomplete")],
            "error": {"code": code, "message": error.message},
        }
        return b"".join(
            (
                self._event("error", code=code, message=error.message, param=error.param),
                self._event("response.failed", response=failed),
            )
        )

    def whole(self, answers: list[list[Piece]], usage: Usage) -> bytes:
        for piece in answers[0]:
            self._take(piece)
        return dump(self._finished(usage))

    def _take(self, piece: Piece) -> None:
        self._text.append(piece.text)
        self._reason = piece.finish_reason or self._reason

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _finished(self, usage: Usage) -> dict[str, object]:
        status = self._status()
        cut_short = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._response,
            "status": status,
            "incomplete_details": cut_short,
            "output": [self._item(status)],
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_reused_tokens},
                "output_tokens": usage.num_new_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.num_prompt_tokens + usage.num_new_tokens,
            },
        }

    def _item(self, status: str) -> dict[str, object]:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self._part("".join(self._text))],
        }

    @staticmethod
    def _part(text: str) -> dict[str, object]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **fields: object) -> bytes:
        data = dump({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
