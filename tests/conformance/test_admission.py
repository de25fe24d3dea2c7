"""Who is admitted, over every network: each refusal with its name, and nothing served before."""

from __future__ import annotations

import logging
from contextlib import (
    AsyncExitStack,
    suppress,
)
from dataclasses import replace
from pathlib import Path

import pytest

from neurogrid.errors import PeerUnreachableError
from neurogrid.p2p import PROTOCOL_V11, Identity, Protocol
from neurogrid.p2p.trust import (
    COORDINATOR,
    TRUST_PROTOCOL,
    WORKER,
    Admission,
    AllowList,
    Cluster,
    Insecure,
    NotAdmittedError,
    Refusal,
)
from tests.conformance.admission import DAY, Scene, check_refused, open_host, pair, refusal_of
from tests.conformance.networks import Network, until
from tests.conformance.streams import ECHO, check_echo, echo, serve_echo

REFUSALS = [
    Refusal.CERTIFICATE_REQUIRED,
    Refusal.CERTIFICATE_INVALID,
    Refusal.WRONG_CLUSTER,
    Refusal.WRONG_PEER,
    Refusal.NOT_YET_VALID,
    Refusal.EXPIRED,
    Refusal.REVOKED,
    Refusal.ROLE_NOT_ADMITTED,
]


async def test_members_are_served(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    coordinator = (ours, scene.member(ours, COORDINATOR))
    worker = (theirs, scene.member(theirs, WORKER))
    async with pair(network, coordinator, worker) as (one, other):
        told: list[tuple[str, str | None]] = []
        one.on_connected(lambda peer_id: told.append((peer_id, one.role_of(peer_id))))
        other.on_connected(lambda peer_id: told.append((peer_id, other.role_of(peer_id))))
        assert one.role_of(other.peer_id) is None
        await network.connect(one, other)
        await until(lambda: len(told) == 2)
        assert set(told) == {(other.peer_id, WORKER), (one.peer_id, COORDINATOR)}
        await check_echo(one, other)
        await check_echo(other, one)
        await one.disconnect(other.peer_id)
        await other.wait_disconnected(one.peer_id)
        assert (one.role_of(other.peer_id), other.role_of(one.peer_id)) == (None, None)


def stranger(scene: Scene, identity: Identity, reason: Refusal, tmp_path: Path) -> Admission:
    """A peer that shows what is refused for this reason."""
    certificate = scene.certificate(identity, WORKER)
    if reason is Refusal.CERTIFICATE_REQUIRED:
        return scene.policy(None, COORDINATOR)
    if reason is Refusal.CERTIFICATE_INVALID:
        forged = bytes([certificate.data[0] ^ 1]) + certificate.data[1:]
        return scene.policy(replace(certificate, data=forged), COORDINATOR)
    if reason is Refusal.WRONG_CLUSTER:
        return Scene(Cluster.create(tmp_path / "other"), scene.clock).member(identity, WORKER)
    if reason is Refusal.WRONG_PEER:
        of_another = scene.certificate(Identity.generate(), WORKER)
        return scene.policy(replace(of_another, peer_id=identity.peer_id), COORDINATOR)
    if reason is Refusal.NOT_YET_VALID:
        later = scene.cluster.issue(identity.peer_id, WORKER, now=scene.clock() + DAY)
        return scene.policy(later, COORDINATOR)
    if reason is Refusal.EXPIRED:
        scene.clock.now += 31 * DAY
    elif reason is Refusal.REVOKED:
        scene.cluster.revoke([identity.peer_id])
    elif reason is Refusal.ROLE_NOT_ADMITTED:
        return scene.policy(scene.certificate(identity, COORDINATOR), COORDINATOR)
    return scene.policy(certificate, COORDINATOR)


@pytest.mark.parametrize("is_dialler", [True, False], ids=["dials", "is_dialled"])
@pytest.mark.parametrize("reason", REFUSALS, ids=lambda reason: reason.name.lower())
async def test_each_refusal_has_its_name(
    network: Network,
    scene: Scene,
    ours: Identity,
    theirs: Identity,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    reason: Refusal,
    is_dialler: bool,
) -> None:
    is_mutual = reason is Refusal.WRONG_CLUSTER  # then who is dialled is the first to say no

    caplog.set_level(logging.WARNING, "neurogrid")
    refused = (theirs, stranger(scene, theirs, reason, tmp_path))
    refuser = (ours, scene.issuer(ours))
    first, second = (refused, refuser) if is_dialler else (refuser, refused)
    async with pair(network, first, second) as (one, other):
        error = await refusal_of(network, one, other)
        assert error.reason == reason
        assert error.refused_by_peer == (is_dialler or is_mutual)
        with pytest.raises(PeerUnreachableError):
            await one.open_stream(other.peer_id, [ECHO])
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("gate")]
    assert len(lines) == 1
    named = ours if is_mutual and not is_dialler else theirs
    assert lines[0].startswith(f"refused {named.peer_id}: ")


