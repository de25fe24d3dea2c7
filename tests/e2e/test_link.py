"""The link over real sockets: writes cut short, slow readers, hostile and dead peers, ends in every order."""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamReset,
)

from neurogrid.p2p.link import LinkLimits, LinkStream
from neurogrid.p2p.link.connection import LinkConnection
from neurogrid.p2p.link.limits import BufferPool
from tests.e2e.link_pair import Pair, link_pair, receive_all, sessions

DEADLINE = 120.0
MIB = 1024 * 1024


def run(
    scenario: Callable[[Pair], Awaitable[None]],
    *,
    limits: LinkLimits | None = None,
    clock: trio.abc.Clock | None = None,
) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE if clock is None else 100 * DEADLINE):
            async with link_pair(limits) as pair:
                await scenario(pair)

    trio.run(main, clock=clock)


async def check(pair: Pair, num_bytes: int = MIB) -> None:
    """The connection carries a stream in both directions."""
    near, far = await pair.streams()
    data = secrets.token_bytes(num_bytes)
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            await near.write(data)
            await near.close_write()

        async def echo() -> None:
            await far.write(await receive_all(far))
            await far.close()

        nursery.start_soon(send)
        nursery.start_soon(echo)
        assert await receive_all(near) == data
    await near.close()


def test_bytes_arrive_whole_both_ways() -> None:
    async def scenario(pair: Pair) -> None:
        await check(pair, 16 * MIB)
        for num_bytes in (1, 100, 20 * 1024, 64 * 1024, 65_519, 100_000):
            await check(pair, num_bytes)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert pair.one.core.streams == pair.other.core.streams == {}

    run(scenario)


def test_bytes_are_received_into_the_readers_memory() -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.streams()
        data = secrets.token_bytes(8 * MIB)
        memory = bytearray(len(data) + 10)

        async def receive() -> None:
            at = 0
            while num_bytes := await far.receive_into(memoryview(memory)[at : at + 3_000_000]):
                at += num_bytes
            assert at == len(data)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            for at in range(0, len(data), 700_000):
                await near.write(memoryview(data)[at : at + 700_000])
            await near.close_write()
        assert memory[: len(data)] == data
        assert memory[len(data) :] == bytes(10)

    run(scenario)


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_a_thousand_writes_cancelled_anywhere_corrupt_nothing(num_buffers: int) -> None:
    """What arrives of each write is a prefix of it, in order; the connection serves on."""
    sizes = (1, 1000, 70_000, 1_000_000)
    dice = random.Random(4)

    async def scenario(pair: Pair) -> None:
        near, far = await pair.streams()
        sent_whole: list[int] = []

        async def send() -> None:
            for number in range(1000):
                size = dice.choice(sizes)
                block = bytearray([number % 256]) * size
                cuts = [0, *sorted(dice.choices(range(size), k=num_buffers - 1)), size]
                buffers = [memoryview(block)[a:b] for a, b in itertools.pairwise(cuts)]
                with trio.move_on_after(dice.choice((0, 0.00001, 0.0003, 0.001))) as scope:
                    await near.write(*buffers)
                if not scope.cancelled_caught:
                    sent_whole.append(number % 256)
                # The memory is ours again: what is written here must not be seen by the peer.
                block[:] = bytes([(number + 128) % 256]) * size
            await near.write(b"end")
            await near.close_write()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            received = await receive_all(far)
        assert received.endswith(b"end")
        numbers = [key for key, _ in itertools.groupby(received[:-3])]
        steps = [(b - a) % 256 for a, b in itertools.pairwise(numbers)]
        # A write of which nothing was sent is missing; none comes late, twice or with other bytes.
        assert all(step < 100 for step in steps)
        assert set(sent_whole) <= set(numbers)
        assert len(sent_whole) < 1000
        await check(pair)

    run(scenario)


def test_a_reader_that_stalls_for_a_minute_makes_the_writer_wait() -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.streams()
        data = secrets.token_bytes(4 * MIB)
        written = False

        async def send() -> None:
            nonlocal written
            await near.write(data)
            await near.close_write()
            written = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.sleep(60)
            assert not written
            assert far.state.inbox.size <= 256 * 1024
            await check(pair)  # other streams do not wait
            assert await receive_all(far) == data
        assert written

    run(scenario, clock=trio.testing.MockClock(autojump_threshold=0.05))


