"""`Discovery`: all sources of peers of one host, as one stream of peers found and lost.

    async with open_host(listen=["/ip4/0.0.0.0/tcp/0"]) as host, Discovery(host) as discovery:
        await discovery.setup_mdns()
        async for change in discovery.peers():
            if isinstance(change, PeerFound):
                await host.connect_any(change.addresses)

It dials no peer by itself. A caller that does so by `Discovery.connect` has the outcome in `explain()`, where also each
source says what it tried.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar, cast
from weakref import WeakSet

import trio

from neurogrid.errors import LocalProtocolError, NeuroGridError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.discovery.changes import PeerChanges
from neurogrid.p2p.discovery.dht import Announcement, Dht, DhtTiming, open_dht
from neurogrid.p2p.discovery.dht_mode import Mode
from neurogrid.p2p.discovery.explanation import Attempts, Explanation, dial_outcome
from neurogrid.p2p.discovery.known import KnownPeers, PeerFound
from neurogrid.p2p.discovery.mdns import DEFAULT_EXPIRY, open_mdns
from neurogrid.p2p.discovery.records_book import Verify
from neurogrid.p2p.discovery.sighting import Attempt, Sighting
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost

__all__ = ["Discovery"]

T = TypeVar("T")

_WAYS = {"mdns": "ask the local network", "dht": "ask a DHT"}


class Discovery:
    """Finds peers for a host, while its `async with` block lasts.

    Args:
        host: a host that runs, and outlives this.
        connect: what dials a full multiaddr and returns the peer id; `host.connect` when None.
    """

    def __init__(
        self, host: Host, *, connect: Callable[[str], Awaitable[str]] | None = None
    ) -> None:
        self._host = host
        self._connect = connect or host.connect
        self._known = KnownPeers(host.peer_id)
        self._attempts = Attempts()
        self._readers: WeakSet[PeerChanges] = WeakSet()
        self._services: dict[str, Any] = {}
        self._nursery: trio.Nursery | None = None
        self._run: AbstractAsyncContextManager[trio.Nursery] | None = None

    async def __aenter__(self) -> Discovery:
        self._run = trio.open_nursery()
        self._nursery = await self._run.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        assert self._run is not None
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel()
        self._nursery, run = None, self._run
        for reader in self._readers:
            reader.close()
        with unwrap_errors():
            return await run.__aexit__(kind, error, traceback)

    # Sources

    async def setup_mdns(
        self, *, interfaces: Sequence[str] = (), expiry: float = DEFAULT_EXPIRY
    ) -> None:
        """Announce this host on its local networks, and find others there; it runs when this returns.

        A host that listens on loopback alone is announced nowhere: `explain` says so, and what to do.

        Args:
            interfaces: names or IP addresses of interfaces to keep to; all that the host listens on by default.
            expiry: seconds after which a peer that was killed is lost: 2 to 4500.

        Raises:
            ConfigurationError: there is no such interface, or `expiry` is out of its range.
            LocalProtocolError: it runs already, or outside of the `async with` block.
        """
        await self._set_up(
            "mdns",
            open_mdns(
                self._host,
                interfaces=interfaces,
                expiry=expiry,
                on_sighting=self.report,
                on_attempt=self.note,
            ),
        )

    async def setup_dht(
        self,
        *,
        namespace: str | None,
        record: Callable[[], Announcement] | None,
        mode: Mode = "auto",
        bootstrap: Sequence[str] = (),
        verify: Verify | None = None,
        may_know: Callable[[str], bool] = lambda peer_id: True,
        is_reachable: Callable[[], bool | None] = lambda: None,
        timing: DhtTiming | None = None,
    ) -> Dht:
        """Find the members of a cluster by Kademlia, and be found; it runs when this returns.

        No network is joined but that of the bootstrap peers that are named. For the arguments see `open_dht`.

        Raises:
            ConfigurationError: a bootstrap address is no full multiaddr, or the arguments contradict each other.
            LocalProtocolError: it runs already, outside of the `async with` block, or the host is not on libp2p.
        """
        if not isinstance(self._host, Libp2pHost):
            raise LocalProtocolError("only a host on libp2p can speak Kademlia")
        return await self._set_up(
            "dht",
            open_dht(
                self._host,
                namespace=namespace,
                record=record,
                mode=mode,
                bootstrap=bootstrap,
                verify=verify,
                may_know=may_know,
                is_reachable=is_reachable,
                timing=timing or DhtTiming(),
                on_sighting=self.report,
                on_attempt=self.note,
            ),
        )

    def dht(self) -> Dht:
        """The DHT that `setup_dht` returned.

        Raises:
            LocalProtocolError: it was not called.
        """
        dht = self._services.get("dht")
        if dht is None:
            raise LocalProtocolError("there is no DHT: setup_dht was not called")
        return cast(Dht, dht)

    async def _set_up(self, name: str, service: AbstractAsyncContextManager[T]) -> T:
        if self._nursery is None or name in self._services:
            raise LocalProtocolError(
                f"{name} runs already" if self._nursery else "a Discovery runs in `async with`"
            )
        self._services[name] = None
        try:
            self._services[name] = await self._nursery.start(_hold, service)
        except BaseException:  # also cancelled: it does not run, and may be set up again
            del self._services[name]
            raise
        return cast(T, self._services[name])

    def report(self, sighting: Sighting) -> None:
        """Take in what a source says: those that were set up here, or one of the caller's."""
        change = self._known.take(sighting)
        if change is not None:
            for reader in list(self._readers):
                reader.put(change)
        if self._known.num_left_out:
            outcome = f"left out {self._known.num_left_out}: too many peers are announced"
            self.note(Attempt("discovery", "keep all peers that are found", outcome, False))

    # Peers

    @property
    def known(self) -> Mapping[str, PeerFound]:
        """The peers that are known at this moment, by peer id."""
        return dict(self._known.peers)

    def peers(self) -> PeerChanges:
        """A stream of peers found and lost: first all that are known, then changes. Any number may be read.

        A peer is found again when its addresses or its sources have changed, and lost when its last source has lost
        it. A slow reader misses repetitions only; what waits for it is bounded by the number of peers.
        """
        reader = PeerChanges(self._known.peers.values())
        if self._nursery is None:
            reader.close()
        self._readers.add(reader)
        return reader

    async def connect(self, address: str) -> str:
        """Dial a full multiaddr and return the peer id; the outcome stands in `explain` too.

        Raises:
            ConfigurationError: `address` is none that can be dialled.
            PeerUnreachableError: nobody answers there, or somebody else does.
        """
        what = f"dial {address}"
        before = self._attempts.get("dial", what)
        self.note(Attempt("dial", what, "", False))
        try:
            peer_id = await self._connect(address)
        except NeuroGridError as exc:
            self.note(Attempt("dial", what, dial_outcome(exc), False))
            raise
        except trio.Cancelled:
            # Of several attempts at an address, the last that had an outcome says more than one that was cut short.
            self.note(before or Attempt("dial", what, "no answer until it was given up", False))
            raise
        self.note(Attempt("dial", what, "connected", True))
        return peer_id

    # What was tried

    def note(self, attempt: Attempt) -> None:
        """Take in what was tried, for `explain`; again when its outcome is known."""
        self._attempts.put(attempt)

    def explain(self) -> Explanation:
        """Tell what was tried, what answered, what did not and why; `str` of the answer is a table."""
        untried = [
            Attempt(name, way, "not tried: it is switched off", False)
            for name, way in _WAYS.items()
            if name not in self._services and not self._attempts.has(name)
        ]
        return Explanation((*self._attempts, *untried))


async def _hold(
    service: AbstractAsyncContextManager[T], *, task_status: Any = trio.TASK_STATUS_IGNORED
) -> None:
    """Run a source until cancelled."""
    async with service as running:
        task_status.started(running)
        await trio.sleep_forever()
