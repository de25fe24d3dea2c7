"""Bytes that are no messages, or never become any: the stream ends, in time, and nothing stays behind."""

from __future__ import annotations

import pytest
import trio

from neurogrid.errors import StreamBrokenError
from neurogrid.p2p import PROTOCOL_V10, PROTOCOL_V11, MessageType
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.wire import Data, ErrorCode
from tests.e2e.hostile.raw_peer import HELLO, RawStream, activation, header, message
from tests.e2e.hostile.scene import VERSIONS, Scene, run, until

# A message of a few bytes has half a second.
HASTY = Bounds(silence_timeout=0.5, min_rate=1000.0, hello_timeout=0.5)
MIB = 1024**2


async def opened(scene: Scene, version: str) -> RawStream:
    """A stream on which messages may be said."""
    hostile = scene.hostile
    return await (hostile.open_v11() if version == PROTOCOL_V11 else hostile.open(version))


async def trickle(stream: RawStream, data: Data, *, interval: float) -> None:
    """Say data byte by byte until the victim has enough."""
    for at in range(len(data)):
        try:
            await stream.say(data[at : at + 1])
        except StreamBrokenError:
            return
        await trio.sleep(interval)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("num_bytes", [1, 24], ids=["a byte", "all but a byte"])
def test_a_truncated_header_then_silence(version: str, num_bytes: int) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await opened(scene, version)
        await stream.say(activation()[:num_bytes])
        await stream.ended(ErrorCode.DEADLINE_EXCEEDED)

    run(scenario, version=version, bounds=HASTY)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_truncated_header_behind_a_message_then_silence(version: str) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await opened(scene, version)
        await stream.say(activation(version=version), activation()[:10])
        await stream.ended(ErrorCode.DEADLINE_EXCEEDED)
        assert len(scene.served) == 2  # the honest peer's, and the one that was whole

    run(scenario, version=version, bounds=HASTY)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("announced", [1000, MIB], ids=["small", "counted"])
def test_truncated_data_then_silence(version: str, announced: int) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await opened(scene, version)
        await stream.say(header(MessageType.ACTIVATION, announced), bytes(10))
        await stream.ended(ErrorCode.DEADLINE_EXCEEDED)

    run(scenario, version=version, bounds=HASTY)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_header_byte_by_byte(version: str) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await opened(scene, version)
        async with trio.open_nursery() as nursery:
            # The victim is not put off by each byte anew, or it would take 9 s here.
            nursery.start_soon(lambda: trickle(stream, activation()[:24], interval=0.375))
            await stream.ended(ErrorCode.DEADLINE_EXCEEDED)
            nursery.cancel_scope.cancel()

    run(scenario, version=version, bounds=HASTY)


@pytest.mark.parametrize("version", VERSIONS)
def test_data_byte_by_byte(version: str) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await opened(scene, version)
        await stream.say(header(MessageType.ACTIVATION, 100_000))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: trickle(stream, bytes(10_000), interval=0.02))
            # Long before 100 s have gone by, which the whole message might take.
            await stream.ended(ErrorCode.DEADLINE_EXCEEDED)
            nursery.cancel_scope.cancel()

    run(scenario, version=version, bounds=HASTY)


@pytest.mark.parametrize("version", VERSIONS)
def test_slow_is_not_too_slow(version: str) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await opened(scene, version)
        sent = activation(bytes(2000), version=version)
        for at in range(0, len(sent), 200):
            await stream.say(sent[at : at + 200])
            await trio.sleep(0.05)
        await until(lambda: len(scene.served) == 2)

    run(scenario, version=version, bounds=Bounds(silence_timeout=30.0, min_rate=1000.0))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("msg_type", "num_bytes"),
    [
        (MessageType.ACTIVATION, 2**32 - 1),
        (MessageType.ACTIVATION, 256 * MIB + 1),
        (MessageType.WEIGHTS, MIB + 9),
        (MessageType.WEIGHTS_ACK, 1),
        (MessageType.MODEL_CONFIG, 4 * MIB + 1),
        (MessageType.LAYER_REQUEST, MIB),
        (MessageType.GPU_INFO_REQUEST, 1),
    ],
)
def test_a_length_over_the_limit(version: str, msg_type: MessageType, num_bytes: int) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await opened(scene, version)
        await stream.say(header(msg_type, num_bytes), bytes(100))
        await stream.ended(ErrorCode.LIMIT_EXCEEDED)

    run(scenario, version=version)


@pytest.mark.parametrize(
    ("version", "first"),
    [
        (PROTOCOL_V10, 0x0A),
        (PROTOCOL_V10, 0x10),
        (PROTOCOL_V10, MessageType.HELLO),
        (PROTOCOL_V10, 0xFF),
        (PROTOCOL_V11, 0x00),
        (PROTOCOL_V11, 0x0A),
        (PROTOCOL_V11, max(MessageType) + 1),
        (PROTOCOL_V11, 0xFF),
    ],
)
def test_an_unknown_type(version: str, first: int) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await opened(scene, version)
        await stream.say(bytes([first]) * 50)
        await stream.ended(ErrorCode.PROTOCOL_VIOLATION)

    run(scenario, version=version)


HALVES = {
    "half a header": activation()[:12],
    "a header": header(MessageType.ACTIVATION, MIB),
    "half a message": header(MessageType.ACTIVATION, MIB) + bytes(100_000),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("how", ["reset", "end", "disconnect"])
def test_an_end_in_mid_message(version: str, half: str, how: str) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await opened(scene, version)
        await stream.say(HALVES[half])
        if how == "reset":
            await stream.stream.reset()
        elif how == "end":
            await stream.stream.send_eof()
            await stream.ended(ErrorCode.PROTOCOL_VIOLATION)
        else:
            await scene.hostile.leave()
        await until(lambda: scene.hostile_id not in scene.victim._streams)

    run(scenario, version=version)


def test_no_hello() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open(PROTOCOL_V11)
        await stream.ended(ErrorCode.DEADLINE_EXCEEDED)

    run(scenario, bounds=HASTY)


@pytest.mark.parametrize(
    "first",
    [
        activation(),
        message(MessageType.GPU_INFO_REQUEST, request_id=1),
        message(MessageType.CREDIT, bytes(8)),
        message(MessageType.LAYER_STATUS, bytes(4)),
    ],
    ids=["activation", "request", "credit", "answer"],
)
def test_another_first_message_than_hello(first: bytes) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open(PROTOCOL_V11)
        await stream.say(first)
        await stream.ended(ErrorCode.PROTOCOL_VIOLATION)

    run(scenario)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"\xff" * 64, b"\xc1", b"\x81\xa4role", HELLO.encode()[:-1], b"\x91" * 60_000],
    ids=["empty", "no keys", "noise", "never used", "cut", "short", "deep"],
)
def test_hello_with_garbage(data: bytes) -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open(PROTOCOL_V11)
        await stream.say(message(MessageType.HELLO, data))
        await stream.ended(ErrorCode.PROTOCOL_VIOLATION)

    run(scenario)


def test_hello_twice() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        await stream.say(message(MessageType.HELLO, HELLO.encode()))
        await stream.ended(ErrorCode.PROTOCOL_VIOLATION)

    run(scenario)