def test_a_small_write_overtakes_the_bulk_of_other_streams() -> None:
    async def scenario(pair: Pair) -> None:
        (bulk, bulk_far), (small, small_far) = await pair.streams(), await pair.streams()
        received = 0

        async def read_bulk() -> None:
            nonlocal received
            while data := await bulk_far.receive_some():
                received += len(data)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bulk.write, bytes(64 * MIB))
            nursery.start_soon(read_bulk)
            await trio.sleep(0.01)
            await small.write(b"urgent")
            assert await small_far.receive_some() == b"urgent"
            assert received < 64 * MIB
            nursery.cancel_scope.cancel()

    run(scenario)


def test_a_thousand_streams_at_once() -> None:
    async def scenario(pair: Pair) -> None:
        async def serve() -> None:
            while True:
                pair.nursery.start_soon(echo, await pair.other.accept_stream())

        async def echo(stream: LinkStream) -> None:
            await stream.write(await receive_all(stream))
            await stream.close()

        num_open = most_open = 0

        async def use(number: int) -> None:
            nonlocal num_open, most_open
            stream = await pair.one.open_stream()
            num_open += 1
            most_open = max(most_open, num_open)
            await all_open.wait()
            data = number.to_bytes(2, "big") * 2000
            await stream.write(data)
            await stream.close_write()
            assert await receive_all(stream) == data
            await stream.close()
            num_open -= 1

        all_open = trio.Event()
        pair.nursery.start_soon(serve)
        async with trio.open_nursery() as nursery:
            for number in range(1000):
                nursery.start_soon(use, number)
            while num_open < 1000:
                await trio.sleep(0.01)
            all_open.set()
        assert most_open == 1000
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert pair.one.core.streams == pair.other.core.streams == {}

    run(scenario)


def test_a_reset_in_mid_write_frees_the_writer() -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.streams()

        async def reset_soon() -> None:
            assert await far.receive_some()
            await far.reset()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reset_soon)
            with pytest.raises(MuxedStreamReset):
                await near.write(bytes(64 * MIB))
        with pytest.raises(MuxedStreamReset):
            await near.write(b"x")
        with pytest.raises(MuxedStreamReset):
            await near.receive_some()
        with pytest.raises(MuxedStreamReset):
            await far.receive_some()
        await check(pair)

    run(scenario)


def test_half_close_and_py_libp2ps_end() -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.streams()
        await near.close_write()
        with pytest.raises(MuxedStreamClosed):
            await near.write(b"x")
        with pytest.raises(MuxedStreamEOF):
            await far.read(10)
        await far.write(b"still")
        assert await near.read(3) == b"sti"
        assert await near.read() == b"ll"
        await far.close()
        assert await near.receive_some() == await near.receive_some() == b""

    run(scenario)


def test_what_was_sent_before_a_close_arrives() -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.streams()
        data = secrets.token_bytes(200_000)
        await near.write(data)
        await near.close()
        await pair.one.close()
        assert await receive_all(far) == data
        await pair.other.event_closed.wait()
        await pair.one.event_closed.wait()

    run(scenario)


def test_everybody_is_told_of_the_end_of_the_connection() -> None:
    async def scenario(pair: Pair) -> None:
        errors = []

        async def expect(call: Callable[..., Awaitable[object]], *args: object) -> None:
            with pytest.raises((MuxedStreamReset, MuxedConnUnavailable)) as caught:
                await call(*args)
            errors.append(caught.value)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                for side in range(2):
                    stream = (await pair.streams())[side]  # the other end does nothing
                    nursery.start_soon(expect, stream.receive_some)
                    nursery.start_soon(expect, stream.write, bytes(4 * MIB))
            nursery.start_soon(expect, pair.one.accept_stream)
            nursery.start_soon(expect, pair.other.accept_stream)
            await trio.sleep(0.05)
            await pair.one.close()
            await pair.one.close()
        assert len(errors) == 14
        await expect(pair.one.open_stream)
        await pair.other.event_closed.wait()
        await expect(pair.other.open_stream)

    run(scenario)


def test_streams_may_end_after_the_peer_said_that_it_goes() -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.streams()
        pair.one.core.go_away(0)
        pair.one.kick()
        await near.write(b"one")
        assert await far.receive_some() == b"one"
        with pytest.raises(MuxedConnUnavailable):
            await pair.other.open_stream()
        await far.write(b"two")
        await far.close_write()
        assert await receive_all(near) == b"two"
        assert not pair.other.is_closed
        await near.close()
        await pair.other.event_closed.wait()

    run(scenario)


def test_a_peer_that_says_goodbye_with_a_code_is_gone() -> None:
    async def scenario(pair: Pair) -> None:
        _, far = await pair.streams()
        pair.one.core.go_away(2)
        pair.one.kick()
        with pytest.raises(MuxedStreamReset, match="code 2"):
            await far.receive_some()
        await pair.other.event_closed.wait()

    run(scenario)


