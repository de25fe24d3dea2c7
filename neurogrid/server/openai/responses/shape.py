"""Shape of answers of the Responses API: a response with items; streamed, each step as an event with a number.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from neurogrid.server.errors import APIError
from neurogrid.server.openai.answer import Framing, Usage
from neurogrid.server.openai.answer_shapes import dump
from neurogrid.server.openai.answer_writer import CallPiece, Piece
from neurogrid.server.openai.request_reader import CompletionRequest

__all__ = ["ResponseShape"]

_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
# The name of each event stands before its data: events are framed where they are made.
EVENTS: Final = Framing(b"text/event-stream; charset=utf-8")


@dataclass
class _Item:
    """An item of the output, as it grows.

    Attributes:
        kind: its type.
        place: among all of them.
        call: number of the call that it is, in its answer.
    """

    kind: str
    place: int
    call: int = -1
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    item_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.item_id = f"{_PREFIXES[self.kind]}_{secrets.token_hex(24)}"

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def where(self) -> dict[str, object]:
        return {"item_id": self.item_id, "output_index": self.place}

    def as_json(self, status: str, *, is_new: bool = False) -> dict[str, object]:
        told: dict[str, object] = {"id": self.item_id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**told, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        if self.kind == "reasoning":
            content = [] if is_new else [{"type": "reasoning_text", "text": self.text}]
            return {**told, "summary": [], "content": content}
        return {**told, "role": "assistant", "content": [] if is_new else [_part(self.text)]}


class ResponseShape:
    """Shape of one request's answer.

    Args:
        body: of the request, checked: some of it is told again.
    """

    framing = EVENTS

    def __init__(self, model: str, body: Mapping[str, Any], request: CompletionRequest) -> None:
        self._items: list[_Item] = []
        self._number = 0
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
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.get("user"),
        }

    def begin(self, index: int) -> bytes:
        return self._event("response.created", response=self._response) + self._event(
            "response.in_progress", response=self._response
        )

    def event(self, index: int, piece: Piece) -> bytes | None:
        return b"".join(self._grown(piece)) or None

    def usage_event(self, usage: Usage) -> bytes:
        told = self._closed() if self._items else [*self._opened("message"), *self._closed()]
        finished = self._finished(usage)
        return b"".join((*told, self._event(f"response.{self._status()}", response=finished)))

    def error_event(self, error: APIError) -> bytes:
        code = error.code or "server_error"
        failed = {
            **self._response,
            "status": "failed",
            "output": [item.as_json("incomplete") for item in self._items],
            "error": {"code": code, "message": error.message},
        }
        told = self._event("error", code=code, message=error.message, param=error.param)
        return told + self._event("response.failed", response=failed)

    def whole(self, answers: list[list[Piece]], usage: Usage) -> bytes:
        for piece in answers[0]:
            self._grown(piece)
        if not self._items:
            self._opened("message")
        return dump(self._finished(usage))

    def _grown(self, piece: Piece) -> list[bytes]:
        """The events of what the answer grows by: the call under way; then as models write, thoughts, text, calls."""
        self._reason = piece.finish_reason or self._reason
        told: list[bytes] = []
        calls = list(piece.calls)
        # A token may end a call and begin text: what is the call's is told before its item is closed.
        while calls and calls[0].call_id is None:
            told += self._called(calls.pop(0))
        if piece.reasoning:
            told += self._turned_to("reasoning")
            told.append(self._delta("response.reasoning_text.delta", piece.reasoning))
        if piece.text:
            told += self._turned_to("message")
            told.append(self._delta("response.output_text.delta", piece.text))
        for call in calls:
            told += self._called(call)
        return told

    def _called(self, call: CallPiece) -> list[bytes]:
        told = self._turned_to("function_call", call)
        if call.arguments:
            told.append(self._delta("response.function_call_arguments.delta", call.arguments))
        return told

    def _turned_to(self, kind: str, call: CallPiece | None = None) -> list[bytes]:
        """The events with which another item begins, if it is another."""
        last = self._items[-1] if self._items else None
        number = -1 if call is None else call.index
        if last is not None and (last.kind, last.call) == (kind, number):
            return []
        return [*self._closed(), *self._opened(kind, call)]

    def _opened(self, kind: str, call: CallPiece | None = None) -> list[bytes]:
        item = _Item(kind, len(self._items))
        if call is not None:
            item.call, item.call_id, item.name = call.index, call.call_id or "", call.name or ""
        self._items.append(item)
        new = item.as_json("in_progress", is_new=True)
        told = [self._event("response.output_item.added", output_index=item.place, item=new)]
        if kind == "message":
            kind = "response.content_part.added"
            told.append(self._event(kind, **item.where, content_index=0, part=_part("")))
        return told

    def _closed(self) -> list[bytes]:
        """The events with which the last item ends."""
        if not self._items:
            return []
        item = self._items[-1]
        text, in_part = item.text, {**item.where, "content_index": 0}
        if item.kind == "function_call":
            kind = "response.function_call_arguments.done"
            told = [self._event(kind, **item.where, name=item.name, arguments=text)]
        elif item.kind == "reasoning":
            told = [self._event("response.reasoning_text.done", **in_part, text=text)]
        else:
            told = [
                self._event("response.output_text.done", **in_part, text=text, logprobs=[]),
                self._event("response.content_part.done", **in_part, part=_part(text)),
            ]
        done = item.as_json(self._status())
        told.append(self._event("response.output_item.done", output_index=item.place, item=done))
        return told

    def _delta(self, kind: str, text: str) -> bytes:
        item = self._items[-1]
        item.parts.append(text)
        more: dict[str, object] = {} if item.kind == "function_call" else {"content_index": 0}
        if item.kind == "message":
            more["logprobs"] = []
        return self._event(kind, **item.where, **more, delta=text)

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _finished(self, usage: Usage) -> dict[str, object]:
        status = self._status()
        cut_short = {"reason": "max_output_tokens"} if status == "incomplete" else None
        last = len(self._items) - 1
        return {
            **self._response,
            "status": status,
            "incomplete_details": cut_short,
            "output": [
                item.as_json(status if item.place == last else "completed") for item in self._items
            ],
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_reused_tokens},
                "output_tokens": usage.num_new_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},  # they are not counted apart
                "total_tokens": usage.num_prompt_tokens + usage.num_new_tokens,
            },
        }

    def _event(self, kind: str, **fields: object) -> bytes:
        data = dump({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
