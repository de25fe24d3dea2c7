"""A worker that joins by a ticket, and its coordinator, who dial each other at the same time: over every network.

Each of them begins an exchange of credentials, and the worker may show its token in both. One use is spent, and one
certificate is given.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress

import pytest
import trio

from neurogrid.errors import NeuroGridError
from neurogrid.node.kept_connections import keep_coordinators
from neurogrid.p2p import Host, Identity, Protocol
from neurogrid.p2p.memory import Link
from neurogrid.p2p.trust import (
    COORDINATOR,
    WORKER,
    Admitted,
    ClusterAdmission,
    NotAdmittedError,
    Refusal,
    Ticket,
)
from neurogrid.p2p.trust.gated_peer import GatedPeer
from neurogrid.p2p.trust.messages import Credentials
from neurogrid.p2p.trust.private_files import locked
from tests.conformance.admission import Scene, open_host, pair, refusal_of
from tests.conformance.networks import InMemory, Network, in_memory, until
from tests.conformance.streams import check_echo, serve_echo

DELAY = 0.01  # seconds, one way
# When the coordinator's dial arrives after the worker's: before, in each step of, and after the worker's exchange.
LATER = [(n + 0.5) * DELAY / 4 for n in range(20)]


class Issuer(ClusterAdmission):
    """Counts how often it was shown a token."""

    num_tokens = 0

    def judge(self, peer_id: str, shown: Credentials) -> Admitted:
        self.num_tokens += bool(shown.token)
        return super().judge(peer_id, shown)


def issuer(scene: Scene, identity: Identity) -> Issuer:
    plain = scene.issuer(identity)
    return Issuer(plain.membership, admits={WORKER}, issuer=scene.cluster, clock=scene.clock)


def ticket(scene: Scene, coordinator: Identity, *, max_uses: int) -> Ticket:
    return scene.cluster.ticket(coordinator.peer_id, [], now=scene.clock(), max_uses=max_uses)


def dial_back(worker: Host, coordinator: Host) -> None:
    """What both hosts note when a dial of the coordinator's arrives besides the worker's own."""
    coordinator._note_connected(worker.peer_id, is_dialler=True)
    worker._note_connected(coordinator.peer_id, is_dialler=False)


async def check_members(worker: Host, coordinator: Host, policy: ClusterAdmission) -> None:
    """Each is admitted by the other once no exchange is under way, by the one certificate that was given."""
    seen, known = known_of(worker, coordinator), known_of(coordinator, worker)
    await until(lambda: not seen.num_exchanges and not known.num_exchanges)
    assert coordinator.role_of(worker.peer_id) == WORKER
    assert worker.role_of(coordinator.peer_id) == COORDINATOR
    assert policy.membership.certificate is not None
    assert known.admitted is not None
    assert known.admitted.serial == policy.membership.certificate.serial
    await check_echo(worker, coordinator)
    await check_echo(coordinator, worker)


def known_of(host: Host, peer: Host) -> GatedPeer:
    assert host.gate is not None
    return host.gate._peers[peer.peer_id]


async def check_used_up(network: Network, made: Ticket, scene: Scene, coordinator: Host) -> None:
    """Nobody else joins by this ticket."""
    async with open_host(network, Identity.generate(), scene.joining(made)) as late:
        with pytest.raises(NotAdmittedError) as caught:
            await late.connect(await network.address_of(coordinator))
        assert caught.value.reason == Refusal.TOKEN_USED_UP


def lines_of(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


@in_memory
@pytest.mark.parametrize("max_uses", [1, 0], ids=["one_use", "any_number"])
async def test_exchanges_that_cross_redeem_a_ticket_once(
    network: Network, scene: Scene, ours: Identity, caplog: pytest.LogCaptureFixture, max_uses: int
) -> None:
    caplog.set_level(logging.INFO, "neurogrid")
    num_tokens: list[int] = []
    assert isinstance(network, InMemory)
    network._network.set_link(Link(delay=DELAY))
    for later in LATER:
        caplog.clear()
        made = ticket(scene, ours, max_uses=max_uses)
        judging, joining = issuer(scene, ours), scene.joining(made)
        async with pair(network, (Identity.generate(), joining), (ours, judging)) as (
            worker,
            coordinator,
        ):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(network.connect, worker, coordinator)
                await trio.sleep(2 * DELAY + later)
                dial_back(worker, coordinator)
            await check_members(worker, coordinator, joining)
            num_tokens.append(judging.num_tokens)
            assert len(lines_of(caplog, "has joined as worker, by a ticket")) == 1
            assert len(lines_of(caplog, "certificate as worker until")) == 1
            if max_uses:
                await check_used_up(network, made, scene, coordinator)
    assert set(num_tokens) == {1, 2}  # some crossed, some did not


@in_memory
async def test_a_certificate_that_was_lost_on_its_way_is_given_again(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    """Also by a coordinator that was started again: a ticket of one use lets its worker in, and nobody else."""
    assert isinstance(network, InMemory)
    network._network.set_link(Link(delay=DELAY))
    num_lost = 0
    for later in LATER:
        made = ticket(scene, ours, max_uses=1)
        for attempt in range(2):
            joining = scene.joining(made)  # what was on its way is all that there was
            judging = issuer(scene, ours)
            async with pair(network, (theirs, joining), (ours, judging)) as (worker, coordinator):
                if attempt:
                    await network.connect(worker, coordinator)
                    await check_members(worker, coordinator, joining)
                    await check_used_up(network, made, scene, coordinator)
                    continue
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_try_to_connect, network, worker, coordinator)
                    await trio.sleep(2 * DELAY + later)
                    network.cut(worker, coordinator)
                    nursery.cancel_scope.cancel()
                num_lost += bool(judging.num_tokens) and joining.membership.certificate is None
    assert num_lost


async def _try_to_connect(network: Network, one: Host, other: Host) -> None:
    with suppress(NeuroGridError):
        await one.connect(await network.address_of(other))


@in_memory
async def test_a_worker_says_once_that_it_is_connected(
    network: Network,
    scene: Scene,
    ours: Identity,
    theirs: Identity,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each time that it was not, whoever dials."""
    caplog.set_level(logging.INFO, "neurogrid")
    assert isinstance(network, InMemory)
    network._network.set_link(Link(delay=DELAY))
    joining = scene.joining(ticket(scene, ours, max_uses=1))
    async with pair(network, (theirs, joining), (ours, issuer(scene, ours))) as (
        worker,
        coordinator,
    ):
        Protocol(coordinator, role="coordinator")
        address = await network.address_of(coordinator)
        async with keep_coordinators([Protocol(worker, role="worker")], [address]):
            for num_times in (1, 2):
                await until(lambda: worker.peer_id in coordinator.unadmitted_peers)
                dial_back(worker, coordinator)
                await check_members(worker, coordinator, joining)
                await trio.sleep(1)
                dial_back(worker, coordinator)
                await trio.sleep(1)
                assert len(lines_of(caplog, "connected to the coordinator")) == num_times
                network.cut(worker, coordinator)
                await coordinator.wait_disconnected(worker.peer_id)


