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
from neurogrid.server.app import make_app
from neurogrid.server.http import http11
from neurogrid.server.http import http_server as serving
from neurogrid.server.http.http_server import open_http
from neurogrid.server.openai.answer import while_connected
from tests.e2e.support import DEADLINE

HOST = "127.0.0.1"
GET = b"GET /%b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"

LARGE = 64 * 2**20  # more than the kernel's buffers have room for


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


async def large(request: Request) -> Response:
    return PlainTextResponse("x" * LARGE)


async def slowly(request: Request) -> Response:
    await trio.sleep(2.0)
    return PlainTextResponse("hello")


class Watched:
    """Answers as the model's answers are sent: whether the client is there is watched meanwhile."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await while_connected(receive, lambda: PlainTextResponse("hello")(scope, receive, send))


def serve(test: Callable[[str, Flood], Awaitable[None]]) -> None:
    async def main() -> None:
        flood = Flood()
        app = make_app(
            [
                Route("/", hello),
                Route("/slowly", slowly),
                Route("/flood", flood),
                Route("/large", large),
                Route("/watched", Watched()),
            ]
        )
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


def test_a_large_answer_has_the_time_of_a_slow_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SEND_TIMEOUT", 0.5)

    async def test(url: str, flood: Flood) -> None:
        async with await trio.open_tcp_stream(HOST, port_of(url)) as stream:
            await stream.send_all(GET % b"large")
            await trio.sleep(1.5)
            received = 0
            while received < LARGE:
                data = await stream.receive_some(2**20)
                assert data, f"the connection was closed after {received:,} bytes"
                received += len(data)

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


async def opened(stack: AsyncExitStack, url: str, address: str, sends: bytes) -> trio.SocketStream:
    """A connection from this address of loopback, on which so much was sent."""
    stream = await trio.open_tcp_stream(HOST, port_of(url), local_address=address)
    await stack.enter_async_context(stream)
    await stream.send_all(sends)
    return stream


async def read_all(stream: trio.SocketStream) -> bytes:
    answer = b""
    while part := await stream.receive_some(65536):
        answer += part
    return answer


async def is_served(stream: trio.SocketStream) -> bool:
    """Whether one request is answered, to the end of the answer."""
    answer = b""
    while not answer.endswith(b"hello"):
        part = await stream.receive_some(65536)
        if not part:
            return False
        answer += part
    return answer.startswith(b"HTTP/1.1 200 ")


async def is_open(stream: trio.SocketStream) -> bool:
    """Whether a connection, on which nothing is to come, was not ended by the other side."""
    with trio.move_on_after(0.2):
        try:
            return bool(await stream.receive_some(1))
        except trio.BrokenResourceError:
            return False
    return True


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on which somebody was served give way to nobody; of one address there are three quarters."""
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 4)

    async def test(url: str, flood: Flood) -> None:
        async with AsyncExitStack() as stack:
            for address in (HOST, HOST, HOST, "127.0.0.2"):
                assert await is_served(await opened(stack, url, address, GET % b""))
            for address in (HOST, "127.0.0.3"):
                assert not await is_open(await opened(stack, url, address, b""))
        closed = trio.current_time()
        while True:  # the server hears of it in its own time
            try:
                assert (await get(url)).status_code == 200
                return
            except httpx.TransportError:
                assert trio.current_time() < closed + serving.IDLE_TIMEOUT / 2
                await trio.sleep(0.05)

    serve(test)


@pytest.mark.parametrize("comes_from", [HOST, "127.0.0.2"])
def test_who_says_nothing_gives_way(monkeypatch: pytest.MonkeyPatch, comes_from: str) -> None:
    """Though all places are taken whoever comes is served, and whoever was served stays."""
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 4)

    async def test(url: str, flood: Flood) -> None:
        async with AsyncExitStack() as stack:
            served = await opened(stack, url, "127.0.0.2", GET % b"")
            assert await is_served(served)
            slow = [
                await opened(stack, url, HOST, b"GET / HTTP/1.1\r\nX-Slow: ") for _ in range(12)
            ]
            for _ in range(2):
                assert await is_served(await opened(stack, url, comes_from, GET % b""))
            for stream in slow[:9]:
                assert not await is_open(stream)
            await served.send_all(GET % b"")
            assert await is_served(served)

    serve(test)


def test_headers_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """However they trickle; whoever says nothing is told nothing."""
    monkeypatch.setattr(http11, "HEAD_TIMEOUT", 0.5)

    async def trickle(stream: trio.SocketStream) -> None:
        while True:
            try:
                await stream.send_all(b"x")
            except trio.BrokenResourceError:
                return
            await trio.sleep(0.05)

    async def test(url: str, flood: Flood) -> None:
        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            silent = await opened(stack, url, HOST, b"")
            slow = await opened(stack, url, HOST, b"GET / HTTP/1.1\r\nX-Slow: ")
            nursery.start_soon(trickle, slow)
            answer = await slow.receive_some(65536)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"the headers did not come within 0.5 s" in answer
            assert await read_all(silent) == b""
            nursery.cancel_scope.cancel()

    serve(test)


