"""JSON schemas of `/tokenize` and `/detokenize`, which are both published and checked."""

from __future__ import annotations

from neurogrid.server.openai.request_schemas import (
    CHAT_REQUEST,
    COMPLETION_REQUEST,
    MAX_PROMPT_CHARS,
    MAX_PROMPT_TOKENS,
)
from neurogrid.server.schema_check import Schema

__all__ = ["DETOKENIZE_REQUEST", "TOKENIZE_REQUEST"]

_FLAG: Schema = {"type": ["boolean", "null"]}
_OF_CHATS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "enable_thinking",
)

TOKENIZE_REQUEST: Schema = {
    "type": "object",
    "properties": {
        "model": COMPLETION_REQUEST["properties"]["model"],
        "prompt": {
            "type": ["string", "null"],
            "maxLength": MAX_PROMPT_CHARS,
            "description": "A text; this, or messages.",
        },
        "messages": {**CHAT_REQUEST["properties"]["messages"], "type": ["array", "null"]},
        "add_special_tokens": {
            **_FLAG,
            "description": "Those that the tokenizer adds to a text; true if left out, and not for messages.",
        },
        "return_token_strs": {
            **_FLAG,
            "description": "The tokens as the vocabulary has them, too.",
        },
        **{name: CHAT_REQUEST["properties"][name] for name in _OF_CHATS},
    },
}
"""The body of `/tokenize`."""

DETOKENIZE_REQUEST: Schema = {
    "type": "object",
    "required": ["tokens"],
    "properties": {
        "model": COMPLETION_REQUEST["properties"]["model"],
        "tokens": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
            "maxItems": MAX_PROMPT_TOKENS,
        },
    },
}
"""The body of `/detokenize`."""
