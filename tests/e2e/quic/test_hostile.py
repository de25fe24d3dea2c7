"""One connection that takes all it may have and uses none of it: its own bounds hold, and others are served."""

from __future__ import annotations

from typing import Any

import trio
from libp2p.peer.id import ID

from neurogrid.errors import TransportError
from neurogrid.p2p import Stream, open_host
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.quic import QuicLimits
from tests.conformance.networks import until
from tests.conformance.streams import check_echo, serve_echo
from tests.e2e.quic.hosts import KIB, MIB, QUIC, run, two_hosts


def connection_of(host: Libp2pHost, peer: Libp2pHost) -> Any:
    """The driver of a connection."""
    network: Any = host.libp2p.get_network()
    (connection,) = network.connections[ID.from_base58(peer.peer_id)]
    return connection.muxed_conn


def test_streams_to_the_bound_that_are_never_used_keep_nobody_away() -> None:
    async def scenario() -> None:
        async with two_hosts() as (hostile, server), open_host(listen=[QUIC]) as honest:
            serve_echo(server)
            limits, num_opened = QuicLimits(), 0
            near, far = connection_of(hostile, server), connection_of(server, hostile)
            # A byte on each, which is the beginning of a negotiation: else nobody would know of it.
            while num_opened < 2 * limits.max_streams and near.core.can_open:
                near.core.send_stream_data(near.core.open(), b"\x13")
                near.flush()
                num_opened += 1
            assert 0.9 * limits.max_streams < num_opened <= limits.max_streams
            await until(lambda: len(far._streams) > limits.max_unaccepted // 2)
            # Its own have odd numbers.
            assert sum(number % 2 == 0 for number in far._streams) <= limits.max_streams
            await honest.connect(server.addresses[0])
            for _ in range(20):
                await check_echo(honest, server, 100 * KIB)

    run(scenario)


def test_answers_that_a_peer_gives_no_credit_for_wait_in_bounded_buffers() -> None:
    """The connection's first credit, and what each writer may be ahead of it; and others are served."""
    num_asked, answer_bytes = 32, 4 * MIB
    limits = QuicLimits()

    async def scenario() -> None:
        async with two_hosts() as (hostile, server), open_host(listen=[QUIC]) as honest:
            serve_echo(server)
            written: dict[int, int] = {}
            ended: list[Stream] = []

            async def answer(stream: Stream) -> None:
                await stream.receive_some()
                number = len(written)
                written[number] = 0
                try:
                    for _ in range(answer_bytes // (16 * KIB)):
                        await stream.send_all(bytes(16 * KIB))
                        written[number] += 16 * KIB
                except TransportError:
                    ended.append(stream)

            server.set_stream_handler("/test/answer/1", answer)
            streams = [
                await hostile.open_stream(server.peer_id, ["/test/answer/1"])
                for _ in range(num_asked)
            ]
            # It reads nothing, so that no credit is given beside that of the beginning.
            for stream in streams:
                await stream.send_all(b"?")
            await until(lambda: len(written) == num_asked)
            before = -1
            while sum(written.values()) != before:
                before = sum(written.values())
                await trio.sleep(0.5)
            most = limits.first_window + num_asked * (limits.send_buffer + 64 * KIB)
            assert 0 < before <= most < num_asked * answer_bytes
            await honest.connect(server.addresses[0])
            await check_echo(honest, server, MIB)
            await hostile.disconnect(server.peer_id)
            await until(lambda: len(ended) == num_asked)

    run(scenario)
