"""A server that goes from one coordinator to the next: what is being answered ends first, and nothing is cut off."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from trio.testing import MockClock

from neurogrid.server.app import make_app
from neurogrid.server.backend import DRAIN_PATIENCE, Backend
from neurogrid.server.errors import APIError
from neurogrid.server.openai.json_route import JsonRoute


class Ready:
    """As much of a coordinator as a backend looks at."""

    why_not_ready = None
    model = SimpleNamespace(sight=None)


async def test_nobody_is_refused_before_the_moment_without_requests_has_come(
    autojump_clock: MockClock,
) -> None:
    backend, old, new = Backend(), Ready(), Ready()
    one: Any = old
    async with trio.open_nursery() as nursery:

        async def ask(seconds: float) -> None:
            with backend.request() as coordinator:
                assert coordinator is one
                await trio.sleep(seconds)
                assert coordinator is one

        with backend.serving(one):
            nursery.start_soon(ask, 3.0)
            await trio.sleep(1.0)
            nursery.start_soon(ask, DRAIN_PATIENCE - 4.0)
            began = trio.current_time()
            await backend.drain("soon")
            assert trio.current_time() == began + DRAIN_PATIENCE - 4.0
            assert backend.why_not_ready == "soon"
        with pytest.raises(APIError, match="not ready: soon"), backend.request():
            pass
        one = new
        with backend.serving(one):
            assert backend.why_not_ready is None
            await ask(1.0)


async def test_those_who_come_without_a_break_are_refused_after_a_while(
    autojump_clock: MockClock,
) -> None:
    backend, num_refused, num_answered = Backend(), 0, 0
    one: Any = Ready()

    async def ask_on() -> None:
        nonlocal num_refused, num_answered
        while True:
            try:
                with backend.request():
                    await trio.sleep(3.0)
                    num_answered += 1
            except APIError:
                num_refused += 1
                return

    async with trio.open_nursery() as nursery:
        with backend.serving(one):
            nursery.start_soon(ask_on)
            await trio.sleep(1.5)
            nursery.start_soon(ask_on)
            await backend.drain("soon")
            assert num_refused >= 1
            assert num_answered > DRAIN_PATIENCE / 3
    assert num_refused == 2


async def test_a_body_that_comes_slowly_is_waited_for_by_its_own_request_alone(
    autojump_clock: MockClock,
) -> None:
    backend, read = Backend(), []

    async def prepare(body: Mapping[str, Any], coordinator: Any) -> Response:
        read.append(body)
        return JSONResponse({})

    app = make_app([Route("/say", JsonRoute(backend, prepare, 100.0), methods=["POST"])])
    told: list[dict[str, Any]] = []
    parts = [b"{", b"}"]

    async def receive() -> dict[str, Any]:
        await trio.sleep(20.0)
        part = parts.pop(0) if parts else b""
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Any) -> None:
        told.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/say",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    }
    ready: Any = Ready()
    with backend.serving(ready):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(app, scope, receive, send)
            await trio.sleep(1.0)
            began = trio.current_time()
            await backend.drain("soon")
            assert trio.current_time() == began
    assert told[0]["status"] == 503
    assert not read
