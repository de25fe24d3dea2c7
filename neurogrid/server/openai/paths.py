"""Paths of the OpenAI API, as the document has them."""

from __future__ import annotations

from neurogrid.server.openai.embedding_schemas import EMBEDDING_REQUEST
from neurogrid.server.openai.request_schemas import (
    ADAPTER_REQUEST,
    CHAT_REQUEST,
    COMPLETION_REQUEST,
    MODEL_REQUEST,
)
from neurogrid.server.openai.responses.schemas import RESPONSE_REQUEST
from neurogrid.server.openai.token_schemas import DETOKENIZE_REQUEST, TOKENIZE_REQUEST
from neurogrid.server.openapi import Paths, json_answer, operation
from neurogrid.server.schema_check import Schema

__all__ = ["OPENAI_PATHS"]


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


_STRING: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FINISH_REASON: Schema = {"type": "string", "enum": ["stop", "length"]}
_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
# One of a stream: its data is an object as text, or [DONE].
_EVENT: Schema = {"type": "object", "properties": {"data": _STRING}, "required": ["data"]}
_MODEL: Schema = {
    "type": "object",
    "required": [
        *("id", "object", "created", "owned_by", "max_model_len", "root", "parent", "state")
    ],
    "properties": {
        "id": _STRING,
        "object": {"type": "string", "enum": ["model"]},
        "created": _COUNT,
        "owned_by": _STRING,
        "max_model_len": {
            "type": ["integer", "null"],
            "minimum": 0,
            "description": "null of a model that has not been open yet.",
        },
        "root": _STRING,
        "parent": {"type": ["string", "null"]},
        "state": {"type": "string", "enum": ["ready", "opening", "idle", "closing", "failed"]},
        "reason": {**_STRING, "description": "Of the state, where there is something to say."},
        "input_modalities": {
            "type": "array",
            "items": {"type": "string", "enum": ["text", "image"]},
        },
    },
}
_DELETED = _object(
    id=_STRING,
    object={"type": "string", "enum": ["model"]},
    deleted={"type": "boolean"},
)


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_TOKEN = {
    "token": _STRING,
    "logprob": _NUMBER,
    "bytes": {"type": ["array", "null"], "items": {"type": "integer"}},
}
_CHAT_LOGPROBS: Schema = {
    "anyOf": [
        {"type": "null"},
        _object(
            content=_list(_object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN)))),
            refusal={"type": "null"},
        ),
    ]
}
_CALL = _object(
    id=_STRING,
    type={"type": "string", "enum": ["function"]},
    function=_object(name=_STRING, arguments=_STRING),
)
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content", "refusal"],
    "properties": {
        "role": _STRING,
        "content": {"type": ["string", "null"]},
        "refusal": {"type": "null"},
        "tool_calls": _list(_CALL),
        "reasoning_content": _STRING,
        "reasoning": _STRING,
    },
}
_COMPLETION_LOGPROBS: Schema = {
    "anyOf": [
        {"type": "null"},
        _object(
            tokens=_list(_STRING),
            token_logprobs=_list({"type": ["number", "null"]}),
            top_logprobs=_list({"type": ["object", "null"], "additionalProperties": _NUMBER}),
            text_offset=_list(_COUNT),
        ),
    ]
}


def _answer(kind: str, choice: Schema) -> dict[str, object]:
    whole = _object(
        id=_STRING,
        object={"type": "string", "enum": [kind]},
        created=_COUNT,
        model=_STRING,
        choices=_list(choice),
        usage=_USAGE,
    )
    answer = json_answer(whole, "The answers; with `stream`, events that end with [DONE].")
    answer["content"]["text/event-stream"] = {"schema": _EVENT}
    return answer


def _response_answer() -> dict[str, object]:
    item = _object(id=_STRING, type=_STRING, status=_STRING)
    whole = _object(
        id=_STRING,
        object={"type": "string", "enum": ["response"]},
        created_at=_COUNT,
        status={"type": "string", "enum": ["completed", "incomplete"]},
        model=_STRING,
        output=_list(item),
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
    )
    answer = json_answer(whole, "The response; with `stream`, events with names and numbers.")
    answer["content"]["text/event-stream"] = {"schema": _EVENT}
    return answer


