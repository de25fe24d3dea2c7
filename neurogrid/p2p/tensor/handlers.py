"""Handlers of messages, as `Exchange` calls them, made of handlers of contents, as `Protocol` takes them.

A sync handler stays sync and a coroutine function one, since that decides where it runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from neurogrid.errors import NeuroGridError
from neurogrid.p2p.exchange.subscribers import MessageHandler, is_async
from neurogrid.p2p.streams.message_forms import sender_of
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
    answer: Callable[[TensorMessage, Any], TensorMessage],
    *,
    send: Callable[[str, TensorMessage], Awaitable[None]],
    send_nowait: Callable[[str, TensorMessage], bool],
) -> MessageHandler:
    """A handler of messages whose result, if not None, is sent back as `answer(message, result)`.

    The result of a sync handler goes out at once where that needs no waiting, else in a task.
    """

    async def reply(message: TensorMessage, result: Any) -> None:
        await send(sender_of(message), answer(message, result))

    if is_async(handler):

        async def serve(message: TensorMessage) -> None:
            result = await handler(message)
            if result is not None:
                await reply(message, result)

        return serve

    def call(message: TensorMessage) -> Awaitable[None] | None:
        result = handler(message)
        if result is None:
            return None
        if hasattr(result, "__await__"):  # a coroutine has it too
            return _finish(message, result)
        with suppress(NeuroGridError):  # the task meets it again, and tells
            if send_nowait(sender_of(message), answer(message, result)):
                return None
        return reply(message, result)

    async def _finish(message: TensorMessage, result: Awaitable[Any]) -> None:
        content = await result
        if content is not None:
            await reply(message, content)

    return call
