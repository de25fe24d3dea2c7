"""Credit: taken without leave, made to shrink, never granted. Control messages and answers pass all the same."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from neurogrid.errors import ResponseTimeout, StreamBrokenError
from neurogrid.p2p import MessageType
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.wire import Credit, ErrorCode, LayerIds
from tests.e2e.hostile.raw_peer import RawStream, activation, header, message, response
from tests.e2e.hostile.scene import DEADLINE, GATED_LAYER, Scene, run

SMALL = Bounds(credit_window=1000)


def credit(max_total: int) -> bytes:
    return message(MessageType.CREDIT, Credit(max_total).encode())


async def answer_activation(stream: RawStream, data: bytes) -> None:
    asked = await stream.receive(MessageType.ACTIVATION)
    await stream.say(response(data, request_id=asked.request_id))


def test_bulk_without_credit() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        # The first uses up the window, and its handler is at work; the second should have waited.
        await stream.say(activation(bytes(1000), layer_id=GATED_LAYER, request_id=1))
        await stream.say(activation(request_id=2))
        await stream.ended(ErrorCode.LIMIT_EXCEEDED)
        scene.gate.set()

    run(scenario, bounds=SMALL)


def test_bulk_without_credit_beside_requests_that_need_none() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        await stream.say(activation(bytes(1000), layer_id=GATED_LAYER, request_id=1))
        for request_id in range(2, 50):
            await stream.say(
                message(MessageType.LAYER_REQUEST, LayerIds(()).encode(), request_id=request_id)
            )
            status = await stream.receive(MessageType.LAYER_STATUS)
            assert status.request_id == request_id
        await stream.say(header(MessageType.WEIGHTS, 8, request_id=2), bytes(8))
        await stream.ended(ErrorCode.LIMIT_EXCEEDED)
        scene.gate.set()

    run(scenario, bounds=SMALL)


def test_what_was_refused_is_granted_anew() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        granted, sent = 1000, 0
        for request_id in range(1, 101):
            data = bytes(300)  # no envelope
            await stream.say(message(MessageType.ACTIVATION, data, request_id=request_id))
            await stream.refused(ErrorCode.PROTOCOL_VIOLATION, request_id=request_id)
            sent += 300
            while sent >= granted:
                latest = await stream.receive(MessageType.CREDIT)
                granted = Credit.decode(latest.data).max_total
        assert granted > 29_000

    run(scenario, bounds=SMALL)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (credit(99), ErrorCode.PROTOCOL_VIOLATION),
        (credit(0), ErrorCode.PROTOCOL_VIOLATION),
        (credit(200) + credit(199), ErrorCode.PROTOCOL_VIOLATION),
        (message(MessageType.CREDIT, bytes(7)), ErrorCode.PROTOCOL_VIOLATION),
        (header(MessageType.CREDIT, 9) + bytes(9), ErrorCode.LIMIT_EXCEEDED),
    ],
    ids=["shrinks", "none", "shrinks later", "short", "long"],
)
def test_credit_that_is_none(said: bytes, code: ErrorCode) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11(credit=100)
        await stream.say(said)
        await stream.ended(code)

    run(scenario)


def test_the_same_credit_ten_thousand_times() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11(credit=100)
        await stream.say(credit(100) * 10_000)
        await stream.say(activation(b"abc"))
        answer = await stream.receive(MessageType.RESPONSE)
        assert bytes(answer.data).endswith(b"cba")

    run(scenario)


def test_credit_never_granted() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11(credit=0)
        victim, hostile_id = scene.victim, scene.hostile_id
        for _ in range(3):
            with pytest.raises(ResponseTimeout):
                await victim.request_activation(hostile_id, 1, 0, b"abc", timeout=0.1)
        # What needs no credit passes those that wait for it, both ways.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_never_sent, scene)
            await stream.say(activation(b"abc"))
            await stream.receive(MessageType.RESPONSE)
            nursery.start_soon(_status, scene)
            asked = await stream.receive(MessageType.LAYER_REQUEST)
            await stream.say(
                message(
                    MessageType.LAYER_STATUS,
                    LayerIds((7,)).encode(),
                    request_id=asked.request_id,
                )
            )
        # And once there is credit, those that gave up have used none of it.
        await stream.say(credit(1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_activation, stream, b"late")
            answer = await victim.request_activation(hostile_id, 1, 0, b"now", timeout=DEADLINE)
        assert bytes(answer.data) == b"late"

    async def _never_sent(scene: Scene) -> None:
        with pytest.raises(ResponseTimeout):
            await scene.victim.request_activation(scene.hostile_id, 1, 0, b"abc", timeout=0.5)

    async def _status(scene: Scene) -> None:
        status = await scene.victim.request_layer_status(scene.hostile_id, timeout=DEADLINE)
        assert status == (7,)

    run(scenario)


def test_credit_never_granted_by_a_peer_that_goes() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.hostile.open_v11(credit=0)
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(_fails, scene)
            await trio.testing.wait_all_tasks_blocked(0.05)
            await scene.hostile.leave()

    async def _fails(scene: Scene) -> None:
        with pytest.raises(StreamBrokenError):
            await scene.victim.request_activation(scene.hostile_id, 1, 0, b"x", timeout=DEADLINE)

    run(scenario)


def test_a_request_given_up_in_the_queue_gives_its_credit_back() -> None:
    """Else the sender's count runs away from the receiver's, and the stream stalls for ever."""

    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11(credit=50_000_000)
        victim, hostile_id = scene.victim, scene.hostile_id
        big = bytes(24 * 1024**2)
        async with trio.open_nursery() as nursery:
            # The writer is busy with the first for as long as the hostile peer reads nothing.
            nursery.start_soon(victim.send_activation, hostile_id, 1, 0, 1, big)
            await trio.testing.wait_all_tasks_blocked(0.05)
            for _ in range(5):
                with pytest.raises(ResponseTimeout):
                    await victim.request_activation(hostile_id, 1, 0, big, timeout=0.1)
            assert (await stream.receive(MessageType.ACTIVATION)).request_id == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_activation, stream, b"fine")
            answer = await victim.request_activation(hostile_id, 1, 0, b"x", timeout=DEADLINE)
        assert bytes(answer.data) == b"fine"
        await stream.say(response(b"", request_id=1))
        await victim.wait_for_response(hostile_id, 1, timeout=DEADLINE)

    run(scenario)
