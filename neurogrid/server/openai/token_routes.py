"""`/tokenize` and `/detokenize`, as vLLM has them: what the model's own tokenizer makes of texts and conversations.

Source: https://docs.vllm.ai/en/stable/serving/openai_compatible_server/, "Tokenizer API".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.server.backend import Backends
from neurogrid.server.errors import APIError
from neurogrid.server.openai.answer_shapes import dump
from neurogrid.server.openai.json_route import JsonRoute
from neurogrid.server.openai.not_offered import NOT_IN_CHATS, refuse_fields, refuse_messages
from neurogrid.server.openai.request_reader import chat_prompt, encode_text, read_model_name
from neurogrid.server.openai.token_schemas import DETOKENIZE_REQUEST, TOKENIZE_REQUEST
from neurogrid.server.schema_check import check

__all__ = ["token_routes"]

# Above it an answer is written in a thread: two million tokens, as a body may have, take half a second.
MAX_INLINE_TOKENS = 4096
# Refused in a conversation, as in a chat; what the tokenizer adds is asked for by name here.
_NOT_OFFERED = {
    name: values for name, values in NOT_IN_CHATS.items() if name != "add_special_tokens"
}


def token_routes(backend: Backends, *, request_timeout: float) -> list[BaseRoute]:
    """The routes; arguments as for `openai_routes`."""
    return [
        Route("/tokenize", JsonRoute(backend, _tokenize, request_timeout), methods=["POST"]),
        Route("/detokenize", JsonRoute(backend, _detokenize, request_timeout), methods=["POST"]),
    ]


async def _tokenize(body: Mapping[str, Any], coordinator: Coordinator) -> Response:
    model = coordinator.model
    is_chat = body.get("messages") is not None
    if is_chat:
        refuse_fields(body, _NOT_OFFERED)
        refuse_messages(body.get("messages"), model)
    check(body, TOKENIZE_REQUEST)
    read_model_name(model, coordinator.adapters.names, body.get("model"))
    if is_chat == (body.get("prompt") is not None):
        raise APIError(
            422,
            "one of prompt and messages is needed, and not both",
            param="prompt",
            code="invalid_value",
        )
    if is_chat:
        if body.get("add_special_tokens"):
            raise APIError(
                400,
                "add_special_tokens is not supported with messages: the model's template writes them",
                param="add_special_tokens",
                code="unsupported_parameter",
            )
        token_ids = await chat_prompt(body, model)
    else:
        adds = body.get("add_special_tokens") is not False
        token_ids = await encode_text(body["prompt"], model, add_special_tokens=adds)
    token_strs = None
    if body.get("return_token_strs"):
        token_strs = await trio.to_thread.run_sync(model.tokenizer.names, token_ids)
    told = {
        "count": len(token_ids),
        "max_model_len": model.max_seq_len,
        "tokens": token_ids,
        "token_strs": token_strs,
    }
    if len(token_ids) > MAX_INLINE_TOKENS:
        written = await trio.to_thread.run_sync(dump, told)
    else:
        written = dump(told)
    return Response(written, media_type="application/json")


async def _detokenize(body: Mapping[str, Any], coordinator: Coordinator) -> Response:
    model = coordinator.model
    check(body, DETOKENIZE_REQUEST)
    read_model_name(model, coordinator.adapters.names, body.get("model"))
    token_ids = [int(token_id) for token_id in body["tokens"]]
    if max(token_ids, default=0) >= model.tokenizer.vocab_size:
        raise APIError(
            422,
            f"the tokenizer has tokens 0 to {model.tokenizer.vocab_size - 1}, and not {max(token_ids)}",
            param="tokens",
            code="invalid_value",
        )
    text = await trio.to_thread.run_sync(model.tokenizer.decode_verbatim, token_ids)
    return JSONResponse({"prompt": text})