async def test_a_worker_cannot_pose_as_a_coordinator(
    network: Network,
    scene: Scene,
    ours: Identity,
    theirs: Identity,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever its Hello would say, and whoever it admits itself."""

    caplog.set_level(logging.WARNING, "neurogrid")
    poser = (theirs, scene.member(theirs, WORKER, admits=WORKER))
    async with pair(network, poser, (ours, scene.member(ours, WORKER))) as (one, other):
        Protocol(one, role="coordinator")
        Protocol(other, role="worker")
        error = await refusal_of(network, one, other)
        assert error.reason == Refusal.ROLE_NOT_ADMITTED
        assert error.refused_by_peer
    assert f"refused {theirs.peer_id}: its role is worker" in caplog.text


async def test_who_is_not_on_the_list_is_refused(
    network: Network, ours: Identity, theirs: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "neurogrid")
    listed = (ours, AllowList({ours.peer_id: WORKER}))
    async with pair(network, (theirs, Insecure()), listed) as (one, other):
        error = await refusal_of(network, one, other)
        assert error.reason == Refusal.NOT_ON_LIST
        error = await refusal_of(network, one, other)
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("gate")]
    assert theirs.peer_id in line
    assert "--allow" in line


async def test_who_is_on_the_list_has_its_role(
    network: Network, ours: Identity, theirs: Identity
) -> None:
    def worker_again(identity: Identity, peer: Identity) -> tuple[Identity, Admission]:
        return identity, AllowList({peer.peer_id: COORDINATOR})

    coordinator = (ours, AllowList({theirs.peer_id: WORKER}, admits=[WORKER]))
    worker = (theirs, AllowList.parse([f"{ours.peer_id}=coordinator"], admits=[COORDINATOR]))
    async with pair(network, coordinator, worker) as (one, other):
        await network.connect(one, other)
        assert one.role_of(other.peer_id) == WORKER
        assert other.role_of(one.peer_id) == COORDINATOR
        await check_echo(other, one)
    wrong = (ours, AllowList({theirs.peer_id: WORKER}, admits=[COORDINATOR]))
    async with pair(network, worker_again(theirs, ours), wrong) as (one, other):
        error = await refusal_of(network, one, other)
        assert error.reason == Refusal.ROLE_NOT_ADMITTED


async def test_a_listed_peer_need_not_know_the_protocol(
    network: Network, ours: Identity, theirs: Identity
) -> None:
    listed = (ours, AllowList({theirs.peer_id: WORKER}))
    async with pair(network, (theirs, None), listed) as (one, other):
        await network.connect(one, other)
        await check_echo(one, other)
    async with pair(network, (ours, AllowList({theirs.peer_id: WORKER})), (theirs, None)) as (
        one,
        other,
    ):
        await network.connect(one, other)
        assert one.role_of(theirs.peer_id) == WORKER
        await check_echo(one, other)


async def test_a_member_refuses_who_does_not_know_the_protocol(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    member = (ours, scene.member(ours, COORDINATOR))
    async with pair(network, member, (theirs, None)) as (one, other):
        with pytest.raises(NotAdmittedError, match=TRUST_PROTOCOL) as caught:
            await one.connect(await network.address_of(other))
        assert caught.value.reason == Refusal.NOT_SPOKEN
        await other.wait_disconnected(one.peer_id)


async def test_nothing_is_served_before(
    network: Network,
    over: str,
    scene: Scene,
    ours: Identity,
    theirs: Identity,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that never shows anything: its streams are refused, and in the end its connection."""

    if over != "memory":
        monkeypatch.setattr("neurogrid.p2p.trust.gate.ADMISSION_TIMEOUT", 3.0)

    caplog.set_level(logging.WARNING, "neurogrid")
    member = (ours, scene.member(ours, COORDINATOR))
    async with pair(network, (theirs, None), member) as (one, other):
        served: list[str] = []
        Protocol(other).on_message(None, lambda message: served.append("message"))
        other.on_connected(served.append)
        await one.connect(await network.address_of(other))
        await until(lambda: one.peer_id in other.unadmitted_peers)
        for protocol_id in (PROTOCOL_V11, ECHO):
            await check_refused(one, other, protocol_id)
        assert other.connected_peers == frozenset()
        with pytest.raises(PeerUnreachableError):
            await other.open_stream(one.peer_id, [ECHO])
        await one.wait_disconnected(other.peer_id)
        assert not served
    assert any(
        f"refused {theirs.peer_id}: it showed no credentials" in record.getMessage()
        for record in caplog.records
    )


async def test_a_flood_of_peers_that_show_nothing_is_bounded(
    network: Network, scene: Scene, ours: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neurogrid.p2p.trust.gate.MAX_UNADMITTED", 4)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            open_host(network, ours, scene.member(ours, COORDINATOR))
        )
        serve_echo(server)
        address = await network.address_of(server)
        for _ in range(8):
            idle = await stack.enter_async_context(open_host(network, Identity.generate(), None))
            with suppress(PeerUnreachableError):
                await idle.connect(address)
        await until(lambda: len(server.unadmitted_peers) <= 4)
        late = Identity.generate()
        member = await stack.enter_async_context(
            open_host(network, late, scene.member(late, WORKER))
        )
        await member.connect(address)
        await until(lambda: server.connected_peers == {late.peer_id})
        await check_echo(member, server)


async def test_a_tolerated_peer_is_kept_and_not_served(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    member = (ours, scene.member(ours, COORDINATOR))
    async with pair(network, member, (theirs, None)) as (one, other):
        one.tolerate(other.peer_id, ["/test/known/1"])
        one.set_stream_handler("/test/known/1", echo)
        await one.connect(await network.address_of(other))
        await until(lambda: one.peer_id in other.connected_peers)
        assert one.unadmitted_peers == {other.peer_id}
        assert one.role_of(other.peer_id) is None
        stream = await other.open_stream(one.peer_id, ["/test/known/1"])
        await stream.send_all(b"served")
        assert await stream.receive_some() == b"served"
        await stream.aclose()
        await check_refused(other, one, ECHO)
