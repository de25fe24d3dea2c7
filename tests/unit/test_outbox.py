"""The lanes of a stream's writer: what passes what, who is told what, and what cancellation leaves."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from neurogrid.errors import DataWriteError, HeaderWriteError, StreamBrokenError
from neurogrid.p2p.streams.outbox import Outbox, Outgoing
from neurogrid.p2p.wire import MessageType, TensorMessage

pytestmark = pytest.mark.usefixtures("autojump_clock")

CLOSED = StreamBrokenError("the peer went")


def message(msg_type: MessageType, request_id: int = 1) -> TensorMessage:
    return TensorMessage(msg_type=msg_type, request_id=request_id)


async def put(outbox: Outbox, msg_type: MessageType, request_id: int = 1) -> None:
    await outbox.put(Outgoing(message(msg_type, request_id)))


async def test_owed_first_weights_last() -> None:
    outbox = Outbox(max_owed=10)
    async with trio.open_nursery() as nursery:
        for msg_type in (
            MessageType.WEIGHTS,
            MessageType.ACTIVATION,
            MessageType.WEIGHTS,
            MessageType.RESPONSE,
        ):
            nursery.start_soon(put, outbox, msg_type)
            await trio.testing.wait_all_tasks_blocked()
        assert outbox.owe(message(MessageType.ERROR))
        order = []
        for _ in range(5):
            outgoing = await outbox.next()
            assert outgoing is not None
            order.append(outgoing.message.msg_type)
            outgoing.succeed()
    assert order == [
        MessageType.ERROR,
        MessageType.ACTIVATION,
        MessageType.RESPONSE,
        MessageType.WEIGHTS,
        MessageType.WEIGHTS,
    ]


async def test_the_writer_waits_for_something_to_do() -> None:
    outbox = Outbox(max_owed=10)
    taken: list[Outgoing | None] = []

    async def write() -> None:
        taken.append(await outbox.next())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        assert not taken
        outbox.owe(message(MessageType.CREDIT))
    assert taken[0] is not None


def test_what_is_owed_is_bounded() -> None:
    outbox = Outbox(max_owed=3)
    assert [outbox.owe(message(MessageType.ERROR)) for _ in range(5)] == [True] * 3 + [False] * 2


async def test_a_sender_is_told_how_it_ended() -> None:
    outbox = Outbox(max_owed=3)
    outcomes: list[str] = []

    async def send(request_id: int) -> None:
        try:
            await put(outbox, MessageType.RESPONSE, request_id)
        except StreamBrokenError as exc:
            outcomes.append(f"{request_id} {type(exc).__name__}")
        else:
            outcomes.append(f"{request_id} sent")

    async with trio.open_nursery() as nursery:
        for request_id in (1, 2, 3):
            nursery.start_soon(send, request_id)
            await trio.testing.wait_all_tasks_blocked()
        for error in (None, DataWriteError("cut")):
            outgoing = await outbox.next()
            assert outgoing is not None
            outgoing.succeed() if error is None else outgoing.fail(error)
        # The third was not begun: it may be sent again over another stream.
        outbox.close(CLOSED)
    assert sorted(outcomes) == ["1 sent", "2 DataWriteError", "3 HeaderWriteError"]


async def test_a_closed_outbox_takes_and_gives_nothing() -> None:
    outbox = Outbox(max_owed=3)
    outbox.owe(message(MessageType.ERROR))
    outbox.close(CLOSED)
    assert await outbox.next() is None
    assert not outbox.owe(message(MessageType.ERROR))
    with pytest.raises(HeaderWriteError):
        await put(outbox, MessageType.RESPONSE)


async def test_a_finished_outbox_gives_what_is_owed_and_sends_the_others_elsewhere() -> None:
    outbox = Outbox(max_owed=3)
    moved = HeaderWriteError("moved")
    failures: list[Exception] = []

    async def wait_to_send(kind: MessageType) -> None:
        with pytest.raises(HeaderWriteError) as caught:
            await put(outbox, kind)
        failures.append(caught.value)

    async with trio.open_nursery() as nursery:
        for kind in (MessageType.RESPONSE, MessageType.WEIGHTS):
            nursery.start_soon(wait_to_send, kind)
        await trio.testing.wait_all_tasks_blocked()
        assert outbox.owe(message(MessageType.ERROR))
        outbox.finish(moved)
    await wait_to_send(MessageType.RESPONSE)
    assert failures == [moved, moved, moved]
    assert not outbox.is_idle
    owed = await outbox.next()
    assert owed is not None
    assert owed.message.msg_type is MessageType.ERROR
    assert await outbox.next() is None


async def test_closing_wakes_the_writer() -> None:
    outbox = Outbox(max_owed=3)
    async with trio.open_nursery() as nursery:

        async def write() -> None:
            assert await outbox.next() is None

        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        outbox.close(CLOSED)


@pytest.mark.parametrize("msg_type", [MessageType.WEIGHTS, MessageType.RESPONSE])
async def test_cancelled_before_its_turn_it_is_not_sent(msg_type: MessageType) -> None:
    outbox = Outbox(max_owed=3)
    with trio.move_on_after(1):
        await put(outbox, msg_type)
    with trio.move_on_after(1) as scope:
        await outbox.next()
    assert scope.cancelled_caught


async def test_cancelled_in_its_turn_it_is_sent_whole() -> None:
    outbox = Outbox(max_owed=3)
    outgoing = Outgoing(message(MessageType.RESPONSE))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.put, outgoing)
        await trio.testing.wait_all_tasks_blocked()
        assert await outbox.next() is outgoing
        nursery.cancel_scope.cancel()
    assert outgoing.is_begun
    outgoing.succeed()
