"""The application in front of a training run: its page, what programs ask, and metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from neurogrid.server.app import make_app
from neurogrid.server.http.guard import Access
from neurogrid.server.metrics import METRICS_PATHS, metrics_routes
from neurogrid.server.openapi import Paths, json_answer, openapi_routes, operation
from neurogrid.server.page.routes import TRAINING, page_routes
from neurogrid.server.training.routes import TRAINING_PATHS, training_routes
from neurogrid.telemetry.http_metrics import HttpStatistics
from neurogrid.training.leading.board import RunBoard

__all__ = ["training_app"]

_ALIVE = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
_HEALTH_PATHS: Paths = {
    "/health": {"get": operation("Whether the process lives.", json_answer(_ALIVE), is_open=True)}
}


def training_app(
    board: RunBoard,
    registry: CollectorRegistry,
    *,
    access: Access | None = None,
    statistics: HttpStatistics | None = None,
) -> Starlette:
    """The application.

    Args:
        board: what is known of the run.
        registry: of its metrics.
        access: which clients are served; None for all that reach the port by address.
        statistics: told of every request.
    """

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    return make_app(
        [*training_routes(board), *metrics_routes(registry)],
        open_routes=[
            Route("/health", health),
            *openapi_routes(
                TRAINING_PATHS,
                _HEALTH_PATHS,
                METRICS_PATHS,
                description="A training run: how it stands, what it wrote, and whether it learns.",
            ),
            *page_routes(TRAINING),
        ],
        access=access,
        statistics=statistics,
    )
