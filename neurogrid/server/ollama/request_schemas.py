"""JSON schemas of Ollama's requests, which are both published and checked.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md

Fields and options that are not named here are taken and ignored, as Ollama does: those that say how its own machine is
used (`num_gpu`, `num_thread`, `use_mmap`, `keep_alive` ...), and those that cannot change the answer.
"""

from __future__ import annotations

from typing import Any

from neurogrid.inference.generation.sampling_params import (
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)
from neurogrid.model.images.decoding import MAX_IMAGES
from neurogrid.server.openai.embedding_schemas import EMBEDDING_REQUEST, MAX_INPUTS
from neurogrid.server.openai.image_parts import MAX_URL_CHARS
from neurogrid.server.openai.request_schemas import (
    MAX_MESSAGES,
    MAX_PROMPT_CHARS,
    MAX_STOP_CHARS,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
)
from neurogrid.server.openai.tools.tool_schemas import MAX_CALLS, TOOL_FIELDS
from neurogrid.server.schema_check import Schema

__all__ = [
    "CHAT_REQUEST",
    "EMBEDDINGS_REQUEST",
    "EMBED_REQUEST",
    "GENERATE_REQUEST",
    "SHOW_REQUEST",
]

# Model files name the ends of turns here, more of them than OpenAI's four.
MAX_STOPS = 32

_FLAG: Schema = {"type": ["boolean", "null"]}
_TEXT: Schema = {"type": ["string", "null"], "maxLength": MAX_PROMPT_CHARS}
_PENALTY: Schema = {"type": ["number", "null"], "minimum": -2, "maximum": 2}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_MODEL: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": 1024,
    "description": "One of /api/tags, with or without `:latest`.",
}

_OPTIONS: Schema = {
    "type": ["object", "null"],
    "maxProperties": 256,
    "properties": {
        "temperature": {
            "type": ["number", "null"],
            "minimum": 0,
            "maximum": 2,
            "description": "Left out: the model's own, or 0.8.",
        },
        "top_k": {
            "type": ["integer", "null"],
            "minimum": -1,
            "maximum": 2**31 - 1,
            "description": "0 or -1 for all. Left out: the model's own, or 40.",
        },
        "top_p": {
            "type": ["number", "null"],
            "minimum": 0,
            "maximum": 1,
            "description": "Left out: the model's own, or 0.9.",
        },
        "min_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        "seed": {
            "type": ["integer", "null"],
            "minimum": -(2**63),
            "maximum": 2**63 - 1,
            "description": "Below 0: another one each time.",
        },
        "stop": {
            "anyOf": [
                {"type": "null"},
                _STOP,
                {"type": "array", "items": _STOP, "maxItems": MAX_STOPS},
            ]
        },
        "num_predict": {
            "type": ["integer", "null"],
            "minimum": -2,
            "maximum": MAX_TOKENS,
            "description": "New tokens at most; 0, -1 and -2 for as many as there is room for.",
        },
        "num_ctx": {
            "type": ["integer", "null"],
            "minimum": 0,
            "maximum": MAX_TOKENS,
            "description": "Tokens of prompt and answer at most; 0 for what a session holds, and never more than that.",
        },
        "repeat_penalty": {
            "type": ["number", "null"],
            "minimum": MIN_REPETITION_PENALTY,
            "maximum": MAX_REPETITION_PENALTY,
            "description": "Counts all of prompt and answer.",
        },
        "repeat_last_n": {
            "type": ["integer", "null"],
            "minimum": -1,
            "maximum": MAX_TOKENS,
            "description": "0 leaves repeat_penalty out; it is not bounded by other values.",
        },
        "presence_penalty": _PENALTY,
        "frequency_penalty": _PENALTY,
    },
}

_IMAGES: Schema = {
    "type": ["array", "null"],
    "maxItems": MAX_IMAGES,
    "items": {"type": "string", "minLength": 1, "maxLength": MAX_URL_CHARS},
    "description": "Files in base64, for a model that sees images: PNG, JPEG, WebP or GIF.",
}

_CALL: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 256},
        "arguments": {"type": ["object", "null"]},
    },
}

_COMMON: dict[str, Any] = {
    "model": _MODEL,
    "stream": {**_FLAG, "description": "A line of JSON for each piece; true if left out."},
    "options": _OPTIONS,
    "format": {
        "description": "`json` for any object, or a JSON schema, which the answer fits.",
        "anyOf": [
            {"type": "null"},
            {"type": "string", "enum": ["", "json"]},
            {"type": "object"},
        ],
    },
    "think": {
        "description": "For the model's chat template: whether it is to think, or how much.",
        "anyOf": [
            {"type": ["boolean", "null"]},
            {"type": "string", "enum": ["low", "medium", "high"]},
        ],
    },
    "logprobs": _FLAG,
    "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
}

CHAT_REQUEST: Schema = {
    "type": "object",
    "required": ["model"],
    "properties": {
        **_COMMON,
        "tools": TOOL_FIELDS["tools"],
        "messages": {
            "type": ["array", "null"],
            "maxItems": MAX_MESSAGES,
            "description": "None of them: nothing is generated, and the model is ready.",
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"type": "string", "enum": ["system", "user", "assistant", "tool"]},
                    "content": _TEXT,
                    "thinking": _TEXT,
                    "tool_calls": {
                        "type": ["array", "null"],
                        "maxItems": MAX_CALLS,
                        "items": {
                            "type": "object",
                            "required": ["function"],
                            "properties": {"function": _CALL},
                        },
                    },
                    "tool_name": {"type": ["string", "null"], "maxLength": 256},
                    "images": _IMAGES,
                },
            },
        },
    },
}
"""The body of `/api/chat`."""

GENERATE_REQUEST: Schema = {
    "type": "object",
    "required": ["model"],
    "properties": {
        **_COMMON,
        "prompt": {**_TEXT, "description": "Empty: nothing is generated, and the model is ready."},
        "system": {
            **_TEXT,
            "description": "A message before the prompt, for the model's chat template.",
        },
        "images": _IMAGES,
        "suffix": {
            **_TEXT,
            "description": "Text behind the gap that the answer fills; for models with tokens for that.",
        },
        "raw": {**_FLAG, "description": "Continue the prompt as it is, without a template."},
    },
}
"""The body of `/api/generate`."""

EMBED_REQUEST: Schema = {
    "type": "object",
    "required": ["model", "input"],
    "properties": {
        "model": _MODEL,
        "input": {
            "description": "A text, or several. None is cut off, whatever `truncate` says.",
            "anyOf": [
                {"type": "string", "maxLength": MAX_PROMPT_CHARS},
                {
                    "type": "array",
                    "items": {"type": "string", "maxLength": MAX_PROMPT_CHARS},
                    "minItems": 1,
                    "maxItems": MAX_INPUTS,
                },
            ],
        },
        "dimensions": EMBEDDING_REQUEST["properties"]["dimensions"],
    },
}
"""The body of `/api/embed`."""

EMBEDDINGS_REQUEST: Schema = {
    "type": "object",
    "required": ["model", "prompt"],
    "properties": {
        "model": _MODEL,
        "prompt": {"type": "string", "maxLength": MAX_PROMPT_CHARS},
    },
}
"""The body of `/api/embeddings`."""

SHOW_REQUEST: Schema = {
    "type": "object",
    "properties": {
        "model": {**_MODEL, "type": ["string", "null"]},
        "name": {
            **_MODEL,
            "type": ["string", "null"],
            "description": "What older clients call `model`.",
        },
    },
}
"""The body of `/api/show`."""
