"""Bytes that are no messages: the stream is reset, and the worker serves on."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable

import pytest
import trio

from neurogrid.errors import StreamBrokenError
from neurogrid.p2p import PROTOCOL_V11, MessageType, TensorMessage, open_host
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.wire import (
    ErrorCode,
    ErrorPayload,
    Hello,
    StreamDecoder,
    encode_message,
)
from tests.e2e.bad_input_peer.scenarios import VERSIONS, Good, generation_on
from tests.e2e.support import (
    DEADLINE,
    WorkerProcess,
)


async def with_stream(
    worker: WorkerProcess, version: str, scenario: Callable[[Stream], Awaitable[None]]
) -> None:
    with trio.fail_after(DEADLINE):
        async with open_host() as host:
            worker_id = await host.connect(worker.address)
            await scenario(await host.open_stream(worker_id, [version]))


async def read_until_end(stream: Stream) -> bytes:
    received = b""
    try:
        while data := await stream.receive_some():
            received += data
    except StreamBrokenError:
        return received
    # Over 1.1.0 the Error says it, and the end follows in order; 1.0.0 has nothing but the reset.
    assert stream.protocol_id == PROTOCOL_V11
    return received


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        # An activation that announces 4 GiB, and weights that announce 2 MiB.
        struct.pack(">BIQQI", 0x01, 0, 0, 1, 2**32 - 1),
        struct.pack(">BIQQI", 0x03, 0, 0, 1, 2 * 1024**2),
        # A message that stops in the middle.
        struct.pack(">BIQQI", 0x07, 0, 0, 1, 1000) + b"{",
    ],
    ids=["noise", "http", "4 GiB", "2 MiB", "half"],
)
def test_bytes_that_are_no_message(worker: WorkerProcess, data: bytes, version: str) -> None:
    async def scenario(stream: Stream) -> None:
        await stream.send_all(data)
        await stream.send_eof()
        answer = await read_until_end(stream)
        if version == PROTOCOL_V11:
            hello, error = StreamDecoder().receive_data(answer)
            assert hello.msg_type is MessageType.HELLO
            assert error.msg_type is MessageType.ERROR

    trio.run(with_stream, worker, version, scenario)


@pytest.mark.parametrize("num_hellos", [0, 2])
def test_a_stream_that_begins_wrongly(worker: WorkerProcess, num_hellos: int) -> None:
    hello = Hello("coordinator", "test", (PROTOCOL_V11,), 2**20, 2**20).encode()
    messages = [TensorMessage(msg_type=MessageType.HELLO, data=hello)] * num_hellos
    messages += [TensorMessage(msg_type=MessageType.GPU_INFO_REQUEST, request_id=1, data=b"")]

    async def scenario(stream: Stream) -> None:
        await stream.send_all(b"".join(map(encode_message, messages)))
        answers = StreamDecoder().receive_data(await read_until_end(stream))
        error = ErrorPayload.decode(answers[-1].data)
        assert error.code == ErrorCode.PROTOCOL_VIOLATION
        assert "Hello" in error.text

    trio.run(with_stream, worker, PROTOCOL_V11, scenario)


def test_a_peer_that_says_nothing(worker: WorkerProcess, good: Good) -> None:
    async def scenario(stream: Stream) -> None:
        async with generation_on(good, worker.address) as outcome:
            assert outcome.tokens == [good.expected]

    for version in VERSIONS:
        trio.run(with_stream, worker, version, scenario)
