"""The metrics of an HTTP server: how often each route was asked, what was answered, and how long that took.

Labels are bounded, whatever is asked for: routes by their templates, methods that HTTP has, and statuses that are sent.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from neurogrid.node.histogram import WAIT_SECONDS, Histogram
from neurogrid.telemetry.metric import MetricSpec, Reading

__all__ = ["CLIENT_LEFT", "HTTP_METRICS", "OTHER", "HttpStatistics"]

REQUESTS: Final = MetricSpec(
    "neurogrid_http_requests_total",
    "counter",
    "Requests that were answered, by the route's template (`other`: there is none), method and status; `499`: the "
    "client left before there was one.",
    ("route", "method", "status"),
)
DURATION: Final = MetricSpec(
    "neurogrid_http_request_duration_seconds",
    "histogram",
    "From when the head of a request was there to the end of its answer, all events of a stream included.",
    ("route",),
)
HTTP_METRICS: Final = (REQUESTS, DURATION)

OTHER: Final = "other"
# As nginx has it, since no status was sent.
CLIENT_LEFT: Final = 499
# Of RFC 9110 and RFC 5789.
_METHODS: Final = frozenset(
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"}
)


class HttpStatistics:
    """Counts and durations of one server's requests."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._durations: dict[str, Histogram] = {}

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request was answered, or its client left (`CLIENT_LEFT`).

        Args:
            route: its template, or `OTHER`; there are as many series as there are of these.
        """
        known = method if method in _METHODS else OTHER
        self._requests[route, known, str(status)] += 1
        if route not in self._durations:
            self._durations[route] = Histogram(WAIT_SECONDS)
        self._durations[route].observe(seconds)

    def read(self, reading: Reading) -> None:
        """Add the counts and durations of requests to what a scrape finds."""
        for (route, method, status), count in self._requests.items():
            reading.add(REQUESTS, count, route, method, status)
        for route, histogram in self._durations.items():
            reading.add_histogram(DURATION, histogram, route)
