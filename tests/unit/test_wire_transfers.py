"""Whole transfers against `vectors/transfer_v11.json`: the peer under test takes every blob that it is
offered, and has the blob of one zero byte. The network is in memory; the other peer is the vector.
"""

from __future__ import annotations

from typing import Any

import trio
import trio.testing
from blake3 import blake3

from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.tensor.protocol import Protocol
from neurogrid.p2p.transfer import BytesSource, Transfers
from neurogrid.p2p.wire import (
    PROTOCOL_V11,
    ErrorCode,
    ErrorPayload,
    Hello,
    MessageType,
    StreamDecoder,
    TensorMessage,
    encode_message,
)
from tests.unit.blocking_pair import open_two
from tests.unit.transfer_peers import Taking
from tests.unit.vectors import in_turn

ZERO_BYTE = b"\0"
ZERO_BYTE_ID = blake3(blake3(ZERO_BYTE).digest()).digest()
HELLO = Hello("peer", "vectors", (PROTOCOL_V11,), 2**28, 2**30)
DEADLINE = 60.0
# What comes beside the transfer, whenever the receiver likes.
BESIDE = {MessageType.HELLO, MessageType.CREDIT}


class Reader:
    """The messages of a stream one by one, without what comes beside the transfer."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._decoder = StreamDecoder()
        self._messages: list[TensorMessage] = []

    async def next(self) -> TensorMessage:
        while True:
            while self._messages:
                message = self._messages.pop(0)
                if message.msg_type not in BESIDE:
                    return message
            data = await self._stream.receive_some()
            assert data, "the stream ended"
            self._messages = self._decoder.receive_data(data)


async def follow(stream: Stream, steps: list[Any]) -> None:
    reader = Reader(stream)
    await stream.send_all(encode_message(TensorMessage(MessageType.HELLO, data=HELLO.encode())))
    for step in steps:
        if "send" in step:
            await stream.send_all(bytes.fromhex(step["send"]))
            continue
        message = await reader.next()
        if "expect" in step:
            assert encode_message(message).hex() == step["expect"], message
            continue
        assert message.msg_type is MessageType.ERROR, message
        ids = {int(step["request_id"])} | ({0} if step.get("or_stream") else set())
        assert message.request_id in ids
        allowed = {ErrorCode[step[key]] for key in ("expect_error", "or") if key in step}
        assert ErrorPayload.decode(message.data).code in allowed


@in_turn("transfer_v11")
def test_transfer(name: str, case: Any) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_two() as (there, here):
                Transfers(Protocol(here), Taking({ZERO_BYTE_ID: BytesSource(ZERO_BYTE)}))
                await there.connect(here.addresses[0])
                stream = await there.open_stream(here.peer_id, [PROTOCOL_V11])
                await follow(stream, case["steps"])
                await stream.aclose()
                # What is under way ends with the stream, before the host does.
                await trio.testing.wait_all_tasks_blocked()

    trio.run(main)


@in_turn("transfer_v11")
def test_what_is_invalid_ends_in_its_error(name: str, case: Any) -> None:
    told = {step["expect_error"] for step in case["steps"] if "expect_error" in step}
    assert told == ({case["error"]} if case["result"] == "invalid" else set())
