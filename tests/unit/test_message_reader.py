"""Bytes to messages under bounds of time and memory, on a clock that jumps: no socket, no waiting."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import RemoteProtocolError, RequestRefusedError, StreamBrokenError
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.streams.budget import ByteBudget
from neurogrid.p2p.streams.message_reader import MessageReader
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.streams.succession import Hold
from neurogrid.p2p.wire import (
    PROTOCOL_V11,
    ErrorCode,
    MessageType,
    StreamDecoder,
    TensorMessage,
    encode_message,
)

pytestmark = pytest.mark.usefixtures("autojump_clock")

BOUNDS = Bounds(
    silence_timeout=10.0,
    min_rate=100.0,
    small_message=50,
    room_timeout=20.0,
    max_bytes_per_peer=1000,
    max_bytes=2000,
)
HEADER_BYTES = 25
WAYS = pytest.mark.parametrize("where_it_arrives", [False, True])


class Script(Stream):
    """A stream on which each piece comes so many seconds after it is waited for; then nothing, or the end."""

    def __init__(self, *pieces: tuple[float, bytes]) -> None:
        super().__init__(peer_id="peer", protocol_id=PROTOCOL_V11)
        self.pieces = list(pieces)

    async def receive_some(self, max_bytes: int = 256 * 1024) -> bytes:
        seconds, data = self.pieces[0] if self.pieces else (math.inf, b"")
        await trio.sleep(seconds)
        self.pieces.pop(0)
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        raise StreamBrokenError("nobody reads")

    async def send_eof(self) -> None: ...
    async def aclose(self) -> None: ...
    async def reset(self) -> None: ...


def activation(num_bytes: int, request_id: int = 1) -> bytes:
    return encode_message(
        TensorMessage(msg_type=MessageType.ACTIVATION, request_id=request_id, data=bytes(num_bytes))
    )


def reader_of(
    *pieces: tuple[float, bytes],
    budget: ByteBudget | None = None,
    silence_timeout: float = math.inf,
) -> MessageReader:
    return MessageReader(
        Script(*pieces),
        StreamDecoder(),
        budget=budget or budget_of(),
        bounds=BOUNDS,
        silence_timeout=silence_timeout,
    )


def budget_of() -> ByteBudget:
    return ByteBudget(per_peer=BOUNDS.max_bytes_per_peer, total=BOUNDS.max_bytes)


def run(test: Callable[[], Awaitable[None]]) -> None:
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


async def read_all(reader: MessageReader) -> None:
    while await reader.receive():
        pass


async def too_slow(reader: MessageReader, *, where_it_arrives: bool = False) -> float:
    """Seconds after which the reader gives the peer up."""
    start = trio.current_time()
    with pytest.raises(RemoteProtocolError) as caught:
        await (reader.receive_all(lambda message: None) if where_it_arrives else read_all(reader))
    assert caught.value.code == ErrorCode.DEADLINE_EXCEEDED
    return trio.current_time() - start


@settings(max_examples=50)
@given(st.lists(st.integers(0, 120), max_size=6), st.integers(1, 60))
def test_messages_come_whole_however_they_were_cut(sizes: list[int], piece: int) -> None:
    data = b"".join(activation(size, request_id=at) for at, size in enumerate(sizes))
    pieces = [(0.01, data[at : at + piece]) for at in range(0, len(data), piece)]

    async def test() -> None:
        budget = budget_of()
        received: list[TensorMessage] = []
        with reader_of(*pieces, (0.01, b""), budget=budget) as reader:
            while messages := await reader.receive():
                received += messages
        assert [len(message.data) for message in received] == sizes
        assert [message.request_id for message in received] == list(range(len(sizes)))
        assert budget.held_bytes == 0

    run(test)


async def test_between_messages_there_is_no_hurry() -> None:
    hours = 3600.0
    with reader_of((hours, activation(3)), (hours, activation(4)), (hours, b"")) as reader:
        assert len((await reader.receive())[0].data) == 3
        assert len((await reader.receive())[0].data) == 4
        assert await reader.receive() == []


async def test_unless_the_stream_is_not_to_be_silent() -> None:
    with reader_of((1.0, activation(3)), silence_timeout=7.0) as reader:
        assert await too_slow(reader) == pytest.approx(8.0)


@WAYS
@pytest.mark.parametrize("num_bytes", [1, 24])
async def test_a_header_has_its_time_however_it_comes(
    num_bytes: int, where_it_arrives: bool
) -> None:
    pieces = [(3.0, activation(3)[at : at + 1]) for at in range(num_bytes)]
    with reader_of(*pieces) as reader:
        # From its first byte on; each byte that comes buys a hundredth of a second.
        assert await too_slow(reader, where_it_arrives=where_it_arrives) == pytest.approx(
            3.0 + 10.0, abs=0.1
        )


@WAYS
async def test_a_header_behind_a_message_has_its_time(where_it_arrives: bool) -> None:
    with reader_of((0.0, activation(3) + activation(3)[:5])) as reader:
        assert await too_slow(reader, where_it_arrives=where_it_arrives) == pytest.approx(10.0)


@WAYS
async def test_data_that_is_announced_and_never_comes(where_it_arrives: bool) -> None:
    budget = budget_of()
    with reader_of((0.0, activation(900)[:HEADER_BYTES]), budget=budget) as reader:
        # Not the 19 s that all of it might take.
        assert await too_slow(reader, where_it_arrives=where_it_arrives) == pytest.approx(10.0)
    assert budget.held_bytes == 0


async def test_data_that_comes_pays_for_its_time() -> None:
    data = activation(900)
    steady = [(1.0, data[at : at + 100]) for at in range(HEADER_BYTES, len(data), 100)]
    with reader_of((0.0, data[:HEADER_BYTES]), *steady) as reader:
        assert len((await reader.receive())[0].data) == 900
    trickle = [(1.0, data[at : at + 1]) for at in range(HEADER_BYTES, len(data))]
    with reader_of((0.0, data[:HEADER_BYTES]), *trickle) as reader:
        assert await too_slow(reader) == pytest.approx(10.0, abs=0.2)


async def test_a_message_has_its_time_whatever_came_before_it() -> None:
    # The clock of the first goes off in the silence after the second, which nothing is made of but that the
    # stream is waited for anew.
    data = activation(900)
    pieces = [(0.0, data[:100]), (5.0, data[100:]), (2.0, data), (30.0, data[:300])]
    with reader_of(*pieces) as reader:
        given_up = await too_slow(reader, where_it_arrives=True)
    assert given_up == pytest.approx(10.0 + 30.0 + 10.0, abs=0.1)


async def test_what_came_while_the_stream_was_held_has_its_time_too() -> None:
    class Old:
        peer_id = "peer"
        received_all = trio.Event()

    old = Old()
    hold = Hold([old])

    async def end() -> None:
        await trio.sleep(20.0)
        old.received_all.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        with reader_of((0.0, activation(3) + activation(3)[:5])) as reader:
            start = trio.current_time()
            with pytest.raises(RemoteProtocolError) as caught:
                await reader.receive_all(lambda message: hold.begin(), hold=hold)
        assert caught.value.code == ErrorCode.DEADLINE_EXCEEDED
        assert trio.current_time() - start == pytest.approx(20.0 + 10.0)


async def test_data_that_comes_into_its_memory_pays_for_its_time() -> None:
    bounds = replace(BOUNDS, min_rate=100_000.0, max_bytes_per_peer=10**7, max_bytes=2 * 10**7)
    data = activation(1_000_000)
    received: list[TensorMessage] = []

    def read(*pieces: tuple[float, bytes]) -> MessageReader:
        budget = ByteBudget(per_peer=10**7, total=10**7)
        return MessageReader(Script(*pieces), StreamDecoder(), budget=budget, bounds=bounds)

    steady = [(1.0, data[at : at + 100_000]) for at in range(0, len(data), 100_000)]
    with read(*steady, (0.0, b"")) as reader:
        await reader.receive_all(received.append)
    assert [len(message.data) for message in received] == [1_000_000]
    trickle = [(1.0, data[:300_000]), *((1.0, bytes(1000)) for _ in range(100))]
    with read(*trickle) as reader:
        # All of it pays but what came before its header was whole.
        assert 10.0 < await too_slow(reader, where_it_arrives=True) < 13.0


async def test_where_it_arrives_a_message_waits_for_room_too() -> None:
    budget = budget_of()
    budget.add("peer", 500)
    received: list[tuple[float, int]] = []

    def take(message: TensorMessage) -> None:
        received.append((trio.current_time(), len(message.data)))

    async def make_room() -> None:
        await trio.sleep(15.0)  # longer than a message may take
        budget.remove("peer", 500)

    start = trio.current_time()
    data = activation(600)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(make_room)
        pieces = (0.0, activation(3) + data[:100]), (0.0, data[100:]), (0.0, b"")
        with reader_of(*pieces, budget=budget) as reader:
            await reader.receive_all(take)
    assert received == [(start, 3), (start + 15.0, 600)]
    assert budget.held_bytes == 0


async def test_a_large_message_waits_for_room_and_its_clock_with_it() -> None:
    budget = budget_of()
    budget.add("peer", 950)
    data = activation(100)
    pieces = ((0.0, data[:HEADER_BYTES]), (9.0, data[HEADER_BYTES:]))
    async with trio.open_nursery() as nursery:

        async def make_room() -> None:
            await trio.sleep(15.0)
            budget.remove("peer", 950)

        nursery.start_soon(make_room)
        with reader_of(*pieces, budget=budget) as reader:
            assert len((await reader.receive())[0].data) == 100
            assert trio.current_time() >= 24.0
    assert budget.held_bytes == 0


async def test_a_small_message_does_not_wait_for_room() -> None:
    budget = budget_of()
    budget.add("peer", 5000)
    data = activation(50)
    with reader_of((0.0, data[:30]), (0.0, data[30:]), budget=budget) as reader:
        assert len(await reader.receive()) == 1


async def test_no_room_in_time() -> None:
    budget = budget_of()
    budget.add("other", 1900)
    with (
        reader_of((0.0, activation(100)[:30]), budget=budget) as reader,
        pytest.raises(RequestRefusedError) as caught,
    ):
        await reader.receive()
    assert caught.value.code == ErrorCode.BUSY
    assert caught.value.retry_after == BOUNDS.room_timeout
    assert budget.held_bytes == 1900


async def test_room_is_held_while_a_message_comes_and_no_longer() -> None:
    budget = budget_of()
    data = activation(100)
    with reader_of((0.0, data[:30]), (5.0, data[30:]), budget=budget) as reader:
        with trio.move_on_after(1.0):
            await reader.receive()
        assert budget.held_bytes == 100
        # Cancelled, it goes on where it was.
        assert len(await reader.receive()) == 1
        assert budget.held_bytes == 0
    with reader_of((0.0, data[:30]), budget=budget) as reader:
        with trio.move_on_after(1.0):
            await reader.receive()
        assert budget.held_bytes == 100
    assert budget.held_bytes == 0


@pytest.mark.parametrize("num_bytes", [10, 30])
async def test_an_end_in_mid_message(num_bytes: int) -> None:
    with (
        reader_of((0.0, activation(100)[:num_bytes]), (0.0, b"")) as reader,
        pytest.raises(RemoteProtocolError) as caught,
    ):
        await reader.receive()
    assert caught.value.code == ErrorCode.PROTOCOL_VIOLATION


async def test_what_was_whole_before_a_violation_is_handed_on() -> None:
    with reader_of((0.0, activation(3) + b"\xff" * 30)) as reader:
        assert len(await reader.receive()) == 1
        with pytest.raises(RemoteProtocolError):
            await reader.receive()
