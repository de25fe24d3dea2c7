"""Who is called for a message, in what order, and what is left to await."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.exchange.subscribers import Subscribers
from neurogrid.p2p.wire import ErrorCode, MessageType, TensorMessage

pytestmark = pytest.mark.usefixtures("autojump_clock")

ACTIVATION = MessageType.ACTIVATION
MESSAGE = TensorMessage(msg_type=ACTIVATION, request_id=1)


def refuse() -> RequestRefusedError:
    return RequestRefusedError("no", code=ErrorCode.BUSY)


@dataclass
class Called:
    """Handlers that write down that they were called."""

    subscribers: Subscribers = field(default_factory=Subscribers)
    names: list[str] = field(default_factory=list)

    def sync(self, name: str, *, fails: Exception | None = None) -> None:
        def handler(message: TensorMessage) -> None:
            self.names.append(name)
            if fails is not None:
                raise fails

        self.subscribers.add(ACTIVATION, handler, None)

    def later(self, name: str, *, fails: Exception | None = None) -> None:
        async def handler(message: TensorMessage) -> None:
            await trio.sleep(1)
            self.names.append(name)
            if fails is not None:
                raise fails

        self.subscribers.add(ACTIVATION, handler, None)

    def sync_and_later(self, name: str) -> None:
        async def rest() -> None:
            self.names.append(f"rest of {name}")

        def handler(message: TensorMessage) -> Awaitable[None]:
            self.names.append(name)
            return rest()

        self.subscribers.add(ACTIVATION, handler, None)


async def test_sync_at_once_the_rest_in_order() -> None:
    called = Called()
    called.later("first")
    called.sync("second")
    called.sync_and_later("third")
    called.later("fourth")
    job = called.subscribers.call(MESSAGE)
    assert called.names == ["second", "third"]
    assert job is not None
    await job.run()
    assert called.names == ["second", "third", "first", "rest of third", "fourth"]


def test_nothing_is_left_where_all_is_sync() -> None:
    called = Called()
    called.sync("only")
    assert called.subscribers.call(MESSAGE) is None
    assert called.names == ["only"]


@pytest.mark.parametrize("msg_type", [MessageType.RESPONSE, None])
def test_what_nobody_serves_is_refused(msg_type: MessageType | None) -> None:
    called = Called()
    called.sync("another")
    message = TensorMessage(msg_type=msg_type)
    assert not called.subscribers.has(message)
    with pytest.raises(RequestRefusedError) as caught:
        called.subscribers.call(message)
    assert caught.value.code == ErrorCode.NOT_SUPPORTED
    assert called.names == []


def test_a_traced_message_counts_as_its_type() -> None:
    called = Called()
    called.sync("traced too")
    called.subscribers.call(TensorMessage(msg_type=MessageType.TRACED_ACTIVATION))
    assert called.names == ["traced too"]


def test_a_condition_selects() -> None:
    subscribers = Subscribers()
    seen: list[str] = []
    for wanted in (1, 2):
        subscribers.add(
            ACTIVATION,
            lambda message, wanted=wanted: seen.append(f"{wanted}"),
            lambda message, wanted=wanted: message.request_id == wanted,
        )
    for request_id in (2, 1):
        subscribers.call(TensorMessage(msg_type=ACTIVATION, request_id=request_id))
    assert seen == ["2", "1"]
    assert not subscribers.has(TensorMessage(msg_type=ACTIVATION, request_id=3))


async def test_one_refusal_does_not_keep_the_others_from_it() -> None:
    called = Called()
    called.sync("refuses", fails=refuse())
    called.sync("second")
    called.later("third", fails=refuse())
    called.later("fourth")
    job = called.subscribers.call(MESSAGE)
    assert job is not None
    with pytest.raises(RequestRefusedError):
        await job.run()
    assert called.names == ["refuses", "second", "third", "fourth"]


def test_a_refusal_with_nothing_left_is_raised_at_once() -> None:
    called = Called()
    called.sync("refuses", fails=refuse())
    called.sync("second")
    with pytest.raises(RequestRefusedError):
        called.subscribers.call(MESSAGE)
    assert called.names == ["refuses", "second"]


async def test_an_error_ends_the_rest_and_leaves_no_coroutine() -> None:
    """Else Python would warn of what was never awaited, and tests take warnings for errors."""
    called = Called()
    called.sync_and_later("first")
    called.sync("fails", fails=ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        called.subscribers.call(MESSAGE)
    called = Called()
    called.later("fails", fails=ValueError("a bug"))
    called.sync_and_later("second")
    job = called.subscribers.call(MESSAGE)
    assert job is not None
    with pytest.raises(ValueError, match="a bug"):
        await job.run()
    assert called.names == ["second", "fails"]


def test_a_job_that_is_dropped_leaves_no_coroutine() -> None:
    called = Called()
    called.sync_and_later("dropped")
    called.later("never")
    job = called.subscribers.call(MESSAGE)
    assert job is not None
    job.drop()
    job.drop()
    assert called.names == ["dropped"]


async def test_a_job_that_is_cancelled_leaves_no_coroutine() -> None:
    called = Called()
    called.later("cancelled")
    called.sync_and_later("never")
    job = called.subscribers.call(MESSAGE)
    assert job is not None
    with trio.move_on_after(0.5):
        await job.run()
    assert called.names == ["never"]


async def test_an_object_with_an_async_call_is_async() -> None:
    seen: list[int] = []

    class Handler:
        async def __call__(self, message: TensorMessage) -> None:
            seen.append(message.request_id)

    subscribers = Subscribers()
    subscribers.add(ACTIVATION, Handler(), None)
    job = subscribers.call(MESSAGE)
    assert seen == []
    assert job is not None
    await job.run()
    assert seen == [1]
