"""An ASGI application on TCP ports: Hypercorn's HTTP on listeners of our own.

Hypercorn bounds neither the connections nor the time that a client takes to read what it is sent, cannot be
interrupted while it sends, and keeps a connection that its client has closed until it would have timed out. So each
connection is handed to it in a wrapper that does better, and what is spoken on it is bounded in `http11`.

Connections are `Places`: an address has three quarters of them at most, and one on which nothing was served yet gives
way to one that comes, the oldest first. The application says which are served, by `KEEP_PLACE` in a request's state.
"""

from __future__ import annotations

import ipaddress
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState
from starlette.types import ASGIApp

from neurogrid.exception_groups import unwrap_errors
from neurogrid.server.http.guard import KEEP_PLACE
from neurogrid.server.http.http11 import Http11Server
from neurogrid.server.http.listeners import open_listeners
from neurogrid.server.http.places import NoPlaceError, Places, client_address, share_of

__all__ = ["open_http"]

logger = logging.getLogger(__name__)

# As many as a process may have files by default, less what the rest of it needs.
MAX_CONNECTIONS = 512
# Seconds in which a client has to take what is sent to it, the kernel's buffers (some MiB) aside; and what it takes in
# a second at least where that is a large body.
SEND_TIMEOUT = 60.0
LEAST_RATE = 16 * 1024
# Seconds that a connection without a request is kept; longer than clients keep theirs, so that they close first.
IDLE_TIMEOUT = 75
# Seconds for what is answered when the block is left.
CLOSE_TIMEOUT = 1.0
# Seconds for what is left to do once a client has closed its connection.
FAREWELL_TIMEOUT = 0.2
# Between two warnings that there are more connections than places. Seconds.
WARNING_INTERVAL = 60.0


@asynccontextmanager
async def open_http(
    app: ASGIApp, *, host: str, port: int, flags: str = "--http"
) -> AsyncIterator[str]:
    """Serve `app` for as long as the block runs; yields its URL, without a slash at the end.

    Args:
        host, port, flags: as for `open_listeners`.

    Raises:
        ConfigurationError: as `open_listeners`.
    """
    listeners = await open_listeners(host, port, flags=flags)
    config = Config()
    config.accesslog = None
    config.errorlog = logger
    config.include_server_header = False
    config.keep_alive_timeout = IDLE_TIMEOUT
    context = WorkerContext(None)
    wrapped = ASGIWrapper(cast(ASGIFramework, app))
    places: Places[_Connection] = Places(MAX_CONNECTIONS, share_of(MAX_CONNECTIONS))
    warnings = _Warnings()

    async def serve(stream: trio.SocketStream) -> None:
        connection = _Connection(stream)
        try:
            leaver = places.take(connection, _address_of(stream))
        except NoPlaceError as refusal:
            warnings.warn("an HTTP connection is refused: %s", refusal)
            await trio.aclose_forcefully(stream)
            return
        try:
            if leaver is not None:
                warnings.warn(
                    "as many HTTP connections as can be: those without a request give way"
                )
                await leaver.end()
            state = ConnectionState({KEEP_PLACE: partial(places.keep, connection)})
            with connection.scope:
                await Http11Server(wrapped, config, context, state, cast(Any, connection))
        except* (trio.BrokenResourceError, trio.ClosedResourceError) as gone:
            logger.debug("a client went away: %s", gone.exceptions[0])
        finally:
            places.leave(connection)
            await trio.aclose_forcefully(stream)

    bound = listeners[0].socket.getsockname()
    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            accepting = trio.CancelScope()

            async def accept() -> None:
                with accepting:
                    await trio.serve_listeners(serve, listeners, handler_nursery=nursery)

            nursery.start_soon(accept)
            try:
                yield _url(host, bound)
            finally:
                accepting.cancel()
                with trio.CancelScope(shield=True):
                    await context.terminated.set()
                    with trio.move_on_after(CLOSE_TIMEOUT):
                        while len(places):
                            await trio.sleep(0.01)
                    for connection in list(places):
                        await trio.aclose_forcefully(connection.stream)
                nursery.cancel_scope.cancel()


class _Connection:
    """The stream that Hypercorn reads from and writes to, whose reader may not keep it waiting for ever.

    Attributes:
        scope: what Hypercorn does with it; cancelled soon after the client has closed it.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.socket = stream.socket
        self.scope = trio.CancelScope()

    async def receive_some(self, max_bytes: int) -> bytes | bytearray:
        data: bytes | bytearray = b""
        try:
            data = await self.stream.receive_some(max_bytes)
        finally:
            if not data:
                self.scope.deadline = trio.current_time() + FAREWELL_TIMEOUT
        return data

    async def send_all(self, data: bytes) -> None:
        timeout = SEND_TIMEOUT + len(data) / LEAST_RATE
        with trio.move_on_after(timeout) as scope:
            await self.stream.send_all(data)
        if scope.cancelled_caught:
            # Half of it may be out: nothing can be said on this connection any more.
            await trio.aclose_forcefully(self.stream)
            raise trio.BrokenResourceError(
                f"the client did not read {len(data):,} bytes within {timeout:.0f} s"
            )

    async def send_eof(self) -> None:
        await self.stream.send_eof()

    async def aclose(self) -> None:
        await self.stream.aclose()

    async def end(self) -> None:
        """Close it at once, whatever is done with it."""
        self.scope.cancel()
        await trio.aclose_forcefully(self.stream)


class _Warnings:
    """Warnings that a client can bring about: one in `WARNING_INTERVAL`."""

    def __init__(self) -> None:
        self._next_at = -math.inf

    def warn(self, message: str, *args: object) -> None:
        now = trio.current_time()
        if now >= self._next_at:
            self._next_at = now + WARNING_INTERVAL
            logger.warning(message, *args)


def _address_of(stream: trio.SocketStream) -> str:
    try:
        return client_address(str(stream.socket.getpeername()[0]))
    except OSError:
        return ""  # it has gone already


def _url(host: str, bound: tuple[Any, ...]) -> str:
    address = ipaddress.ip_address(bound[0].partition("%")[0])
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{bound[1]}" if ":" in host else f"http://{host}:{bound[1]}"
