"""The OpenAI API: `/v1/models`, `/v1/chat/completions`, `/v1/completions`, and what others put beside it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.server.backend import Backends
from neurogrid.server.models import Models
from neurogrid.server.openai.answer_shapes import ChatShape, CompletionShape
from neurogrid.server.openai.embeddings import answer_embeddings
from neurogrid.server.openai.json_route import JsonRoute, ToGenerate
from neurogrid.server.openai.model_routes import ModelPlaces, model_routes
from neurogrid.server.openai.request_reader import CompletionRequest, read_chat, read_completion
from neurogrid.server.openai.responses.request_reader import read_response
from neurogrid.server.openai.responses.shape import ResponseShape
from neurogrid.server.openai.token_routes import token_routes

__all__ = ["openai_routes"]

Reader = Callable[[Mapping[str, Any], LoadedModel, Collection[str]], Awaitable[CompletionRequest]]


def openai_routes(
    backend: Backends,
    *,
    request_timeout: float,
    models: Models | None = None,
    places: ModelPlaces | None = None,
) -> list[BaseRoute]:
    """The routes.

    Args:
        backend: one, or one of several by the model that a request names.
        request_timeout: seconds from when a request is there until its answer is finished.
        models, places: as for `model_routes`.
    """

    def completions(read: Reader, shape: type[ChatShape] | type[CompletionShape]) -> ASGIApp:
        async def prepare(body: Mapping[str, Any], coordinator: Coordinator) -> ToGenerate:
            request = await read(body, coordinator.model, coordinator.adapters.names)
            return ToGenerate(
                request,
                shape(
                    request.adapter or coordinator.model.name,
                    with_logprobs=request.num_logprobs is not None,
                    with_usage=request.include_usage,
                ),
            )

        return JsonRoute(backend, prepare, request_timeout)

    async def respond(body: Mapping[str, Any], coordinator: Coordinator) -> ToGenerate:
        request = await read_response(body, coordinator.model, coordinator.adapters.names)
        name = request.adapter or coordinator.model.name
        return ToGenerate(request, ResponseShape(name, body, request))

    return [
        *model_routes(backend, models, places),
        Route("/v1/chat/completions", completions(read_chat, ChatShape), methods=["POST"]),
        Route("/v1/completions", completions(read_completion, CompletionShape), methods=["POST"]),
        Route("/v1/responses", JsonRoute(backend, respond, request_timeout), methods=["POST"]),
        Route(
            "/v1/embeddings",
            JsonRoute(backend, answer_embeddings, request_timeout),
            methods=["POST"],
        ),
        *token_routes(backend, request_timeout=request_timeout),
    ]
