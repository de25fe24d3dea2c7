"""Streams that break or wait: resets, lost connections, slow readers, handlers that fail."""

from __future__ import annotations

import logging
import secrets

import pytest
import trio

from neurogrid.errors import NeuroGridError, StreamBrokenError
from neurogrid.p2p import Host, Stream
from tests.conformance.networks import Network, two_hosts, until
from tests.conformance.streams import (
    ECHO,
    check_echo,
    digest,
    echo,
    receive_all,
    receive_into,
    serve_echo,
    stream_pair,
)

KIB = 1024
MIB = 1024 * KIB


# Resets


async def test_a_reset_is_no_end(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        await near.send_all(b"half a mess")
        assert await far.receive_some()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def read() -> None:
                with pytest.raises(StreamBrokenError, match="reset"):
                    await receive_all(far)

            await near.reset()
            await near.reset()
        assert (near.is_reset_by_peer, far.is_reset_by_peer) == (False, True)
        for stream in (near, far):
            with pytest.raises(StreamBrokenError):
                await stream.receive_some()
            with pytest.raises(StreamBrokenError):
                await stream.send_all(b"x")
            with pytest.raises(StreamBrokenError):
                await stream.send_eof()
        serve_echo(other)
        await check_echo(one, other)  # the connection lives on


async def test_a_reset_ends_a_write_that_waits(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def write() -> None:
                with pytest.raises(StreamBrokenError):
                    await near.send_all(bytes(32 * MIB))

            assert await far.receive_some()
            await far.reset()
        serve_echo(other)
        await check_echo(one, other, MIB)


@pytest.mark.parametrize("how", ["disconnect", "cut"])
async def test_a_lost_connection_is_no_end(network: Network, how: str) -> None:
    """What was sent and ended in order arrives whole, or breaks: it is never cut short without a word."""
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        await near.send_all(b"x" * 200_000)
        await near.send_eof()
        if how == "cut":
            network.cut(one, other)
        else:
            await one.disconnect(other.peer_id)
        await other.wait_disconnected(one.peer_id)
        try:
            received = await receive_all(far)
        except StreamBrokenError:
            assert not far.is_reset_by_peer
        else:
            assert received == b"x" * 200_000


@pytest.mark.parametrize("num_bytes", [1, 10_000, 300_000, 2_000_000])
async def test_a_connection_cut_in_mid_write_breaks_both_sides(
    network: Network, num_bytes: int
) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        network.cut_after(num_bytes, sender=one, receiver=other)
        data = secrets.token_bytes(16 * MIB)
        received = bytearray()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def write() -> None:
                with pytest.raises(StreamBrokenError):
                    await near.send_all(data)

            with pytest.raises(StreamBrokenError):
                await receive_into(received, far)
        assert len(received) <= num_bytes
        assert data.startswith(bytes(received))
        await one.wait_disconnected(other.peer_id)
        await other.wait_disconnected(one.peer_id)
        serve_echo(other)
        await network.connect(one, other)
        await check_echo(one, other)


# Slow readers


async def test_a_slow_reader_makes_the_writer_wait_and_loses_nothing(network: Network) -> None:
    async with two_hosts(network) as (one, other), stream_pair(one, other) as (near, far):
        serve_echo(other)
        data = secrets.token_bytes(32 * MIB)
        is_sent = trio.Event()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def write() -> None:
                await near.send_all(data)
                is_sent.set()
                await near.send_eof()

            for _ in range(3):  # and it holds up nobody else
                await check_echo(one, other, 300 * KIB)
            assert not is_sent.is_set()
            received = bytearray()
            while some := await far.receive_some(100_000):
                received += some
                if len(received) < 3 * MIB:
                    assert not is_sent.is_set()
                    await trio.sleep(0.001)
        assert digest(bytes(received)) == digest(data)


# Handlers


async def test_a_handler_that_raises_resets_its_stream_alone(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with two_hosts(network) as (one, other):

        async def fail(stream: Stream) -> None:
            await stream.receive_some()
            raise ZeroDivisionError("on purpose")

        serve_echo(other)
        other.set_stream_handler("/test/fails", fail)
        echoing = await one.open_stream(other.peer_id, [ECHO])
        for _ in range(3):
            stream = await one.open_stream(other.peer_id, ["/test/fails"])
            await stream.send_all(b"x")
            with pytest.raises(StreamBrokenError):
                await receive_all(stream)
            await stream.aclose()
        await echoing.send_all(b"still there")
        assert await echoing.receive_some() == b"still there"
        await echoing.aclose()
    failures = [record for record in caplog.records if "on purpose" in str(record.exc_info)]
    assert len(failures) == 3
    assert all("/test/fails" in record.getMessage() for record in failures)


async def test_a_handler_may_leave_its_stream_to_another_task(network: Network) -> None:
    async with two_hosts(network) as (one, other):

        async def hand_on(stream: Stream) -> None:
            other.start_soon(echo, stream)

        other.set_stream_handler("/test/1", hand_on)
        stream = await one.open_stream(other.peer_id, ["/test/1"])
        await stream.send_all(b"x")
        await stream.send_eof()
        assert await receive_all(stream) == b"x"


async def test_handlers_are_cancelled_with_their_host(network: Network) -> None:
    ends: list[str] = []

    async def serve(stream: Stream) -> None:
        await stream.send_all(b"x")
        try:
            await trio.sleep_forever()
        finally:
            ends.append("cancelled")

    async with network.open_host() as one:
        async with network.open_host() as other:
            other.set_stream_handler("/test/1", serve)
            await network.connect(one, other)
            stream = await one.open_stream(other.peer_id, ["/test/1"])
            assert await stream.receive_some() == b"x"
        with pytest.raises(StreamBrokenError):
            await stream.receive_some()
    assert ends == ["cancelled"]


async def test_every_error_is_one_of_ours(network: Network) -> None:
    """Whatever is done with streams while their connection goes, no error of the network's own appears."""

    async def check_nested(one: Host, other: Host) -> None:
        stream = await one.open_stream(other.peer_id, [ECHO])
        try:
            await stream.send_all(b"x" * 100_000)
            await stream.send_eof()
            assert digest(await receive_all(stream)) == digest(b"x" * 100_000)
        finally:
            await stream.aclose()

    async with two_hosts(network) as (one, other):
        serve_echo(other)
        num_uses = num_errors = 0

        async def use() -> None:
            nonlocal num_uses, num_errors
            try:
                while True:
                    await check_nested(one, other)
                    num_uses += 1
                    if num_uses == 30:
                        network.cut(one, other)
            except NeuroGridError:
                num_errors += 1

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(use)
        assert num_errors == 10
        await until(lambda: not other.connected_peers)
