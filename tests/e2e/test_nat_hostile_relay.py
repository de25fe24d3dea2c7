"""A relay that does not do what it should with a circuit, and peers that come over one and are not admitted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest
import trio

from neurogrid.errors import PeerUnreachableError, StreamBrokenError, TransportError
from neurogrid.p2p import Identity, Stream
from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.reach import relay_client
from neurogrid.p2p.reach.relay_service import RelayService
from neurogrid.p2p.trust import (
    COORDINATOR,
    WORKER,
    Cluster,
    ClusterAdmission,
    Membership,
    NotAdmittedError,
    Refusal,
)
from tests.e2e.test_nat_relay import DEADLINE, ECHO, Scene, exchange, play, until


class HostileRelay(RelayService):
    """Passes on what it should until it `is_hostile`: then it changes a bit, or keeps what it was sent."""

    is_hostile = False
    stalls = False

    async def _pump(self, source: Stream, target: Stream, scope: trio.CancelScope) -> None:
        try:
            while data := await source.receive_some():
                if self.is_hostile and self.stalls:
                    continue
                changed = bytearray(data)
                if self.is_hostile:
                    changed[-1] ^= 1
                await target.send_all(bytes(changed))
            if not self.stalls:
                await target.send_eof()
        except StreamBrokenError:
            if not self.stalls:
                scope.cancel()


@asynccontextmanager
async def impatient_scene() -> AsyncIterator[Scene]:
    """Hosts that give a silent peer up soon, whatever way leads to it."""
    async with (
        open_host() as relay,
        open_host(keep_alive=2.0) as server,
        open_host(keep_alive=2.0) as client,
    ):
        yield Scene(relay, server, client)


def test_a_relay_that_changes_a_handshake_brings_nobody() -> None:
    async def scene(scene: Scene) -> None:
        HostileRelay(scene.relay).is_hostile = True
        await scene.reserve()
        with pytest.raises(PeerUnreachableError) as caught:
            await scene.client_side.connect(scene.address)
        assert scene.relay.peer_id in str(caught.value)
        await until(lambda: not scene.server_side._num_inbound)
        assert not scene.arrived
        assert not scene.server.is_connected(scene.client.peer_id)

    play(scene)


def test_a_relay_that_changes_a_byte_ends_the_connection_and_nothing_else() -> None:
    async def scene(scene: Scene) -> None:
        service = HostileRelay(scene.relay)
        arrived = bytearray()
        broken: list[Stream] = []

        async def keep(stream: Stream) -> None:
            try:
                while data := await stream.receive_some():
                    arrived.extend(data)
            except StreamBrokenError:
                broken.append(stream)

        scene.server.set_stream_handler("/test/keep/1", keep)
        await scene.reserve()
        await scene.client_side.connect(scene.address)
        stream = await scene.client.open_stream(scene.server.peer_id, ["/test/keep/1"])
        await stream.send_all(b"before")
        await until(lambda: arrived == b"before")
        service.is_hostile = True
        await stream.send_all(b"after")
        with pytest.raises(StreamBrokenError):
            await stream.receive_some()
        await until(lambda: scene.client.peer_id not in scene.server.connected_peers)
        await until(lambda: scene.server.peer_id not in scene.client.connected_peers)
        await until(lambda: broken)
        assert arrived == b"before"
        # The relay is connected to both as before, and may do better the next time.
        service.is_hostile = False
        await scene.client_side.connect(scene.address)
        assert await exchange(scene, b"again") == b"again"

    play(scene)


def test_a_relay_that_keeps_a_handshake_is_given_up_by_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_client, "CIRCUIT_TIMEOUT", 2.0)

    async def scene(scene: Scene) -> None:
        service = HostileRelay(scene.relay)
        service.is_hostile = service.stalls = True
        await scene.reserve()
        with pytest.raises(PeerUnreachableError, match="no answer from") as caught:
            await scene.client_side.connect(scene.address)
        assert scene.relay.peer_id in str(caught.value)
        await until(lambda: not scene.server_side._num_inbound)
        assert not scene.arrived

    play(scene)


def test_a_relay_that_keeps_what_a_circuit_carries_is_noticed_by_both() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with impatient_scene() as scene:
                service = HostileRelay(scene.relay)
                service.stalls = True
                await scene.reserve()
                await scene.client_side.connect(scene.address)
                await until(lambda: scene.client.peer_id in scene.server.connected_peers)
                stream = await scene.client.open_stream(scene.server.peer_id, [ECHO])
                service.is_hostile = True
                await stream.send_all(b"anybody there")
                with pytest.raises(StreamBrokenError):
                    await stream.receive_some()
                await until(lambda: scene.client.peer_id not in scene.server.connected_peers)
                await until(lambda: scene.server.peer_id not in scene.client.connected_peers)

    trio.run(main)


@pytest.mark.parametrize("client", ["member", "without", "revoked", "of another cluster"])
def test_over_a_circuit_members_alone_are_served(tmp_path: Path, client: str) -> None:
    """As over any other connection: the relay is no part of the cluster, and says nothing of who comes."""
    cluster, other = (Cluster.create(tmp_path / name) for name in ("cluster", "other"))
    ours, theirs = Identity.generate(), Identity.generate()
    issuer = other if client == "of another cluster" else cluster
    certificate = issuer.issue(theirs.peer_id, COORDINATOR)
    comes = ClusterAdmission(Membership(issuer.public_key, certificate), admits={WORKER})
    membership = Membership(cluster.public_key, cluster.issue(ours.peer_id, WORKER))
    if client == "revoked":
        membership.take_revocations(cluster.revoke([theirs.peer_id]))
    serves = ClusterAdmission(membership, admits={COORDINATOR})
    reason = {
        "member": None,
        "without": Refusal.CERTIFICATE_REQUIRED,
        "revoked": Refusal.REVOKED,
        "of another cluster": Refusal.WRONG_CLUSTER,
    }[client]

    async def main() -> None:
        async with (
            open_host() as relay,
            open_host(identity=ours, admission=serves) as server,
            open_host(identity=theirs, admission=None if client == "without" else comes) as host,
        ):
            scene = Scene(relay, server, host)
            RelayService(relay)
            await scene.reserve()
            if reason is None:
                await scene.client_side.connect(scene.address)
                assert await exchange(scene, b"hello") == b"hello"
                return
            # Who asks for no admission hears of it when its streams are not served.
            expected = nullcontext() if client == "without" else pytest.raises(NotAdmittedError)
            with expected as caught:
                await scene.client_side.connect(scene.address)
            if caught is not None:
                assert caught.value.reason == reason
            with pytest.raises((TransportError, NotAdmittedError)):
                await exchange_nothing(scene)
            assert server.role_of(host.peer_id) is None

    async def bounded() -> None:
        with trio.fail_after(DEADLINE):
            await main()

    trio.run(bounded)


async def exchange_nothing(scene: Scene) -> None:
    stream = await scene.client.open_stream(scene.server.peer_id, [ECHO])
    await stream.send_all(b"hello")
    assert not await stream.receive_some(), "the server has answered"
    raise StreamBrokenError("it has ended")