_REFUSED = (400, 404, 408, 413, 415, 422, 429, 503, 504)

OPENAI_PATHS: Paths = {
    "/v1/models": {
        "get": operation(
            "The models that are served, and the adapters beside each, whose `parent` it is.",
            json_answer(_object(object={"type": "string", "enum": ["list"]}, data=_list(_MODEL))),
            errors=(503,),
        ),
        "post": operation(
            "Serve one more model; answered when it is ready.",
            json_answer(_MODEL),
            errors=(400, 403, 408, 409, 413, 415, 503),
            body=MODEL_REQUEST,
        ),
    },
    "/v1/models/{model}": {
        "get": operation(
            "One model.",
            json_answer(_MODEL),
            errors=(404, 503),
            parameters=[{"name": "model", "in": "path", "required": True, "schema": _STRING}],
        ),
        "delete": operation(
            "Serve a model no longer; answered when those that it was answering have their answers.",
            json_answer(_DELETED),
            errors=(403, 404),
            parameters=[{"name": "model", "in": "path", "required": True, "schema": _STRING}],
        ),
    },
    "/v1/adapters": {
        "post": operation(
            "Serve one more adapter, as a model of its name.",
            json_answer(_MODEL),
            errors=(400, 403, 404, 408, 413, 415, 503),
            body=ADAPTER_REQUEST,
        )
    },
    "/v1/adapters/{name}": {
        "delete": operation(
            "Serve an adapter no longer; answers that have begun with it go on.",
            json_answer(_DELETED),
            errors=(403, 404, 503),
            parameters=[{"name": "name", "in": "path", "required": True, "schema": _STRING}],
        )
    },
    "/v1/chat/completions": {
        "post": operation(
            "Continue a conversation.",
            _answer(
                "chat.completion",
                _object(
                    index=_COUNT,
                    message=_MESSAGE,
                    logprobs=_CHAT_LOGPROBS,
                    finish_reason={"type": "string", "enum": ["stop", "length", "tool_calls"]},
                ),
            ),
            errors=_REFUSED,
            body=CHAT_REQUEST,
        )
    },
    "/v1/completions": {
        "post": operation(
            "Continue texts.",
            _answer(
                "text_completion",
                _object(
                    index=_COUNT,
                    text=_STRING,
                    logprobs=_COMPLETION_LOGPROBS,
                    finish_reason=_FINISH_REASON,
                ),
            ),
            errors=_REFUSED,
            body=COMPLETION_REQUEST,
        )
    },
    "/v1/responses": {
        "post": operation(
            "Answer a text or a conversation; nothing is stored.",
            _response_answer(),
            errors=_REFUSED,
            body=RESPONSE_REQUEST,
        )
    },
    "/v1/embeddings": {
        "post": operation(
            "The embeddings of texts.",
            json_answer(
                _object(
                    object={"type": "string", "enum": ["list"]},
                    data=_list(
                        _object(
                            object={"type": "string", "enum": ["embedding"]},
                            index=_COUNT,
                            embedding={"anyOf": [_STRING, _list(_NUMBER)]},
                        )
                    ),
                    model=_STRING,
                    usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
                )
            ),
            errors=_REFUSED,
            body=EMBEDDING_REQUEST,
        )
    },
    "/tokenize": {
        "post": operation(
            "The tokens of a text or a conversation.",
            json_answer(
                _object(
                    count=_COUNT,
                    max_model_len=_COUNT,
                    tokens=_list(_COUNT),
                    token_strs={"type": ["array", "null"], "items": _STRING},
                )
            ),
            errors=_REFUSED,
            body=TOKENIZE_REQUEST,
        )
    },
    "/detokenize": {
        "post": operation(
            "The text of tokens, special ones written out.",
            json_answer(_object(prompt=_STRING)),
            errors=_REFUSED,
            body=DETOKENIZE_REQUEST,
        )
    },
}
