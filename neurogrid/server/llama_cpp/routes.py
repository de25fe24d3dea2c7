"""The routes of llama.cpp's server that are here: `/infill`, which llama.vim and llama.vscode ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.routing import BaseRoute, Route

from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.server.backend import Backends
from neurogrid.server.llama_cpp.answer_shape import InfillShape
from neurogrid.server.llama_cpp.request_reader import read_infill
from neurogrid.server.openai.json_route import JsonRoute, ToGenerate

__all__ = ["llama_cpp_routes"]


def llama_cpp_routes(backends: Backends, *, request_timeout: float) -> list[BaseRoute]:
    """The routes.

    Args:
        request_timeout: seconds from when a request is there until its answer is finished.
    """
    return [Route("/infill", JsonRoute(backends, _infill, request_timeout), methods=["POST"])]


async def _infill(body: Mapping[str, Any], coordinator: Coordinator) -> ToGenerate:
    request = await read_infill(body, coordinator.model, coordinator.adapters.names)
    shape = InfillShape(
        request.adapter or coordinator.model.name,
        fields=body.get("response_fields"),
        tells=body.get("n_predict") != 0,
    )
    return ToGenerate(request, shape)
