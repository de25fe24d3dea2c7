"""The JSON schema of `/v1/responses`, which is both published and checked.

Source: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from neurogrid.server.openai.request_schemas import (
    CHAT_REQUEST,
    MAX_MESSAGES,
    MAX_PROMPT_CHARS,
    MAX_TOKENS,
)
from neurogrid.server.schema_check import Schema

__all__ = ["RESPONSE_REQUEST"]

_CHAT = CHAT_REQUEST["properties"]
_TEXT: Schema = {"type": "string", "maxLength": MAX_PROMPT_CHARS}
_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {
        "type": {"type": "string", "enum": ["input_text", "output_text", "text"]},
        "text": _TEXT,
    },
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"enum": ["message", None]},
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _PART, "minItems": 1, "maxItems": MAX_MESSAGES},
            ]
        },
    },
}

RESPONSE_REQUEST: Schema = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "model": _CHAT["model"],
        "input": {
            "description": "A text, or messages: what a response had as its `output` is one of them.",
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES},
            ],
        },
        "instructions": {
            "type": ["string", "null"],
            "maxLength": MAX_PROMPT_CHARS,
            "description": "A message of the system, before the input.",
        },
        "max_output_tokens": {
            "type": ["integer", "null"],
            "minimum": 1,
            "maximum": MAX_TOKENS,
            "description": "New tokens at most. Left out: as many as the session holds.",
        },
        "metadata": {
            "type": ["object", "null"],
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
            "description": "Told again with the response.",
        },
        "reasoning": {
            "type": ["object", "null"],
            "properties": {"effort": _CHAT["reasoning_effort"]},
        },
        "store": {
            "type": ["boolean", "null"],
            "description": "Nothing is stored, as if it were false; true is refused.",
        },
        **{name: _CHAT[name] for name in ("temperature", "top_p", "stream", "user")},
    },
}
"""The body of `/v1/responses`."""
