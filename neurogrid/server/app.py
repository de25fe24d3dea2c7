"""The ASGI application: routes that others make, behind what holds for all of them.

    app = make_app(routes, open_routes=health_routes(backend), access=Access())

A route answers, or raises `APIError`. It may rely on this: the client is let in, and a body is JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route

from neurogrid.server.errors import (
    APIError,
    answer_api_error,
    answer_bug,
    answer_http_exception,
    answer_nobody,
)
from neurogrid.server.http.body import WholeBodies
from neurogrid.server.http.guard import Access, Guard
from neurogrid.server.http.request_counter import CountedRequests
from neurogrid.server.http.trace_parents import TraceParents
from neurogrid.telemetry.http_metrics import HttpStatistics

__all__ = ["make_app"]


def make_app(
    routes: Sequence[BaseRoute],
    *,
    open_routes: Sequence[BaseRoute] = (),
    access: Access | None = None,
    statistics: HttpStatistics | None = None,
) -> Starlette:
    """The application.

    Args:
        routes: served to clients with a key, or to all where there are no keys.
        open_routes: served without a key.
        access: which clients are served; None for all that reach the port by address.
        statistics: told of every request.
    """
    access = access or Access()
    middleware = [
        Middleware(WholeBodies),
        Middleware(Guard, access=access, open_routes=open_routes, routes=routes),
        Middleware(TraceParents),
    ]
    all_routes = [*open_routes, *routes]
    if access.cors_origins:
        methods = {
            method
            for route in all_routes
            if isinstance(route, Route)
            for method in route.methods or ()
        }
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(access.cors_origins),
            allow_methods=sorted(methods),
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
        middleware.insert(0, cors)
    if statistics is not None:
        middleware.insert(0, Middleware(CountedRequests, statistics=statistics, routes=all_routes))
    return Starlette(
        routes=all_routes,
        middleware=middleware,
        exception_handlers={
            APIError: answer_api_error,
            HTTPException: answer_http_exception,
            ClientDisconnect: answer_nobody,
            Exception: answer_bug,
        },
    )
