"""Before it is admitted: what a peer of py-libp2p's own making is served, over TCP and over QUIC, and what not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.host.ping import PingService
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify_push.identify_push import ID_PUSH as IDENTIFY_PUSH
from libp2p.peer.id import ID

from neurogrid.errors import ConfigurationError, PeerUnreachableError, StreamBrokenError
from neurogrid.p2p import PROTOCOL_V11, Identity, Protocol, Stream, open_host
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.trust import (
    COORDINATOR,
    TRUST_PROTOCOL,
    WORKER,
    Cluster,
    ClusterAdmission,
    Insecure,
    LoopbackOnly,
    Membership,
    NotAdmittedError,
    Refusal,
)
from neurogrid.p2p.trust.messages import Credentials, Verdict, read_frame, write_frames

DEADLINE = 60.0
KADEMLIA = "/ipfs/kad/1.0.0"

Scenario = Callable[[Libp2pHost, Libp2pHost], Awaitable[None]]


@pytest.fixture(
    params=["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"], ids=["tcp", "quic"]
)
def listen(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster.create(tmp_path / "cluster")


def member(cluster: Cluster, identity: Identity, role: str) -> ClusterAdmission:
    membership = Membership(cluster.public_key, cluster.issue(identity.peer_id, role))
    return ClusterAdmission(membership, admits={COORDINATOR, WORKER})


@asynccontextmanager
async def member_and_stranger(
    cluster: Cluster, listen: str
) -> AsyncIterator[tuple[Libp2pHost, Libp2pHost]]:
    """A member that serves much, and a connected peer that is none."""
    identity = Identity.generate()
    async with (
        open_host(
            listen=[listen], identity=identity, admission=member(cluster, identity, WORKER)
        ) as host,
        open_host(listen=[listen]) as stranger,
    ):
        Protocol(host)

        async def kademlia(stream: object) -> None:
            raise AssertionError("it was served")

        host.libp2p.set_stream_handler(TProtocol(KADEMLIA), kademlia)
        await stranger.connect(host.addresses[0])
        yield host, stranger


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        with trio.fail_after(DEADLINE):
            await scenario()

    trio.run(within)


def test_identify_and_ping_are_served(cluster: Cluster, listen: str) -> None:
    async def scenario() -> None:
        async with member_and_stranger(cluster, listen) as (host, stranger):
            peer_id = ID.from_base58(host.peer_id)
            assert await PingService(stranger.libp2p).ping(peer_id, 2)
            stream = await stranger.open_stream(host.peer_id, [str(IDENTIFY)])
            said = bytearray()
            while data := await stream.receive_some():
                said += data
            assert TRUST_PROTOCOL.encode() in said
            await stream.aclose()
            assert host.connected_peers == frozenset()

    run(scenario)


@pytest.mark.parametrize("protocol_id", [PROTOCOL_V11, KADEMLIA, str(IDENTIFY_PUSH)])
def test_nothing_else_is(cluster: Cluster, listen: str, protocol_id: str) -> None:
    async def scenario() -> None:
        async with member_and_stranger(cluster, listen) as (host, stranger):
            try:
                stream = await stranger.open_stream(host.peer_id, [protocol_id])
            except PeerUnreachableError:
                return  # the reset was faster than the answer
            with suppress(StreamBrokenError):
                await stream.send_all(b"\0" * 1000)
            with pytest.raises(StreamBrokenError):
                await stream.receive_some()

    run(scenario)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\0\x01\0\x01",
        b"\0\0\0\x01\xc1",
        b"\0\0\0\x01\x80",
        b"\0\0\0\x05\xdf\xff\xff\xff\xff",
    ],
    ids=["4-GiB", "empty", "over-the-limit", "no-map", "nothing-in-it", "entries-claimed"],
)
def test_what_makes_no_sense_is_refused(cluster: Cluster, listen: str, frame: bytes) -> None:
    async def scenario() -> None:
        async with member_and_stranger(cluster, listen) as (host, stranger):
            stream = await stranger.open_stream(host.peer_id, [TRUST_PROTOCOL])
            await stream.send_all(frame)
            verdict = Verdict.decode(await read_frame(stream))
            assert verdict.reason == Refusal.MALFORMED
            await stream.aclose()
            await host.wait_disconnected(stranger.peer_id)

    run(scenario)


def test_a_refused_answer_to_our_credentials_ends_the_matter(cluster: Cluster, listen: str) -> None:
    """A listener that admits us and then shows nonsense is refused by the one that dialled."""

    async def scenario() -> None:
        identity = Identity.generate()
        async with (
            open_host(
                listen=[listen], identity=identity, admission=member(cluster, identity, WORKER)
            ) as host,
            open_host(listen=[listen]) as liar,
        ):
            verdicts: list[Verdict] = []

            async def answer(stream: Stream) -> None:
                await read_frame(stream)
                await write_frames(stream, Verdict(), Credentials(certificate=b"x" * 200))
                verdicts.append(Verdict.decode(await read_frame(stream)))
                await stream.aclose()

            liar.set_stream_handler(TRUST_PROTOCOL, answer)
            with pytest.raises(NotAdmittedError) as caught:
                await host.connect(liar.addresses[0])
            assert caught.value.reason == Refusal.CERTIFICATE_INVALID
            assert not caught.value.refused_by_peer
            await liar.wait_disconnected(host.peer_id)
            assert [verdict.reason for verdict in verdicts] == [Refusal.CERTIFICATE_INVALID]

    run(scenario)


def test_streams_that_come_too_early_wait_for_the_exchange(cluster: Cluster, listen: str) -> None:
    """The listener knows a moment before the dialler that they agree; what it asks then is not lost."""

    async def scenario() -> None:
        ours, theirs = Identity.generate(), Identity.generate()
        async with (
            open_host(
                listen=[listen], identity=ours, admission=member(cluster, ours, WORKER)
            ) as one,
            open_host(
                listen=[listen], identity=theirs, admission=member(cluster, theirs, COORDINATOR)
            ) as other,
        ):
            answers: list[bytes] = []

            async def ask(peer_id: str) -> None:
                stream = await other.open_stream(peer_id, ["/test/early/1"])
                answers.append(await stream.receive_some())
                await stream.aclose()

            async def answer(stream: Stream) -> None:
                await stream.send_all(b"hello")

            one.set_stream_handler("/test/early/1", answer)
            other.on_connected(lambda peer_id: other.start_soon(ask, peer_id))
            await one.connect(other.addresses[0])
            while not answers:
                await trio.sleep(0.01)
            assert answers == [b"hello"]

    run(scenario)


def test_the_policy_decides_where_a_host_may_listen() -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigurationError, match="--insecure"):
            async with open_host(listen=["/ip4/0.0.0.0/tcp/0"], admission=LoopbackOnly()):
                pass
        async with (
            open_host(admission=LoopbackOnly()) as one,
            open_host(admission=Insecure()) as other,
        ):
            await one.connect(other.addresses[0])
            assert one.role_of(other.peer_id) == other.role_of(one.peer_id) == "any"

    run(scenario)


def test_without_a_policy_everybody_may_act_as_anything() -> None:
    async def scenario() -> None:
        async with open_host() as one, open_host() as other:
            assert one.role_of(other.peer_id) is None
            await one.connect(other.addresses[0])
            assert one.role_of(other.peer_id) == "any"
            assert one.gate is None

    run(scenario)
