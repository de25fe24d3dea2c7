"""Who is refused, by a real worker and by a real coordinator, over TCP and over QUIC: each for its reason, named in
the refuser's log, with nothing served; and the cluster generates as before.

What stands elsewhere, and is not repeated: members whose certificate expires or is revoked while they are connected
(tests/conformance/test_admission.py, test_trust_commands.py), a liar that is dialled (the former, and
test_trust_streams.py), routes and the activations that they allow (test_chain.py), records that are forged, expired
or replayed (tests/unit/test_records.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trio

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.errors import NeuroGridError, PeerRefusedError, TransportError
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.p2p import Identity, MessageType, Protocol, TensorMessage, new_request_id, open_host
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.trust import (
    COORDINATOR,
    WORKER,
    Admission,
    AllowList,
    Cluster,
    ClusterAdmission,
    Insecure,
    JoinToken,
    Membership,
    NotAdmittedError,
    Ticket,
)
from neurogrid.p2p.wire import ErrorCode
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker

LISTEN = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")
TRANSPORTS = ("tcp", "quic")
LONG_AGO = 1_000_000_000.0
PROMPT = (1, 2, 3)


@dataclass(frozen=True)
class Attack:
    """What somebody tries who has no business here.

    Attributes:
        shows: what it shows of itself; None does not speak of it at all.
        says: a pattern of what the refuser's log says of it.
        sends: what it asks for, should it get that far.
        tells: whether the refuser says why; who never showed anything is just disconnected.
    """

    shows: Callable[[Scene, Identity, str], Admission | None]
    says: str
    sends: MessageType = MessageType.MODEL_CONFIG
    tells: bool = True


@dataclass(frozen=True)
class Scene:
    """A cluster and one that is another."""

    cluster: Cluster
    other: Cluster

    def member(self, certificate_of: Cluster, identity: Identity, role: str) -> Membership:
        return Membership(certificate_of.public_key, certificate_of.issue(identity.peer_id, role))


EVERYBODY = {COORDINATOR, WORKER}


def nothing(scene: Scene, identity: Identity, role: str) -> Admission:
    return ClusterAdmission(Membership(scene.cluster.public_key), admits=EVERYBODY)


def silence(scene: Scene, identity: Identity, role: str) -> None:
    return None


def other_cluster(scene: Scene, identity: Identity, role: str) -> Admission:
    return ClusterAdmission(scene.member(scene.other, identity, role), admits=EVERYBODY)


def somebody_elses(scene: Scene, identity: Identity, role: str) -> Admission:
    """A certificate of another peer's, as if it were our own."""
    stolen = scene.cluster.issue(Identity.generate().peer_id, role)
    mine = replace(stolen, peer_id=identity.peer_id)
    return ClusterAdmission(Membership(scene.cluster.public_key, mine), admits=EVERYBODY)


def forged(scene: Scene, identity: Identity, role: str) -> Admission:
    signed = scene.cluster.issue(identity.peer_id, role)
    data = bytes([signed.data[0] ^ 1]) + signed.data[1:]
    membership = Membership(scene.cluster.public_key, replace(signed, data=data))
    return ClusterAdmission(membership, admits=EVERYBODY)


def expired(scene: Scene, identity: Identity, role: str) -> Admission:
    old = scene.cluster.issue(identity.peer_id, role, now=LONG_AGO)
    return ClusterAdmission(Membership(scene.cluster.public_key, old), admits=EVERYBODY)


def revoked(scene: Scene, identity: Identity, role: str) -> Admission:
    """Shows no list itself: the refuser knows."""
    membership = scene.member(scene.cluster, identity, role)
    scene.cluster.revoke([identity.peer_id])
    return ClusterAdmission(membership, admits=EVERYBODY)


def same_role(scene: Scene, identity: Identity, role: str) -> Admission:
    """A member, but of the refuser's own kind: it takes its orders from others."""
    wrong = WORKER if role == COORDINATOR else COORDINATOR
    return ClusterAdmission(scene.member(scene.cluster, identity, wrong), admits=EVERYBODY)


def right_role(scene: Scene, identity: Identity, role: str) -> Admission:
    return ClusterAdmission(scene.member(scene.cluster, identity, role), admits=EVERYBODY)


def unlisted(scene: Scene, identity: Identity, role: str) -> Admission:
    return Insecure()


def old_ticket(scene: Scene, identity: Identity, role: str) -> Admission:
    ticket = scene.cluster.ticket(REFUSER[0], [], now=LONG_AGO)
    return ClusterAdmission(Membership(ticket.cluster_key), admits=EVERYBODY, ticket=ticket)


def false_ticket(scene: Scene, identity: Identity, role: str) -> Admission:
    """The right cluster and coordinator, and a token that another cluster has signed."""
    token: JoinToken = scene.other.ticket(REFUSER[0], []).token
    ticket = Ticket(scene.cluster.public_key, REFUSER[0], (), (), token)
    return ClusterAdmission(Membership(ticket.cluster_key), admits=EVERYBODY, ticket=ticket)


