"""A 1.1.0 stream as its receiver reads it, against `vectors/stream_v11.json`: Hello, credit, order.

The stream underneath is a list of bytes: what the vector holds comes in, what goes out is kept.
"""

from __future__ import annotations

from typing import Any

import trio
import trio.testing

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.streams.bounds import DEFAULT_BOUNDS
from neurogrid.p2p.streams.budget import ByteBudget
from neurogrid.p2p.streams.message_stream import MessageStream
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.wire import (
    PROTOCOL_V11,
    ErrorCode,
    ErrorPayload,
    Hello,
    MessageType,
    StreamDecoder,
    TensorMessage,
    v11_table,
)
from tests.unit.vectors import in_turn

DEADLINE = 60.0


class Recording(Stream):
    """Gives `incoming` in pieces and then the end; keeps what is sent, and how it was closed."""

    def __init__(self, incoming: bytes, step: int) -> None:
        super().__init__(peer_id="12D3KooW", protocol_id=PROTOCOL_V11)
        self._incoming = incoming
        self._step = step
        self.sent = b""
        self.was_reset = False

    async def receive_some(self, max_bytes: int = 0) -> bytes:
        await trio.testing.wait_all_tasks_blocked()  # what is owed goes out first
        piece, self._incoming = self._incoming[: self._step], self._incoming[self._step :]
        return piece

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        self.sent += data

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        self.was_reset = True
        await trio.lowlevel.checkpoint()


def read(case: Any, step: int) -> tuple[list[TensorMessage], Recording, MessageStream]:
    taken: list[TensorMessage] = []
    stream = Recording(bytes.fromhex(case["hex"]), step)
    reader = MessageStream(
        stream,
        hello=Hello("peer", "test", (PROTOCOL_V11,), 2**20, int(case["granted"])),
        table=v11_table(),
        on_message=lambda _, message: taken.append(message),
        on_sent=lambda message, num_bytes: None,
        budget=ByteBudget(per_peer=2**30, total=2**30),
        bounds=DEFAULT_BOUNDS,
    )

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            await reader.run()

    trio.run(main)
    return taken, stream, reader


@in_turn("stream_v11")
def test_stream(name: str, case: Any) -> None:
    for step in (1_000_000, 7):
        check(case, step)


def check(case: Any, step: int) -> None:
    taken, stream, reader = read(case, step)
    assert [m.msg_type for m in taken] == [MessageType[name] for name in case["messages"]]
    hello, *rest = StreamDecoder().receive_data(stream.sent)
    assert hello.msg_type is MessageType.HELLO
    if case["result"] == "valid":
        assert not stream.was_reset
        assert rest == []
        return
    (error,) = rest
    assert error.msg_type is MessageType.ERROR
    assert error.request_id == 0
    assert ErrorPayload.decode(error.data).code == ErrorCode[case["error"]]
    assert isinstance(reader.end_reason, RemoteProtocolError)
    assert stream.was_reset
