"""HTTP at a libp2p port: an answer that says where the page is, and peers that come and go as they did."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import httpx
import pytest
import trio

from neurogrid.p2p import open_host
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.libp2p.http_answer import HTTP_ANSWER
from tests.e2e.support import DEADLINE

MULTISTREAM = b"\x13/multistream/1.0.0\n"


def with_host(test: Callable[[Host, int], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as host:
                await test(host, int(host.listen_addresses[0].split("/")[4]))

    trio.run(main)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_a_browser_is_told_where_the_page_is(method: str) -> None:
    async def test(host: Host, port: int) -> None:
        async with httpx.AsyncClient(timeout=DEADLINE) as client:
            answer = await client.request(method, f"http://127.0.0.1:{port}/v1/models")
        assert answer.status_code == 400
        if method != "HEAD":
            assert "libp2p port of NeuroGrid" in answer.text
            assert "http://127.0.0.1:8090" in answer.text
        async with open_host() as peer:
            assert await peer.connect(host.listen_addresses[0]) == host.peer_id

    with_host(test)


def test_the_answer_is_all_that_a_client_gets() -> None:
    """However much it asks: nothing is read on, and nothing kept."""

    async def test(host: Host, port: int) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            await stream.send_all(b"GET / HTTP/1.1\r\n\r\n" * 100)
            answer = b""
            while part := await stream.receive_some(65536):
                answer += part
        assert answer == HTTP_ANSWER

    with_host(test)


@pytest.mark.parametrize("first", [b"", MULTISTREAM, b"GE"], ids=["nothing", "a peer", "a part"])
def test_what_is_no_http_is_met_as_before(first: bytes) -> None:
    async def test(host: Host, port: int) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            if first:
                await stream.send_all(first)
            if first == b"GE":
                assert await stream.receive_some(65536) != HTTP_ANSWER
            else:
                assert await stream.receive_some(len(MULTISTREAM)) == MULTISTREAM

    with_host(test)
