"""Find the workers of a coordinator: dial those that were named or are found, take in those that dial us.

Ends when enough are there, or at the deadline with what was tried and why it failed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import trio

from neurogrid.errors import (
    ConfigurationError,
    NeuroGridError,
    NoRouteError,
    PeerRefusedError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.inference.progress import Progress
from neurogrid.inference.remote_v10 import RemoteWorkerV10
from neurogrid.inference.remote_v11 import RemoteWorkerV11
from neurogrid.inference.remote_worker import RemoteWorker, Timeouts
from neurogrid.p2p.dialing import connect_any
from neurogrid.p2p.discovery import Discovery, PeerFound
from neurogrid.p2p.host import parse_peer_address
from neurogrid.p2p.protocol import Protocol
from neurogrid.p2p.wire import PROTOCOL_V10, Hello

__all__ = ["gather_workers", "look_for_workers"]

logger = logging.getLogger(__name__)

# Between attempts at an address where nobody answers yet. Seconds.
RETRY_DELAY = 0.5
# What that grows to for a peer that nobody named: it may be no concern of ours.
MAX_RETRY_DELAY = 8.0


async def gather_workers(
    protocol: Protocol,
    discovery: Discovery,
    *,
    addresses: Sequence[str],
    min_peers: int,
    wait: float,
    timeouts: Timeouts,
    progress: Progress,
) -> list[RemoteWorker]:
    """Return at least `min_peers` workers, in the order of `addresses`, then as they came.

    Raises:
        ConfigurationError: an address is malformed or our own.
        NoRouteError: fewer workers were there after `wait` seconds; `progress` is told what was tried.
    """
    gathering = _Gathering(protocol, discovery, timeouts, progress, min_peers)
    await gathering.run(addresses, wait)
    found = gathering.workers
    if len(found) < min_peers:
        progress.explained(str(discovery.explain()))
        reasons = "".join(f"; {reason}" for reason in gathering.failures.values())
        raise NoRouteError(
            f"{len(found)} of {min_peers} workers were there after {wait:g} s{reasons}. Start "
            "neurogrid-worker on the other machines and name its address with --peer"
        )
    named = [parse_peer_address(address)[1] for address in addresses]
    order = {peer_id: index for index, peer_id in enumerate(named)}
    return sorted(found.values(), key=lambda worker: order.get(worker.peer_id, len(order)))


async def look_for_workers(
    protocol: Protocol, discovery: Discovery, *, addresses: Sequence[str], wait: float
) -> list[str]:
    """Look for workers for `wait` seconds; returns their peer ids. `discovery.explain()` tells the rest.

    Raises:
        ConfigurationError: an address is malformed or our own.
    """
    gathering = _Gathering(protocol, discovery, Timeouts(), Progress(), sys.maxsize)
    await gathering.run(addresses, wait)
    return list(gathering.workers)


class _Gathering:
    def __init__(
        self,
        protocol: Protocol,
        discovery: Discovery,
        timeouts: Timeouts,
        progress: Progress,
        min_peers: int,
    ) -> None:
        self.workers: dict[str, RemoteWorker] = {}
        self.failures: dict[str, str] = {}
        self.enough = trio.Event()
        self.nursery: trio.Nursery | None = None
        self._protocol = protocol
        self._discovery = discovery
        self._timeouts = timeouts
        self._progress = progress
        self._min_peers = min_peers
        progress.waiting(0, min_peers)

    async def run(self, addresses: Sequence[str], wait: float) -> None:
        """Gather until there are enough, or for `wait` seconds."""
        host = self._protocol.host
        for address in addresses:
            _, peer_id = parse_peer_address(address)
            if peer_id == host.peer_id:
                raise ConfigurationError(f"{address} is this coordinator's own address")
        host.on_connected(self.on_connected)
        host.on_disconnected(self.on_disconnected)
        self._protocol.on_peer_opened(self.on_opened)
        with trio.move_on_after(wait):
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                for peer_id in host.connected_peers:
                    self.on_connected(peer_id)
                for address in dict.fromkeys(addresses):
                    nursery.start_soon(self.dial, address)
                nursery.start_soon(self.follow)
                await self.enough.wait()
                nursery.cancel_scope.cancel()
        self.nursery = None

    async def dial(self, address: str) -> None:
        """Try an address until somebody answers; the reasons are kept for the deadline."""
        while True:
            try:
                peer_id = await self._discovery.connect(address)
                await self._meet(peer_id)
                self.failures.pop(address, None)
                await self._protocol.host.wait_disconnected(peer_id)
            except (TransportError, PeerRefusedError, RemoteProtocolError) as exc:
                if self.failures.get(address) != str(exc):
                    logger.warning("%s; trying again", exc)
                self.failures[address] = str(exc)
            await trio.sleep(RETRY_DELAY)

    async def follow(self) -> None:
        """Dial whoever is found and may be a worker."""
        assert self.nursery is not None
        async for change in self._discovery.peers():
            if isinstance(change, PeerFound) and change.role in ("", "worker"):
                self.nursery.start_soon(self._dial_found, change)

    async def _dial_found(self, found: PeerFound) -> None:
        """Try a peer until it is connected, and again when it is lost; until it says no, or is known in another way.

        `on_connected` asks what it is.
        """
        host, delay = self._protocol.host, RETRY_DELAY
        while self._discovery.known.get(found.peer_id) == found:
            try:
                if found.peer_id not in host.connected_peers:
                    ways = host.ways_to(found.peer_id, found.addresses)
                    await connect_any(self._discovery.connect, ways)
                await host.wait_disconnected(found.peer_id)
                await trio.sleep(RETRY_DELAY)
            except TransportError as exc:
                logger.info("found %s, and could not connect: %s", found.peer_id, exc)
                await trio.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_DELAY)
            except NeuroGridError as exc:
                logger.warning("found %s, and will not use it: %s", found.peer_id, exc)
                return

    def on_connected(self, peer_id: str) -> None:
        """Somebody connected; ask what they are."""
        if self.nursery is not None and peer_id not in self.workers:
            self.nursery.start_soon(self._meet_unnamed, peer_id)

    def on_disconnected(self, peer_id: str) -> None:
        """A worker that has gone does not count; it may come back."""
        if self.nursery is not None and self.workers.pop(peer_id, None) is not None:
            self._progress.waiting(len(self.workers), self._min_peers)

    def on_opened(self, peer_id: str, hello: Hello) -> None:
        """A peer said what it is."""
        if hello.role == "worker":
            self._add(RemoteWorkerV11(self._protocol, peer_id, self._timeouts))

    async def _meet_unnamed(self, peer_id: str) -> None:
        try:
            await self._meet(peer_id)
        except NeuroGridError as exc:
            logger.debug("%s is no worker: %s", peer_id, exc)

    async def _meet(self, peer_id: str) -> None:
        if await self._protocol.open(peer_id) == PROTOCOL_V10:
            worker = RemoteWorkerV10(self._protocol, peer_id, self._timeouts)
            await worker.describe(assumed_bytes=0)
            self._add(worker)
            return
        hello = self._protocol.hello_of(peer_id)
        if hello is not None and hello.role != "worker":
            raise TransportError(f"{peer_id} is a {hello.role}, no worker")

    def _add(self, worker: RemoteWorker) -> None:
        if worker.peer_id in self.workers:
            return
        self.workers[worker.peer_id] = worker
        self._progress.waiting(len(self.workers), self._min_peers)
        if len(self.workers) >= self._min_peers:
            self.enough.set()
