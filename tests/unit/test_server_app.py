"""What holds for every route: who is served, what a body may be, and the shape of errors."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.server.app import make_app
from neurogrid.server.backend import Backend
from neurogrid.server.health import health_routes
from neurogrid.server.http import body
from neurogrid.server.http.body import MAX_BODY_BYTES, read_json
from neurogrid.server.http.guard import KEEP_PLACE, Access
from neurogrid.telemetry.http_metrics import CLIENT_LEFT
from tests.unit.asgi_client import Answered, ask, run

KEY = "a-key-of-enough-characters"
JSON = ("content-type", "application/json")


async def say_back(request: Request) -> JSONResponse:
    return JSONResponse(await read_json(request))


async def fail(request: Request) -> JSONResponse:
    raise KeyError("a bug")


ROUTES = [Route("/say", say_back, methods=["POST"]), Route("/bug", fail)]


def asked(method: str, path: str, access: Access | None = None, **more: Any) -> Answered:
    app = make_app(ROUTES, open_routes=health_routes(Backend()), access=access)
    return run(partial(ask, app, method, path, **more))


def test_it_answers() -> None:
    assert asked("POST", "/say", json_body={"a": ["é"]}).json == {"a": ["é"]}


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8090", "127.0.0.1", "[::1]:8090", "localhost:8090", "192.168.1.7", "LOCALHOST"],
)
def test_an_address_is_served(host: str) -> None:
    assert asked("GET", "/health", headers=[("host", host)]).status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "a b", "é"])
def test_a_name_of_somebody_else_is_not(host: str) -> None:
    answered = asked("GET", "/health", headers=[("host", host)])
    assert (answered.status, answered.error["code"]) == (403, "host_not_allowed")


def test_with_keys_any_name_will_do() -> None:
    access = Access(keys=(KEY,))
    headers = [("host", "chat.example"), ("authorization", f"Bearer {KEY}"), JSON]
    assert asked("POST", "/say", access, parts=[b"{}"], headers=headers).status == 200


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer é"]
)
def test_a_key_is_needed(authorization: str) -> None:
    headers = [JSON, *([("authorization", authorization)] if authorization else [])]
    answered = asked("POST", "/say", Access(keys=(KEY,)), parts=[b"{}"], headers=headers)
    assert (answered.status, answered.error["code"]) == (401, "invalid_api_key")
    assert answered.headers["www-authenticate"] == "Bearer"
    # What says whether it lives says no more.
    assert asked("GET", "/health", Access(keys=(KEY,))).status == 200


def test_every_key_opens() -> None:
    access = Access(keys=("another-key-of-characters", KEY))
    headers = [JSON, ("authorization", f"bearer {KEY}")]
    assert asked("POST", "/say", access, parts=[b"{}"], headers=headers).status == 200


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_what_a_page_can_send_unasked_is_not_taken(content_type: str) -> None:
    headers = [("content-type", content_type)]
    assert asked("POST", "/say", parts=[b"{}"], headers=headers).status == 415
    # What nobody takes is told so, as audio is that somebody wants transcribed.
    answered = asked("POST", "/v1/audio/transcriptions", parts=[b"{}"], headers=headers)
    assert (answered.status, answered.error["code"]) == (404, "unknown_url")
    assert asked("POST", "/health", parts=[b"{}"], headers=headers).status == 405


def test_other_origins_are_told_nothing_unless_named() -> None:
    origin = ("origin", "https://chat.example")
    assert "access-control-allow-origin" not in asked("GET", "/health", headers=[origin]).headers
    access = Access(keys=(KEY,), cors_origins=("https://chat.example",))
    asks = [
        origin,
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ]
    preflight = asked("OPTIONS", "/say", access, headers=asks)
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refused = asked("POST", "/say", access, parts=[b"{}"], headers=[origin, JSON])
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"
    other = asked("GET", "/health", access, headers=[("origin", "https://evil.example")])
    assert "access-control-allow-origin" not in other.headers


def test_a_page_that_is_named_may_use_every_method_that_a_route_takes() -> None:
    async def gone(request: Request) -> JSONResponse:
        return JSONResponse({})

    access = Access(keys=(KEY,), cors_origins=("https://chat.example",))
    app = make_app([*ROUTES, Route("/thing/{name}", gone, methods=["DELETE"])], access=access)
    for method, status in (("DELETE", 200), ("POST", 200), ("GET", 200), ("PUT", 400)):
        asks = [("origin", "https://chat.example"), ("access-control-request-method", method)]
        preflight = run(partial(ask, app, "OPTIONS", "/thing/one", headers=asks))
        assert preflight.status == status, method


CROSS_SITE = ("sec-fetch-site", "cross-site")
LINK = [("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")]


def test_a_page_of_another_site_is_not_served_without_keys() -> None:
    """A GET that its page cannot read the answer of would still be computed, and keep its connection."""
    for path in ("/bug", "/health"):
        for headers in ([CROSS_SITE], [CROSS_SITE, ("origin", "https://evil.example")]):
            answered = asked("GET", path, headers=headers)
            assert (answered.status, answered.error["code"]) == (403, "cross_site")


@pytest.mark.parametrize("site", ["same-origin", "same-site", "none"])
def test_other_requests_of_browsers_are_served(site: str) -> None:
    assert asked("GET", "/health", headers=[("sec-fetch-site", site)]).status == 200


def test_a_link_from_another_site_leads_to_what_is_open() -> None:
    assert asked("GET", "/health", headers=[CROSS_SITE, *LINK]).status == 200
    frame = [("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")]
    assert asked("GET", "/health", headers=[CROSS_SITE, *frame]).status == 403
    assert asked("GET", "/bug", headers=[CROSS_SITE, *LINK]).status == 403


def test_a_site_that_is_named_is_served() -> None:
    access = Access(cors_origins=("https://chat.example",))
    headers = [CROSS_SITE, ("origin", "https://chat.example"), JSON]
    assert asked("POST", "/say", access, parts=[b"{}"], headers=headers).status == 200
    assert asked("GET", "/health", access, headers=[CROSS_SITE]).status == 403


def test_with_keys_it_is_the_key_that_matters() -> None:
    headers = [CROSS_SITE, ("authorization", f"Bearer {KEY}"), JSON]
    access = Access(keys=(KEY,))
    assert asked("POST", "/say", access, parts=[b"{}"], headers=headers).status == 200


@pytest.mark.parametrize(
    ("path", "keys", "authorization", "keeps"),
    [
        ("/say", (), "", True),
        ("/health", (), "", False),
        ("/say", (KEY,), f"Bearer {KEY}", True),
        ("/say", (KEY,), "Bearer of-something-else", False),
        ("/health", (KEY,), f"Bearer {KEY}", False),
    ],
)
def test_a_connection_keeps_its_place_for_whoever_is_served(
    path: str, keys: tuple[str, ...], authorization: str, keeps: bool
) -> None:
    kept: list[bool] = []
    app = make_app(ROUTES, open_routes=health_routes(Backend()), access=Access(keys=keys))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {KEEP_PLACE: lambda: kept.append(True)}}, receive, send)

    method, headers = (
        ("POST" if path == "/say" else "GET"),
        [JSON, ("authorization", authorization)],
    )
    run(partial(ask, with_state, method, path, parts=[b"{}"], headers=headers))
    assert bool(kept) is keeps


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[]", "has to be a JSON object"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a": "\xff"}', "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "no JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON"),
        (b"{" + b" " * 100_000, "no JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, says: str) -> None:
    answered = asked("POST", "/say", parts=[body], headers=[JSON])
    assert answered.status == 400
    assert says in answered.error["message"]


def test_a_body_is_bounded_and_read_to_its_end_all_the_same() -> None:
    """Whether its length is told or not; the answer comes after the last part of it."""
    part = b" " * (1024 * 1024)
    parts = [part] * (MAX_BODY_BYTES // len(part) + 4)
    for headers in ([JSON], [JSON, ("content-length", str(len(part) * len(parts)))]):
        answered = asked("POST", "/say", parts=parts, headers=headers)
        assert (answered.status, answered.error["code"]) == (413, "request_too_large")
        assert answered.is_finished


async def test_bodies_are_bounded_together_but_for_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "MAX_BODIES_BYTES", 1024 * 1024)
    goes_on = trio.Event()

    async def hold(request: Request) -> JSONResponse:
        read = await read_json(request)
        await goes_on.wait()
        return JSONResponse(len(str(read["a"])))

    app = make_app([Route("/hold", hold, methods=["POST"]), *ROUTES])

    async def sent(path: str, num_bytes: int) -> Answered:
        parts = [b'{"a": "', *[b"x" * 10_000] * (num_bytes // 10_000), b'"}']
        return await ask(app, "POST", path, parts=parts, headers=[JSON])

    async def hold_one() -> None:
        assert (await sent("/hold", 600_000)).json == 600_000

    with trio.fail_after(10.0):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold_one)
            await trio.testing.wait_all_tasks_blocked(0.2)
            for _ in range(2):  # what was refused has no part in it
                refused = await sent("/say", 500_000)
                assert (refused.status, refused.error["code"]) == (503, "bodies_too_large")
                assert refused.headers["retry-after"] == "5"
                assert refused.is_finished
            assert (await sent("/say", 400_000)).status == 200
            assert (await sent("/say", 400_000)).status == 200
            monkeypatch.setattr(body, "MAX_BODIES_BYTES", 600_000)
            assert (await sent("/say", 60_000)).status == 200
            monkeypatch.undo()
            goes_on.set()
        assert (await sent("/say", 600_000)).status == 200


def test_errors_have_one_shape() -> None:
    missing = asked("GET", "/nothing")
    assert missing.status == 404
    assert set(missing.error) == {"message", "type", "param", "code"}
    wrong = asked("GET", "/say")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")


def test_a_bug_is_told_as_one_and_raised_for_the_log() -> None:
    app = make_app(ROUTES)
    seen: list[Answered] = []

    async def main() -> None:
        with pytest.raises(KeyError):
            await ask(app, "GET", "/bug", leaves=lambda answered: bool(seen.append(answered)))

    try:
        run(main)
    except* KeyError:
        pass
    assert seen[-1].status == 500
    assert seen[-1].error["type"] == "server_error"
    assert "a bug of its own" in seen[-1].error["message"]


def test_a_client_that_leaves_within_its_body_is_no_bug() -> None:
    counted: list[Any] = []
    statistics = SimpleNamespace(observe=lambda *told: counted.append(told[:3]))
    app = make_app(ROUTES, statistics=cast(Any, statistics))
    messages = [
        {"type": "http.request", "body": b'{"a": ', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        await trio.lowlevel.checkpoint()

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/say",
        "raw_path": b"/say",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    }
    run(lambda: app(scope, receive, send))
    assert counted == [("/say", "POST", CLIENT_LEFT)]


def test_not_ready_says_what_is_waited_for() -> None:
    board = StatusBoard()
    app = make_app([], open_routes=health_routes(Backend(board)))
    board.waiting(1, 3)
    answered = run(partial(ask, app, "GET", "/ready"))
    assert answered.status == 503
    assert int(answered.headers["retry-after"]) > 0
    assert "waiting for workers: 1 of 3 are there" in answered.error["message"]
