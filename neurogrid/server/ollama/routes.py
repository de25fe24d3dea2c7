"""Ollama's API: `/api/chat`, `/api/generate`, and what it tells of models."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from neurogrid import __version__
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.server.backend import Backends
from neurogrid.server.ollama.answer_shapes import OllamaShape
from neurogrid.server.ollama.model_facts import shown
from neurogrid.server.ollama.model_states import running, tagged
from neurogrid.server.ollama.request_reader import (
    TAG,
    Load,
    read_name,
    read_ollama_chat,
    read_ollama_generate,
)
from neurogrid.server.ollama.request_schemas import (
    EMBED_REQUEST,
    EMBEDDINGS_REQUEST,
    SHOW_REQUEST,
)
from neurogrid.server.openai.answer_shapes import dump
from neurogrid.server.openai.embeddings import Embedded, embed_texts
from neurogrid.server.openai.json_route import JsonRoute, ToGenerate
from neurogrid.server.openai.request_reader import CompletionRequest
from neurogrid.server.schema_check import check

__all__ = ["ollama_routes"]

# Whose API this is: clients look whether it is new enough for what they want.
OLLAMA_VERSION: Final = "0.12.11"

Reader = Callable[
    [Mapping[str, Any], LoadedModel, Collection[str]], Awaitable[CompletionRequest | Load]
]


def ollama_routes(backend: Backends, *, request_timeout: float) -> list[BaseRoute]:
    """The routes.

    Args:
        request_timeout: seconds from when a request is there until its answer is finished.
    """

    def generating(kind: str, read: Reader) -> ASGIApp:
        async def prepare(
            body: Mapping[str, Any], coordinator: Coordinator
        ) -> ToGenerate | Response:
            request = await read(body, coordinator.model, coordinator.adapters.names)
            shape = OllamaShape(str(body["model"]), kind)
            if isinstance(request, Load):
                return Response(shape.empty(request.reason), media_type="application/json")
            return ToGenerate(request, shape)

        return JsonRoute(backend, prepare, request_timeout, tag=TAG)

    async def embed(body: Mapping[str, Any], coordinator: Coordinator) -> Response:
        check(body, EMBED_REQUEST)
        return await _embed(body, body["input"], coordinator, _embed_answer)

    async def embeddings(body: Mapping[str, Any], coordinator: Coordinator) -> Response:
        check(body, EMBEDDINGS_REQUEST)
        return await _embed(body, body["prompt"], coordinator, _embeddings_answer)

    async def tags(request: Request) -> Response:
        backend.require_one()
        return JSONResponse({"models": [entry for each in backend.all() for entry in tagged(each)]})

    async def ps(request: Request) -> Response:
        backend.require_one()
        return JSONResponse(
            {"models": [entry for each in backend.all() for entry in running(each)]}
        )

    async def version(request: Request) -> Response:
        return JSONResponse({"version": OLLAMA_VERSION, "neurogrid": __version__})

    async def show(body: Mapping[str, Any], coordinator: Coordinator) -> Response:
        check(body, SHOW_REQUEST)
        names = coordinator.adapters.names
        name = read_name(coordinator.model, names, body.get("model") or body.get("name") or "")
        return JSONResponse(shown(coordinator, name))

    return [
        Route("/api/chat", generating("chat", read_ollama_chat), methods=["POST"]),
        Route("/api/generate", generating("generate", read_ollama_generate), methods=["POST"]),
        Route("/api/embed", JsonRoute(backend, embed, request_timeout, tag=TAG), methods=["POST"]),
        Route(
            "/api/embeddings",
            JsonRoute(backend, embeddings, request_timeout, tag=TAG),
            methods=["POST"],
        ),
        Route("/api/tags", tags),
        Route("/api/ps", ps),
        Route("/api/version", version),
        Route("/api/show", JsonRoute(backend, show, request_timeout, tag=TAG), methods=["POST"]),
    ]


async def _embed(
    body: Mapping[str, Any],
    given: str | list[str],
    coordinator: Coordinator,
    answer: Callable[[str, Embedded, int], dict[str, object]],
) -> Response:
    began = time.monotonic_ns()
    model, names = coordinator.model, coordinator.adapters.names
    name = read_name(model, names, body["model"])
    texts = [given] if isinstance(given, str) else given
    embedded = await embed_texts(
        coordinator,
        texts,
        param="input",
        dimensions=body.get("dimensions"),
        adapter=None if name == model.name else name,
    )
    told = answer(str(body["model"]), embedded, time.monotonic_ns() - began)
    return Response(await trio.to_thread.run_sync(dump, told), media_type="application/json")


def _embed_answer(model: str, embedded: Embedded, nanoseconds: int) -> dict[str, object]:
    return {
        "model": model,
        "embeddings": embedded.vectors,
        "total_duration": nanoseconds,
        "load_duration": 0,
        "prompt_eval_count": embedded.num_tokens,
    }


def _embeddings_answer(model: str, embedded: Embedded, nanoseconds: int) -> dict[str, object]:
    return {"embedding": embedded.vectors[0]}