def test_the_deadline_of_headers_is_that_of_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of what is between two of them, nor of the answer to one, though the next has begun by then."""
    monkeypatch.setattr(http11, "HEAD_TIMEOUT", 1.0)

    async def test(url: str, flood: Flood) -> None:
        async with AsyncExitStack() as stack:
            second = GET % b""
            stream = await opened(stack, url, HOST, GET % b"slowly" + second[:10])
            assert await is_served(stream)
            await stream.send_all(second[10:])
            assert await is_served(stream)
            await trio.sleep(1.5)
            await stream.send_all(GET % b"")
            assert await is_served(stream)
            await stream.send_all(second[:10])
            assert (await stream.receive_some(65536)).startswith(b"HTTP/1.1 408")

    serve(test)


H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize("frames", [b"", b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"])
def test_http_2_in_clear_text_is_refused(frames: bytes) -> None:
    async def test(url: str, flood: Flood) -> None:
        async with AsyncExitStack() as stack:
            answer = await read_all(await opened(stack, url, HOST, H2_PREFACE + frames))
            assert answer.startswith(b"HTTP/1.1 505 ")
            assert b"this server speaks HTTP/1.1 alone" in answer

    serve(test)


@pytest.mark.parametrize(
    "upgrade",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    ],
    ids=["h2c", "websocket"],
)
def test_who_asks_to_upgrade_is_answered_in_http_1(upgrade: bytes) -> None:
    """As some clients do unasked: Java's, and curl with --http2."""

    async def test(url: str, flood: Flood) -> None:
        async with AsyncExitStack() as stack:
            stream = await opened(stack, url, HOST, (GET % b"")[:-2] + upgrade + b"\r\n")
            assert await is_served(stream)
            await stream.send_all(GET % b"")  # the same connection goes on
            assert await is_served(stream)

    serve(test)


CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Content-Length: 3\r\n" + CHUNKED, 400),
        (CHUNKED + b"Content-Length: 3\r\n", 400),
        (b"Content-Length: 3\r\nContent-Length: 4\r\n", 400),
        (b"Content-Length: 3, 4\r\n", 400),
        (b"Content-Length: +3\r\n", 400),
        (b"Content-Length: 3\r\n 4\r\n", 400),
        (b"Content-Length : 3\r\n", 400),
        (b"Transfer-Encoding : chunked\r\n", 400),
        (b"Transfer-Encoding: \x0bchunked\r\n", 400),
        (b"Transfer-Encoding: chunked, identity\r\n", 501),
        (CHUNKED + CHUNKED, 501),
        (b"X: a\rTransfer-Encoding: chunked\r\n", 400),
        (b"Host: 127.0.0.2\r\n", 400),
    ],
)
def test_a_request_that_ends_elsewhere_for_others_is_refused(head: bytes, status: int) -> None:
    """And its connection closed, so that what follows is no request."""

    async def test(url: str, flood: Flood) -> None:
        async with AsyncExitStack() as stack:
            request = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n%b\r\n" % head
            stream = await opened(stack, url, HOST, request + b"0\r\n\r\n" + GET % b"")
            answer = await read_all(stream)
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert answer.count(b"HTTP/1.1") == 1
            assert b'"message":' in answer

    serve(test)


def test_http_1_0_has_no_chunks() -> None:
    async def test(url: str, flood: Flood) -> None:
        async with AsyncExitStack() as stack:
            request = b"POST / HTTP/1.0\r\nHost: 127.0.0.1\r\n%b\r\n0\r\n\r\n" % CHUNKED
            answer = await read_all(await opened(stack, url, HOST, request))
            assert answer.startswith(b"HTTP/1.1 400 ")

    serve(test)


@pytest.mark.parametrize(
    "head",
    [b"Content-Length: 3\r\nContent-Length: 3\r\n", b"Content-Length: 3, 3\r\n", b"X: a\r\n b\r\n"],
    ids=["the same length twice", "the same length in a list", "a folded line"],
)
def test_what_has_one_meaning_is_taken(head: bytes) -> None:
    """As RFC 9112 has it (5.2, 6.3): read like one length, and like a space."""

    async def test(url: str, flood: Flood) -> None:
        async with AsyncExitStack() as stack:
            request = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n%b\r\n" % head
            body = b"abc" if b"Content-Length" in head else b""
            last = (GET % b"")[:-2] + b"Connection: close\r\n\r\n"
            answer = await read_all(await opened(stack, url, HOST, request + body + last))
            assert answer.count(b"HTTP/1.1 200 ") == 2

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
        assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 505"))
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
