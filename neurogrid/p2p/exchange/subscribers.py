"""Handlers of messages by type, several for each, sync and async.

Knows no streams: sync handlers are called at once, and the rest is given back as a job for the caller to run.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.streams.message_forms import untraced
from neurogrid.p2p.streams.tracing import continued_trace
from neurogrid.p2p.wire import ErrorCode, MessageCode, TensorMessage

__all__ = ["Job", "MessageHandler", "Subscribers", "is_async"]

MessageHandler = Callable[[TensorMessage], Awaitable[None] | None]


@dataclass(frozen=True)
class _Subscriber:
    handler: MessageHandler
    when: Callable[[TensorMessage], bool] | None
    is_async: bool


class Job:
    """The handlers that are left to await for one message: `run` them, or `drop` them."""

    def __init__(self, message: TensorMessage, steps: list[_Subscriber | Awaitable[None]]) -> None:
        self._message = message
        self._steps = steps

    async def run(self) -> None:
        """Await every handler in order, also when one before it refused; raises the first refusal."""
        refusal: RequestRefusedError | None = None
        try:
            with continued_trace(self._message):
                while self._steps:
                    step = self._steps.pop(0)
                    try:
                        await _awaitable(step, self._message)
                    except RequestRefusedError as exc:
                        refusal = refusal or exc
        finally:
            self.drop()
        if refusal is not None:
            raise refusal

    def drop(self) -> None:
        """Leave what has not begun undone."""
        for step in self._steps:
            # Not coroutines of functions alone: a handler may return one of its own making.
            if isinstance(step, Coroutine):
                step.close()
        self._steps.clear()


class Subscribers:
    """The handlers of one `Exchange`."""

    def __init__(self) -> None:
        self._by_type: dict[MessageCode | None, list[_Subscriber]] = {}

    def add(
        self,
        msg_type: MessageCode | None,
        handler: MessageHandler,
        when: Callable[[TensorMessage], bool] | None,
    ) -> None:
        """Register a handler for a type, after those that are there."""
        self._by_type.setdefault(untraced(msg_type), []).append(
            _Subscriber(handler, when, is_async=is_async(handler))
        )

    def has(self, message: TensorMessage) -> bool:
        """Whether anybody serves this message."""
        return bool(self._serving(message))

    def call(self, message: TensorMessage) -> Job | None:
        """Call the sync handlers; returns what is left to await, or None.

        Raises:
            RequestRefusedError: nobody serves the message (NOT_SUPPORTED), or a handler refused it and
                nothing is left to await.
        """
        subscribers = self._serving(message)
        if not subscribers:
            name = message.msg_type.name if message.msg_type is not None else "a legacy message"
            raise RequestRefusedError(f"{name} is not served here", code=ErrorCode.NOT_SUPPORTED)
        steps: list[_Subscriber | Awaitable[None]] = []
        refusal: RequestRefusedError | None = None
        for subscriber in subscribers:
            if subscriber.is_async:
                steps.append(subscriber)
                continue
            try:
                with continued_trace(message):
                    left = subscriber.handler(message)
            except RequestRefusedError as exc:
                refusal = refusal or exc
            except BaseException:
                Job(message, steps).drop()  # what handlers before this one have left
                raise
            else:
                if left is not None:
                    steps.append(left)
        if refusal is not None:
            steps.insert(0, _raise(refusal))
            if len(steps) == 1:
                Job(message, steps).drop()
                raise refusal
        return Job(message, steps) if steps else None

    def _serving(self, message: TensorMessage) -> list[_Subscriber]:
        return [
            subscriber
            for subscriber in self._by_type.get(untraced(message.msg_type), ())
            if subscriber.when is None or subscriber.when(message)
        ]


def is_async(handler: Callable[..., object]) -> bool:
    """Whether calling it gives a coroutine, so that it runs in a task."""
    # An object may be called by an async method.
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        type(handler).__call__
    )


async def _awaitable(step: _Subscriber | Awaitable[None], message: TensorMessage) -> None:
    if isinstance(step, _Subscriber):
        left = step.handler(message)
        assert left is not None, "an async handler gives a coroutine"
        step = left
    await step


async def _raise(refusal: RequestRefusedError) -> None:
    raise refusal
