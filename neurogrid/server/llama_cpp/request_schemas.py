"""The JSON schema of `/infill`, which is both published and checked, and what is refused beside it.

Source: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md, "POST /infill" and "POST /completion".

Fields that are not named here are taken and ignored: those that say how llama.cpp's own process is used (`id_slot`,
`cache_prompt`, ...), and the hints that llama.vim and llama.vscode send beside (`samplers`, `n_indent`, `t_max_*_ms`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from neurogrid.inference.generation.sampling_params import (
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)
from neurogrid.server.errors import APIError
from neurogrid.server.openai.request_schemas import (
    MAX_PROMPT_CHARS,
    MAX_STOP_CHARS,
    MAX_TOKENS,
)
from neurogrid.server.schema_check import Schema, is_one_of

__all__ = ["INFILL_REQUEST", "refuse_fields"]

# Texts beside the one with the gap: llama.vim sends 16 of them, llama.vscode about as many.
MAX_EXTRA = 256
MAX_STOPS = 32
MAX_RESPONSE_FIELDS = 64

_TEXT: Schema = {"type": ["string", "null"], "maxLength": MAX_PROMPT_CHARS}
_FLAG: Schema = {"type": ["boolean", "null"]}
_PART: Schema = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
_PENALTY: Schema = {"type": ["number", "null"], "minimum": -2, "maximum": 2}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}

INFILL_REQUEST: Schema = {
    "type": "object",
    "required": ["input_prefix", "input_suffix"],
    "properties": {
        "model": {
            "type": ["string", "null"],
            "maxLength": 1024,
            "description": "One of /v1/models; the model itself if left out.",
        },
        "input_prefix": {
            "type": "string",
            "maxLength": MAX_PROMPT_CHARS,
            "description": "Text before the gap.",
        },
        "input_suffix": {
            "type": "string",
            "maxLength": MAX_PROMPT_CHARS,
            "description": "Text behind it.",
        },
        "input_extra": {
            "type": ["array", "null"],
            "maxItems": MAX_EXTRA,
            "description": "Other texts of the project; the last ones that fit are told to the model.",
            "items": {
                "type": "object",
                "properties": {"filename": {"type": "string", "maxLength": 4096}, "text": _TEXT},
            },
        },
        "prompt": {**_TEXT, "description": "The last text before the gap, behind input_prefix."},
        "n_predict": {
            "type": ["integer", "null"],
            "minimum": -1,
            "maximum": MAX_TOKENS,
            "description": "New tokens at most; -1 for as many as there is room for, 0 to have the prompt read alone.",
        },
        "stream": _FLAG,
        "stop": {
            "anyOf": [
                {"type": "null"},
                _STOP,
                {"type": "array", "items": _STOP, "maxItems": MAX_STOPS},
            ]
        },
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
        "top_p": {**_PART, "description": "Left out: the model's own, or 0.95."},
        "min_p": {**_PART, "description": "Left out: the model's own, or 0.05."},
        "seed": {
            "type": ["integer", "null"],
            "minimum": -(2**63),
            "maximum": 2**63 - 1,
            "description": "Below 0, or 4294967295: another one each time.",
        },
        "repeat_penalty": {
            "type": ["number", "null"],
            "minimum": MIN_REPETITION_PENALTY,
            "maximum": MAX_REPETITION_PENALTY,
            "description": "Counts all of prompt and answer.",
        },
        "presence_penalty": _PENALTY,
        "frequency_penalty": _PENALTY,
        "ignore_eos": _FLAG,
        "response_fields": {
            "type": ["array", "null"],
            "maxItems": MAX_RESPONSE_FIELDS,
            "items": {"type": "string", "maxLength": 128},
            "description": "Of the last object these alone; those of an object within are named `timings/prompt_n`.",
        },
    },
}
"""The body of `/infill`."""

# By field: the values that change nothing.
_NOT_OFFERED: Final[Mapping[str, tuple[object, ...]]] = {
    "grammar": (None, ""),
    "json_schema": (None,),
    "logit_bias": (None, [], {}),
    "mirostat": (None, 0),
    "n_probs": (None, 0),
    "n_cmpl": (None, 1),
    "lora": (None, []),
}


def refuse_fields(body: Mapping[str, object]) -> None:
    """Refuse fields that would change the answer and are not there. `body` is not checked yet.

    Raises:
        APIError: 400, with the field.
    """
    for name, harmless in _NOT_OFFERED.items():
        if not is_one_of(body.get(name), harmless):
            raise APIError(
                400,
                f"{name} is not supported by /infill here",
                param=name,
                code="unsupported_parameter",
            )
