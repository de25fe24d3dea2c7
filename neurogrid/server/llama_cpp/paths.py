"""Paths of llama.cpp's server, as the document has them."""

from __future__ import annotations

from neurogrid.server.llama_cpp.request_schemas import INFILL_REQUEST
from neurogrid.server.openapi import Paths, json_answer, operation
from neurogrid.server.schema_check import Schema

__all__ = ["LLAMA_CPP_PATHS"]

_EVENT: Schema = {
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def _answer() -> dict[str, object]:
    whole: Schema = {
        "type": "object",
        "properties": {
            "content": {"type": "string"},
            "stop": {"type": "boolean"},
            "tokens_predicted": {"type": "integer", "minimum": 0},
            "tokens_evaluated": {"type": "integer", "minimum": 0},
            "timings": {"type": "object"},
        },
    }
    answer = json_answer(whole, "The text; with `stream`, events of which the last has the counts.")
    answer["content"]["text/event-stream"] = {"schema": _EVENT}
    return answer


LLAMA_CPP_PATHS: Paths = {
    "/infill": {
        "post": operation(
            "Fill in between two texts, as llama.cpp's server does.",
            _answer(),
            errors=(400, 404, 408, 413, 415, 422, 429, 503, 504),
            body=INFILL_REQUEST,
        )
    },
}
