"""go-libp2p speaks with us over QUIC: what it does over TCP, and bulk in both directions at once.

The daemon's two copies between a stream and a socket part badly over QUIC: when its client ends, it closes the stream,
which stops its own reading, for which it resets the stream; and a reset of QUIC takes back what has not arrived. Over
TCP that happens now and then, here always.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial

import pytest
import trio

from neurogrid.p2p import Stream, open_host
from tests.e2e.interop import suite
from tests.e2e.interop.foreign_peer import ForeignProcess, ForeignStream
from tests.e2e.interop.go_peer import start_go_peer
from tests.e2e.interop.suite import DEADLINE, PeerSuite, Processes, Way

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


@pytest.fixture(params=["we", "they"], ids=["we-dial", "they-dial"])
def way(request: pytest.FixtureRequest) -> Way:
    return "quic", request.param


def start_peer(_: str = "quic") -> AbstractContextManager[ForeignProcess]:
    # The daemon insists on a security for TCP, where it does not listen.
    return start_go_peer("noise", listen=QUIC)


class TestGoPeerOverQuic(PeerSuite):
    """See `TestGoPeer` for how the daemon ends its streams."""

    confirms = False
    test_their_end_of_a_stream_is_an_orderly_end = None  # it is none; see the module

    def start_peer(self, security: str) -> AbstractContextManager[ForeignProcess]:
        return start_peer()


@asynccontextmanager
async def stream_pair(
    process: ForeignProcess, dialler: str
) -> AsyncIterator[tuple[Stream, ForeignStream]]:
    """Our end and theirs of a stream that we opened, whoever dialled."""
    with trio.fail_after(DEADLINE):
        async with process.use() as peer, open_host(listen=[QUIC]) as host:
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


@pytest.mark.parametrize("is_slow", [False, True], ids=["at-once", "slow"])
def test_bulk_goes_both_ways(processes: Processes, dialler: str, is_slow: bool) -> None:
    """At once; or with readers who wait, until the writers do."""

    async def scenario() -> None:
        async with stream_pair(processes("quic", start_peer), dialler) as (near, far):
            there, back = secrets.token_bytes(24 * MIB), secrets.token_bytes(24 * MIB)
            received = bytearray()
            num_sent = [0, 0]

            async def send(number: int, stream: Stream | ForeignStream, data: bytes) -> None:
                for at in range(0, len(data), MIB // 4):
                    await stream.send_all(data[at : at + MIB // 4])
                    num_sent[number] += MIB // 4

            async def receive_here() -> None:
                while len(received) < len(back):
                    received.extend(await near.receive_some())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, 0, near, there)
                nursery.start_soon(send, 1, far, back)
                if is_slow:
                    await until_still(num_sent)
                    assert max(num_sent) < len(there)
                nursery.start_soon(receive_here)
                assert await far.receive_exactly(len(there)) == there
            assert bytes(received) == back

    trio.run(scenario)


async def until_still(num_sent: list[int]) -> None:
    """Wait until nobody has sent anything for half a second."""
    before: list[int] = []
    while num_sent != before:
        before = [*num_sent]
        await trio.sleep(0.5)
