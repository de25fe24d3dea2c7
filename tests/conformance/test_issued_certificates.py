"""Certificates that come in a Verdict: a member takes those of an admitted issuer that are of more use than its own.

Old certificates of a member are known to whoever was shown them, and their signatures stay good.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from neurogrid.errors import NeuroGridError
from neurogrid.p2p import Host, Identity, Stream
from neurogrid.p2p.trust import (
    COORDINATOR,
    TRUST_PROTOCOL,
    WORKER,
    Certificate,
    ClusterAdmission,
    Membership,
    NotAdmittedError,
    Refusal,
)
from neurogrid.p2p.trust.messages import Credentials, Verdict, read_frame, write_frames
from tests.conformance.admission import DAY, Scene, open_host, pair
from tests.conformance.networks import Network, in_memory, until
from tests.conformance.streams import serve_echo


def victim(scene: Scene, certificate: Certificate, directory: Path) -> ClusterAdmission:
    """A worker whose membership is on disk."""
    membership = Membership(scene.cluster.public_key, certificate, directory=directory)
    membership.save()
    return ClusterAdmission(membership, admits={COORDINATOR, WORKER}, clock=scene.clock)


def answer_with(host: Host, issued: bytes, shown: Credentials) -> list[Verdict]:
    """Serve exchanges with a certificate for whoever comes; returns what they say of it, in time."""
    verdicts: list[Verdict] = []

    async def answer(stream: Stream) -> None:
        await read_frame(stream)
        await write_frames(stream, Verdict(issued=issued), shown)
        verdicts.append(Verdict.decode(await read_frame(stream)))
        await stream.aclose()

    host.set_stream_handler(TRUST_PROTOCOL, answer)
    return verdicts


@in_memory
@pytest.mark.parametrize(
    ("giver", "given", "reason"),
    [
        ("stranger", "newer", Refusal.CERTIFICATE_REQUIRED),
        ("stranger", "older", Refusal.CERTIFICATE_REQUIRED),
        ("worker", "newer", Refusal.NO_ISSUER),
        ("issuer", "older", None),
        ("issuer", "of another role", Refusal.CERTIFICATE_INVALID),
        ("issuer", "of another peer", Refusal.WRONG_PEER),
        ("issuer", "revoked", Refusal.REVOKED),
    ],
)
async def test_what_is_of_no_use_is_not_taken(
    network: Network,
    scene: Scene,
    ours: Identity,
    theirs: Identity,
    tmp_path: Path,
    giver: str,
    given: str,
    reason: Refusal | None,
) -> None:
    """Neither in memory nor on disk."""
    held = scene.certificate(theirs, WORKER, days=20)
    newer = scene.certificate(theirs, WORKER, days=30)
    issued = {
        "newer": newer,
        "older": scene.certificate(theirs, WORKER, days=1),
        "of another role": scene.certificate(theirs, COORDINATOR),
        "of another peer": scene.certificate(ours, WORKER),
        "revoked": newer,
    }[given]
    policy = victim(scene, held, tmp_path / "victim")
    if given == "revoked":
        policy.membership.take_revocations(scene.cluster.revoke(serials=[newer.serial]))
    shown = {
        "stranger": Credentials(is_issuer=True),
        "worker": Credentials(scene.certificate(ours, WORKER).data),
        "issuer": Credentials(scene.certificate(ours, COORDINATOR).data, is_issuer=True),
    }[giver]
    async with pair(network, (theirs, policy), (ours, None)) as (worker, other):
        verdicts = answer_with(other, issued.data, shown)
        address = await network.address_of(other)
        if reason is None:
            await worker.connect(address)
            assert worker.role_of(other.peer_id) == COORDINATOR
        else:
            with pytest.raises(NotAdmittedError) as caught:
                await worker.connect(address)
            assert (caught.value.reason, caught.value.refused_by_peer) == (reason, False)
            assert [verdict.reason for verdict in verdicts] == [reason]
    assert policy.membership.certificate == held
    assert Membership.load(tmp_path / "victim").certificate == held


@in_memory
async def test_what_the_dialler_issues_is_taken_of_an_issuer_alone(
    network: Network, scene: Scene, ours: Identity, theirs: Identity, tmp_path: Path
) -> None:
    held = scene.certificate(theirs, WORKER, days=20)
    newer = scene.certificate(theirs, WORKER, days=30)
    for is_issuer in (False, True):
        policy = victim(scene, held, tmp_path / "victim")
        shown = Credentials(scene.certificate(ours, COORDINATOR).data, is_issuer=is_issuer)
        async with pair(network, (ours, None), (theirs, policy)) as (dialler, worker):
            address = await network.address_of(worker)
            stream = await _open(dialler, address)
            await write_frames(stream, shown)
            assert not Verdict.decode(await read_frame(stream)).reason
            await read_frame(stream)
            await write_frames(stream, Verdict(issued=newer.data))
            await stream.send_eof()
            if is_issuer:
                assert await stream.receive_some() == b""
                assert worker.role_of(dialler.peer_id) == COORDINATOR
            else:
                await worker.wait_disconnected(dialler.peer_id)
        expected = newer if is_issuer else held
        assert Membership.load(tmp_path / "victim").certificate == expected


async def _open(dialler: Host, address: str) -> Stream:
    peer_id = await dialler.connect(address)
    return await dialler.open_stream(peer_id, [TRUST_PROTOCOL])


@in_memory
@pytest.mark.parametrize("ill", ["expired", "from the future", "revoked"])
async def test_a_certificate_that_is_good_replaces_one_that_is_not(
    network: Network, scene: Scene, ours: Identity, theirs: Identity, tmp_path: Path, ill: str
) -> None:
    """By a ticket, also if the one that is no good would end later: the issuer's clock had been ahead."""
    start = scene.clock.now
    if ill == "from the future":
        scene.clock.now += 60 * DAY
    held = scene.certificate(theirs, WORKER)
    scene.clock.now = start + (40 * DAY if ill == "expired" else 0)
    policy = victim(scene, held, tmp_path / "victim")
    if ill == "revoked":
        policy.membership.take_revocations(scene.cluster.revoke(serials=[held.serial]))
    made = scene.cluster.ticket(ours.peer_id, [], now=scene.clock())
    joining = ClusterAdmission(
        policy.membership, admits={COORDINATOR}, ticket=made, clock=scene.clock
    )
    async with (
        open_host(network, ours, scene.issuer(ours)) as coordinator,
        open_host(network, theirs, joining) as worker,
    ):
        serve_echo(coordinator)
        try:
            await network.connect(worker, coordinator)
        except NeuroGridError as exc:
            pytest.fail(str(exc))
        assert coordinator.role_of(worker.peer_id) == WORKER
    kept = Membership.load(tmp_path / "victim").certificate
    assert kept is not None
    assert kept.serial != held.serial
    assert kept.not_before == int(scene.clock.now)


@in_memory
async def test_a_member_that_asks_for_renewal_is_served_though_the_issuer_cannot_read_its_list(
    network: Network, scene: Scene, ours: Identity, theirs: Identity, tmp_path: Path
) -> None:
    """Whoever of the two dials."""
    scene.clock.now += 16 * DAY
    issuer, now = scene.issuer(ours), scene.clock.now
    scene.clock.now -= 16 * DAY
    held = scene.certificate(theirs, WORKER)
    scene.clock.now = now
    (scene.cluster.directory / "revocations").write_bytes(b"\xc1")
    policy = victim(scene, held, tmp_path / "victim")

    def is_worker(coordinator: Host) -> bool:
        return coordinator.role_of(theirs.peer_id) == WORKER

    for worker_dials in (True, False):
        async with (
            open_host(network, ours, issuer) as coordinator,
            open_host(network, theirs, policy) as worker,
        ):
            serve_echo(coordinator)
            hosts = (worker, coordinator) if worker_dials else (coordinator, worker)
            await network.connect(*hosts)
            await until(partial(is_worker, coordinator))
    assert Membership.load(tmp_path / "victim").certificate == held
