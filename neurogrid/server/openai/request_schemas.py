"""JSON schemas of requests, which are both published and checked.

Fields that are not named here are taken and ignored, as long as they cannot change the answer. Those that would
change it, and that we do not have, stand in not_offered.py with the values that change nothing.
"""

from __future__ import annotations

from neurogrid.inference.generation.sampling_params import (
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKENS,
    MIN_REPETITION_PENALTY,
)
from neurogrid.server.openai.image_parts import IMAGE_PART
from neurogrid.server.openai.tools.tool_schemas import (
    FORMAT_FIELDS,
    TOOL_FIELDS,
    TOOL_MESSAGE_FIELDS,
)
from neurogrid.server.schema_check import Schema

__all__ = [
    "ADAPTER_REQUEST",
    "CHAT_REQUEST",
    "COMPLETION_REQUEST",
    "MAX_CHOICES",
    "MAX_MESSAGES",
    "MODEL_REQUEST",
]

# Answers to one request, over all its prompts.
MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_PROMPT_CHARS = 8 * 1024 * 1024
MAX_PROMPT_TOKENS = 4 * 1024 * 1024
MAX_TOKENS = 2**31 - 1
MAX_STOPS = 4
# What is held back of a stream is shorter than the longest stop string.
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 20

_COUNT: Schema = {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_TOKENS}
_FLAG: Schema = {"type": ["boolean", "null"]}
_PENALTY: Schema = {"type": ["number", "null"], "minimum": -2, "maximum": 2}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_TEXT: Schema = {"type": "string", "maxLength": MAX_PROMPT_CHARS}
_TOKEN_IDS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "minItems": 1,
    "maxItems": MAX_PROMPT_TOKENS,
}

_COMMON: dict[str, Schema] = {
    "model": {
        "type": ["string", "null"],
        "maxLength": 1024,
        "description": "One of /v1/models: the model itself, which it is if left out, or an adapter.",
    },
    "max_tokens": {**_COUNT, "description": "New tokens at most."},
    "temperature": {
        "type": ["number", "null"],
        "minimum": 0,
        "maximum": 2,
        "description": "0 takes the likeliest token each time. Left out: the model's own, or 1.",
    },
    "top_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
    "top_k": {
        "type": ["integer", "null"],
        "minimum": -1,
        "maximum": 2**31 - 1,
        "description": "Not of OpenAI's API: sample among the K likeliest; 0 or -1 for all.",
    },
    "min_p": {
        "type": ["number", "null"],
        "minimum": 0,
        "maximum": 1,
        "description": "Not of OpenAI's API: sample among those with this part of the likeliest one's probability.",
    },
    "repetition_penalty": {
        "type": ["number", "null"],
        "minimum": MIN_REPETITION_PENALTY,
        "maximum": MAX_REPETITION_PENALTY,
        "description": "Not of OpenAI's API: above 1, less of what prompt and answer have already.",
    },
    "min_tokens": {
        "type": ["integer", "null"],
        "minimum": 0,
        "maximum": MAX_TOKENS,
        "description": "Not of OpenAI's API: new tokens before anything may end the answer.",
    },
    "stop_token_ids": {
        "type": ["array", "null"],
        "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        "maxItems": MAX_STOP_TOKENS,
        "description": "Not of OpenAI's API: tokens that end the answer and are no text of it.",
    },
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_CHOICES},
    "stop": {
        "description": "Ends the text before the first of these.",
        "anyOf": [
            {"type": "null"},
            _STOP,
            {"type": "array", "items": _STOP, "maxItems": MAX_STOPS},
        ],
    },
    "seed": {
        "type": ["integer", "null"],
        "minimum": -(2**63),
        "maximum": 2**63 - 1,
        "description": "Makes sampling repeatable; each answer gets a seed of its own from it, by its index.",
    },
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "logit_bias": {
        "type": ["object", "null"],
        "maxProperties": 1024,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "description": "Added to the logits of these token ids.",
    },
    "ignore_eos": {
        **_FLAG,
        "description": "Not of OpenAI's API: go on after the end-of-sequence token.",
    },
    "stream": _FLAG,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _FLAG},
    },
    "user": {"type": ["string", "null"], "maxLength": 1024},
}

_TEXT_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": _TEXT},
}

