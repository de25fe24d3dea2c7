"""Members that join, come back, are renewed, or lose what admitted them: over every network."""

from __future__ import annotations

from contextlib import (
    suppress,
)
from functools import partial

import pytest
import trio

from neurogrid.errors import StreamBrokenError
from neurogrid.p2p import Host, Identity, Stream
from neurogrid.p2p.trust import (
    COORDINATOR,
    TRUST_PROTOCOL,
    WORKER,
    ClusterAdmission,
    NotAdmittedError,
    Refusal,
    Ticket,
)
from neurogrid.p2p.trust.messages import Verdict, read_frame, write_frames
from tests.conformance.admission import DAY, Scene, open_host, pair
from tests.conformance.cancellation import attempts
from tests.conformance.networks import Network, until
from tests.conformance.streams import ECHO, check_echo, serve_echo


async def test_an_open_connection_ends_with_the_certificate(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    policy = scene.member(ours, COORDINATOR)
    worker = (theirs, scene.member(theirs, WORKER, days=1))
    async with pair(network, (ours, policy), worker) as (one, other):
        await network.connect(one, other)
        told: list[str] = []
        one.on_disconnected(told.append)
        scene.clock.now += 2 * DAY
        assert one.gate is not None
        one.gate.wake()
        await one.wait_disconnected(other.peer_id)
        await other.wait_disconnected(one.peer_id)
        assert told == [other.peer_id]


async def test_an_open_connection_ends_with_a_revocation(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    """Also on a host that does not hold the cluster: it is shown the list."""
    other_worker = Identity.generate()
    async with (
        pair(network, (ours, scene.issuer(ours)), (theirs, scene.member(theirs, WORKER))) as (
            issuer,
            worker,
        ),
        open_host(
            network,
            other_worker,
            scene.policy(scene.certificate(other_worker, "relay"), COORDINATOR),
        ) as third,
    ):
        membership = scene.policy(scene.certificate(theirs, WORKER), COORDINATOR).membership
        await network.connect(issuer, worker)
        scene.cluster.revoke([other_worker.peer_id])
        assert issuer.gate is not None
        issuer.gate.wake()
        policy = worker.gate._admission if worker.gate else None
        assert isinstance(policy, ClusterAdmission)
        await until(lambda: policy.membership.revocations.version == 1)
        assert membership.revocations.version == 0
        assert worker.peer_id in issuer.connected_peers
        scene.cluster.revoke([theirs.peer_id])
        issuer.gate.wake()
        await worker.wait_disconnected(issuer.peer_id)
        assert not third.connected_peers


async def test_a_worker_joins_by_ticket(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    async with open_host(network, ours, scene.issuer(ours)) as coordinator:
        serve_echo(coordinator)
        address = await network.address_of(coordinator)
        made = scene.cluster.ticket(coordinator.peer_id, [address], now=scene.clock())
        policy = scene.joining(Ticket.parse(made.text(), now=scene.clock()))
        async with open_host(network, theirs, policy) as worker:
            serve_echo(worker)
            await worker.connect_any(Ticket.parse(made.text(), now=scene.clock()).addresses)
            await until(lambda: worker.peer_id in coordinator.connected_peers)
            assert coordinator.role_of(worker.peer_id) == WORKER
            await check_echo(worker, coordinator)
            certificate = policy.membership.certificate
            assert certificate is not None
            assert certificate.peer_id == worker.peer_id
        scene.clock.now += 2 * DAY  # the ticket has expired, the certificate has not
        again = scene.policy(certificate, COORDINATOR)
        async with open_host(network, theirs, again) as worker:
            await worker.connect(address)
        late = Identity.generate()
        async with open_host(network, late, scene.joining(made)) as worker:
            with pytest.raises(NotAdmittedError, match="ticket expired") as caught:
                await worker.connect(address)
            assert caught.value.reason == Refusal.TOKEN_EXPIRED


async def test_a_coordinator_may_dial_who_has_a_ticket(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    made = scene.cluster.ticket(ours.peer_id, [], now=scene.clock(), max_uses=1)
    joining = scene.joining(made)
    async with pair(network, (ours, scene.issuer(ours)), (theirs, joining)) as (one, other):
        await network.connect(one, other)
        await check_echo(other, one)
        assert joining.membership.certificate is not None
        second = Identity.generate()
        async with open_host(network, second, scene.joining(made)) as late:
            with pytest.raises(NotAdmittedError) as caught:
                await late.connect(await network.address_of(one))
            assert caught.value.reason == Refusal.TOKEN_USED_UP


async def test_a_certificate_is_renewed_on_the_open_connection(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    third = Identity.generate()
    worker_policy = scene.member(theirs, WORKER)
    watcher = scene.policy(scene.certificate(third, COORDINATOR, days=300), WORKER)
    async with (
        pair(network, (ours, scene.issuer(ours)), (theirs, worker_policy)) as (one, other),
        open_host(network, third, watcher) as bystander,
    ):
        await network.connect(one, other)
        await network.connect(bystander, other)
        ended: list[str] = []
        for host in (one, other, bystander):
            host.on_disconnected(ended.append)
        stream = await one.open_stream(other.peer_id, [ECHO])
        before = worker_policy.membership.certificate
        for _ in range(4):  # past the end of the first certificates
            scene.clock.now += 16 * DAY
            for host in (one, other, bystander):
                assert host.gate is not None
                host.gate.wake()
            renewed = partial(_is_valid_for, worker_policy, 29 * DAY)
            await until(renewed)
            for host in (one, bystander):
                await until(partial(_knows, host, worker_policy))
            await stream.send_all(b"still here")
            assert await stream.receive_some() == b"still here"
        assert before is not None
        assert scene.clock() > before.not_after
        assert not ended
        assert one.role_of(other.peer_id) == bystander.role_of(other.peer_id) == WORKER
        await stream.aclose()


def _is_valid_for(policy: ClusterAdmission, seconds: float) -> bool:
    certificate = policy.membership.certificate
    return certificate is not None and certificate.not_after - policy._clock() >= seconds


def _knows(host: Host, policy: ClusterAdmission) -> bool:
    """Whether the host was shown the certificate that the peer has now."""
    certificate = policy.membership.certificate
    assert host.gate is not None
    assert certificate is not None
    peer = host.gate._peers.get(certificate.peer_id)
    return (
        peer is not None
        and peer.admitted is not None
        and peer.admitted.serial == certificate.serial
    )


async def test_members_who_dial_each_other_at_once_are_admitted(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    coordinator = (ours, scene.member(ours, COORDINATOR))
    worker = (theirs, scene.member(theirs, WORKER))
    async with pair(network, coordinator, worker) as (one, other):
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(network.connect, one, other)
                nursery.start_soon(network.connect, other, one)
            await check_echo(one, other)
            await check_echo(other, one)
            assert one.role_of(other.peer_id) == WORKER
            await one.disconnect(other.peer_id)
            await one.wait_disconnected(other.peer_id)
            await other.wait_disconnected(one.peer_id)


async def test_a_member_that_comes_back_is_admitted_again(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    """The one that stays may not have noticed that the other was gone."""
    told: list[str] = []
    async with open_host(network, ours, scene.member(ours, COORDINATOR)) as stays:
        serve_echo(stays)
        stays.on_connected(told.append)
        address = await network.address_of(stays)
        for number in range(3):
            policy = scene.member(theirs, WORKER)
            async with open_host(network, theirs, policy) as comes_back:
                serve_echo(comes_back)
                await comes_back.connect(address)
                await until(lambda expected=number + 1: len(told) == expected)  # type: ignore[misc]
                await check_echo(comes_back, stays)
                await check_echo(stays, comes_back)
        assert told == [theirs.peer_id] * 3


async def test_a_call_that_is_cancelled_leaves_nothing_half_done(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    coordinator = (ours, scene.member(ours, COORDINATOR))
    worker = (theirs, scene.member(theirs, WORKER))
    async with pair(network, coordinator, worker) as (one, other):
        address = await network.address_of(other)
        for attempt in attempts():
            await attempt.run(one.connect, address)
            await network.connect(one, other)
            await check_echo(one, other)
            await check_echo(other, one)
            await one.disconnect(other.peer_id)
            await one.wait_disconnected(other.peer_id)
            await other.wait_disconnected(one.peer_id)


async def test_a_peer_that_does_not_answer_again_stays_admitted(
    network: Network,
    over: str,
    scene: Scene,
    ours: Identity,
    theirs: Identity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until its certificate ends: a network that hangs for a while is no refusal."""
    if over != "memory":
        monkeypatch.setattr("neurogrid.p2p.trust.gate.ADMISSION_TIMEOUT", 2.0)
    policy = scene.member(theirs, WORKER)
    num_asked = 0

    async def answer_once(stream: Stream) -> None:
        nonlocal num_asked
        num_asked += 1
        await read_frame(stream)
        if num_asked == 1:
            await write_frames(stream, Verdict(), policy.credentials(ours.peer_id))
            assert not Verdict.decode(await read_frame(stream)).reason
            await stream.aclose()
        else:
            with suppress(StreamBrokenError):
                await stream.receive_some()  # and never say anything

    async with pair(network, (ours, scene.issuer(ours)), (theirs, None)) as (one, other):
        other.set_stream_handler(TRUST_PROTOCOL, answer_once)
        await network.connect(one, other)
        scene.cluster.revoke([Identity.generate().peer_id])
        assert one.gate is not None
        one.gate.wake()
        await until(lambda: num_asked == 2)
        one.gate.wake()  # one exchange at a time: the next follows when this one is given up
        await until(lambda: num_asked == 3)
        assert one.role_of(other.peer_id) == WORKER
        await check_echo(one, other)
        scene.clock.now += 31 * DAY
        one.gate.wake()
        await one.wait_disconnected(other.peer_id)