def test_a_window_exceeded_ends_the_connection() -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.streams()
        near.state.send_window = 2**31  # the peer has not said so
        with pytest.raises(MuxedStreamReset, match="code 1"):
            await near.write(bytes(2 * MIB))
        with pytest.raises(MuxedStreamReset, match="window"):
            await receive_all(far)
        await pair.other.event_closed.wait()

    run(scenario)


def test_a_silent_peer_is_found_dead() -> None:
    async def main() -> None:
        near, silent = await sessions()
        one = LinkConnection(near, near.get_remote_peer(), pool=BufferPool(LinkLimits()))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.start)
            await one.event_started.wait()
            stream = await one.open_stream()
            started = trio.current_time()
            with pytest.raises(MuxedStreamReset, match="no sign of life"):
                await stream.receive_some()
            assert 30 <= trio.current_time() - started <= 60
            await one.event_closed.wait()
        await silent.close()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.05))


def test_an_idle_connection_lives_on() -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.streams()
        await trio.sleep(600)
        await near.write(b"still there")
        assert await far.receive_some() == b"still there"

    run(scenario, clock=trio.testing.MockClock(autojump_threshold=0.05))


def test_a_connection_cut_in_mid_frame_breaks_its_streams() -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.streams()
        await near.write(b"whole")
        assert await far.receive_some() == b"whole"
        pipe = pair.one._pipe
        assert pipe is not None
        pipe._socket.send(b"\xff\xff half a frame")  # type: ignore[attr-defined]
        pipe.end()
        with pytest.raises(MuxedStreamReset, match="closed the connection"):
            await far.receive_some()
        await pair.other.event_closed.wait()

    run(scenario)


def test_bytes_that_nobody_sealed_end_the_connection() -> None:
    async def scenario(pair: Pair) -> None:
        _, far = await pair.streams()
        pipe = pair.one._pipe
        assert pipe is not None
        pipe._socket.send(b"\x00\x20" + bytes(32))  # type: ignore[attr-defined]
        with pytest.raises(MuxedStreamReset, match="authentication"):
            await far.receive_some()
        await pair.other.event_closed.wait()

    run(scenario)


def test_unread_bytes_are_bounded_and_cost_one_stream() -> None:
    async def scenario(pair: Pair) -> None:
        streams = [await pair.streams() for _ in range(6)]

        async def fill(stream: LinkStream) -> None:
            with pytest.raises(MuxedStreamReset):
                await stream.write(bytes(4 * MIB))

        async with trio.open_nursery() as nursery:
            for near, _ in streams:
                nursery.start_soon(fill, near)
            while not any(far.state.was_reset for _, far in streams):
                await trio.sleep(0.01)
            held = sum(far.state.inbox.size for _, far in streams)
            assert 0 < held <= MIB
            for _, far in streams:
                await far.reset()
        await check(pair, 200_000)

    run(scenario, limits=LinkLimits(connection_bytes=MIB))


def test_streams_beyond_the_backlog_are_refused() -> None:
    async def scenario(pair: Pair) -> None:
        opened = [await pair.one.open_stream() for _ in range(20)]
        while sum(stream.state.was_reset for stream in opened) < 15:
            await trio.sleep(0.01)
        accepted = [await pair.other.accept_stream() for _ in range(5)]
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert sum(stream.state.was_reset for stream in opened) == 15
        assert len(accepted) == 5
        await check(pair)

    run(scenario, limits=LinkLimits(max_unaccepted=5))


def test_opening_waits_for_acknowledgements() -> None:
    async def scenario(pair: Pair) -> None:
        for _ in range(3):
            await pair.one.open_stream()
        with trio.move_on_after(0.1) as scope:
            await pair.one.open_stream()
        assert scope.cancelled_caught
        await pair.other.accept_stream()
        await pair.one.open_stream()

    run(scenario, limits=LinkLimits(max_unacknowledged=3))


def test_a_stream_closed_here_alone_is_reset_after_a_while() -> None:
    async def scenario(pair: Pair) -> None:
        near, far = await pair.streams()
        await far.write(b"unread")
        await near.close()

        async def keep_writing() -> None:
            while True:
                await far.write(b"x")
                await trio.sleep(5)

        with pytest.raises(MuxedStreamReset):
            await keep_writing()
        assert pair.one.core.streams == pair.other.core.streams == {}

    run(scenario, clock=trio.testing.MockClock(autojump_threshold=0.05))
