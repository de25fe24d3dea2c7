"""A cluster, who belongs to it, and hosts that ask for credentials: for the tests of who is admitted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
)
from dataclasses import dataclass, field

import pytest

from neurogrid import p2p
from neurogrid.errors import PeerUnreachableError, StreamBrokenError
from neurogrid.p2p import Host, Identity
from neurogrid.p2p.trust import (
    COORDINATOR,
    WORKER,
    Admission,
    Certificate,
    Cluster,
    ClusterAdmission,
    Membership,
    NotAdmittedError,
    Ticket,
)
from tests.conformance.networks import InMemory, Network, OverQuic
from tests.conformance.streams import serve_echo

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
