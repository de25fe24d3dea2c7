"""`/v1/models`: what is served; and models that come and go while the server runs, for clients with a key.

Of the machine's files a client reaches those below one directory, which its owner names, and what the cache of the hub
has; nothing is fetched for it.
"""

from __future__ import annotations

import time
from typing import Protocol

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from neurogrid.errors import NeuroGridError
from neurogrid.inference.residency import ModelState
from neurogrid.server.backend import Backends
from neurogrid.server.errors import APIError, keeping
from neurogrid.server.http.body import read_json
from neurogrid.server.models import Models
from neurogrid.server.openai.model_list import describe, find_entry, list_models
from neurogrid.server.openai.request_reader import read_model_name
from neurogrid.server.openai.request_schemas import MODEL_REQUEST
from neurogrid.server.schema_check import check

__all__ = ["ModelPlaces", "model_routes"]


class ModelPlaces(Protocol):
    """Places of the models that clients add."""

    async def find(self, place: str, name: str | None) -> str:
        """Look for a model at a place, and note where it is; the name that it is to have.

        Raises:
            NeuroGridError: there is none, it is damaged, or it cannot be reached from here.
        """

    async def keep(self, name: str) -> None:
        """Find a model again at the next start.

        Raises:
            ConfigurationError: that cannot be noted.
        """

    async def drop(self, name: str) -> None:
        """Find a model at the next start no longer, nor the adapters beside it; raises as `keep`."""

    def forget(self, name: str) -> None:
        """A model is not to be opened again."""


def model_routes(
    backends: Backends, models: Models | None = None, places: ModelPlaces | None = None
) -> list[BaseRoute]:
    """The routes.

    Args:
        models: those of a server that has several; None for one that has one.
        places: where further ones are; None where none are added.
    """
    started = int(time.time())
    adding, changing = trio.Lock(), trio.Lock()

    async def listed(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list_models(backends, created=started)})

    async def one(request: Request) -> Response:
        name = str(request.path_params["model"])
        if models is None:
            coordinator = backends.choose(name).coordinator
            read_model_name(coordinator.model, coordinator.adapters.names, name)
        return JSONResponse(find_entry(backends, name, created=started))

    async def add(request: Request) -> Response:
        several, where = _require(models, places)
        body = await read_json(request)
        check(body, MODEL_REQUEST)
        several.require_one()
        wanted = body.get("name")
        async with adding:
            try:
                name = await where.find(str(body["model"]), None if wanted is None else str(wanted))
            except NeuroGridError as exc:
                raise _refused(str(exc)) from exc
            try:
                model = several.add(name, is_wanted=False)
            except APIError:
                where.forget(name)
                raise
        is_open = False
        try:
            await model.wake()
            async with changing:
                if several.find(name) is model:  # and nobody has removed it meanwhile
                    with keeping():
                        await where.keep(name)
            is_open = True
        except APIError as exc:
            if several.residency.is_known(name) and model.state is ModelState.FAILED:
                raise _refused(f"the model {name!r} was not opened: {model.reason}") from exc
            raise
        finally:
            if not is_open:
                several.remove(name)
        return JSONResponse(describe(model, created=int(time.time()))[0])

    async def remove(request: Request) -> Response:
        several, where = _require(models, places)
        name = str(request.path_params["model"])
        async with changing:
            with keeping():
                await where.drop(name)
            model = several.remove(name)
        if model is None:
            raise APIError(
                404, f"there is no model {name[:100]!r}", param="model", code="model_not_found"
            )
        await model.is_gone.wait()
        return JSONResponse({"id": name, "object": "model", "deleted": True})

    return [
        Route("/v1/models", listed),
        Route("/v1/models", add, methods=["POST"]),
        Route("/v1/models/{model:path}", one),
        Route("/v1/models/{model:path}", remove, methods=["DELETE"]),
    ]


def _require(models: Models | None, places: ModelPlaces | None) -> tuple[Models, ModelPlaces]:
    if models is None or places is None:
        raise APIError(
            403,
            "models are added and removed here only where the server was started with --model-root DIR",
            code="models_fixed",
        )
    return models, places


def _refused(message: str) -> APIError:
    return APIError(400, message, param="model", code="model_refused")
