"""Tickets for some machines and no more, and tickets that a revocation has made void, through hosts."""

from __future__ import annotations

import pytest
import trio

from neurogrid.errors import NeuroGridError
from neurogrid.p2p import Identity
from neurogrid.p2p.trust import NotAdmittedError, Refusal
from tests.conformance.admission import Scene, open_host
from tests.conformance.networks import Network, in_memory
from tests.conformance.streams import serve_echo


@in_memory
async def test_of_many_who_join_at_once_as_many_do_as_are_meant_to(
    network: Network, scene: Scene, ours: Identity
) -> None:
    """Each tries it three times: nobody spends two uses, and who was admitted once is admitted again."""
    made = scene.cluster.ticket(ours.peer_id, [], now=scene.clock(), max_uses=4)
    identities = [Identity.generate() for _ in range(12)]
    joined: list[str] = []
    refused: set[int] = set()

    async def join(network: Network, identity: Identity, address: str) -> None:
        for _ in range(3):
            async with open_host(network, identity, scene.joining(made)) as worker:
                try:
                    await worker.connect(address)
                except NotAdmittedError as exc:
                    refused.add(exc.reason)
                else:
                    joined.append(identity.peer_id)

    async with open_host(network, ours, scene.issuer(ours)) as coordinator:
        serve_echo(coordinator)
        address = await network.address_of(coordinator)
        async with trio.open_nursery() as nursery:
            for identity in identities:
                nursery.start_soon(join, network, identity, address)
    assert refused == {Refusal.TOKEN_USED_UP}
    assert len(set(joined)) == 4
    assert all(joined.count(peer_id) == 3 for peer_id in set(joined))


@in_memory
@pytest.mark.parametrize("max_uses", [0, 8])
async def test_who_was_revoked_does_not_come_back_by_the_same_ticket(
    network: Network, scene: Scene, ours: Identity, theirs: Identity, max_uses: int
) -> None:
    """Under another peer id, at once, also where the issuer has not looked at its list again."""
    made = scene.cluster.ticket(ours.peer_id, [], now=scene.clock(), max_uses=max_uses)

    async def reason_of(network: Network, identity: Identity, address: str) -> int:
        async with open_host(network, identity, scene.joining(made)) as worker:
            try:
                await worker.connect(address)
            except NotAdmittedError as exc:
                return exc.reason
            except NeuroGridError as exc:
                pytest.fail(str(exc))
        return 0

    async with open_host(network, ours, scene.issuer(ours)) as coordinator:
        address = await network.address_of(coordinator)
        assert not await reason_of(network, theirs, address)
        scene.cluster.revoke([theirs.peer_id])
        assert await reason_of(network, Identity.generate(), address) == Refusal.TOKEN_VOID
        assert await reason_of(network, theirs, address) == Refusal.TOKEN_VOID
