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
from neurogrid.server.backend import Backend
from neurogrid.server.errors import APIError
from neurogrid.server.http.body import read_json
from neurogrid.server.openai.answer import (
    Answer,
    AnswerShape,
    api_error,
    server_ended,
    while_connected,
)
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
    """

    def __init__(self, backend: Backend, prepare: Prepare, timeout: float) -> None:
        self._backend = backend
        self._prepare = prepare
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = trio.current_time() + self._timeout
        with self._backend.request() as coordinator:
            try:
                body = await read_json(Request(scope, receive))
            except ClientDisconnect:
                return
            prepared: ToGenerate | Response | None = None

            async def prepare() -> None:
                nonlocal prepared
                prepared = await self._until_the_end(body, coordinator)

            with trio.move_on_at(deadline) as scope_of_work:
                await while_connected(receive, prepare)
            if scope_of_work.cancelled_caught:
                raise APIError(
                    504, "the answer was not finished in time (--request-timeout)", code="timeout"
                )
            if isinstance(prepared, ToGenerate):
                gave_up = self._backend.gave_up
                request, shape = prepared.request, prepared.shape
                answer = Answer(coordinator, request, shape, deadline=deadline, gave_up=gave_up)
                await answer(scope, receive, send)
            elif prepared is not None:  # or the client has gone
                await prepared(scope, receive, send)

    async def _until_the_end(
        self, body: Mapping[str, Any], coordinator: Coordinator
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
            await self._backend.gave_up.wait()
            nursery.cancel_scope.cancel()
        if isinstance(error, NeuroGridError):
            raise api_error(error) from error
        if error is not None:
            raise error
        if prepared is None:
            raise server_ended()
        return prepared