# Whom tickets are shown to: the coordinator of the test that runs.
REFUSER = [""]

# Who is a worker and a member is asked what it has, and only then does what a worker may not.
HARMLESS = {"hello", "error", "layer_request", "gpu_info_request", "device_info_request"}

ATTACKS = {
    "no certificate": Attack(nothing, "no certificate of cluster"),
    "does not answer": Attack(silence, "it showed no credentials within", tells=False),
    "another cluster": Attack(other_cluster, "the certificate is of cluster"),
    "another's certificate": Attack(somebody_elses, "the certificate is that of"),
    "forged": Attack(forged, "not signed by the cluster's key"),
    "expired": Attack(expired, "the certificate expired at 2001"),
    "revoked": Attack(revoked, "was revoked by the cluster"),
}
ON_A_WORKER = {
    **ATTACKS,
    "a worker that poses as coordinator": Attack(
        same_role,
        "MODEL_CONFIG is taken from coordinator, and the sender is a worker",
    ),
    "a worker that assigns": Attack(
        same_role, "ASSIGN is taken from coordinator, and", sends=MessageType.ASSIGN
    ),
    "a worker that brings weights": Attack(
        same_role,
        "an offer that nobody asked for is taken from coordinator, and",
        sends=MessageType.TRANSFER_OFFER,
    ),
    "a worker that opens a session": Attack(
        same_role,
        "SESSION_OPEN is taken from coordinator, and",
        sends=MessageType.SESSION_OPEN,
    ),
}
ON_A_COORDINATOR = {
    **ATTACKS,
    "a second coordinator": Attack(same_role, "its role is coordinator; admitted here: worker"),
    "a worker that poses as coordinator": Attack(
        right_role, "MODEL_CONFIG is taken from nobody, and the sender is a worker"
    ),
    "a worker that has it compute": Attack(
        right_role, "ACTIVATION is taken from nobody, and", sends=MessageType.ACTIVATION
    ),
    "an old ticket": Attack(old_ticket, "the ticket expired at 2001"),
    "a false ticket": Attack(false_ticket, "the join token is not signed by"),
}

ON_A_LIST = {
    "not on the list": Attack(unlisted, "is not on the list of allowed peers"),
    "a member of a cluster": Attack(right_role, "is not on the list of allowed peers"),
}
Identities = dict[tuple[str, str], tuple[Identity, Admission | None]]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(Cluster.create(tmp_path / "cluster"), Cluster.create(tmp_path / "other"))


@contextmanager
def worker_on_both(directory: Path, *args: str) -> Iterator[tuple[WorkerProcess, list[str]]]:
    """A worker, with its addresses over TCP and over QUIC."""
    listen = [part for address in LISTEN for part in ("--listen", address)]
    identity = ("--identity", str(directory / "worker.key"))
    with start_worker(directory, *listen, *identity, *args) as worker:
        assert worker.process.stdout is not None
        second = worker.process.stdout.readline().strip()
        yield worker, sorted([worker.address, second], key=lambda address: "quic" in address)


@contextmanager
def member_worker(scene: Scene, directory: Path) -> Iterator[tuple[WorkerProcess, list[str]]]:
    identity = Identity.load(directory / "worker.key")
    certificate = scene.cluster.issue(identity.peer_id, WORKER)
    Membership(
        scene.cluster.public_key,
        certificate,
        revocations=scene.cluster.revocations(),
        directory=directory / "member",
    ).save()
    with worker_on_both(directory, "--cluster", str(directory / "member")) as worker:
        yield worker


def issuer(scene: Scene, directory: Path) -> Admission:
    """What the coordinator admits by, which has the cluster's key."""
    identity = Identity.load(directory / "coordinator.key")
    membership = Membership(
        scene.cluster.public_key, scene.cluster.issue(identity.peer_id, COORDINATOR)
    )
    return ClusterAdmission(membership, admits={WORKER}, issuer=scene.cluster)


async def coordinate(
    admission: Admission,
    worker_address: str,
    directory: Path,
    work: Callable[[Coordinator], Awaitable[None]],
) -> None:
    """Run a coordinator that gives the worker its layers; generate before and after `work`."""
    settings = CoordinatorSettings(
        peers=(worker_address,),
        listen=LISTEN,
        identity_file=directory / "coordinator.key",
        admission=admission,
    )
    with trio.fail_after(DEADLINE):
        async with open_coordinator(settings) as coordinator:
            before = [token async for token in coordinator.generate(PROMPT, max_tokens=4)]
            await work(coordinator)
            after = [token async for token in coordinator.generate(PROMPT, max_tokens=4)]
            assert after == before


def addresses_of(coordinator: Coordinator) -> list[str]:
    """Over TCP and over QUIC."""
    own = coordinator._protocol.host.addresses
    return [
        next(address for address in own if ("quic" in address) == is_quic)
        for is_quic in (False, True)
    ]


