"""Streams: negotiation, bytes both ways, and their ends."""

from __future__ import annotations

import secrets
from contextlib import suppress
from functools import partial

import pytest
import trio

from neurogrid.errors import PeerUnreachableError, StreamBrokenError
from neurogrid.p2p import Stream
from tests.conformance.networks import Network, two_hosts, until
from tests.conformance.streams import (
    ECHO,
    Filling,
    Taking,
    check_both_ways,
    check_echo,
    digest,
    receive_all,
    receive_into,
    serve_echo,
    stream_pair,
)

KIB = 1024
MIB = 1024 * KIB


# Negotiation


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (["/test/2", "/test/1"], "/test/2"),
        (["/test/1", "/test/2"], "/test/1"),
        (["/test/3", "/test/1", "/test/2"], "/test/1"),
        (["/test/3", "/other", "/test/2"], "/test/2"),
    ],
)
async def test_the_callers_order_decides(network: Network, asked: list[str], chosen: str) -> None:
    async with two_hosts(network) as (one, other):
        served: list[tuple[str, str]] = []

        async def serve(stream: Stream) -> None:
            served.append((stream.protocol_id, stream.peer_id))
            await stream.send_all(stream.protocol_id.encode())
            await stream.aclose()

        other.set_stream_handler("/test/1", serve)
        other.set_stream_handler("/test/2", serve)
        stream = await one.open_stream(other.peer_id, asked)
        assert (stream.protocol_id, stream.peer_id) == (chosen, other.peer_id)
        assert await receive_all(stream) == chosen.encode()
        assert served == [(chosen, one.peer_id)]
        await stream.aclose()


async def test_a_protocol_that_is_taken_out_can_be_put_in_again(network: Network) -> None:
    async with two_hosts(network) as (one, other):
        serve_echo(other)
        open_before = await one.open_stream(other.peer_id, [ECHO])
        other.remove_stream_handler(ECHO)
        with pytest.raises(PeerUnreachableError):
            await one.open_stream(other.peer_id, [ECHO])
        await open_before.send_all(b"goes on")
        assert await open_before.receive_some() == b"goes on"
        await open_before.aclose()
        serve_echo(other)
        await check_echo(one, other)


@pytest.mark.parametrize("asked", [["/unknown"], ["/unknown", "/as well"], []])
async def test_what_the_peer_does_not_speak_cannot_be_opened(
    network: Network, asked: list[str]
) -> None:
    async with two_hosts(network) as (one, other):
        serve_echo(other)
        for _ in range(3):
            with pytest.raises(PeerUnreachableError):
                await one.open_stream(other.peer_id, asked)
        await check_echo(one, other)  # nothing else has suffered


async def test_the_side_that_was_dialled_opens_streams_too(network: Network) -> None:
    async with two_hosts(network) as (one, other):
        serve_echo(one)
        await check_echo(other, one)


# Bytes


@pytest.mark.parametrize("num_bytes", [0, 1, MIB, 5 * MIB])
async def test_bytes_come_back_as_they_were(network: Network, num_bytes: int) -> None:
    async with two_hosts(network) as (one, other):
        serve_echo(other)
        await check_echo(one, other, num_bytes)


@pytest.mark.parametrize("num_bytes", [0, 1, MIB, 5 * MIB])
async def test_both_sides_send_at_once(network: Network, num_bytes: int) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as streams:
        await check_both_ways(streams, num_bytes)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview], ids=["copy", "array", "view"])
async def test_what_was_sent_can_be_written_over(network: Network, kind: type) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        buffer = bytearray(b"abc" * 1000)
        await near.send_all(kind(buffer))
        buffer[:] = bytes(len(buffer))
        await near.send_eof()
        assert await receive_all(far) == b"abc" * 1000


@pytest.mark.parametrize("sizes", [(10, 100), (10, 100_000, 0, 3 * MIB), (MIB, 10, MIB)], ids=str)
async def test_parts_come_as_one_after_the_other(network: Network, sizes: tuple[int, ...]) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        parts = [memoryview(bytearray(secrets.token_bytes(size))) for size in sizes]
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def write() -> None:
                await near.send_parts(parts)
                await near.send_eof()

            assert digest(await receive_all(far)) == digest(b"".join(parts))


