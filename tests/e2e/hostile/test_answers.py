"""Answers that were not asked for, come from the wrong peer, twice, late, or are none."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
import trio.testing

from neurogrid.errors import RemoteProtocolError, ResponseTimeout
from neurogrid.p2p import PROTOCOL_V10, PROTOCOL_V11, MessageType, TensorMessage, new_request_id
from neurogrid.p2p.wire import ErrorCode, ErrorPayload, LayerIds
from tests.e2e.hostile.raw_peer import RawStream, message, response, tensor
from tests.e2e.hostile.scene import DEADLINE, VERSIONS, Scene, run

MIB = 1024**2


class Asked:
    """The hostile peer, asked by the victim over either version."""

    def __init__(self, scene: Scene, version: str, stream: RawStream | None) -> None:
        self._scene = scene
        self._version = version
        self._stream = stream

    @classmethod
    async def over(cls, scene: Scene, version: str) -> Asked:
        if version == PROTOCOL_V11:
            return cls(scene, version, await scene.hostile.open_v11())
        scene.hostile.serve_v10()
        return cls(scene, version, None)

    async def asked(self) -> TensorMessage:
        if self._stream is None:
            return await self._scene.hostile.asked_v10.receive()
        return await self._stream.receive(MessageType.ACTIVATION)

    async def say(self, data: bytes) -> None:
        if self._stream is None:
            said = await self._scene.hostile.say_v10(data)
            await said.end_in_any_way()
        else:
            await self._stream.say(data)

    async def respond(self, data: bytes, request_id: int) -> None:
        await self.say(response(data, request_id=request_id, version=self._version))


async def ask(scene: Scene, peer_id: str, *, timeout: float = DEADLINE) -> bytes:
    answer = await scene.victim.request_activation(peer_id, 1, 0, b"question", timeout=timeout)
    return bytes(answer.data)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_response_to_a_request_of_another_peer(version: str) -> None:
    async def scenario(scene: Scene) -> None:
        hostile = await Asked.over(scene, version)
        got_id: list[int] = []
        may_answer = trio.Event()

        async def answer(asked: TensorMessage) -> bytes:
            got_id.append(asked.request_id)
            await may_answer.wait()
            return b"honest"

        async def expect_honest() -> None:
            assert await ask(scene, scene.honest.host.peer_id) == b"honest"

        scene.honest.on_activation_received(answer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_honest)
            while not got_id:
                await trio.sleep(0.01)
            for _ in range(3):
                await hostile.respond(b"forged!", got_id[0])
                await hostile.say(
                    message(
                        MessageType.LAYER_STATUS, LayerIds((66,)).encode(), request_id=got_id[0]
                    )
                )
            may_answer.set()

    run(scenario, version=version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_second_response(version: str) -> None:
    async def scenario(scene: Scene) -> None:
        hostile = await Asked.over(scene, version)

        async def answer_twice() -> None:
            first = (await hostile.asked()).request_id
            await hostile.respond(b"first", first)
            await hostile.respond(b"second", first)
            second = (await hostile.asked()).request_id
            await hostile.respond(b"third", first)
            await hostile.respond(b"fourth", second)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_twice)
            assert await ask(scene, scene.hostile_id) == b"first"
            assert await ask(scene, scene.hostile_id) == b"fourth"

    run(scenario, version=version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_response_after_the_deadline(version: str) -> None:
    async def scenario(scene: Scene) -> None:
        hostile = await Asked.over(scene, version)
        with pytest.raises(ResponseTimeout):
            await ask(scene, scene.hostile_id, timeout=0.3)
        late = (await hostile.asked()).request_id
        await hostile.respond(b"late", late)

        async def answer() -> None:
            await hostile.respond(b"in time", (await hostile.asked()).request_id)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            assert await ask(scene, scene.hostile_id) == b"in time"

    run(scenario, version=version)


@pytest.mark.parametrize("version", VERSIONS)
def test_answers_that_nobody_asked_for(version: str) -> None:
    async def scenario(scene: Scene) -> None:
        hostile = await Asked.over(scene, version)
        for _ in range(10):
            await hostile.respond(bytes(4 * MIB), new_request_id())
        for said in (
            message(MessageType.LAYER_STATUS, LayerIds(tuple(range(1000))).encode()),
            message(MessageType.WEIGHTS_ACK, layer_id=1),
            message(MessageType.GPU_INFO, bytes(20)),
        ):
            for _ in range(100 if version == PROTOCOL_V11 else 5):
                await hostile.say(said)
        await scene.check_honest()

    run(scenario, version=version)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1" * 100, tensor(b"abc")[:-1], tensor(b"abc") + b"d", b"\x81\xa1x" + b"\x91" * 5000],
    ids=["empty", "noise", "cut", "long", "deep"],
)
def test_a_response_that_cannot_be_read(data: bytes) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()

        async def answer() -> None:
            asked = await stream.receive(MessageType.ACTIVATION)
            await stream.say(message(MessageType.RESPONSE, data, request_id=asked.request_id))
            asked = await stream.receive(MessageType.ACTIVATION)
            await stream.say(response(b"better", request_id=asked.request_id))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            with pytest.raises(RemoteProtocolError):
                await ask(scene, scene.hostile_id)
            # That request alone has failed.
            assert await ask(scene, scene.hostile_id) == b"better"

    run(scenario)


def test_an_answer_of_another_type() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()

        async def answer() -> None:
            request_id = (await stream.receive(MessageType.ACTIVATION)).request_id
            for msg_type in (MessageType.WEIGHTS_ACK, MessageType.CONFIG_ACK, MessageType.READY):
                await stream.say(message(msg_type, request_id=request_id))
            await stream.say(
                message(MessageType.LAYER_STATUS, LayerIds(()).encode(), request_id=request_id)
            )
            await stream.say(response(b"at last", request_id=request_id))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            assert await ask(scene, scene.hostile_id) == b"at last"

    run(scenario)


def error(request_id: int) -> bytes:
    data = ErrorPayload(code=ErrorCode.BUSY, text="so there").encode()
    return message(MessageType.ERROR, data, request_id=request_id)


@pytest.mark.parametrize("request_id", [0, 12345], ids=["of the stream", "of a request"])
def test_a_flood_of_errors(request_id: int) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        with suppress(Exception):
            await stream.say(error(request_id) * 2000)
        await stream.ended(ErrorCode.LIMIT_EXCEEDED)

    run(scenario)


def test_a_flood_of_errors_before_hello() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open(PROTOCOL_V11)
        with suppress(Exception):
            await stream.say(error(0) * 2000)
        await stream.ended(ErrorCode.LIMIT_EXCEEDED)

    run(scenario)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 10, b"\x91" * 1000])
def test_an_error_that_cannot_be_read(data: bytes) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        await stream.say(message(MessageType.ERROR, data, request_id=1))
        await stream.ended(ErrorCode.PROTOCOL_VIOLATION)

    run(scenario)


def test_an_error_of_a_stranger_fails_nobody_elses_request() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        honest_id = scene.honest.host.peer_id
        seen = trio.Event()

        async def answer(asked: TensorMessage) -> bytes:
            await stream.say(error(asked.request_id), error(0))
            await trio.testing.wait_all_tasks_blocked(0.05)
            seen.set()
            return b"honest"

        scene.honest.on_activation_received(answer)
        assert await ask(scene, honest_id) == b"honest"
        assert seen.is_set()

    run(scenario, version=PROTOCOL_V10)
    run(scenario, version=PROTOCOL_V11)
