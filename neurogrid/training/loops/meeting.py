"""A host for a member of a run, and what leads others to it: a ticket, or on one machine an address."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.hosts.host import Host, is_loopback_address
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.trust import (
    COORDINATOR,
    WORKER,
    Cluster,
    ClusterAdmission,
    LoopbackOnly,
    Membership,
    Ticket,
    Whereabouts,
)
from neurogrid.p2p.trust.limits import CERTIFICATE_LIFETIME

__all__ = ["LISTEN", "Meeting", "open_meeting"]

LISTEN: Final = ("/ip4/0.0.0.0/tcp/0",)
"""Address for a member that was told none: all interfaces; only peers with the ticket are let in."""

_LOCAL: Final = ("/ip4/127.0.0.1/tcp/0",)


@dataclass(frozen=True, slots=True)
class Meeting:
    """A host, and the ways to others.

    Attributes:
        host: this member's.
        join: full multiaddrs of a member that is there; empty where this one is the first.
        invitation: what others are given to join: a ticket, or an address of this machine.
    """

    host: Host
    join: tuple[str, ...]
    invitation: str


@asynccontextmanager
async def open_meeting(
    where: str | None, *, listen: Sequence[str] = LISTEN
) -> AsyncIterator[Meeting]:
    """Open a host and find the others, until the block is left.

    Args:
        where: a ticket, or the address of a member on this machine; None is the first member, which makes the ticket.
            It is good for 30 days, and no longer than that member is there: nobody else lets others in.
        listen: multiaddrs to listen on. On loopback alone no ticket is needed; who joins there listens there, too.

    Raises:
        ConfigurationError: it is neither, or leads to another machine without a ticket; or a first member is to listen
            nowhere, or one that joins without a ticket elsewhere than on this machine.
    """
    if where is None and not listen:
        raise ConfigurationError(
            "others join the first member of a run where it listens, and listen= is empty: leave it out, or give a "
            "multiaddr"
        )
    is_local = all(is_loopback_address(address) for address in listen)
    async with AsyncExitStack() as stack:
        if where is None and not is_local:
            yield await _found(stack, listen)
        elif where is None:
            host = await stack.enter_async_context(
                open_host(listen=listen, admission=LoopbackOnly())
            )
            yield Meeting(host, (), host.addresses[0])
        elif where.startswith("/"):
            if not is_loopback_address(where):
                raise ConfigurationError(
                    f"a ticket leads to another machine, not an address: {where}"
                )
            if not is_local and tuple(listen) != LISTEN:
                raise ConfigurationError(
                    "a run that is joined without a ticket is of this machine alone, and listen= has "
                    f"{', '.join(listen)}: leave it out, or give an address of 127.0.0.1"
                )
            host = await stack.enter_async_context(
                open_host(listen=listen if is_local else _LOCAL, admission=LoopbackOnly())
            )
            yield Meeting(host, (where,), where)
        else:
            ticket = Ticket.parse(where)
            admission = ClusterAdmission(
                Membership(ticket.cluster_key), admits={COORDINATOR, WORKER}, ticket=ticket
            )
            host = await stack.enter_async_context(open_host(listen=listen, admission=admission))
            yield Meeting(host, tuple(ticket.whereabouts.dial_addresses), where)


async def _found(stack: AsyncExitStack, listen: Sequence[str]) -> Meeting:
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="neurogrid-run-"))
    cluster = Cluster.create(Path(directory) / "cluster")
    identity = Identity.generate()
    admission = ClusterAdmission(
        cluster.enrol(identity.peer_id, COORDINATOR), admits={COORDINATOR, WORKER}, issuer=cluster
    )
    host = await stack.enter_async_context(
        open_host(listen=listen, identity=identity, admission=admission)
    )
    where = Whereabouts.of(host.peer_id, host.addresses)
    # Its key is in this process alone, so there will be no other one.
    ticket = cluster.ticket(
        host.peer_id, where.addresses, relays=where.relays, lifetime=CERTIFICATE_LIFETIME
    )
    return Meeting(host, (), ticket.text())