async def test_who_dial_each_other_at_once_spend_one_use(
    network: Network, scene: Scene, ours: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "neurogrid")
    async with open_host(network, ours, issuer(scene, ours)) as coordinator:
        serve_echo(coordinator)
        for _ in range(3):
            caplog.clear()
            made = ticket(scene, ours, max_uses=1)
            joining = scene.joining(made)
            async with open_host(network, Identity.generate(), joining) as worker:
                serve_echo(worker)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(network.connect, worker, coordinator)
                    nursery.start_soon(network.connect, coordinator, worker)
                await check_members(worker, coordinator, joining)
                assert len(lines_of(caplog, "has joined as worker, by a ticket")) == 1
                assert len(lines_of(caplog, "certificate as worker until")) == 1
                await check_used_up(network, made, scene, coordinator)


@in_memory
async def test_others_are_served_while_the_directory_is_locked(
    network: Network, scene: Scene, ours: Identity, theirs: Identity
) -> None:
    """As by a command that was stopped: whoever joins meanwhile waits for it, and nobody else does."""
    joining = scene.joining(ticket(scene, ours, max_uses=1))
    third = Identity.generate()
    async with (
        pair(network, (theirs, joining), (ours, issuer(scene, ours))) as (worker, coordinator),
        open_host(network, third, scene.member(third, WORKER)) as member,
    ):
        await network.connect(member, coordinator)
        async with trio.open_nursery() as nursery:
            with locked(scene.cluster.directory):
                nursery.start_soon(network.connect, worker, coordinator)
                await trio.sleep(1)
                assert known_of(coordinator, worker).num_exchanges
                await check_echo(member, coordinator)
                assert joining.membership.certificate is None
        await check_members(worker, coordinator, joining)


@in_memory
async def test_who_joins_by_a_directory_that_stays_locked_is_told(
    network: Network,
    scene: Scene,
    ours: Identity,
    theirs: Identity,
    caplog: pytest.LogCaptureFixture,
) -> None:
    joining = scene.joining(ticket(scene, ours, max_uses=1))
    async with pair(network, (theirs, joining), (ours, issuer(scene, ours))) as (
        worker,
        coordinator,
    ):
        with locked(scene.cluster.directory):
            refused = await refusal_of(network, worker, coordinator)
        assert refused.reason == Refusal.NO_ISSUER
        assert "directory is locked" in str(refused)
        assert lines_of(caplog, f"(process {os.getpid()} on ")
        await network.connect(worker, coordinator)
        await check_members(worker, coordinator, joining)