async def test_what_is_sent_without_waiting_keeps_its_place(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        pieces = [secrets.token_bytes(secrets.randbelow(20 * KIB) + 1) for _ in range(300)]
        received = bytearray()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_into, received, far)
            for piece in pieces:
                if not near.send_nowait(piece):
                    await near.send_all(piece)
            await near.send_eof()
        assert digest(bytes(received)) == digest(b"".join(pieces))


async def test_what_would_have_to_wait_is_not_sent_at_all(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        await near.send_all(b"first")
        pieces = [secrets.token_bytes(32 * KIB) for _ in range(16)]
        # More than may be under way to a reader that reads nothing, whatever the network.
        num_sent = 0
        while num_sent < 4096 and near.send_nowait(pieces[num_sent % len(pieces)]):
            num_sent += 1
        assert num_sent < 4096
        received = bytearray()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_into, received, far)
            await near.send_all(b"last")
            await near.send_eof()
        sent = (pieces[number % len(pieces)] for number in range(num_sent))
        assert digest(bytes(received)) == digest(b"".join((b"first", *sent, b"last")))


@pytest.mark.parametrize("how", ["end", "reset", "disconnect"])
async def test_nothing_is_sent_without_waiting_after_the_end(network: Network, how: str) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, _far):
        if how == "end":
            await near.send_eof()
        elif how == "reset":
            await near.reset()
        else:
            await one.disconnect(other.peer_id)
        with pytest.raises(StreamBrokenError):
            near.send_nowait(b"too late")


