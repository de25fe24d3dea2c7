"""go-libp2p speaks with us over QUIC: what it does over TCP, and bulk in both directions at once.

The daemon's two copies between a stream and a socket part badly over QUIC: when its client ends, it closes the stream,
which stops its own reading, for which it resets the stream; and a reset of QUIC takes back what has not arrived. Over
TCP that happens now and then, here always.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import pytest
import trio

from neurogrid.p2p import Stream, open_host
from tests.e2e.interop import suite
from tests.e2e.interop.foreign_peer import ForeignPeer, ForeignStream
from tests.e2e.interop.go_peer import run_go_peer
from tests.e2e.interop.suite import DEADLINE, PeerSuite

QUIC = "/ip4/127.0.0.1/udp/0/quic-v1"
MIB = 1024 * 1024
ECHO = "/test/echo/1"


@pytest.fixture(params=["quic"])
def security(request: pytest.FixtureRequest) -> str:
    """QUIC brings its own."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _listen_on_quic_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "open_host", partial(open_host, listen=[QUIC]))


def run_peer() -> AbstractAsyncContextManager[ForeignPeer]:
    # The daemon insists on a security for TCP, where it does not listen.
    return run_go_peer("noise", listen=QUIC)


class TestGoPeerOverQuic(PeerSuite):
    """See `TestGoPeer` for how the daemon ends its streams."""

    confirms = False
    test_their_end_of_a_stream_is_an_orderly_end = None  # it is none; see the module

    def run_peer(self, security: str) -> AbstractAsyncContextManager[ForeignPeer]:
        return run_peer()


@asynccontextmanager
async def stream_pair(dialler: str) -> AsyncIterator[tuple[Stream, ForeignStream]]:
    """Our end and theirs of a stream that we opened, whoever dialled."""
    async with run_peer() as peer, open_host(listen=[QUIC]) as host:
        if dialler == "we":
            await host.connect(peer.address)
        else:
            await peer.connect(host.addresses[0])
        inbound = await peer.accept_streams([ECHO])
        near = await host.open_stream(peer.peer_id, [ECHO])
        far = await inbound.receive()
        yield near, far
        await near.aclose()
        await far.aclose()


def test_16_mib_both_ways_at_once(dialler: str) -> None:
    async def scenario() -> None:
        with trio.fail_after(DEADLINE):
            async with stream_pair(dialler) as (near, far):
                there, back = secrets.token_bytes(16 * MIB), secrets.token_bytes(16 * MIB)
                received = bytearray()

                async def receive_here() -> None:
                    while len(received) < len(back):
                        received.extend(await near.receive_some())

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(near.send_all, there)
                    nursery.start_soon(far.send_all, back)
                    nursery.start_soon(receive_here)
                    assert await far.receive_exactly(len(there)) == there
                assert bytes(received) == back

    trio.run(scenario)


def test_a_slow_reader_there_makes_us_wait_and_here_makes_them(dialler: str) -> None:
    async def scenario() -> None:
        with trio.fail_after(DEADLINE):
            async with stream_pair(dialler) as (near, far):
                there, back = secrets.token_bytes(24 * MIB), secrets.token_bytes(24 * MIB)
                received = bytearray()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(near.send_all, there)
                    nursery.start_soon(far.send_all, back)
                    await trio.sleep(3)  # nobody reads
                    assert await far.receive_exactly(len(there)) == there
                    while len(received) < len(back):
                        received += await near.receive_some()
                assert bytes(received) == back

    trio.run(scenario)
