"""The JSON schema of `/v1/responses`, which is both published and checked.

Source: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from neurogrid.server.openai.image_parts import IMAGE_PART
from neurogrid.server.openai.request_schemas import (
    CHAT_REQUEST,
    MAX_MESSAGES,
    MAX_PROMPT_CHARS,
    MAX_TOKENS,
)
from neurogrid.server.openai.tools.tool_schemas import MAX_ARGUMENTS_CHARS, MAX_TOOLS
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
_IMAGE: Schema = {
    "type": "object",
    "required": ["type", "image_url"],
    "properties": {
        "type": {"type": "string", "enum": ["input_image"]},
        "image_url": IMAGE_PART["properties"]["image_url"]["properties"]["url"],
        "detail": IMAGE_PART["properties"]["image_url"]["properties"]["detail"],
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
                {
                    "type": "array",
                    "items": {"anyOf": [_PART, _IMAGE]},
                    "minItems": 1,
                    "maxItems": MAX_MESSAGES,
                },
            ]
        },
    },
}

_ID: Schema = {"type": ["string", "null"], "maxLength": 256}
_CALL: Schema = {
    "type": "object",
    "required": ["type", "call_id", "name", "arguments"],
    "properties": {
        "type": {"type": "string", "enum": ["function_call"]},
        "call_id": {"type": "string", "minLength": 1, "maxLength": 256},
        "name": {"type": "string", "minLength": 1, "maxLength": 256},
        "arguments": {"type": "string", "maxLength": MAX_ARGUMENTS_CHARS},
    },
}
_RESULT: Schema = {
    "type": "object",
    "required": ["type", "call_id", "output"],
    "properties": {
        "type": {"type": "string", "enum": ["function_call_output"]},
        "call_id": {"type": "string", "minLength": 1, "maxLength": 256},
        "output": _MESSAGE["properties"]["content"],
    },
}
_THOUGHT: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "enum": ["reasoning"]},
        "id": _ID,
        "content": {
            "type": ["array", "null"],
            "maxItems": MAX_MESSAGES,
            "items": {"type": "object", "required": ["text"], "properties": {"text": _TEXT}},
        },
    },
}
_FUNCTION = CHAT_REQUEST["properties"]["tools"]["items"]["properties"]["function"]
_TOOL: Schema = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"type": "string", "enum": ["function"]},
        **_FUNCTION["properties"],
    },
}
_FORMAT: Schema = {
    "type": ["object", "null"],
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
        "name": {"type": ["string", "null"], "maxLength": 256},
        "schema": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
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
                {
                    "type": "array",
                    "items": {"anyOf": [_MESSAGE, _CALL, _RESULT, _THOUGHT]},
                    "minItems": 1,
                    "maxItems": MAX_MESSAGES,
                },
            ],
        },
        "tools": {"type": ["array", "null"], "maxItems": MAX_TOOLS, "items": _TOOL},
        "tool_choice": {
            "anyOf": [
                {"type": "null"},
                {"type": "string", "enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "required": ["type", "name"],
                    "properties": {
                        "type": {"type": "string", "enum": ["function"]},
                        "name": _FUNCTION["properties"]["name"],
                    },
                },
            ]
        },
        "parallel_tool_calls": _CHAT["parallel_tool_calls"],
        "text": {"type": ["object", "null"], "properties": {"format": _FORMAT}},
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
        **{
            name: _CHAT[name]
            for name in ("temperature", "top_p", "stream", "user", "enable_thinking")
        },
    },
}
"""The body of `/v1/responses`."""
