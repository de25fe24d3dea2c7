"""What the cluster's routes and the page's say, asked over ASGI without a socket."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette

import neurogrid.server.page.routes
from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.node.events import MAX_SUBSCRIBERS, EventKind
from neurogrid.server.app import make_app
from neurogrid.server.cluster.merge_patch import merge_patch, without_nulls
from neurogrid.server.cluster.routes import cluster_routes
from neurogrid.server.page.routes import SERVING, TRAINING, page_routes
from tests.unit.test_status import FakeFleet, board, clock, counters, fleet

__all__ = ["board", "clock", "counters", "fleet"]  # fixtures

OBJECTS = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
)


def asked(app: Starlette, ask: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await ask(client)

    return trio.run(main)


def patched(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7396, section 2."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            inner = result.get(key)
            result[key] = patched(inner if isinstance(inner, dict) else {}, value)
        else:
            result[key] = value
    return result


@given(st.dictionaries(st.text(max_size=2), OBJECTS), st.dictionaries(st.text(max_size=2), OBJECTS))
def test_a_patch_makes_the_one_of_the_other(before: Any, after: Any) -> None:
    assert patched(before, merge_patch(before, after)) == after
    assert merge_patch(after, after) == {}


def test_what_is_not_known_is_left_out() -> None:
    assert without_nulls({"a": None, "b": {"c": None, "d": [None, {"e": None}]}}) == {
        "b": {"d": [None, {}]}
    }


def test_info_has_what_it_is_to_have(board: StatusBoard) -> None:
    answer = asked(make_app(cluster_routes(board)), lambda client: client.get("/v1/cluster/info"))
    info = answer.json()
    assert answer.status_code == 200
    assert info["peer_id"] == "coordinator"
    assert info["connected_peers"] == ["first", "second", "third"]
    assert info["layer_assignments"] == {
        "first": [0, 1, 2, 3],
        "second": [4, 5, 6, 7],
        "third": [],
    }
    assert info["memory_usage"]["first"]["total_bytes"] == 8 * 1024**3
    assert (info["total_layers"], info["loaded_layers"]) == (8, list(range(8)))
    assert info["status"]["phase"] == "ready"


def test_who_is_lost_is_not_connected(board: StatusBoard, fleet: FakeFleet) -> None:
    board.lost("second", range(4, 8), "killed")
    fleet.members.pop(1)
    answer = asked(make_app(cluster_routes(board)), lambda client: client.get("/v1/cluster/info"))
    assert answer.json()["connected_peers"] == ["first", "third"]
    assert answer.json()["loaded_layers"] == [0, 1, 2, 3]


def test_it_answers_before_there_is_anything() -> None:
    answer = asked(
        make_app(cluster_routes(StatusBoard())), lambda client: client.get("/v1/cluster/info")
    )
    assert answer.json()["connected_peers"] == []


class Reader:
    """Reads an event stream of an application as an ASGI server would."""

    def __init__(self, app: Starlette, address: str = "127.0.0.1") -> None:
        self.app = app
        self.address = address
        self.send_part, self.parts = trio.open_memory_channel[dict[str, Any]](100)
        self.gone = trio.Event()
        self._unread: list[tuple[str, Any]] = []

    async def run(self) -> None:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET",
            "path": "/v1/cluster/events",
            "raw_path": b"/v1/cluster/events",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1")],
            "client": (self.address, 50000),
        }
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        await self.app(scope, receive, self.send_part.send)  # type: ignore[arg-type]
        await self.send_part.aclose()

    async def next_part(self) -> dict[str, Any]:
        return await self.parts.receive()

    async def next(self) -> tuple[str, Any]:
        while not self._unread:
            part = await self.next_part()
            text = part.get("body", b"").decode()
            self._unread += [
                (kind, json.loads(data))
                for kind, data in re.findall(r"event: (\w+)\ndata: (.*)\n\n", text)
            ]
        return self._unread.pop(0)


def test_events_begin_with_all_and_go_on_with_changes(board: StatusBoard, fleet: FakeFleet) -> None:
    async def main() -> None:
        reader = Reader(make_app(cluster_routes(board)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.run)
            kind, status = await reader.next()
            assert (kind, status["phase"]) == ("snapshot", "ready")
            assert status["events"][-1]["kind"] == "ready"
            del status["at"], status["events"]
            board.lost("second", range(4, 8), "killed")
            fleet.members.pop(1)
            kind, event = await reader.next()
            assert (kind, event["kind"], event["peer_id"]) == ("event", "worker_lost", "second")
            while status["phase"] != "mending":
                kind, patch = await reader.next()
                assert kind == "patch"
                status = patched(status, patch)
            assert status["peers"]["second"]["health"] == "lost"
            assert "first" in status["peers"]
            reader.gone.set()

    trio.run(main)


def test_events_end_when_the_coordinator_does(board: StatusBoard) -> None:
    async def main() -> None:
        reader = Reader(make_app(cluster_routes(board)))
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reader.run)
                await reader.next()
                board.events.close()

    trio.run(main)


def test_who_goes_away_is_no_subscriber_any_more(board: StatusBoard) -> None:
    async def main() -> None:
        for _ in range(2 * MAX_SUBSCRIBERS):
            reader = Reader(make_app(cluster_routes(board)))
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(reader.run)
                    await reader.next()
                    reader.gone.set()
        assert not board.events.is_full

    trio.run(main)


def test_one_too_many_is_told_to_come_again(board: StatusBoard) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neurogrid.node.events.MAX_SUBSCRIBERS", 0)
        answer = asked(
            make_app(cluster_routes(board)), lambda client: client.get("/v1/cluster/events")
        )
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "10"


def test_one_address_leaves_places_to_others(board: StatusBoard) -> None:
    app = make_app(cluster_routes(board))

    async def main() -> None:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                readers = [Reader(app) for _ in range(MAX_SUBSCRIBERS * 3 // 4)]
                for reader in readers:
                    nursery.start_soon(reader.run)
                    await reader.next()
                for address, status in (("127.0.0.1", 503), ("127.0.0.2", 200)):
                    other = Reader(app, address)
                    nursery.start_soon(other.run)
                    started = await other.next_part()
                    assert (address, started["status"]) == (address, status)
                    other.gone.set()
                readers[0].gone.set()  # a place of this address is free
                async for _ in readers[0].parts:
                    pass
                again = Reader(app)
                nursery.start_soon(again.run)
                assert (await again.next())[0] == "snapshot"
                for reader in (*readers, again):
                    reader.gone.set()

    trio.run(main)


def test_an_event_is_one_line(board: StatusBoard) -> None:
    board.events.publish(EventKind.WORKING, "one\nevent: snapshot\ndata: {}")

    async def main() -> None:
        reader = Reader(make_app(cluster_routes(board)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.run)
            _, status = await reader.next()
            assert status["events"][-1]["text"] == "one\nevent: snapshot\ndata: {}"
            reader.gone.set()

    trio.run(main)


STATIC = Path(neurogrid.server.page.routes.__file__).parent / "static"
PAGE_PATHS = [
    "/",
    *(f"/static/{file.name}" for file in STATIC.iterdir() if file.suffix != ".html"),
]
PAGES = pytest.mark.parametrize("page", [SERVING, TRAINING])


@PAGES
def test_a_page_and_its_files(page: str) -> None:
    assert {"/", "/static/style.css", "/static/main.js"} <= set(PAGE_PATHS)
    for path in PAGE_PATHS:

        async def ask(client: httpx.AsyncClient, path: str = path) -> None:
            answer = await client.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await client.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")

        asked(make_app([], open_routes=page_routes(page)), ask)


@PAGES
def test_a_page_names_only_what_is_there_and_runs_nothing_inline(page: str) -> None:
    texts: dict[str, str] = {}

    async def ask(client: httpx.AsyncClient) -> None:
        for path in PAGE_PATHS:
            texts[path] = (await client.get(path)).text

    asked(make_app([], open_routes=page_routes(page)), ask)
    del (
        texts["/static/marked.js"],
        texts["/static/marked-license.txt"],
    )  # as their authors wrote them
    for path, text in texts.items():
        named = re.findall(r'(?:src|href)="(/[^"]*)"', text)
        named += [f"/static/{name}" for name in re.findall(r'from "\./([\w.]+)"', text)]
        assert set(named) <= set(PAGE_PATHS), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(", text), path
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), path
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", texts["/"])
