"""The OpenAI API: `/v1/models`, `/v1/chat/completions`, `/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import trio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.server.backend import Backend
from neurogrid.server.errors import APIError
from neurogrid.server.http.body import read_json
from neurogrid.server.openai.adapter_routes import describe_adapter
from neurogrid.server.openai.answer import Answer, while_connected
from neurogrid.server.openai.answer_shapes import ChatShape, CompletionShape
from neurogrid.server.openai.request_reader import (
    CompletionRequest,
    read_chat,
    read_completion,
    read_model_name,
)

__all__ = ["openai_routes"]

Reader = Callable[[Mapping[str, Any], LoadedModel, Collection[str]], Awaitable[CompletionRequest]]


def openai_routes(backend: Backend, *, request_timeout: float) -> list[BaseRoute]:
    """The routes.

    Args:
        request_timeout: seconds from when a request is there until its answer is finished.
    """
    started = int(time.time())

    def described(model: LoadedModel) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": started,
            "owned_by": "neurogrid",
            "max_model_len": model.max_seq_len,
            "root": model.name,
            "parent": None,
        }

    async def models(request: Request) -> Response:
        coordinator = backend.coordinator
        model = coordinator.model
        beside = (
            describe_adapter(coordinator, each, created=started) for each in coordinator.adapters
        )
        data = [described(model), *beside]
        return JSONResponse({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        coordinator = backend.coordinator
        served, adapters = coordinator.model, coordinator.adapters
        name = read_model_name(served, adapters.names, request.path_params["model"])
        adapter = None if name is None else adapters.get(name)
        if adapter is None:
            return JSONResponse(described(served))
        return JSONResponse(describe_adapter(coordinator, adapter, created=started))

    def completions(reader: Reader, shape: type[ChatShape] | type[CompletionShape]) -> ASGIApp:
        return _Completions(backend, reader, shape, request_timeout)

    return [
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/v1/chat/completions", completions(read_chat, ChatShape), methods=["POST"]),
        Route("/v1/completions", completions(read_completion, CompletionShape), methods=["POST"]),
    ]


class _Completions:
    """The application of one of the two routes."""

    def __init__(
        self,
        backend: Backend,
        reader: Reader,
        shape: type[ChatShape] | type[CompletionShape],
        timeout: float,
    ) -> None:
        self._backend = backend
        self._reader = reader
        self._shape = shape
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = trio.current_time() + self._timeout
        with self._backend.request() as coordinator:
            try:
                body = await read_json(Request(scope, receive))
            except ClientDisconnect:
                return
            request: CompletionRequest | None = None

            async def read() -> None:
                nonlocal request
                request = await self._reader(body, coordinator.model, coordinator.adapters.names)

            with trio.move_on_at(deadline) as scope_of_reading:
                await while_connected(receive, read)
            if scope_of_reading.cancelled_caught:
                raise APIError(504, "the request was not read in time", code="timeout")
            if request is None:
                return  # the client has gone
            shape = self._shape(
                request.adapter or coordinator.model.name,
                with_logprobs=request.num_logprobs is not None,
                with_usage=request.include_usage,
            )
            gave_up = self._backend.gave_up
            answer = Answer(coordinator, request, shape, deadline=deadline, gave_up=gave_up)
            await answer(scope, receive, send)
