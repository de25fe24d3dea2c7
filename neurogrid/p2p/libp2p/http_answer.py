"""An answer for browsers at a libp2p port: what this is, and where the page is.

A peer begins with the name of multistream-select; a browser that was given the address of a peer begins with the name
of a method. The first bytes tell, and are left in place for their reader. A connection that is not HTTP goes on
as it did. Source: https://github.com/multiformats/multistream-select
"""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from typing import Any

import trio
from libp2p.io.trio import TrioTCPStream
from libp2p.network.exceptions import SwarmException

__all__ = ["HTTP_ANSWER", "answer_http", "is_http"]

logger = logging.getLogger(__name__)

_METHODS = (
    b"GET ",
    b"HEAD ",
    b"POST ",
    b"PUT ",
    b"DELETE ",
    b"OPTIONS ",
    b"PATCH ",
    b"CONNECT ",
    b"TRACE ",
    b"PRI ",
)
_LONGEST = max(map(len, _METHODS))
# Peers need not wait for each other before they begin, and all that are known do not; one that did is let in after
# that. Seconds.
_FIRST_BYTES_TIMEOUT = 1.0
# What is read of a request, so that its client comes to read the answer. Bytes; seconds.
_MAX_REQUEST_BYTES = 16 * 1024
_ANSWER_TIMEOUT = 2.0

_TEXT = (
    "This is a libp2p port of NeuroGrid, which speaks no HTTP. The page and the API are at the URL that "
    "neurogrid-coordinator prints: http://127.0.0.1:8090 on its machine, unless --http-host and --http-port say "
    "otherwise. A worker has neither.\n"
)
HTTP_ANSWER = (
    "HTTP/1.1 400 Bad Request\r\n"
    "Content-Type: text/plain; charset=utf-8\r\n"
    f"Content-Length: {len(_TEXT)}\r\n"
    "Connection: close\r\n\r\n"
    f"{_TEXT}"
).encode()
"""All that is sent, whatever was asked."""


def is_http(first: bytes) -> bool:
    """Whether a connection that begins with `first` is one of HTTP."""
    return first.startswith(_METHODS)


def answer_http(swarm: Any) -> None:
    """Let a swarm answer inbound connections that speak HTTP, and close them. Before it listens."""
    upgrade = swarm.upgrade_inbound_raw_conn

    async def upgrade_or_answer(raw_conn: Any, maddr: Any) -> Any:
        tcp = getattr(raw_conn, "stream", None)
        if isinstance(tcp, TrioTCPStream) and await _begins_with_http(tcp.stream.socket):
            with trio.move_on_after(_ANSWER_TIMEOUT):
                await _answer(tcp.stream)
            raise SwarmException("the client speaks HTTP")
        return await upgrade(raw_conn, maddr)

    swarm.upgrade_inbound_raw_conn = upgrade_or_answer


async def _begins_with_http(connection: trio.socket.SocketType) -> bool:
    """Look at what came first, and leave it there."""
    first = b""
    with trio.move_on_after(_FIRST_BYTES_TIMEOUT), suppress(OSError):  # the next reader meets it
        first = await connection.recv(_LONGEST, socket.MSG_PEEK)
    return is_http(first)


async def _answer(stream: trio.SocketStream) -> None:
    try:
        await stream.receive_some(_MAX_REQUEST_BYTES)
        await stream.send_all(HTTP_ANSWER)
        await stream.send_eof()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return
    logger.debug("a client spoke HTTP to this libp2p port, and was told where the page is")