_CONTENT: Schema = {
    "anyOf": [
        _TEXT,
        {
            "type": "array",
            "items": {"anyOf": [_TEXT_PART, IMAGE_PART]},
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
        },
    ]
}
_SOME: Schema = {"type": "array", "minItems": 1}
_MESSAGE: dict[str, Schema] = {
    "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
    "content": _CONTENT,
    "name": {"type": ["string", "null"], "maxLength": 256},
    **TOOL_MESSAGE_FIELDS,
}

CHAT_REQUEST: Schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        **_COMMON,
        "max_completion_tokens": {
            **_COUNT,
            "description": "New tokens at most; goes before max_tokens. Left out: as many as the session holds.",
        },
        "messages": {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
            "items": {
                "anyOf": [
                    {"type": "object", "required": ["role", "content"], "properties": _MESSAGE},
                    {
                        "type": "object",
                        "required": ["role", "tool_calls"],
                        "properties": {
                            **_MESSAGE,
                            "role": {"type": "string", "enum": ["assistant"]},
                            "content": {"anyOf": [{"type": "null"}, _CONTENT]},
                            "tool_calls": {**TOOL_MESSAGE_FIELDS["tool_calls"], **_SOME},
                        },
                    },
                ],
            },
        },
        **TOOL_FIELDS,
        **FORMAT_FIELDS,
        "logprobs": _FLAG,
        "top_logprobs": {
            "type": ["integer", "null"],
            "minimum": 0,
            "maximum": MAX_TOP_LOGPROBS,
        },
        "reasoning_effort": {
            "type": ["string", "null"],
            "maxLength": 64,
            "description": "For the model's chat template, if it names it.",
        },
        "enable_thinking": {
            **_FLAG,
            "description": "Not of OpenAI's API: for the model's chat template, if it names it.",
        },
        "chat_template_kwargs": {
            "type": ["object", "null"],
            "maxProperties": 64,
            "propertyNames": {"pattern": "^[A-Za-z][A-Za-z0-9_]{0,63}$"},
            "description": "Not of OpenAI's API: variables of the model's chat template, at most 64 KiB as JSON.",
        },
        "add_generation_prompt": {
            **_FLAG,
            "description": "Not of OpenAI's API: begin the assistant's message; true if left out.",
        },
        "continue_final_message": {
            **_FLAG,
            "description": "Not of OpenAI's API: go on with the last message, which is the assistant's.",
        },
    },
}

COMPLETION_REQUEST: Schema = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        **_COMMON,
        "prompt": {
            "description": "A text, token ids, or several of either.",
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_CHOICES},
            ],
        },
        "suffix": {
            "type": ["string", "null"],
            "maxLength": MAX_PROMPT_CHARS,
            "description": "Text behind the gap that the answer fills; for models with tokens for that.",
        },
        "max_tokens": {
            **_COUNT,
            "minimum": 0,
            "description": "New tokens at most; 16 if left out. 0 with echo, for the prompt alone.",
        },
        "echo": {
            **_FLAG,
            "description": "Begin with the prompt; with logprobs, its tokens have theirs, too.",
        },
        "best_of": {
            "type": ["integer", "null"],
            "minimum": 1,
            "maximum": MAX_CHOICES,
            "description": "Generate so many, and give the n with the highest log probability per token.",
        },
        "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    },
}

ADAPTER_REQUEST: Schema = {
    "type": "object",
    "required": ["name", "path"],
    "properties": {
        "name": {
            "type": "string",
            "minLength": 1,
            "maxLength": 128,
            "description": "What requests call it as their model: letters, digits and ._:/@+-.",
        },
        "path": {
            "type": "string",
            "minLength": 1,
            "maxLength": 4096,
            "description": "Of its directory, or of the training run that made it, below --adapter-root.",
        },
        "model": {
            "type": ["string", "null"],
            "maxLength": 128,
            "description": "Of several models the one that it is for; the first, where nothing is said.",
        },
    },
}
"""The body of `POST /v1/adapters`."""

MODEL_REQUEST: Schema = {
    "type": "object",
    "required": ["model"],
    "properties": {
        "model": {
            "type": "string",
            "minLength": 1,
            "maxLength": 4096,
            "description": "Of its directory or file below --model-root, or OWNER/NAME as the cache has it.",
        },
        "name": {
            "type": ["string", "null"],
            "minLength": 1,
            "maxLength": 128,
            "description": "What requests call it; as its directory, or as at the hub, where nothing is said.",
        },
    },
}
"""The body of `POST /v1/models`."""
