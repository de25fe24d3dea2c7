"""The options of both commands that say what they tell to those who run them: metrics and traces."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neurogrid.telemetry.metric import Registry

__all__ = ["add_metrics_options", "add_trace_options", "serving_metrics", "exporting_traces"]

logger = logging.getLogger(__name__)


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where traces go."""
    group = parser.add_argument_group("traces")
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send traces to this OTLP collector, e.g. http://127.0.0.1:4318 (default: what "
        "OTEL_EXPORTER_OTLP_ENDPOINT says; else none are made)",
    )


def add_metrics_options(
    parser: argparse.ArgumentParser, *, port_type: Callable[[str], int]
) -> None:
    """Add the options of the metrics of a worker or a run's leader; a coordinator serves its own with all else."""
    group = parser.add_argument_group("metrics")
    group.add_argument(
        "--metrics-port",
        type=port_type,
        metavar="PORT",
        help="serve metrics for Prometheus on this port, 0 for a free one (default: nowhere)",
    )
    group.add_argument(
        "--metrics-host",
        metavar="HOST",
        default="127.0.0.1",
        help="address to serve them on; whoever reaches it may read them (default %(default)s)",
    )


@contextmanager
def exporting_traces(options: argparse.Namespace, service: str) -> Iterator[None]:
    """Send traces for as long as the block runs, where options or environment say to.

    Raises:
        ConfigurationError: they say so, and it cannot be done.
    """
    from neurogrid.telemetry import otlp

    if options.otlp_endpoint:
        # As everybody else says it, so that workers that are started here say it too.
        os.environ[otlp.ENDPOINT] = options.otlp_endpoint
        os.environ.pop(otlp.TRACES_ENDPOINT, None)
    with otlp.exporting_traces(service):
        yield


@asynccontextmanager
async def serving_metrics(
    options: argparse.Namespace, registry: Callable[[], Registry]
) -> AsyncIterator[None]:
    """Serve metrics for as long as the block runs, if that is asked for.

    Args:
        registry: makes what has them.

    Raises:
        ConfigurationError: the port is taken, or the host is not this machine's.
    """
    if options.metrics_port is None:
        yield
        return
    from neurogrid.server.app import make_app
    from neurogrid.server.http.guard import Access
    from neurogrid.server.http.http_server import open_http
    from neurogrid.server.metrics import metrics_routes

    host = options.metrics_host
    app = make_app(metrics_routes(registry()), access=Access(hosts=frozenset({host})))
    async with open_http(app, host=host, port=options.metrics_port, flags="--metrics") as url:
        logger.info("metrics are at %s/metrics", url)
        yield
