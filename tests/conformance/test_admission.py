"""Who is admitted, over every network: each refusal with its name, and nothing served before.

Long, and one file: every refusal is shown on the same cluster of hosts, which is made at its top.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import trio

from neurogrid import p2p
from neurogrid.errors import PeerUnreachableError, StreamBrokenError
from neurogrid.p2p import PROTOCOL_V11, Host, Identity, Protocol, Stream
from neurogrid.p2p.trust import (
    COORDINATOR,
    TRUST_PROTOCOL,
    WORKER,
    Admission,
    AllowList,
    Certificate,
    Cluster,
    ClusterAdmission,
    Insecure,
    Membership,
    NotAdmittedError,
    Refusal,
    Ticket,
)
from neurogrid.p2p.trust.messages import Verdict, read_frame, write_frames
from tests.conformance.cancellation import attempts
from tests.conformance.networks import InMemory, Network, OverQuic, Runner, until
from tests.conformance.streams import ECHO, check_echo, echo, serve_echo

DAY = 86_400.0
START = 1_800_000_000.0


@dataclass
class Clock:
    """A wall clock that stands until it is set."""

    now: float = START

    def __call__(self) -> float:
        return self.now


@dataclass
class Scene:
    """One cluster, its clock, and who belongs to it."""

    cluster: Cluster
    clock: Clock = field(default_factory=Clock)

    def certificate(self, identity: Identity, role: str, *, days: float = 30) -> Certificate:
        return self.cluster.issue(identity.peer_id, role, lifetime=days * DAY, now=self.clock())

    def member(
        self, identity: Identity, role: str, *, admits: str | None = None, days: float = 30
    ) -> ClusterAdmission:
        """A member that admits the other role, unless told otherwise."""
        other = COORDINATOR if role == WORKER else WORKER
        return self.policy(self.certificate(identity, role, days=days), admits or other)

    def policy(self, certificate: Certificate | None, admits: str) -> ClusterAdmission:
        membership = Membership(self.cluster.public_key, certificate)
        return ClusterAdmission(membership, admits={admits}, clock=self.clock)

    def issuer(self, identity: Identity) -> ClusterAdmission:
        """The coordinator that has the cluster's key."""
        membership = Membership(self.cluster.public_key, self.certificate(identity, COORDINATOR))
        return ClusterAdmission(membership, admits={WORKER}, issuer=self.cluster, clock=self.clock)

    def joining(self, ticket: Ticket) -> ClusterAdmission:
        return ClusterAdmission(
            Membership(ticket.cluster_key), admits={COORDINATOR}, ticket=ticket, clock=self.clock
        )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(Cluster.create(tmp_path / "cluster"))


@pytest.fixture
def ours() -> Identity:
    return Identity.generate()


@pytest.fixture
def theirs() -> Identity:
    return Identity.generate()


def open_host(
    network: Network, identity: Identity, admission: Admission | None
) -> AbstractAsyncContextManager[Host]:
    if isinstance(network, InMemory):
        return network._network.open_host(identity=identity, admission=admission)
    listen = "/ip4/127.0.0.1/tcp/0"
    if isinstance(network, OverQuic):
        listen = "/ip4/127.0.0.1/udp/0/quic-v1"
    return p2p.open_host(listen=[listen], identity=identity, admission=admission)


@asynccontextmanager
async def pair(
    network: Network,
    dialler: tuple[Identity, Admission | None],
    listener: tuple[Identity, Admission | None],
) -> AsyncIterator[tuple[Host, Host]]:
    """Two hosts that serve echoes and are not connected."""
    async with (
        open_host(network, *dialler) as one,
        open_host(network, *listener) as other,
    ):
        serve_echo(one)
        serve_echo(other)
        yield one, other


def test_members_are_served(over: Runner, scene: Scene, ours: Identity, theirs: Identity) -> None:
    async def scenario(network: Network) -> None:
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

    over.run(scenario)


async def refusal_of(network: Network, one: Host, other: Host) -> NotAdmittedError:
    """Dial, and be refused; the connection ends on both sides, and nobody was told of it."""
    told: list[str] = []
    for host in (one, other):
        host.on_connected(told.append)
        host.on_disconnected(told.append)
    with pytest.raises(NotAdmittedError) as caught:
        await one.connect(await network.address_of(other))
    await one.wait_disconnected(other.peer_id)
    await other.wait_disconnected(one.peer_id)
    assert not told
    assert caught.value.peer_id == other.peer_id
    return caught.value


async def check_refused(one: Host, other: Host, protocol_id: str) -> None:
    """Assert that `other` does not serve `one` this protocol: the stream is reset, or does not come about."""
    try:
        stream = await one.open_stream(other.peer_id, [protocol_id])
    except PeerUnreachableError:
        return
    with pytest.raises(StreamBrokenError):
        await stream.receive_some()


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
def test_each_refusal_has_its_name(
    over: Runner,
    scene: Scene,
    ours: Identity,
    theirs: Identity,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    reason: Refusal,
    is_dialler: bool,
) -> None:
    is_mutual = reason is Refusal.WRONG_CLUSTER  # then who is dialled is the first to say no

    async def scenario(network: Network) -> None:
        refused = (theirs, stranger(scene, theirs, reason, tmp_path))
        refuser = (ours, scene.issuer(ours))
        first, second = (refused, refuser) if is_dialler else (refuser, refused)
        async with pair(network, first, second) as (one, other):
            error = await refusal_of(network, one, other)
            assert error.reason == reason
            assert error.refused_by_peer == (is_dialler or is_mutual)
            with pytest.raises(PeerUnreachableError):
                await one.open_stream(other.peer_id, [ECHO])

    with caplog.at_level(logging.WARNING, "neurogrid"):
        over.run(scenario)
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("gate")]
    assert len(lines) == 1
    named = ours if is_mutual and not is_dialler else theirs
    assert lines[0].startswith(f"refused {named.peer_id}: ")


