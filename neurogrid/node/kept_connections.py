"""Connections that a worker or a coordinator keeps: dialled again when they are lost, with growing pauses.

A worker keeps those to the coordinators that it was told of, for as long as it runs. A coordinator keeps those to its
workers, at the addresses that were typed and that discovery has.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import trio

from neurogrid.errors import (
    ConfigurationError,
    NeuroGridError,
    PeerRefusedError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.discovery import Discovery, PeerFound
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import parse_peer_address
from neurogrid.p2p.reach.backoff import Backoff
from neurogrid.p2p.reach.keeper import Keeper, KeeperLimits, keep_connections
from neurogrid.p2p.trust import NotAdmittedError, Refusal

__all__ = ["keep_coordinators", "keep_workers"]

logger = logging.getLogger(__name__)

# Seconds. Somebody waits at the other end: the first attempt comes soon, and none much later than a coordinator waits.
BACKOFF = Backoff(first=0.5, largest=15.0)
# What a worker that wants to join cannot mend by waiting: somebody has to give it another ticket.
TICKET_REFUSED = (
    Refusal.TOKEN_INVALID,
    Refusal.TOKEN_EXPIRED,
    Refusal.TOKEN_USED_UP,
    Refusal.TOKEN_VOID,
)


@asynccontextmanager
async def keep_coordinators(
    protocols: Sequence[Exchange], addresses: Sequence[str]
) -> AsyncIterator[Keeper]:
    """Keep connections to the peers at these full multiaddrs, and say to each what we are.

    Args:
        protocols: of one host, by each of which a peer that speaks it is told.

    Raises:
        ConfigurationError: one of the addresses is malformed, or our own.
        NotAdmittedError: the ticket that this host has is no good, which waiting does not mend; while the block runs.
    """
    host = protocols[0].host
    limits = KeeperLimits(backoff=BACKOFF, gone_after=math.inf)
    refusals: list[NotAdmittedError] = []
    is_refused = trio.Event()

    async def connect(address: str) -> str:
        try:
            return await host.connect(address)
        except NotAdmittedError as exc:
            if exc.reason in TICKET_REFUSED:
                refusals.append(exc)
                is_refused.set()
            raise

    async def end_when_refused() -> None:
        await is_refused.wait()
        raise refusals[0]

    with unwrap_errors():
        async with (
            keep_connections(host, limits=limits, connect=connect) as keeper,
            trio.open_nursery() as nursery,
        ):
            introduced: set[str] = set()

            def connected(peer_id: str) -> None:
                if peer_id in keeper.wanted:
                    host.start_soon(_introduce, protocols, peer_id, introduced)

            nursery.start_soon(end_when_refused)
            host.on_connected(connected)
            host.on_disconnected(introduced.discard)
            for peer_id, known in _by_peer(addresses).items():
                keeper.want(peer_id, known)
            yield keeper
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def keep_workers(
    protocol: Exchange, discovery: Discovery, addresses: Sequence[str]
) -> AsyncIterator[Callable[[str], None]]:
    """Keep connections to the workers of a coordinator: those whose peer ids are given to what is yielded.

    Args:
        protocol: on the coordinator's host.
        discovery: where their addresses come from, and new ones. A worker of which no address is known is waited
            for: it dialled us.
        addresses: full multiaddrs that were typed, of any peers.
    """
    named = _by_peer(addresses)
    limits = KeeperLimits(backoff=BACKOFF)
    async with (
        keep_connections(protocol.host, limits=limits, connect=discovery.connect) as keeper,
        trio.open_nursery() as nursery,
    ):

        def keep(peer_id: str) -> None:
            found = discovery.known.get(peer_id)
            _want(keeper, peer_id, [*named.get(peer_id, ()), *(found.addresses if found else ())])

        nursery.start_soon(_follow, discovery, keeper)
        yield keep
        nursery.cancel_scope.cancel()


async def _follow(discovery: Discovery, keeper: Keeper) -> None:
    """Learn where workers are that have moved."""
    async for change in discovery.peers():
        if isinstance(change, PeerFound) and change.peer_id in keeper.wanted:
            _want(keeper, change.peer_id, change.addresses)


def _want(keeper: Keeper, peer_id: str, addresses: Sequence[str]) -> None:
    try:
        keeper.want(peer_id, addresses)
    except ConfigurationError as exc:  # of others' making: what was typed has been checked by now
        logger.warning("%s is not dialled again when it is lost: %s", peer_id, exc)


async def _introduce(protocols: Sequence[Exchange], peer_id: str, introduced: set[str]) -> None:
    """Bring up the streams on which each side says what it is, of one protocol at least.

    Of two peers that dial each other at once each has two connections, of which one may be closed with its streams:
    so this is done for each, and told once.
    """
    num_failures = 0
    while protocols[0].host.is_connected(peer_id):
        errors: list[NeuroGridError] = []
        for protocol in protocols:
            try:
                await protocol.open(peer_id)
            except (TransportError, PeerRefusedError) as exc:
                errors.append(exc)
        if len(errors) == len(protocols):
            delay = min(BACKOFF.largest, BACKOFF.first * 2**num_failures)
            num_failures += 1
            logger.warning("%s; trying again in %.1f s", errors[0], delay)
            await trio.sleep(delay)
        else:
            if peer_id not in introduced:
                introduced.add(peer_id)
                logger.info("connected to the coordinator %s", peer_id)
            return


def _by_peer(addresses: Iterable[str]) -> Mapping[str, list[str]]:
    by_peer: dict[str, list[str]] = {}
    for address in addresses:
        by_peer.setdefault(parse_peer_address(address)[1], []).append(address)
    return by_peer
