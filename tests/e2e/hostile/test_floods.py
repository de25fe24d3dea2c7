"""More than is due: of requests, of answers that nobody reads, of 1.0.0 streams. The others are served meanwhile."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from neurogrid.errors import StreamBrokenError, TransportError
from neurogrid.p2p import PROTOCOL_V10, PROTOCOL_V11, MessageType
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.wire import ErrorCode, ErrorPayload, LayerIds
from tests.e2e.hostile.raw_peer import RawStream, activation, header, message
from tests.e2e.hostile.scene import GATED_LAYER, VERSIONS, Scene, run, until

MIB = 1024**2


def status_request(request_id: int) -> bytes:
    return message(MessageType.LAYER_REQUEST, LayerIds(()).encode(), request_id=request_id)


async def say_until_reset(stream: RawStream, data: bytes) -> None:
    """Say as much of it as the victim lets us."""
    for at in range(0, len(data), 65_536):
        try:
            await stream.say(data[at : at + 65_536])
        except StreamBrokenError:
            return


def test_requests_beyond_the_queue() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        await stream.say(
            *(activation(layer_id=GATED_LAYER, request_id=1 + index) for index in range(20))
        )
        refused = set()
        for _ in range(20 - 2 - 5):
            error = await stream.receive(MessageType.ERROR)
            payload = ErrorPayload.decode(error.data)
            assert payload.code == ErrorCode.LIMIT_EXCEEDED
            assert payload.retry_after is not None
            refused.add(error.request_id)
        # Others have queues of their own.
        await scene.check_honest()
        scene.gate.set()
        answered = {(await stream.receive(MessageType.RESPONSE)).request_id for _ in range(7)}
        assert refused | answered == set(range(1, 21))
        # And now there is room again.
        await stream.say(activation(request_id=100))
        assert (await stream.receive(MessageType.RESPONSE)).request_id == 100

    run(scenario, bounds=Bounds(max_running_per_peer=2, max_waiting_per_peer=5))


def test_all_places_taken_by_one_peer_are_taken_in_turns() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        await stream.say(
            *(activation(layer_id=GATED_LAYER, request_id=1 + index) for index in range(100))
        )
        await until(lambda: len(scene.served) == 5)  # the honest peer's first, and four
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.check_honest)
            await until(lambda: scene.victim._dispatcher.serving.num_waiting(_honest(scene)) == 1)
            scene.gate.set()
        for _ in range(100):
            await stream.receive(MessageType.RESPONSE)

    run(scenario, bounds=Bounds(max_running=4))


def _honest(scene: Scene) -> str:
    return scene.honest.host.peer_id


def test_a_peer_that_reads_none_of_the_errors_it_causes() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        # Nobody serves it, so that an Error is owed for each.
        flood = b"".join(
            message(MessageType.SESSION_CLOSE, b"\x80", request_id=1 + index)
            for index in range(20_000)
        )
        await say_until_reset(stream, flood)
        await until(lambda: scene.hostile_id not in scene.victim._running)
        await stream.end_in_any_way()

    run(scenario, bounds=Bounds(max_owed=100))


def test_a_peer_that_reads_no_answers() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        flood = b"".join(status_request(1 + index) for index in range(30_000))
        await say_until_reset(stream, flood)
        await until(lambda: scene.hostile_id not in scene.victim._running)
        await stream.end_in_any_way()

    run(
        scenario,
        bounds=Bounds(max_owed=100, max_running_per_peer=8, max_waiting_per_peer=8),
    )


def test_a_peer_that_reads_no_large_answers() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        for request_id in range(1, 11):
            await stream.say(activation(bytes(2 * MIB), request_id=request_id))
        # Nobody waits for such a peer for ever.
        await until(lambda: scene.hostile_id not in scene.victim._running)
        await stream.end_in_any_way()

    run(scenario, bounds=Bounds(silence_timeout=1.0, min_rate=8.0 * MIB))


def test_a_peer_that_reads_no_answers_over_1_0_0() -> None:
    """It takes the victim's streams, reads nothing from them and never ends them."""

    async def scenario(scene: Scene) -> None:
        async def never_read(stream: object) -> None:
            await trio.sleep_forever()

        scene.hostile.host.set_stream_handler(PROTOCOL_V10, never_read)
        streams = [
            await scene.hostile.say_v10(
                activation(bytes(MIB), request_id=1 + index, version=PROTOCOL_V10)
            )
            for index in range(8)
        ]
        await until(lambda: scene.hostile_id not in scene.victim._oneshot._num_streams)
        for stream in streams:
            await stream.end_in_any_way()

    run(
        scenario,
        version=PROTOCOL_V10,
        bounds=Bounds(silence_timeout=1.0, min_rate=8.0 * MIB, confirm_timeout=1.0),
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_a_flood_of_1_0_0_streams(version: str) -> None:
    async def scenario(scene: Scene) -> None:
        streams = []
        for index in range(40):
            stream = await scene.hostile.open(PROTOCOL_V10)
            streams.append(stream)
            if index % 2:
                await say_until_reset(stream, header(MessageType.ACTIVATION, MIB) + bytes(1000))
        await until(lambda: scene.victim._oneshot._num_streams[scene.hostile_id] == 8)
        for stream in streams[8:]:
            await stream.ended()
        await scene.check_honest()
        for stream in streams[:8]:
            await stream.stream.reset()
        # There is room again.
        await until(lambda: not scene.victim._oneshot._num_streams[scene.hostile_id])
        await (await scene.hostile.open(PROTOCOL_V10)).stream.reset()

    run(scenario, version=version, bounds=Bounds(max_v10_streams_per_peer=8))


def test_more_1_1_0_streams_than_may_be() -> None:
    async def scenario(scene: Scene) -> None:
        streams = [await scene.hostile.open_v11() for _ in range(4)]
        for _ in range(20):
            await (await scene.hostile.open(PROTOCOL_V11)).ended()
        await scene.check_honest()
        # Those that are there are read, whichever is the latest.
        for request_id, stream in enumerate(streams, 1):
            await stream.say(status_request(request_id))
        answers = [await streams[-1].receive(MessageType.LAYER_STATUS) for _ in streams]
        assert {answer.request_id for answer in answers} == {1, 2, 3, 4}

    run(scenario)


def test_a_flood_of_messages_without_data() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        flood = message(MessageType.WEIGHTS_ACK) * 20_000
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say_until_reset, stream, flood)
            await scene.check_honest()
        await stream.say(status_request(1))
        assert (await stream.receive(MessageType.LAYER_STATUS)).request_id == 1

    run(scenario)


@pytest.mark.parametrize("how", ["violation", "reset", "disconnect", "end"])
def test_whoever_sends_to_a_peer_that_does_not_read_is_freed_when_it_goes(how: str) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        num_failed = 0

        async def send(size: int) -> None:
            nonlocal num_failed
            with pytest.raises(TransportError):
                await scene.victim.send_response(scene.hostile_id, 1, 0, 1, bytes(size))
            num_failed += 1

        async with trio.open_nursery() as nursery:
            # One is half out, the others wait for the writer.
            for size in (64 * MIB, MIB, 10):
                nursery.start_soon(send, size)
                await trio.testing.wait_all_tasks_blocked(0.02)
            if how == "violation":
                await stream.say(b"\xff" * 50)
            elif how == "reset":
                await stream.stream.reset()
            elif how == "disconnect":
                await scene.hostile.leave()
            else:
                await stream.stream.aclose()
        assert num_failed == 3

    run(scenario)
