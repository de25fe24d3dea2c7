"""Paths of Ollama's API, as the document has them."""

from __future__ import annotations

from functools import partial
from typing import Any

from neurogrid.server.ollama.request_schemas import (
    CHAT_REQUEST,
    EMBED_REQUEST,
    EMBEDDINGS_REQUEST,
    GENERATE_REQUEST,
    SHOW_REQUEST,
)
from neurogrid.server.openapi import Paths, json_answer, operation
from neurogrid.server.schema_check import Schema

__all__ = ["OLLAMA_PATHS"]

_STRING: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_REFUSED = (400, 404, 408, 413, 415, 422, 429, 503, 504)
_operation = partial(operation, api="Ollama")


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _generated(**text: Schema) -> dict[str, Any]:
    whole = _object(model=_STRING, created_at=_STRING, **text, done={"type": "boolean"})
    answer = json_answer(
        whole, "The answer; with `stream`, an object a line, the last with counts and durations."
    )
    answer["content"]["application/x-ndjson"] = {"schema": whole}
    return answer


_DETAILS = _object(
    parent_model=_STRING,
    format=_STRING,
    family=_STRING,
    families={"type": "array", "items": _STRING},
    parameter_size=_STRING,
    quantization_level=_STRING,
)
_NAMED = {"name": _STRING, "model": _STRING, "size": _COUNT, "digest": _STRING, "details": _DETAILS}


def _models(**more: Schema) -> dict[str, Any]:
    return json_answer(_object(models={"type": "array", "items": _object(**_NAMED, **more)}))


OLLAMA_PATHS: Paths = {
    "/api/chat": {
        "post": _operation(
            "Continue a conversation, as Ollama does.",
            _generated(message=_object(role=_STRING, content=_STRING)),
            errors=_REFUSED,
            body=CHAT_REQUEST,
        )
    },
    "/api/generate": {
        "post": _operation(
            "Answer a prompt, as Ollama does.",
            _generated(response=_STRING),
            errors=_REFUSED,
            body=GENERATE_REQUEST,
        )
    },
    "/api/embed": {
        "post": _operation(
            "The embeddings of texts.",
            json_answer(
                _object(
                    model=_STRING,
                    embeddings=_list(_list(_NUMBER)),
                    total_duration=_COUNT,
                    load_duration=_COUNT,
                    prompt_eval_count=_COUNT,
                )
            ),
            errors=_REFUSED,
            body=EMBED_REQUEST,
        )
    },
    "/api/embeddings": {
        "post": _operation(
            "The embedding of a text, for older clients.",
            json_answer(_object(embedding=_list(_NUMBER))),
            errors=_REFUSED,
            body=EMBEDDINGS_REQUEST,
        )
    },
    "/api/tags": {
        "get": _operation(
            "The model that is served, and the adapters beside it.",
            _models(modified_at=_STRING),
            errors=(503,),
        )
    },
    "/api/ps": {
        "get": _operation(
            "The same, as models that are loaded.",
            _models(expires_at=_STRING, size_vram=_COUNT, context_length=_COUNT),
            errors=(503,),
        )
    },
    "/api/version": {
        "get": _operation(
            "The version of Ollama whose API this is, and that of this program.",
            json_answer(_object(version=_STRING, neurogrid=_STRING)),
        )
    },
    "/api/show": {
        "post": _operation(
            "What is known of a model.",
            json_answer(
                _object(
                    modelfile=_STRING,
                    parameters=_STRING,
                    template=_STRING,
                    details=_DETAILS,
                    model_info={"type": "object"},
                    capabilities={"type": "array", "items": _STRING},
                    modified_at=_STRING,
                )
            ),
            errors=(400, 404, 408, 413, 415, 503, 504),
            body=SHOW_REQUEST,
        )
    },
}
