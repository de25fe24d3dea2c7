"""Requests by route, method and status: whoever asks, and whatever for, there are no more series than routes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from neurogrid.server.app import make_app
from neurogrid.server.http.guard import Access
from neurogrid.server.page.routes import page_routes
from neurogrid.telemetry.http_metrics import HTTP_METRICS, HttpStatistics
from neurogrid.telemetry.metric import make_registry
from tests.unit.asgi_client import ask, run

KEY = "a-key-of-enough-characters"
ASKED = ("authorization", f"Bearer {KEY}")


async def named(request: Request) -> Response:
    return JSONResponse({"name": request.path_params["name"]})


async def fail(request: Request) -> Response:
    raise KeyError("a bug")


class Leaving:
    """An ASGI application that answers nothing, and ends when its client has left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


class Server:
    def __init__(self) -> None:
        self.statistics = HttpStatistics()
        self.app = make_app(
            [
                Route("/named/{name:path}", named),
                Route("/bug", fail),
                Route("/leave", Leaving(), methods=["POST"]),
            ],
            open_routes=page_routes(),
            access=Access(keys=(KEY,), cors_origins=("https://chat.example",)),
            statistics=self.statistics,
        )
        self.registry: CollectorRegistry = make_registry({self.statistics.read: HTTP_METRICS})

    def asked(self, method: str, path: str, **more: Any) -> int:
        status: int = run(partial(ask, self.app, method, path, **more)).status
        return status

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(generate_latest(self.registry).decode())
        samples = [sample for family in families for sample in family.samples]
        labels = ("route", "method", "status")
        return {
            tuple(s.labels[label] for label in labels if label in s.labels): s.value
            for s in samples
            if s.name == name
        }

    @property
    def requests(self) -> dict[tuple[str, ...], float]:
        return self.series("neurogrid_http_requests_total")


def test_a_route_counts_by_its_template() -> None:
    server = Server()
    for name in ("a", "b", "a/b"):
        assert server.asked("GET", f"/named/{name}", headers=[ASKED]) == 200
    assert server.requests == {("/named/{name}", "GET", "200"): 3}
    durations = server.series("neurogrid_http_request_duration_seconds_count")
    assert durations == {("/named/{name}",): 3}


@pytest.mark.parametrize(
    ("method", "path", "headers", "series"),
    [
        ("GET", "/nothing/at/all", [ASKED], ("other", "GET", "404")),
        ("MKCOL", "/named/a", [ASKED], ("/named/{name}", "other", "405")),
        ("GET", "/named/a", [], ("/named/{name}", "GET", "401")),
        ("GET", "/static/main.js", [], ("/static/{file}", "GET", "200")),
        ("GET", "/static/none.js", [], ("/static/{file}", "GET", "404")),
        (
            "OPTIONS",
            "/named/a",
            [("origin", "https://chat.example"), ("access-control-request-method", "GET")],
            ("/named/{name}", "OPTIONS", "200"),
        ),
    ],
)
def test_what_is_refused_counts_too(
    method: str, path: str, headers: list[tuple[str, str]], series: tuple[str, ...]
) -> None:
    server = Server()
    assert str(server.asked(method, path, headers=headers)) == series[-1]
    assert server.requests == {series: 1}


def test_a_bug_counts_as_one() -> None:
    server = Server()
    with pytest.raises(ExceptionGroup, match="nursery") as failed:
        run(partial(ask, server.app, "GET", "/bug", headers=[ASKED]))
    assert failed.group_contains(KeyError)
    assert server.requests == {("/bug", "GET", "500"): 1}


async def test_a_client_that_leaves_before_its_answer_counts_as_that() -> None:
    server = Server()
    sending, receiving = trio.open_memory_channel[dict[str, Any]](1)
    await sending.send({"type": "http.disconnect"})
    headers = [
        (b"authorization", f"Bearer {KEY}".encode()),
        (b"content-type", b"application/json"),
    ]
    scope = {"type": "http", "method": "POST", "path": "/leave", "headers": headers}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    await server.app(scope, receiving.receive, send)
    assert server.requests == {("/leave", "POST", "499"): 1}
