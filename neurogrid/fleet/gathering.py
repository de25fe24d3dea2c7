"""Find the workers of a coordinator: dial those that were named or are found, take in those that dial us.

It goes on for as long as the coordinator runs: a lost worker is dialled again, and a later one is taken in.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import trio

from neurogrid.errors import (
    ConfigurationError,
    NeuroGridError,
    NoRouteError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.fleet.progress import FleetProgress
from neurogrid.fleet.remote_worker import RemoteWorker
from neurogrid.p2p.discovery import Discovery, PeerFound
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.dialing import connect_any
from neurogrid.p2p.hosts.host import parse_peer_address
from neurogrid.p2p.trust import SILENCE, NotAdmittedError
from neurogrid.p2p.wire import PROTOCOL_V11, Hello
from neurogrid.renewed_event import RenewedEvent

__all__ = ["Gathering", "MakeRemoteWorker", "look_for_workers", "open_gathering"]

logger = logging.getLogger(__name__)

MakeRemoteWorker: TypeAlias = Callable[[str, str], RemoteWorker]
"""Gives how a worker is spoken to, by its peer id and the protocol id of its stream."""

# Between attempts at an address where nobody answers yet. Seconds.
RETRY_DELAY = 0.5
# What that grows to for a peer that nobody named: it may be no concern of ours.
MAX_RETRY_DELAY = 8.0


@asynccontextmanager
async def open_gathering(
    protocol: Exchange,
    discovery: Discovery,
    *,
    addresses: Sequence[str],
    make_worker: MakeRemoteWorker,
    progress: FleetProgress,
) -> AsyncIterator[Gathering]:
    """Dial, follow what is found and take in workers that dial, until the block is left.

    Raises:
        ConfigurationError: an address is malformed or our own.
    """
    gathering = Gathering(protocol, discovery, make_worker, progress, addresses)
    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            gathering.start(nursery)
            try:
                yield gathering
            finally:
                gathering.stop()
                nursery.cancel_scope.cancel()


async def look_for_workers(
    protocol: Exchange,
    discovery: Discovery,
    *,
    addresses: Sequence[str],
    make_worker: MakeRemoteWorker,
    wait: float,
) -> list[str]:
    """Look for workers for `wait` seconds; returns their peer ids. `discovery.explain()` tells the rest.

    Raises:
        ConfigurationError: an address is malformed or our own.
    """
    async with open_gathering(
        protocol, discovery, addresses=addresses, make_worker=make_worker, progress=FleetProgress()
    ) as gathering:
        await trio.sleep(wait)
        return list(gathering.workers)


class Gathering:
    """Made by `open_gathering`.

    Attributes:
        workers: those that are there, by peer id.
        failures: why an address that was named could not be reached, so far.
    """

    def __init__(
        self,
        protocol: Exchange,
        discovery: Discovery,
        make_worker: MakeRemoteWorker,
        progress: FleetProgress,
        addresses: Sequence[str],
    ) -> None:
        self.workers: dict[str, RemoteWorker] = {}
        self.failures: dict[str, str] = {}
        self._protocol = protocol
        self._discovery = discovery
        self._make_worker = make_worker
        self._progress = progress
        self._addresses = tuple(dict.fromkeys(addresses))
        self._named = {parse_peer_address(address)[1]: address for address in self._addresses}
        self._kept = trio.Event()  # set when others dial the workers here again
        self._num_wanted = 0
        self._came = RenewedEvent()
        self._nursery: trio.Nursery | None = None
        self._on_worker: Callable[[RemoteWorker], None] = lambda worker: None
        self._on_lost: Callable[[str, str], None] = lambda peer_id, reason: None
        if protocol.host.peer_id in self._named:
            address = self._named[protocol.host.peer_id]
            raise ConfigurationError(f"{address} is this coordinator's own address")

    def start(self, nursery: trio.Nursery) -> None:
        """Begin, with tasks in `nursery`."""
        self._nursery = nursery
        host = self._protocol.host
        host.on_connected(self._on_connected)
        self._protocol.on_peer_opened(self._on_opened)
        self._protocol.on_peer_lost(self._on_stream_lost)
        host.on_disconnected(self._on_disconnected)
        for peer_id in host.connected_peers:
            self._on_connected(peer_id)
        for address in self._addresses:
            nursery.start_soon(self._dial, address)
        nursery.start_soon(self._follow)

    def stop(self) -> None:
        """Begin nothing any more."""
        self._nursery = None

    async def enough(self, min_peers: int, wait: float) -> list[RemoteWorker]:
        """Wait for at least `min_peers` workers; return all in the order of the addresses, then as they came.

        Raises:
            NoRouteError: fewer were there after `wait` seconds; the progress is told what was tried.
        """
        self._num_wanted = min_peers
        self._progress.waiting(len(self.workers), min_peers)
        with trio.move_on_after(wait):
            while len(self.workers) < min_peers:
                await self._came.wait()
        self._num_wanted = 0
        found = self.workers
        if len(found) < min_peers:
            self._progress.explained(str(self._discovery.explain()))
            reasons = "".join(f"; {reason}" for reason in self.failures.values())
            raise NoRouteError(
                f"{len(found)} of {min_peers} workers were there after {wait:g} s{reasons}. Start "
                "neurogrid-worker on the other machines and name its address with --peer, or have them join the "
                "cluster by its ticket; --wait waits longer"
            )
        order = {peer_id: index for index, peer_id in enumerate(self._named)}
        return sorted(found.values(), key=lambda worker: order.get(worker.peer_id, len(order)))

    def tell(
        self, *, on_worker: Callable[[RemoteWorker], None], on_lost: Callable[[str, str], None]
    ) -> None:
        """Call these from now on when a worker comes or goes (peer id and reason); their owner keeps the connections.

        Neither may block.
        """
        self._on_worker, self._on_lost = on_worker, on_lost
        self._kept.set()

    @property
    def _is_kept(self) -> bool:
        return self._kept.is_set()

    async def _dial(self, address: str) -> None:
        """Try an address until a peer answers, and again when that is lost; keep the reasons, to be asked for."""
        while True:
            try:
                peer_id = await self._discovery.connect(address)
                await self._meet(peer_id)
                self.failures.pop(address, None)
                await self._until_lost(peer_id)
            except ConfigurationError:
                raise
            except NeuroGridError as exc:
                if self.failures.get(address) != str(exc):
                    logger.warning("%s; trying again", exc)
                self.failures[address] = str(exc)
            else:
                if self._is_kept:
                    return
            await trio.sleep(RETRY_DELAY)

    async def _until_lost(self, peer_id: str) -> None:
        """Wait until a peer is lost, or is somebody else's to dial again."""
        async with trio.open_nursery() as nursery:

            async def wait_kept() -> None:
                await self._kept.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait_kept)
            await self._protocol.host.wait_disconnected(peer_id)
            nursery.cancel_scope.cancel()

    async def _follow(self) -> None:
        """Dial each peer that is found and may be a worker."""
        async for change in self._discovery.peers():
            if self._nursery is None:
                return
            if isinstance(change, PeerFound) and change.role in ("", "worker"):
                self._nursery.start_soon(self._dial_found, change)

    async def _dial_found(self, found: PeerFound) -> None:
        """Try a peer until it is connected, and again when it is lost; until it says no, or is known in another way.

        `on_connected` asks what it is.
        """
        host, delay = self._protocol.host, RETRY_DELAY
        while self._discovery.known.get(found.peer_id) == found:
            try:
                if not host.is_connected(found.peer_id):
                    ways = host.ways_to(found.peer_id, found.addresses)
                    await connect_any(self._discovery.connect, ways)
                await self._until_lost(found.peer_id)
                if self._is_kept:
                    return
                await trio.sleep(RETRY_DELAY)
            except NeuroGridError as exc:
                # A peer that says nothing may be about to end, or has only just begun.
                is_silent = isinstance(exc, NotAdmittedError) and exc.reason in SILENCE
                if is_silent or isinstance(exc, TransportError):
                    logger.info("found %s, and could not connect: %s", found.peer_id, exc)
                    await trio.sleep(delay)
                    delay = min(2 * delay, MAX_RETRY_DELAY)
                    continue
                logger.warning("found %s, and will not use it: %s", found.peer_id, exc)
                return

    def _on_connected(self, peer_id: str) -> None:
        """A peer connected; ask what it is."""
        if self._nursery is not None and peer_id not in self.workers:
            self._nursery.start_soon(self._meet_unnamed, peer_id)

    def _on_opened(self, peer_id: str, hello: Hello) -> None:
        """A peer said what it is."""
        if hello.role == "worker":
            self._add(self._make_worker(peer_id, PROTOCOL_V11))

    def _on_stream_lost(self, peer_id: str, reason: NeuroGridError) -> None:
        self._remove(peer_id, str(reason))
        if self._protocol.host.is_connected(peer_id):
            self._on_connected(peer_id)

    def _on_disconnected(self, peer_id: str) -> None:
        self._remove(peer_id, "its connection has ended")

    def _remove(self, peer_id: str, reason: str) -> None:
        """A worker that has gone does not count; it may come back."""
        if self._nursery is None or self.workers.pop(peer_id, None) is None:
            return
        if len(self.workers) < self._num_wanted:
            self._progress.waiting(len(self.workers), self._num_wanted)
        self._on_lost(peer_id, reason)

    async def _meet_unnamed(self, peer_id: str) -> None:
        try:
            await self._meet(peer_id)
        except NeuroGridError as exc:
            logger.debug("%s is no worker: %s", peer_id, exc)

    async def _meet(self, peer_id: str) -> None:
        version = await self._protocol.open(peer_id)
        hello = self._protocol.hello_of(peer_id)
        if (
            hello is None
        ):  # it says nothing of itself: whether it is a worker shows when it is asked
            worker = self._make_worker(peer_id, version)
            await worker.describe(assumed_bytes=0)
            self._add(worker)
        elif hello.role != "worker":
            raise TransportError(f"{peer_id} is a {hello.role}, no worker")
        else:  # told already, unless its stream was up before this began to listen
            self._on_opened(peer_id, hello)

    def _add(self, worker: RemoteWorker) -> None:
        if self._nursery is None or worker.peer_id in self.workers:
            return
        self.workers[worker.peer_id] = worker
        if len(self.workers) <= self._num_wanted:
            self._progress.waiting(len(self.workers), self._num_wanted)
        self._came.set()
        self._on_worker(worker)
