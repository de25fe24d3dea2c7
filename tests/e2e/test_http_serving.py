"""The HTTP server on a real port: taken ports, clients that read nothing, too many of them, and its end."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import trio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from neurogrid.errors import ConfigurationError
from neurogrid.server import serving
from neurogrid.server.answering import while_connected
from neurogrid.server.app import make_app
from neurogrid.server.serving import open_http
from tests.e2e.support import DEADLINE

HOST = "127.0.0.1"
GET = b"GET /%b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Flood:
    """Answers without end; tells when it has been stopped."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.stopped = trio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, send)
                while (await receive())["type"] != "http.disconnect":
                    pass
                nursery.cancel_scope.cancel()
        finally:
            self.stopped.set()

    async def _send(self, send: Any) -> None:
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.num_sent += 1


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


class Watched:
    """Answers as the model's answers are sent: whether the client is there is watched meanwhile."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await while_connected(receive, lambda: PlainTextResponse("hello")(scope, receive, send))


def serve(test: Callable[[str, Flood], Awaitable[None]]) -> None:
    async def main() -> None:
        flood = Flood()
        app = make_app([Route("/", hello), Route("/flood", flood), Route("/watched", Watched())])
        with trio.fail_after(DEADLINE):
            async with open_http(app, host=HOST, port=0) as url:
                await test(url, flood)

    trio.run(main)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def get(url: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=DEADLINE) as client:
        return await client.get(url)


def test_a_client_that_reads_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SEND_TIMEOUT", 0.5)

    async def test(url: str, flood: Flood) -> None:
        async with await trio.open_tcp_stream(HOST, port_of(url)) as stream:
            await stream.send_all(GET % b"flood")
            await flood.stopped.wait()  # though the client is still there
            assert flood.num_sent > 0
            assert (await get(url)).text == "hello"

    serve(test)


def test_the_end_waits_for_nobody_who_reads_nothing() -> None:
    with socket.socket() as client:

        async def test(url: str, flood: Flood) -> None:
            client.connect((HOST, port_of(url)))  # the kernel accepts it
            client.sendall(GET % b"flood")
            sent = -1
            while not sent or flood.num_sent != sent:  # until the buffers are full
                sent = flood.num_sent
                await trio.sleep(0.2)

        serve(test)


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 3)

    async def test(url: str, flood: Flood) -> None:
        async with AsyncExitStack() as stack:
            for _ in range(3):
                stream = await trio.open_tcp_stream(HOST, port_of(url))
                await stack.enter_async_context(stream)
                await stream.send_all(GET % b"")
                assert await stream.receive_some(65536)  # it was accepted
            with pytest.raises(httpx.TransportError):
                await get(url)
        closed = trio.current_time()
        while True:  # the server hears of it in its own time
            try:
                assert (await get(url)).status_code == 200
                return
            except httpx.TransportError:
                assert trio.current_time() < closed + serving.IDLE_TIMEOUT / 2
                await trio.sleep(0.05)

    serve(test)


def test_a_connection_without_a_request_is_closed_whatever_it_was_asked_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "IDLE_TIMEOUT", 3.0)  # in which all are asked

    async def test(url: str, flood: Flood) -> None:
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(await trio.open_tcp_stream(HOST, port_of(url)))
                for _ in range(16)
            ]
            for number, stream in enumerate(streams):
                await stream.send_all(GET % (b"watched" if number else b""))
            for stream in streams:
                answer = b""
                while part := await stream.receive_some(65536):
                    answer += part
                assert answer.endswith(b"hello")

    serve(test)


@pytest.mark.parametrize(
    "request_line",
    [b"", b"\x00\xff" * 40, b"GET / HTTP/9.9"],
    ids=["nothing", "noise", "another version"],
)
def test_what_is_no_http_ends_its_connection_alone(request_line: bytes) -> None:
    async def test(url: str, flood: Flood) -> None:
        answer = b""
        async with await trio.open_tcp_stream(HOST, port_of(url)) as stream:
            await stream.send_all(request_line + b"\r\n\r\n")
            await stream.send_eof()
            while part := await stream.receive_some(65536):
                answer += part
        assert not answer or answer.startswith(b"HTTP/1.1 4")
        assert (await get(url)).status_code == 200

    serve(test)


def test_a_port_that_is_taken_says_what_to_do() -> None:
    async def main(port: int) -> None:
        async with open_http(make_app([]), host=HOST, port=port):
            pass

    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} .* is taken: --http-port"):
            trio.run(main, port)


def test_a_host_that_is_not_ours() -> None:
    async def main() -> None:
        async with open_http(make_app([]), host="192.0.2.1", port=0):
            pass

    with pytest.raises(ConfigurationError, match=r"cannot listen on 192.0.2.1"):
        trio.run(main)
