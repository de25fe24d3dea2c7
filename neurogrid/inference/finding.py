"""How a coordinator and its workers find each other when no address is typed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from neurogrid.p2p.discovery import Attempt, Discovery
from neurogrid.p2p.host import Host

__all__ = ["FindingSettings", "open_discovery"]


@dataclass(frozen=True)
class FindingSettings:
    """By which means a command finds peers, and is found.

    Attributes:
        mdns: announce this peer on its local networks, and find those that do; never on loopback alone.
        why_no_mdns: what to say where it is not used.
        mdns_interfaces: names or addresses of the interfaces to keep to; empty for all that are listened on.
    """

    mdns: bool = False
    why_no_mdns: str = ""
    mdns_interfaces: tuple[str, ...] = ()


@asynccontextmanager
async def open_discovery(host: Host, settings: FindingSettings) -> AsyncIterator[Discovery]:
    """A discovery with the sources that were asked for.

    Raises:
        ConfigurationError: an interface is named that is not there.
    """
    async with Discovery(host) as discovery:
        if settings.mdns:
            await discovery.setup_mdns(interfaces=settings.mdns_interfaces)
        elif settings.why_no_mdns:
            what = "ask the local network"
            discovery.note(Attempt("mdns", what, f"not tried: {settings.why_no_mdns}", False))
        yield discovery
