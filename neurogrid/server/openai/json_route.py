"""A route that takes JSON and has the cluster compute something: read, worked on while somebody wants it, answered.

What ends the work early: the client goes away, the deadline passes, or the server ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import trio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from neurogrid.errors import NeuroGridError
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.server.backend import Backend, Backends
from neurogrid.server.errors import APIError
from neurogrid.server.http.body import MAX_BODY_BYTES, read_json
from neurogrid.server.openai.answer import (
    Answer,
    AnswerShape,
    api_error,
    server_ended,
    while_connected,
)
from neurogrid.server.openai.image_parts import MAX_IMAGE_BODY_BYTES
from neurogrid.server.openai.request_reader import CompletionRequest

__all__ = ["JsonRoute", "Prepare", "ToGenerate"]


@dataclass(frozen=True)
class ToGenerate:
    """A request that is answered by generating, and the shape of its answer."""

    request: CompletionRequest
    shape: AnswerShape


Prepare = Callable[[Mapping[str, Any], Coordinator], Awaitable[ToGenerate | Response]]
"""Reads a body; gives what is to be generated, or the answer itself. Raises `APIError`, or an error of computing."""


class JsonRoute:
    """The application of one route.

    Args:
        timeout: seconds from when a request is there until its answer is finished.
        tag: as for `Backends.choose`.
    """

    def __init__(
        self, backends: Backends, prepare: Prepare, timeout: float, *, tag: str = ""
    ) -> None:
        self._backends = backends
        self._prepare = prepare
        self._timeout = timeout
        self._tag = tag

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = trio.current_time() + self._timeout
        backends = self._backends
        backends.require_one()
        try:
            sees = any(each.sees for each in backends.all())
            max_bytes = MAX_IMAGE_BODY_BYTES if sees else MAX_BODY_BYTES
            body = await read_json(Request(scope, receive), max_bytes=max_bytes)
        except ClientDisconnect:
            return
        backend = backends.choose(body.get("model") or body.get("name"), tag=self._tag)
        if not isinstance(backends, Backend):
            await self._wake(backend, receive, deadline)
        # Not before: whoever waits for the end of all requests waits for no client that takes its time over a body.
        with backend.request() as coordinator:
            await self._answer(body, backend, coordinator, deadline, scope, receive, send)

    async def _wake(self, backend: Backend, receive: Receive, deadline: float) -> None:
        """Have a model open that gave way; no longer than the client is there."""
        while not backend.is_there:
            has_left = True

            async def wake() -> None:
                nonlocal has_left
                await backend.wake()
                has_left = False

            with trio.move_on_at(deadline) as scope_of_waking:
                await while_connected(receive, wake)
            if scope_of_waking.cancelled_caught:
                raise backend.not_ready(backend.why_not_ready or "")
            if has_left:
                break  # nobody hears that it is not there

    async def _answer(
        self,
        body: Mapping[str, Any],
        backend: Backend,
        coordinator: Coordinator,
        deadline: float,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        prepared: ToGenerate | Response | None = None

        async def prepare() -> None:
            nonlocal prepared
            prepared = await self._until_the_end(body, backend, coordinator)

        with trio.move_on_at(deadline) as scope_of_work:
            await while_connected(receive, prepare)
        if scope_of_work.cancelled_caught:
            raise _timeout()
        if isinstance(prepared, ToGenerate):
            gave_up = backend.gave_up
            request, shape = prepared.request, prepared.shape
            answer = Answer(coordinator, request, shape, deadline=deadline, gave_up=gave_up)
            await answer(scope, receive, send)
        elif prepared is not None:  # or the client has gone
            await prepared(scope, receive, send)

    async def _until_the_end(
        self, body: Mapping[str, Any], backend: Backend, coordinator: Coordinator
    ) -> ToGenerate | Response:
        """Prepare, unless the server ends first."""
        prepared: ToGenerate | Response | None = None
        error: NeuroGridError | APIError | None = None
        async with trio.open_nursery() as nursery:

            async def prepare() -> None:
                nonlocal prepared, error
                try:
                    prepared = await self._prepare(body, coordinator)
                except (NeuroGridError, APIError) as exc:
                    error = exc
                nursery.cancel_scope.cancel()

            nursery.start_soon(prepare)
            await backend.gave_up.wait()
            nursery.cancel_scope.cancel()
        if isinstance(error, NeuroGridError):
            raise api_error(error) from error
        if error is not None:
            raise error
        if prepared is None:
            raise server_ended()
        return prepared


def _timeout() -> APIError:
    return APIError(504, "the answer was not finished in time (--request-timeout)", code="timeout")
