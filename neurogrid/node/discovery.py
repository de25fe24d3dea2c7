"""Discovery, by which a coordinator and its workers find each other when no address is typed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import trio

from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.discovery import Attempt, Discovery
from neurogrid.p2p.discovery.dht import Announcement
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.reach.autonat import Reachability
from neurogrid.p2p.reach.reach import Reach
from neurogrid.p2p.trust import Admission

__all__ = ["DhtSettings", "FindingSettings", "is_news", "open_discovery"]

# How often it is looked whether what this peer says of itself has changed. Seconds.
CHANGE_INTERVAL = 5.0
# Memory that is freed and taken by others all the time is news from one part in so many on.
NEWS_OF_MEMORY = 8


@dataclass(frozen=True)
class DhtSettings:
    """Settings of the DHT, for discovery beyond the local network.

    Attributes:
        namespace: the cluster's name in the DHT: members of one find each other.
        bootstrap: full multiaddrs of servers of the DHT to begin with; no others are known.
    """

    namespace: str
    bootstrap: tuple[str, ...] = ()


@dataclass(frozen=True)
class FindingSettings:
    """Settings of discovery: the means by which a command finds peers, and is found.

    Attributes:
        mdns: announce this peer on its local networks, and find those that do; never on loopback alone.
        why_no_mdns: what to say where it is not used.
        mdns_interfaces: names or addresses of the interfaces to keep to; empty for all that are listened on.
        dht: announce this peer in a DHT, and find those that do; None for no DHT.
    """

    mdns: bool = False
    why_no_mdns: str = ""
    mdns_interfaces: tuple[str, ...] = ()
    dht: DhtSettings | None = None

    @property
    def is_looking(self) -> bool:
        """Whether peers can be found that nobody named."""
        return self.mdns or self.dht is not None


@asynccontextmanager
async def open_discovery(
    host: Host,
    settings: FindingSettings,
    *,
    announcement: Callable[[], Announcement],
    admission: Admission | None = None,
    reach: Reach | None = None,
) -> AsyncIterator[Discovery]:
    """A discovery with the sources that were asked for.

    Args:
        host: a host that runs.
        settings: which sources.
        announcement: what this peer says of itself now, but for its certificate; asked for again and again.
        admission: by whose word others are believed; None believes every signed record.
        reach: knows whether others get through to this peer: only then it serves the DHT.

    Raises:
        ConfigurationError: an interface is named that is not there.
    """
    async with Discovery(host) as discovery:
        if settings.mdns:
            await discovery.setup_mdns(interfaces=settings.mdns_interfaces)
        elif settings.why_no_mdns:
            what = "ask the local network"
            discovery.note(Attempt("mdns", what, f"not tried: {settings.why_no_mdns}", False))
        if settings.dht is None:
            discovery.note(
                Attempt("dht", "ask a DHT", "not tried: it was not asked for (--dht)", False)
            )
            yield discovery
            return
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                await nursery.start(
                    partial(_use_dht, discovery, settings.dht, announcement, admission, reach)
                )
                yield discovery
                nursery.cancel_scope.cancel()


async def _use_dht(
    discovery: Discovery,
    settings: DhtSettings,
    announcement: Callable[[], Announcement],
    admission: Admission | None,
    reach: Reach | None,
    *,
    task_status: Any = trio.TASK_STATUS_IGNORED,
) -> None:
    """Join the DHT as soon as this peer can prove what it is, and tell the others when that changes."""
    if admission is not None and admission.own_certificate is None:
        what = "announce ourselves"
        discovery.note(Attempt("dht", what, "not yet: there is no certificate to show", False))
        task_status.started()
        await _wait_for_certificate(admission)
        discovery.note(Attempt("dht", what, "there is a certificate to show", True))

    def record() -> Announcement:
        certificate = admission.own_certificate if admission is not None else None
        return replace(announcement(), certificate=certificate or b"")

    dht = await discovery.setup_dht(
        namespace=settings.namespace,
        record=record,
        bootstrap=settings.bootstrap,
        verify=admission.verify if admission is not None else None,
        may_know=admission.may_know if admission is not None else lambda peer_id: True,
        is_reachable=lambda: _is_reachable(reach),
    )
    task_status.started()
    told = record()
    while True:
        await trio.sleep(CHANGE_INTERVAL)
        if is_news(told, said := record()):
            told = said
            dht.tell()


def _is_reachable(reach: Reach | None) -> bool | None:
    found = reach.state().reachability if reach is not None else None
    if found is None or found.reachability is Reachability.UNKNOWN:
        return None
    return found.reachability is Reachability.PUBLIC


async def _wait_for_certificate(admission: Admission) -> None:
    changed = trio.Event()
    admission.on_change(lambda: changed.set())
    while admission.own_certificate is None:
        await changed.wait()
        changed = trio.Event()


def is_news(told: Announcement, said: Announcement) -> bool:
    """Whether members should be told at once, rather than when they ask next."""
    moved = abs(said.free_memory - told.free_memory)
    return moved * NEWS_OF_MEMORY > told.free_memory or said != replace(
        told, free_memory=said.free_memory
    )
