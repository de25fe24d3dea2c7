"""From handlers of contents, as `Protocol` takes them, to handlers of messages, as `Exchange` calls them.

A sync handler stays sync and a coroutine function one, since that decides where it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from neurogrid.p2p.subscribers import MessageHandler, is_async
from neurogrid.p2p.wire import TensorMessage

__all__ = ["answering", "as_async", "with_sender"]


def as_async(call: Callable[[TensorMessage], Any]) -> Callable[[TensorMessage], Any]:
    """The same call as a coroutine function: its handler is one, and runs in a task."""

    async def run(message: TensorMessage) -> Any:
        return await call(message)

    return run


def with_sender(
    handler: Callable[..., Awaitable[None] | None], read: Callable[[TensorMessage], object]
) -> MessageHandler:
    """A handler of messages that calls `handler(what read gives, from_peer)`."""

    def call(message: TensorMessage) -> Awaitable[None] | None:
        return handler(read(message), message.from_peer)

    return as_async(call) if is_async(handler) else call


def answering(
    handler: Callable[[TensorMessage], Any],
    answer: Callable[[TensorMessage, Any], Awaitable[None]],
) -> MessageHandler:
    """A handler of messages whose result, if not None, is sent by `answer(message, result)`."""
    if is_async(handler):

        async def serve(message: TensorMessage) -> None:
            result = await handler(message)
            if result is not None:
                await answer(message, result)

        return serve

    def call(message: TensorMessage) -> Awaitable[None] | None:
        result = handler(message)
        if result is None:
            return None
        if inspect.isawaitable(result):
            return _finish(message, result)
        return answer(message, result)

    async def _finish(message: TensorMessage, result: Awaitable[Any]) -> None:
        content = await result
        if content is not None:
            await answer(message, content)

    return call
