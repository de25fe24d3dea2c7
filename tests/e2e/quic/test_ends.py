"""How streams, dials, connections and hosts end: in order, by a reset, cancelled, or in silence."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import replace

import pytest
import trio

from neurogrid.errors import StreamBrokenError
from neurogrid.p2p import Stream, open_host
from neurogrid.p2p.libp2p import libp2p_host as libp2p_host_module
from neurogrid.p2p.quic import QuicLimits
from tests.conformance.streams import ECHO, check_echo, digest, echo, receive_all, stream_pair
from tests.e2e.quic.hosts import (
    KIB,
    MIB,
    QUIC,
    core_of,
    limits_of_hosts,
    run,
    send_without_end,
    two_hosts,
)


def test_a_side_that_has_finished_can_still_receive() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            await near.send_all(b"question")
            await near.send_eof()
            assert await receive_all(far) == b"question"
            with pytest.raises(StreamBrokenError):
                await near.send_all(b"more")
            await far.send_all(b"answer")
            await far.send_eof()
            assert await receive_all(near) == b"answer"

    run(scenario)


def test_what_was_sent_before_a_close_still_arrives() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            data = secrets.token_bytes(300 * KIB)
            await near.send_all(data)
            await near.aclose()
            assert digest(await receive_all(far)) == digest(data)

    run(scenario)


def test_what_was_sent_before_a_disconnect_still_arrives() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            data = secrets.token_bytes(300 * KIB)
            await near.send_all(data)
            await near.send_eof()
            await one.disconnect(other.peer_id)
            assert digest(await receive_all(far)) == digest(data)
            await other.wait_disconnected(one.peer_id)

    run(scenario)


def test_a_reset_ends_both_directions_on_both_sides() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other):
            async with stream_pair(one, other) as (near, far):
                await near.send_all(b"begun")
                assert await far.receive_some() == b"begun"
                await near.reset()
                for stream in (near, far):
                    with pytest.raises(StreamBrokenError):
                        await stream.receive_some()
                with pytest.raises(StreamBrokenError):
                    await send_without_end(far)
            other.set_stream_handler(ECHO, echo)
            await check_echo(one, other)

    run(scenario)


def test_a_reset_in_the_middle_of_a_write_ends_it() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def write() -> None:
                    with pytest.raises(StreamBrokenError):
                        await near.send_all(bytes(32 * MIB))

                await far.receive_some()
                await far.reset()
            other.set_stream_handler(ECHO, echo)
            await check_echo(one, other)

    run(scenario)


def test_unread_bytes_of_ended_streams_leave_their_room_to_others() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other):
            other.set_stream_handler(ECHO, echo)
            limits = QuicLimits()
            for number in range(2 * limits.first_window // limits.first_stream_window):
                async with stream_pair(one, other) as (near, far):
                    with trio.move_on_after(0.2):
                        await near.send_all(bytes(MIB))
                    if number % 2:
                        await far.reset()
                    else:
                        await near.reset()
            await check_echo(one, other, 4 * MIB)

    run(scenario)


# Cancellation


def test_cancelled_writes_leave_prefixes_and_harm_nobody() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other):
            other.set_stream_handler(ECHO, echo)
            for _ in range(20):
                async with stream_pair(one, other) as (near, far):
                    data = secrets.token_bytes(2 * MIB)
                    with trio.move_on_after(secrets.randbelow(50) / 1000):
                        await near.send_all(data)
                    await near.send_eof()
                    received = await receive_all(far)
                    assert data.startswith(received)
            await check_echo(one, other, MIB)

    run(scenario)


def test_cancelled_reads_lose_nothing() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            data = secrets.token_bytes(2 * MIB)
            received = bytearray()
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def write() -> None:
                    for at in range(0, len(data), 16 * KIB):
                        await near.send_all(data[at : at + 16 * KIB])
                        await trio.sleep(0.001)
                    await near.send_eof()

                while True:
                    with trio.move_on_after(0.002):
                        if not (piece := await far.receive_some()):
                            break
                        received += piece
            assert digest(bytes(received)) == digest(data)

    run(scenario)


def test_a_cancelled_dial_leaves_nothing() -> None:
    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
            for delay in (0, 0.001, 0.005, 0.02):
                with trio.move_on_after(delay):
                    await one.connect(other.addresses[0])
            await one.connect(other.addresses[0])
            other.set_stream_handler(ECHO, echo)
            await check_echo(one, other)

    run(scenario)


# The host's own end


def test_a_host_that_closes_is_seen_to_go() -> None:
    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as one:
            async with open_host(listen=[QUIC]) as other:
                await one.connect(other.addresses[0])
                stream: Stream
                async with stream_pair(one, other) as (stream, _):
                    pass
            with trio.fail_after(10):
                await one.wait_disconnected(other.peer_id)
            with suppress(StreamBrokenError):
                assert not await stream.receive_some()

    run(scenario)


def test_peers_come_and_go_more_often_than_may_be_there_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libp2p_host_module, "MAX_CONNECTIONS", 4)

    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
            other.set_stream_handler(ECHO, echo)
            for _ in range(10):
                await one.connect(other.addresses[0])
                await check_echo(one, other)
                await one.disconnect(other.peer_id)
                await other.wait_disconnected(one.peer_id)

    run(scenario)


def test_a_peer_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_of_hosts(monkeypatch, replace(QuicLimits(), idle_timeout=1.0))

    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, _):
            monkeypatch.setattr(core_of(other, one), "datagrams_to_send", lambda now: [])
            with pytest.raises(StreamBrokenError):
                await near.receive_some()
            await one.wait_disconnected(other.peer_id)

    run(scenario)
