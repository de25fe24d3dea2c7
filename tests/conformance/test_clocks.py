"""Wall clocks that are wrong, or jump while hosts are connected: who is admitted, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from neurogrid.p2p import Host, Identity
from neurogrid.p2p.trust import (
    COORDINATOR,
    WORKER,
    Certificate,
    ClusterAdmission,
    Membership,
    Refusal,
)
from tests.conformance.admission import DAY, START, Clock, Scene, open_host, pair, refusal_of
from tests.conformance.networks import Network, in_memory, until
from tests.conformance.streams import check_echo

HOUR = 3600.0


def worker_at(scene: Scene, clock: Clock, certificate: Certificate | None) -> ClusterAdmission:
    membership = Membership(scene.cluster.public_key, certificate)
    return ClusterAdmission(membership, admits={COORDINATOR}, clock=clock)


def wake(*hosts: Host) -> None:
    for host in hosts:
        assert host.gate is not None
        host.gate.wake()


@in_memory
@pytest.mark.parametrize(
    ("off", "reason", "parts"),
    [
        (31 * DAY, Refusal.EXPIRED, ("24 h ago", "2027-02-15 08:00:00", "own certificate, too")),
        (-2 * HOUR, Refusal.NOT_YET_VALID, ("in 2 h", "2027-01-15 06:00:00", "is behind the")),
    ],
)
async def test_who_has_a_wrong_clock_is_told_so(
    network: Network,
    scene: Scene,
    ours: Identity,
    theirs: Identity,
    caplog: pytest.LogCaptureFixture,
    off: float,
    reason: Refusal,
    parts: tuple[str, ...],
) -> None:
    """Which clock says what, by how much, and what to do: on the machine whose clock it is."""
    certificate = scene.certificate(theirs, WORKER)
    coordinator = scene.issuer(ours)
    clock = Clock(START + off)
    policy = worker_at(scene, clock, certificate)
    async with pair(network, (theirs, policy), (ours, coordinator)) as (worker, other):
        refused = await refusal_of(network, worker, other)
        assert (refused.reason, refused.refused_by_peer) == (reason, False)
        said = str(refused)
        assert all(part in said for part in parts), said
        assert "timedatectl" in said
    assert "nobody will admit this host" in caplog.text


@in_memory
async def test_who_is_refused_by_a_wrong_clock_is_told_what_its_own_says(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    ahead = Clock(START + 31 * DAY)
    certificate = scene.certificate(ours, COORDINATOR)
    coordinator = ClusterAdmission(
        Membership(scene.cluster.public_key, certificate), admits={WORKER}, clock=ahead
    )
    async with pair(network, (theirs, scene.member(theirs, WORKER)), (ours, coordinator)) as (
        worker,
        other,
    ):
        refused = await refusal_of(network, worker, other)
        assert (refused.reason, refused.refused_by_peer) == (Refusal.EXPIRED, True)
        said = str(refused)
        assert "by the clock of the host that says so (2027-02-15 08:00:00 UTC)" in said
        assert "By this machine's clock (2027-01-15 08:00:00 UTC) it is valid" in said


@in_memory
async def test_clocks_that_jump_together_cost_connections_and_nothing_else(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    """Ahead beyond every certificate, and back; the issuer's own, made meanwhile, is made again."""
    coordinator, member = scene.issuer(ours), scene.member(theirs, WORKER)
    async with pair(network, (theirs, member), (ours, coordinator)) as (worker, other):
        await network.connect(worker, other)
        scene.clock.now = START + 90 * DAY
        wake(other, worker)
        await worker.wait_disconnected(other.peer_id)
        await other.wait_disconnected(worker.peer_id)
        await until(lambda: _begins(coordinator) == START + 90 * DAY)
        scene.clock.now = START + 60
        wake(other, worker)
        await until(lambda: _begins(coordinator) == START + 60)
        await network.connect(worker, other)
        await check_echo(worker, other)


@in_memory
async def test_an_issuer_that_is_ahead_renews_nothing_that_others_cannot_use(
    network: Network,
    scene: Scene,
    ours: Identity,
    theirs: Identity,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A member keeps the certificate that it has while that is valid, and stays connected."""
    scene.clock.now = START - 16 * DAY
    held = scene.certificate(theirs, WORKER)
    scene.clock.now = START + 8 * DAY
    clock = Clock(START)
    policy = worker_at(scene, clock, held)
    certificate = scene.cluster.issue(ours.peer_id, COORDINATOR, now=START)
    issuer = ClusterAdmission(
        Membership(scene.cluster.public_key, certificate),
        admits={WORKER},
        issuer=scene.cluster,
        clock=scene.clock,
    )
    async with pair(network, (theirs, policy), (ours, issuer)) as (worker, other):
        await network.connect(worker, other)
        await check_echo(worker, other)
        assert policy.membership.certificate == held
        assert "sent a certificate that is left" in caplog.text
        # The clock is set right, and the member asks again.
        scene.clock.now = clock.now = START + 60
        wake(worker)
        await until(lambda: policy.membership.certificate != held)
        assert _begins(policy) == START + 60


def _begins(policy: ClusterAdmission) -> float:
    assert policy.membership.certificate is not None
    return policy.membership.certificate.not_before


@in_memory
async def test_a_member_whose_clock_goes_back_stays(
    network: Network, scene: Scene, ours: Identity, theirs: Identity, tmp_path: Path
) -> None:
    """By less than the allowance nothing happens; by more, it refuses until the clock is right again."""
    clock = Clock(START)
    policy = worker_at(scene, clock, scene.certificate(theirs, WORKER))
    async with (
        open_host(network, theirs, policy) as worker,
        open_host(network, ours, scene.member(ours, COORDINATOR)) as other,
    ):
        await network.connect(worker, other)
        clock.now = START - 299
        wake(worker)
        await network.connect(worker, other)
        clock.now = START - DAY
        wake(worker)
        # An open connection is judged by its end alone: nobody is cut off by a clock that is set back.
        await network.connect(worker, other)
        await worker.disconnect(other.peer_id)
        await other.wait_disconnected(worker.peer_id)
        assert (await refusal_of(network, worker, other)).reason == Refusal.NOT_YET_VALID
        clock.now = START
        await network.connect(worker, other)
