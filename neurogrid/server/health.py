"""`/health`: the process lives. `/ready`: a request would be served."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from neurogrid.server.backend import Backends
from neurogrid.server.openapi import Paths, json_answer, operation

__all__ = ["HEALTH_PATHS", "health_routes"]

_STATUS = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string"}},
}
HEALTH_PATHS: Paths = {
    "/health": {"get": operation("Whether the process lives.", json_answer(_STATUS), is_open=True)},
    "/ready": {
        "get": operation(
            "Whether every layer is on a worker that is ready; of several models, of one of them.",
            json_answer(_STATUS),
            errors=(503,),
            is_open=True,
        )
    },
}


def health_routes(backend: Backends) -> list[BaseRoute]:
    """The two routes. Neither needs a key: they say nothing of what is served to whom."""

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> JSONResponse:
        reason = backend.why_not_ready
        if reason is not None:
            raise backend.not_ready(reason)
        return JSONResponse({"status": "ready"})

    return [Route("/health", health), Route("/ready", ready)]