def test_a_worker_cannot_pose_as_a_coordinator(
    over: Runner, scene: Scene, ours: Identity, theirs: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its Hello would say, and whoever it admits itself."""

    async def scenario(network: Network) -> None:
        poser = (theirs, scene.member(theirs, WORKER, admits=WORKER))
        async with pair(network, poser, (ours, scene.member(ours, WORKER))) as (one, other):
            Protocol(one, role="coordinator")
            Protocol(other, role="worker")
            error = await refusal_of(network, one, other)
            assert error.reason == Refusal.ROLE_NOT_ADMITTED
            assert error.refused_by_peer

    with caplog.at_level(logging.WARNING, "neurogrid"):
        over.run(scenario)
    assert f"refused {theirs.peer_id}: its role is worker" in caplog.text


def test_who_is_not_on_the_list_is_refused(
    over: Runner, ours: Identity, theirs: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(network: Network) -> None:
        listed = (ours, AllowList({ours.peer_id: WORKER}))
        async with pair(network, (theirs, Insecure()), listed) as (one, other):
            error = await refusal_of(network, one, other)
            assert error.reason == Refusal.NOT_ON_LIST
            error = await refusal_of(network, one, other)

    with caplog.at_level(logging.WARNING, "neurogrid"):
        over.run(scenario)
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("gate")]
    assert theirs.peer_id in line
    assert "--allow" in line


def test_who_is_on_the_list_has_its_role(over: Runner, ours: Identity, theirs: Identity) -> None:
    async def scenario(network: Network) -> None:
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

    def worker_again(identity: Identity, peer: Identity) -> tuple[Identity, Admission]:
        return identity, AllowList({peer.peer_id: COORDINATOR})

    over.run(scenario)


def test_a_listed_peer_need_not_know_the_protocol(
    over: Runner, ours: Identity, theirs: Identity
) -> None:
    async def scenario(network: Network) -> None:
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

    over.run(scenario)


def test_a_member_refuses_who_does_not_know_the_protocol(
    over: Runner, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    async def scenario(network: Network) -> None:
        member = (ours, scene.member(ours, COORDINATOR))
        async with pair(network, member, (theirs, None)) as (one, other):
            with pytest.raises(NotAdmittedError, match=TRUST_PROTOCOL) as caught:
                await one.connect(await network.address_of(other))
            assert caught.value.reason == Refusal.NOT_SPOKEN
            await other.wait_disconnected(one.peer_id)

    over.run(scenario)


def test_nothing_is_served_before(
    over: Runner,
    scene: Scene,
    ours: Identity,
    theirs: Identity,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that never shows anything: its streams are refused, and in the end its connection."""

    if over.name != "memory":
        monkeypatch.setattr("neurogrid.p2p.trust.gate.ADMISSION_TIMEOUT", 3.0)

    async def scenario(network: Network) -> None:
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

    with caplog.at_level(logging.WARNING, "neurogrid"):
        over.run(scenario)
    assert any(
        f"refused {theirs.peer_id}: it showed no credentials" in record.getMessage()
        for record in caplog.records
    )


def test_an_open_connection_ends_with_the_certificate(
    over: Runner, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    async def scenario(network: Network) -> None:
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

    over.run(scenario)


def test_an_open_connection_ends_with_a_revocation(
    over: Runner, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    """Also on a host that does not hold the cluster: it is shown the list."""

    async def scenario(network: Network) -> None:
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

    over.run(scenario)


def test_a_worker_joins_by_ticket(
    over: Runner, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    async def scenario(network: Network) -> None:
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

    over.run(scenario)


def test_a_coordinator_may_dial_who_has_a_ticket(
    over: Runner, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    async def scenario(network: Network) -> None:
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

    over.run(scenario)


def test_a_certificate_is_renewed_on_the_open_connection(
    over: Runner, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    async def scenario(network: Network) -> None:
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

    over.run(scenario)


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


def test_a_flood_of_peers_that_show_nothing_is_bounded(
    over: Runner, scene: Scene, ours: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neurogrid.p2p.trust.gate.MAX_UNADMITTED", 4)

    async def scenario(network: Network) -> None:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(
                open_host(network, ours, scene.member(ours, COORDINATOR))
            )
            serve_echo(server)
            address = await network.address_of(server)
            for _ in range(8):
                idle = await stack.enter_async_context(
                    open_host(network, Identity.generate(), None)
                )
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

    over.run(scenario)


def test_a_tolerated_peer_is_kept_and_not_served(
    over: Runner, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    async def scenario(network: Network) -> None:
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

    over.run(scenario)


def test_members_who_dial_each_other_at_once_are_admitted(
    over: Runner, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    async def scenario(network: Network) -> None:
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

    over.run(scenario)


def test_a_member_that_comes_back_is_admitted_again(
    over: Runner, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    """The one that stays may not have noticed that the other was gone."""

    async def scenario(network: Network) -> None:
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

    over.run(scenario)


def test_a_call_that_is_cancelled_leaves_nothing_half_done(
    over: Runner, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    async def scenario(network: Network) -> None:
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

    over.run(scenario)


def test_a_peer_that_does_not_answer_again_stays_admitted(
    over: Runner,
    scene: Scene,
    ours: Identity,
    theirs: Identity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until its certificate ends: a network that hangs for a while is no refusal."""
    if over.name != "memory":
        monkeypatch.setattr("neurogrid.p2p.trust.gate.ADMISSION_TIMEOUT", 2.0)

    async def scenario(network: Network) -> None:
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

    over.run(scenario)
