"""A message onto a stream: in how many writes, how long each may take, and what a failure is called."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
import trio.testing

from neurogrid.errors import DataWriteError, StreamBrokenError
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.streams.message_writer import write_message
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.wire import PROTOCOL_V11

pytestmark = pytest.mark.usefixtures("autojump_clock")

MIB = 1024**2
BOUNDS = Bounds(silence_timeout=10.0, min_rate=1.0 * MIB)
HEADER = bytes(25)


class Slow(Stream):
    """Takes so many seconds for each write, and breaks after so many of them."""

    def __init__(self, *, seconds: float = 0.0, breaks_after: int = 1000) -> None:
        super().__init__(peer_id="peer", protocol_id=PROTOCOL_V11)
        self.seconds = seconds
        self.breaks_after = breaks_after
        self.written: list[bytes] = []
        self.was_reset = False

    async def receive_some(self, max_bytes: int = 256 * 1024) -> bytes:
        return b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if len(self.written) == self.breaks_after:
            raise StreamBrokenError("broken")
        await trio.sleep(self.seconds)
        self.written.append(bytes(data))

    async def send_parts(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        await self.send_all(b"".join(parts))

    async def send_eof(self) -> None: ...
    async def aclose(self) -> None: ...

    async def reset(self) -> None:
        self.was_reset = True


@pytest.mark.parametrize(
    ("size", "num_writes"), [(0, 1), (1000, 1), (100_000, 1), (MIB, 1), (5 * MIB // 2, 3)]
)
async def test_small_ones_at_once_large_ones_in_pieces(size: int, num_writes: int) -> None:
    stream = Slow()
    data = memoryview(bytes(range(256)) * (size // 256 + 1))[:size]
    assert await write_message(stream, (HEADER, data), bounds=BOUNDS) == 25 + size
    assert b"".join(stream.written) == HEADER + data
    assert len(stream.written) == num_writes


async def test_slow_is_not_too_slow() -> None:
    stream = Slow(seconds=9.0)
    await write_message(stream, (HEADER, bytes(20 * MIB)), bounds=BOUNDS)
    assert trio.current_time() == pytest.approx(20 * 9)
    assert not stream.was_reset


async def test_a_peer_that_takes_nothing_loses_the_stream() -> None:
    stream = Slow(seconds=1000.0)
    start = trio.current_time()
    with pytest.raises(DataWriteError, match="took less than"):
        await write_message(stream, (HEADER, bytes(20 * MIB)), bounds=BOUNDS)
    assert trio.current_time() - start == pytest.approx(11.0, abs=0.1)  # a MiB, at the least rate
    assert stream.was_reset


@pytest.mark.parametrize(("size", "breaks_after"), [(10, 0), (MIB, 0), (3 * MIB, 1)])
async def test_how_much_of_it_went_out_nobody_knows(size: int, breaks_after: int) -> None:
    with pytest.raises(DataWriteError):
        await write_message(Slow(breaks_after=breaks_after), (HEADER, bytes(size)), bounds=BOUNDS)
