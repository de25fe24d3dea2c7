"""`/metrics`: what Prometheus asks for, in the format that it asks for.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from neurogrid.server.openapi import Paths, operation

__all__ = ["METRICS_PATHS", "metrics_routes"]

_TEXT = {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
METRICS_PATHS: Paths = {"/metrics": {"get": operation("Metrics for Prometheus.", _TEXT)}}


def metrics_routes(registry: CollectorRegistry) -> list[BaseRoute]:
    """The route. What it tells is the operator's business: it needs a key where others do."""

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        # Here, in the thread whose state is read: it takes a millisecond or two.
        return Response(encode(registry), headers={"Content-Type": content_type})

    return [Route("/metrics", metrics)]
