"""Hypercorn's HTTP/1.1 and nothing beside it: no HTTP/2, no upgrade, no request that two programs may read differently.

Hypercorn takes HTTP/2 in clear text from any client, and bounds neither its streams nor what waits in them for a
client that opens no window. Clients of this server need none of it: one that asks to upgrade is answered in HTTP/1.1,
as RFC 9110 (7.8) has it, and one that begins with HTTP/2 is told so.

h11 refuses most of what makes a request end elsewhere for a proxy than for us (lengths that differ, unknown transfer
codings, spaces before a colon, control characters). It takes a length beside a transfer coding, which RFC 9112 (6.1)
allows and advises against; here that is refused too.
"""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

import h11
import trio
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer

from neurogrid.server.errors import APIError

__all__ = ["HEAD_TIMEOUT", "Http11Server"]

# Seconds from a connection, or from the first byte of a later request on it, to the end of the request's headers.
HEAD_TIMEOUT = 10.0

_VERSIONS = (b"1.0", b"1.1")


class Http11Server(TCPServer):
    """Serves one connection, which may not take its time over the head of a request."""

    async def _read_data(self) -> None:
        stock = self.protocol
        protocol = _Http11(
            self.app,
            self.config,
            self.context,
            self._task_group,
            stock.state,
            stock.ssl,
            stock.client,
            stock.server,
            self.protocol_send,
        )
        self.protocol = protocol  # type: ignore[assignment]  # whatever takes events
        while True:
            try:
                with trio.fail_at(protocol.head_deadline):
                    data = await self.stream.receive_some(MAX_RECV)
            except trio.TooSlowError:
                await protocol.give_up()
                break
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                break
            await protocol.handle(RawData(bytes(data)))
            if not data:
                break
        await protocol.handle(Closed())


class _Http11(H11Protocol):
    """HTTP/1.1 on one connection.

    Attributes:
        head_deadline: when the head that has begun has to be there, in trio's time; infinite while none is waited for.
    """

    connection: _StrictConnection

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connection = _StrictConnection(
            h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size
        )
        self.head_deadline = trio.current_time() + HEAD_TIMEOUT

    async def handle(self, event: Event) -> None:
        """Take what came; returns when more can be taken."""
        await super().handle(event)
        if not self.connection.has_part_of_head:
            self.head_deadline = math.inf
        elif self.head_deadline == math.inf:
            self.head_deadline = trio.current_time() + HEAD_TIMEOUT

    async def give_up(self) -> None:
        """Tell the client, if it has begun to say something, that it took too long."""
        if self.connection.has_part_of_head:
            self.connection.refusal = f"the headers did not come within {HEAD_TIMEOUT:g} s"
            await self._send_error_response(408)

    async def _create_stream(self, request: h11.Request) -> None:
        self.head_deadline = math.inf
        await super()._create_stream(request)

    async def _send_error_response(self, status_code: int) -> None:
        # The last that is said on this connection, and in one piece: its end may overtake a second.
        body = APIError(status_code, self.connection.refusal).json()
        head = (
            f"HTTP/1.1 {status_code} {HTTPStatus(status_code).phrase}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        self.connection.send_failed()
        await self.send(RawData(head.encode() + body))


class _StrictConnection(h11.Connection):
    """h11, which takes no more than one meaning of a request.

    Attributes:
        refusal: why the last request was not taken, for its client.
    """

    refusal = ""

    @property
    def has_part_of_head(self) -> bool:
        """Whether a request has begun whose headers are not all there."""
        return self.their_state is h11.IDLE and bool(self.trailing_data[0])

    def next_event(self) -> Any:
        """Return h11's next event; a request without what it would upgrade to.

        Raises:
            h11.RemoteProtocolError: also where h11 would take the request.
        """
        try:
            event = super().next_event()
            return _checked(event) if isinstance(event, h11.Request) else event
        except h11.RemoteProtocolError as error:
            self.refusal = str(error)[:200]
            raise


def _checked(request: h11.Request) -> h11.Request:
    if request.http_version not in _VERSIONS:
        raise h11.RemoteProtocolError("this server speaks HTTP/1.1 alone", error_status_hint=505)
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            raise h11.RemoteProtocolError(
                "Content-Length and Transfer-Encoding say different things of where a request ends: send one of them"
            )
        if request.http_version == b"1.0":
            raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding")
    if b"upgrade" not in names:
        return request
    return h11.Request(
        method=request.method,
        target=request.target,
        headers=[(name, value) for name, value in request.headers if name != b"upgrade"],
        http_version=request.http_version,
    )
