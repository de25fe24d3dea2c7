"""A request that names a trace is served within it: `traceparent`, as browsers, proxies and clients send it.

Source: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import sys

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["TraceParents"]

_NAMES = (b"traceparent", b"tracestate")


class TraceParents:
    """ASGI middleware. Without the SDK of OpenTelemetry nobody would record the trace: then it does nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "opentelemetry.sdk.trace" not in sys.modules:
            await self._app(scope, receive, send)
            return
        from opentelemetry import context as contexts
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _NAMES
        }
        # A malformed one is none.
        token = contexts.attach(TraceContextTextMapPropagator().extract(named))
        try:
            await self._app(scope, receive, send)
        finally:
            contexts.detach(token)
