"""Tells the metrics of every request: its route, what it was answered with, and how long that took."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neurogrid.telemetry.http_metrics import CLIENT_LEFT, OTHER, HttpStatistics

__all__ = ["CountedRequests"]


class CountedRequests:
    """ASGI middleware, around all others: what they refuse counts too.

    Args:
        routes: all that there are.
    """

    def __init__(
        self, app: ASGIApp, statistics: HttpStatistics, routes: Sequence[BaseRoute]
    ) -> None:
        self._app = app
        self._statistics = statistics
        self._routes = tuple(route for route in routes if isinstance(route, Route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = CLIENT_LEFT

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_look)
        except Exception:
            if status == CLIENT_LEFT:
                status = 500  # the middleware around us answers so
            raise
        finally:
            seconds = time.monotonic() - began
            self._statistics.observe(self._route(scope), scope["method"], status, seconds)

    def _route(self, scope: Scope) -> str:
        """The template of the route that is asked, also where the method is not one that it takes."""
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return route.path_format
        return OTHER
