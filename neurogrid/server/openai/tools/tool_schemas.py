"""JSON schemas of what a chat request says of tools, and of the format of its answer."""

from __future__ import annotations

from typing import Final

from neurogrid.server.schema_check import Schema

__all__ = [
    "FORMAT_FIELDS",
    "MAX_ARGUMENTS_CHARS",
    "MAX_CALLS",
    "MAX_TOOLS",
    "TOOL_FIELDS",
    "TOOL_MESSAGE_FIELDS",
]

MAX_TOOLS: Final = 128
# Of earlier calls in one message.
MAX_CALLS: Final = 128
MAX_ARGUMENTS_CHARS: Final = 1024 * 1024
MAX_TEXT_CHARS: Final = 1024 * 1024

_NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_DESCRIPTION: Schema = {"type": ["string", "null"], "maxLength": 64 * 1024}
_FLAG: Schema = {"type": ["boolean", "null"]}
_SCHEMA: Schema = {
    "type": ["object", "null"],
    "description": "A JSON schema: at most 64 KiB, and 64 objects and lists deep.",
}
_FUNCTION: Schema = {"type": "string", "enum": ["function"]}
# What calls are written and read by, where arguments stand between tags.
_PARAMETERS: Schema = {
    **_SCHEMA,
    "properties": {
        "type": {"type": "string", "enum": ["object"]},
        "properties": {
            "type": ["object", "null"],
            "additionalProperties": {"properties": {"enum": {"type": ["array", "null"]}}},
        },
        "required": {"type": ["array", "null"], "items": {"type": "string"}},
    },
}

TOOL_FIELDS: dict[str, Schema] = {
    "tools": {
        "type": ["array", "null"],
        "maxItems": MAX_TOOLS,
        "items": {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": _FUNCTION,
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": _NAME,
                        "description": _DESCRIPTION,
                        "parameters": _PARAMETERS,
                        "strict": _FLAG,
                    },
                },
            },
        },
        "description": "For the model's chat template, if it names them, and calls are of a known format.",
    },
    "tool_choice": {
        "description": "With 'required' or a name, the answer is a call whose arguments fit the schema.",
        "anyOf": [
            {"type": "null"},
            {"type": "string", "enum": ["none", "auto", "required"]},
            {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": _FUNCTION,
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": _NAME},
                    },
                },
            },
        ],
    },
    "parallel_tool_calls": {**_FLAG, "description": "false: one call at most."},
}

TOOL_MESSAGE_FIELDS: dict[str, Schema] = {
    "tool_call_id": {"type": ["string", "null"], "maxLength": 256},
    "tool_calls": {
        "type": ["array", "null"],
        "maxItems": MAX_CALLS,
        "items": {
            "type": "object",
            "required": ["id", "function"],
            "properties": {
                "id": {"type": "string", "maxLength": 256},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string", "minLength": 1, "maxLength": 256},
                        "arguments": {
                            "type": ["string", "null"],
                            "maxLength": MAX_ARGUMENTS_CHARS,
                        },
                    },
                },
            },
        },
    },
    "reasoning_content": {"type": ["string", "null"], "maxLength": MAX_TEXT_CHARS},
    "reasoning": {"type": ["string", "null"], "maxLength": MAX_TEXT_CHARS},
}

FORMAT_FIELDS: dict[str, Schema] = {
    "response_format": {
        "type": ["object", "null"],
        "required": ["type"],
        "properties": {
            "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
            "json_schema": {
                "type": ["object", "null"],
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "maxLength": 256},
                    "description": _DESCRIPTION,
                    "schema": _SCHEMA,
                    "strict": _FLAG,
                },
            },
        },
        "description": "json_object, or json_schema with a schema: the answer is JSON that fits it, strict or not.",
    },
    "structured_outputs": {
        "type": ["object", "null"],
        "properties": {
            "json": _SCHEMA,
            "regex": {"type": ["string", "null"], "minLength": 1, "maxLength": 4096},
            "choice": {
                "type": ["array", "null"],
                "items": {"type": "string", "minLength": 1, "maxLength": 4096},
                "minItems": 1,
                "maxItems": 1024,
            },
        },
        "description": "Not of OpenAI's API: one of json, regex and choice, which the answer has to be.",
    },
}
