"""The JSON schema of `/v1/embeddings`, which is both published and checked."""

from __future__ import annotations

from neurogrid.server.openai.request_schemas import COMPLETION_REQUEST
from neurogrid.server.schema_check import Schema

__all__ = ["EMBEDDING_REQUEST", "MAX_INPUTS"]

# As OpenAI bounds them.
MAX_INPUTS = 2048
MAX_DIMENSIONS = 65536

_TEXT, _, _TOKEN_IDS, _ = COMPLETION_REQUEST["properties"]["prompt"]["anyOf"]

EMBEDDING_REQUEST: Schema = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "model": COMPLETION_REQUEST["properties"]["model"],
        "input": {
            "description": "A text, token ids, or several of either.",
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_INPUTS},
            ],
        },
        "encoding_format": {
            "enum": ["float", "base64", None],
            "description": "base64: of float32, little-endian.",
        },
        "dimensions": {
            "type": ["integer", "null"],
            "minimum": 1,
            "maximum": MAX_DIMENSIONS,
            "description": "The first so many, brought to length 1: for models that were made so.",
        },
        "user": {"type": ["string", "null"], "maxLength": 1024},
    },
}
"""The body of `/v1/embeddings`."""
