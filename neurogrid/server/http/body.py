"""Request bodies: bounded in size and time, each and all together, and read to their end even where nobody wants them.

An answer that is sent before the request was read makes the connection end with a reset, which may overtake the
answer; and Hypercorn's queue of what was received stays full with nobody left to empty it.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from functools import reduce
from typing import NoReturn

import trio
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neurogrid.server.errors import APIError

__all__ = ["MAX_BODY_BYTES", "WholeBodies", "read_json"]

# A prompt of a million token ids, written out.
MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_TIMEOUT = 60.0  # seconds
# Of all requests together, until each is answered: what is read of a body lives as long. Ten of the largest.
MAX_BODIES_BYTES = 512 * 1024 * 1024
# Up to it a body is none of those: whoever sends little text is answered, whatever others send.
SMALL_BODY_BYTES = 64 * 1024
# What a client is told to wait where there are too many of them. Seconds.
BODIES_RETRY_AFTER = 5.0
# What is read of a body that is not wanted, so that the client comes to read the answer.
MAX_UNWANTED_BYTES = 64 * 1024 * 1024
UNWANTED_TIMEOUT = 5.0  # seconds
# Above it JSON is parsed in a thread: 8 MiB take a fifth of a second.
MAX_INLINE_BYTES = 64 * 1024
# Of the levels that JSON can be nested in, by how deep the stack is, those that are left to others.
SPARE_LEVELS = 256


async def read_json(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> dict[str, object]:
    """The JSON object in the body of `request`, of so many bytes at most.

    Raises:
        APIError: 400, 408 or 413: it is none, or did not come in time, or is too long.
        ClientDisconnect: the client has gone.
    """
    data = await _read(request, max_bytes)
    if len(data) > MAX_INLINE_BYTES:
        return await trio.to_thread.run_sync(_parse, data)
    return _parse(data)


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > max_bytes:
        raise _too_long(max_bytes)
    data = bytearray()
    with trio.move_on_after(BODY_TIMEOUT):
        async with aclosing(request.stream()) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) > max_bytes:
                    raise _too_long(max_bytes)
        return bytes(data)
    raise APIError(408, f"the body did not come within {BODY_TIMEOUT:g} s", code="request_timeout")


def _too_long(max_bytes: int) -> APIError:
    return APIError(413, f"the body is longer than {max_bytes:,} B", code="request_too_large")


def _parse(data: bytes) -> dict[str, object]:
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
        # Half of a surrogate pair is no text: nothing could encode it, least of all into an answer. Nor is infinity a
        # number of JSON, as which 1e999 is read. And whoever writes a part of it later is called from deeper down.
        deeper = reduce(lambda inner, _: [inner], range(SPARE_LEVELS), value)
        json.dumps(deeper, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise APIError(400, "a string in the body has half of a surrogate pair") from None
    except (ValueError, RecursionError) as exc:
        raise APIError(400, f"the body is no JSON: {str(exc)[:200]}") from None
    if not isinstance(value, dict):
        raise APIError(400, "the body has to be a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


class WholeBodies:
    """ASGI middleware: an answer ends only after the request did, or after some seconds; and bodies are not too many.

    A body for which there is no room raises `APIError` (503) where it is read.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._room = _Room()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reader = _Reader(receive, self._room)

        async def send_after_body(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if not is_last:
                await send(message)
                return
            if reader.is_at_end:
                # With it Hypercorn tells the application that the client is gone, as it calls the end of a request,
                # and makes the connection ready for the next one, with a deadline: the first must not interrupt that.
                with trio.CancelScope(shield=True):
                    await send(message)
                return
            if message.get("body"):
                await send({**message, "more_body": True})
            with trio.move_on_after(UNWANTED_TIMEOUT):
                await reader.skip(MAX_UNWANTED_BYTES)
            async with trio.open_nursery() as nursery:
                # Sending the last part puts one more message into the queue: somebody has to empty it.
                nursery.start_soon(reader.skip, None)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await self._app(scope, reader.receive, send_after_body)
        finally:
            reader.leave()


class _Room:
    """Memory that the bodies of all requests take together."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Take so much more; raises 503 where there is not as much."""
        if self._num_bytes + num_bytes > MAX_BODIES_BYTES:
            raise APIError(
                503,
                f"the bodies of all requests together are longer than {MAX_BODIES_BYTES:,} B: try again later",
                code="bodies_too_large",
                retry_after=BODIES_RETRY_AFTER,
            )
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Give back what was taken."""
        self._num_bytes -= num_bytes


class _Reader:
    def __init__(self, receive: Receive, room: _Room) -> None:
        self._receive = receive
        self._room = room
        self._num_bytes = 0
        self._num_taken = 0
        self.is_at_end = False

    async def receive(self) -> Message:
        message = await self._next()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > max(SMALL_BODY_BYTES, self._num_taken):
            self._room.take(self._num_bytes - self._num_taken)
            self._num_taken = self._num_bytes
        return message

    def leave(self) -> None:
        """The request is over."""
        self._room.give_back(self._num_taken)

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            self.is_at_end = True
        return message

    async def skip(self, max_bytes: int | None) -> None:
        num_bytes = 0
        while not self.is_at_end and (max_bytes is None or num_bytes < max_bytes):
            num_bytes += len((await self._next()).get("body", b""))