async def test_no_more_bytes_come_than_were_asked_for(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        await near.send_all(b"0123456789")
        await near.send_eof()
        received = []
        while data := await far.receive_some(3):
            assert len(data) <= 3
            received.append(data)
        assert b"".join(received) == b"0123456789"


async def test_each_piece_is_handed_over_until_enough(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        data = secrets.token_bytes(3 * MIB)
        received = bytearray()

        def take_a_mebibyte(piece: bytes) -> bool:
            received.extend(piece)
            return len(received) < MIB

        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def write() -> None:
                await near.send_all(data)
                await near.send_eof()

            assert await far.receive_each(Taking(take_a_mebibyte))
            assert MIB <= len(received) < 3 * MIB
            received += await far.receive_some()
            assert not await far.receive_each(Taking(lambda piece: received.extend(piece) or True))
        assert digest(bytes(received)) == digest(data)


async def test_what_a_taker_raises_is_its_readers(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        received = bytearray()

        def refuse(piece: bytes) -> bool:
            received.extend(piece)
            raise ValueError("not this")

        for text in (b"first", b"second"):
            await near.send_all(text)
            with pytest.raises(ValueError, match="not this"):
                await far.receive_each(Taking(refuse))
        assert received == b"firstsecond"
        await near.send_eof()
        assert await receive_all(far) == b""


async def test_a_taker_may_cancel_its_reader(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        received = bytearray()
        with trio.CancelScope() as scope:

            def take(piece: bytes) -> bool:
                received.extend(piece)
                scope.cancel()
                return True

            await near.send_all(b"first")
            await far.receive_each(Taking(take))
        assert scope.cancelled_caught
        await near.send_all(b"second")
        await near.send_eof()
        assert received + await receive_all(far) == b"firstsecond"


@pytest.mark.parametrize("how", ["reset", "disconnect"])
async def test_a_taker_is_told_that_nothing_more_comes(network: Network, how: str) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        received = bytearray()

        async def break_off() -> None:
            await until(lambda: received == b"first")
            await (near.reset() if how == "reset" else one.disconnect(other.peer_id))

        async with trio.open_nursery() as nursery:
            await near.send_all(b"first")
            nursery.start_soon(break_off)
            with suppress(StreamBrokenError):
                # A host that goes away in order may end its streams before it closes the connection.
                assert not await far.receive_each(
                    Taking(lambda piece: received.extend(piece) or True)
                )
        assert received == b"first"


async def test_a_takers_memory_is_filled(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        head, body, tail = b"head", secrets.token_bytes(3 * MIB), b"tail"

        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def write() -> None:
                await near.send_parts([head, body])
                await near.send_all(tail)
                await near.send_eof()

            filling = Filling(len(head + body))
            assert await far.receive_each(filling)
            assert digest(filling.received) == digest(head + body)
            # What is short of its memory is told at the end.
            filling = Filling(100)
            assert not await far.receive_each(filling)
            assert filling.received == tail


async def test_a_taker_that_is_cancelled_has_been_told_of_all_in_its_memory(
    network: Network,
) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        data = secrets.token_bytes(MIB)
        received = bytearray()
        for at in range(0, len(data), 128 * KIB):
            filling = Filling(MIB)
            is_begun = partial(getattr, filling, "received")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(far.receive_each, filling)
                await near.send_all(data[at : at + 1000])
                await until(is_begun)
                await near.send_all(data[at + 1000 : at + 128 * KIB])
                await trio.sleep(0.01)  # some of it may have come, or none, or all
                nursery.cancel_scope.cancel()
            received += filling.received
            while len(received) < at + 128 * KIB:
                received += await far.receive_some(at + 128 * KIB - len(received))
        assert digest(bytes(received)) == digest(data)


@pytest.mark.parametrize("how", ["reset", "disconnect"])
async def test_a_taker_with_memory_is_told_that_nothing_more_comes(
    network: Network, how: str
) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        filling = Filling(MIB)

        async def break_off() -> None:
            await until(lambda: filling.received == b"first")
            await (near.reset() if how == "reset" else one.disconnect(other.peer_id))

        async with trio.open_nursery() as nursery:
            await near.send_all(b"first")
            nursery.start_soon(break_off)
            with suppress(StreamBrokenError):
                assert not await far.receive_each(filling)
        assert filling.received == b"first"


async def test_bytes_come_into_a_buffer_that_is_there(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        data = secrets.token_bytes(3 * MIB)
        memory = bytearray(len(data) + 10)
        is_full = trio.Event()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def write() -> None:
                await near.send_all(data)
                await is_full.wait()
                await near.send_all(b"the rest")
                await near.send_eof()

            filled = 0
            while filled < len(data):
                num_bytes = await far.receive_into(memoryview(memory)[filled : len(data)])
                assert num_bytes > 0
                filled += num_bytes
            is_full.set()
            assert await receive_all(far) == b"the rest"
            assert await far.receive_into(memoryview(memory)) == 0
        assert digest(bytes(memory)) == digest(data + bytes(10))
        await near.reset()
        with pytest.raises(StreamBrokenError):
            await near.receive_into(memoryview(memory))


async def test_many_streams_at_once_do_not_mix(network: Network) -> None:
    async with two_hosts(network) as (one, other):
        serve_echo(one)
        serve_echo(other)
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(check_echo, one, other, 1000 * number)
                nursery.start_soon(check_echo, other, one, 1000 * number)


async def test_hundreds_of_streams_one_after_the_other(network: Network) -> None:
    async with two_hosts(network) as (one, other):
        serve_echo(other)
        for _ in range(300):  # more than may be open at once
            await check_echo(one, other, 10)


# Ends


async def test_a_side_that_has_finished_can_still_receive(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        await near.send_all(b"question")
        await near.send_eof()
        assert await receive_all(far) == b"question"
        assert await far.receive_some() == b""  # the end stays the end
        with pytest.raises(StreamBrokenError):
            await near.send_all(b"more")
        await far.send_all(b"answer" * 10_000)
        await far.aclose()
        assert await receive_all(near) == b"answer" * 10_000
        await near.send_eof()  # a second time changes nothing


async def test_closing_ends_what_was_sent_in_order(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        await near.send_all(b"x" * 100_000)
        await near.aclose()
        await near.aclose()
        assert await receive_all(far) == b"x" * 100_000
        with pytest.raises(StreamBrokenError):
            await near.send_all(b"more")
        with pytest.raises(StreamBrokenError):
            await near.receive_some()


async def test_a_writer_whose_reader_has_left_does_not_wait_for_ever(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        await far.aclose()
        # What nobody reads may go nowhere, or the writer may be told.
        with suppress(StreamBrokenError):
            await near.send_all(bytes(32 * MIB))
        assert await receive_all(near) == b""


@pytest.mark.parametrize("how", ["reset", "aclose"])
async def test_a_reader_whose_own_side_gives_up_wakes(network: Network, how: str) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, _):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def read() -> None:
                with pytest.raises(StreamBrokenError, match="here"):
                    await near.receive_some()

            await trio.sleep(0.05)
            await getattr(near, how)()
        with pytest.raises(StreamBrokenError):
            await near.send_all(b"more")