async def attack(
    attack: Attack, admission: Admission | None, identity: Identity, address: str, role: str
) -> tuple[NeuroGridError, Libp2pHost]:
    """Connect, say what we are, and ask; the refusal, and the host, which has ended."""
    async with open_host(listen=[LISTEN[0]], identity=identity, admission=admission) as host:
        protocol = Protocol(host, role=role)
        try:
            peer_id = await host.connect(address)
            await protocol.open(peer_id)
            message = TensorMessage(
                msg_type=attack.sends, request_id=new_request_id(), data=b"not looked at"
            )
            await protocol.request(peer_id, message, MessageType.CONFIG_ACK, timeout=DEADLINE)
        except (PeerRefusedError, TransportError) as exc:
            if not attack.tells:
                await host.wait_disconnected(address.rpartition("/")[2])
            for kind in (MessageType.WEIGHTS, MessageType.RESPONSE):
                counted = protocol.counters.total(Direction.RECEIVED, msg_type=kind)
                assert counted.num_bytes == 0
            return exc, host
    raise AssertionError("it was served")


async def run_attacks(
    attacks: dict[str, Attack],
    addresses: Sequence[str],
    role: str,
    log: Callable[[], str],
    identities: Identities,
) -> None:
    """Every attack over every transport, all at once; assert what each was told and what the log says."""

    async def one(name: str, transport: str, address: str) -> None:
        identity, admission = identities[name, transport]
        wanted = attacks[name]
        error, _ = await attack(wanted, admission, identity, address, role)
        where = f"{name} over {transport}: {error!r}"
        if wanted.tells:
            assert isinstance(error, PeerRefusedError), where
            assert isinstance(error, NotAdmittedError) or error.code == ErrorCode.UNAUTHORIZED, (
                where
            )
            assert re.search(wanted.says, str(error)), where
        while not any(
            identity.peer_id in line and re.search(wanted.says, line) for line in log().splitlines()
        ):
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        for name in attacks:
            for transport, address in zip(TRANSPORTS, addresses, strict=True):
                nursery.start_soon(one, name, transport, address)


def disguises(attacks: dict[str, Attack], scene: Scene, role: str) -> Identities:
    """Who attacks: an identity for each attack and transport, and what it shows."""
    made = {}
    for name, one in attacks.items():
        for transport in TRANSPORTS:
            identity = Identity.generate()
            made[name, transport] = identity, one.shows(scene, identity, role)
    return made


def check_sent_nothing(coordinator: Coordinator, identities: Identities) -> None:
    """Assert that no attacker was sent anything but who we are, why not, and questions."""
    sent = coordinator.counters.snapshot()
    for identity, _ in identities.values():
        by_type = sent.get(identity.peer_id, {}).get("sent", {})
        assert set(by_type) <= HARMLESS, by_type


def test_a_worker_and_a_coordinator_refuse(
    scene: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both at once: who shows nothing is waited for."""
    caplog.set_level(logging.INFO, logger="neurogrid")
    REFUSER[0] = Identity.load(tmp_path / "coordinator.key").peer_id
    on_worker = disguises(ON_A_WORKER, scene, COORDINATOR)
    on_coordinator = disguises(ON_A_COORDINATOR, scene, WORKER)
    with member_worker(scene, tmp_path) as (worker, addresses):

        async def work(coordinator: Coordinator) -> None:
            own = addresses_of(coordinator)
            async with trio.open_nursery() as nursery:
                for attacks, at, role, log, identities in (
                    (ON_A_WORKER, addresses, COORDINATOR, lambda: worker.log, on_worker),
                    (ON_A_COORDINATOR, own, WORKER, lambda: caplog.text, on_coordinator),
                ):
                    nursery.start_soon(run_attacks, attacks, at, role, log, identities)
            check_sent_nothing(coordinator, on_coordinator)

        trio.run(coordinate, issuer(scene, tmp_path), addresses[0], tmp_path, work)
        assert worker.is_alive()
        assert worker.log.count(" serves ") == 1


def test_who_is_not_on_the_list_is_refused(
    scene: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the worker and by the coordinator; a certificate is of no help."""
    caplog.set_level(logging.INFO, logger="neurogrid")
    on_both = [disguises(ON_A_LIST, scene, role) for role in (COORDINATOR, WORKER)]
    names = {
        role: Identity.load(tmp_path / f"{role}.key").peer_id for role in (COORDINATOR, WORKER)
    }
    allow = ("--allow", f"{names[COORDINATOR]}=coordinator")
    with worker_on_both(tmp_path, *allow) as (worker, addresses):

        async def work(coordinator: Coordinator) -> None:
            await run_attacks(ON_A_LIST, addresses, COORDINATOR, lambda: worker.log, on_both[0])
            own = addresses_of(coordinator)
            await run_attacks(ON_A_LIST, own, WORKER, lambda: caplog.text, on_both[1])
            check_sent_nothing(coordinator, on_both[1])

        listed = AllowList({names[WORKER]: WORKER}, admits={WORKER})
        trio.run(coordinate, listed, addresses[0], tmp_path, work)
        assert worker.log.count(" serves ") == 1
