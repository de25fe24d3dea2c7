"""Ask the router at home to let peers in: port mappings by UPnP, over `miniupnpc`.

A mapping is leased for an hour and renewed at half of it, so that a host that is killed leaves nothing for long; in
order, it is removed at the end. When the port is another's at the router, others are tried. The library blocks, so
it runs in a thread, which a cancellation leaves behind: its own deadlines end it. (py-libp2p's manager is not used:
its mappings never end, and it takes a taken port for a failure.)

Source: UPnP Forum, WANIPConnection:1 and :2.
"""

from __future__ import annotations

import ipaddress
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeVar

import miniupnpc
import trio

from neurogrid.p2p.hosts.host import ip_place
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.reach.backoff import Backoff

__all__ = ["MappedPort", "PortMapper", "PortMappingState"]

logger = logging.getLogger(__name__)

DISCOVERY_MILLISECONDS: Final = 2000
# All in seconds.
CALL_TIMEOUT: Final = 15.0
LEASE: Final = 3600
REMOVE_TIMEOUT: Final = 3.0
RETRY: Final = Backoff(first=60.0, largest=900.0)
MAX_PORTS_TRIED: Final = 5
MAX_MAPPINGS: Final = 8
DESCRIPTION: Final = "NeuroGrid"

T = TypeVar("T")
# A thread that was left behind counts for as long as it runs.
_threads = trio.CapacityLimiter(4)


@dataclass(frozen=True)
class MappedPort:
    """A port of the router that leads here.

    Attributes:
        protocol: "TCP" or "UDP".
        port: ours.
        external_port: the router's.
    """

    protocol: Literal["TCP", "UDP"]
    port: int
    external_port: int


@dataclass(frozen=True)
class PortMappingState:
    """State of the port mapping at a router.

    Attributes:
        external_ip: its address outside; None without a router that maps ports.
        mappings: what leads here now.
        reason: why there is none, or is no more; empty when all is well.
    """

    external_ip: str | None
    mappings: tuple[MappedPort, ...]
    reason: str


class _MappingError(Exception):
    """The router does not do it."""


class PortMapper:
    """Maps the ports that a host listens on, until the host ends. `run` is for a task of the host.

    Args:
        host: the libp2p host, listening on other addresses than loopback.
    """

    def __init__(self, host: Libp2pHost) -> None:
        self._host = host
        self._router: Any = None
        self._mappings: dict[tuple[str, int], MappedPort] = {}
        self._external_ip: str | None = None
        self._reason = "no router was asked yet"

    @property
    def state(self) -> PortMappingState:
        """State of the port mapping at the router."""
        return PortMappingState(self._external_ip, tuple(self._mappings.values()), self._reason)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Our addresses at the router, without `/p2p/`."""
        ip = self._external_ip
        if ip is None:
            return ()
        return tuple(
            f"/ip4/{ip}/tcp/{mapped.external_port}"
            if mapped.protocol == "TCP"
            else f"/ip4/{ip}/udp/{mapped.external_port}/quic-v1"
            for mapped in self._mappings.values()
        )

    async def run(self) -> None:
        """Find the router, map, renew; on the way out, remove."""
        draw, num_failures = random.SystemRandom(), 0
        try:
            while True:
                try:
                    await self._map_all()
                except _MappingError as exc:
                    num_failures += 1
                    if self._reason != str(exc):
                        logger.info("no port is mapped at the router: %s", exc)
                    self._router, self._external_ip, self._reason = None, None, str(exc)
                    self._mappings.clear()
                    await trio.sleep(RETRY.delay(num_failures, draw))
                else:
                    num_failures = 0
                    await trio.sleep(LEASE / 2)
        finally:
            with trio.move_on_after(REMOVE_TIMEOUT) as scope:
                scope.shield = True
                await self._remove_all()

    async def _map_all(self) -> None:
        ports = _listening_ports(self._host)
        if not ports:
            raise _MappingError("this host listens on loopback alone, or not on IPv4")
        if self._router is None:
            await self._find_router()
        for protocol, port in ports[:MAX_MAPPINGS]:
            await self._map(protocol, port)
        self._reason = ""

    async def _find_router(self) -> None:
        router = miniupnpc.UPnP()
        router.discoverdelay = DISCOVERY_MILLISECONDS
        if not await _in_thread("no router answers", router.discover):
            raise _MappingError("no router answers")
        await _in_thread("none of the devices that answer is a router", router.selectigd)
        external = await _in_thread("the router has no address outside", router.externalipaddress)
        try:
            ip = ipaddress.ip_address(str(external))
        except ValueError as exc:
            raise _MappingError(f"the router's address outside is {external!r}") from exc
        if not ip.is_global:
            raise _MappingError(f"the router has the address {ip}: it is behind another NAT itself")
        self._router, self._external_ip = router, str(ip)

    async def _map(self, protocol: Literal["TCP", "UDP"], port: int) -> None:
        router = self._router
        known = self._mappings.get((protocol, port))
        candidates = [known.external_port] if known else [port]
        draw = random.SystemRandom()
        while len(candidates) < MAX_PORTS_TRIED:
            candidates.append(draw.randrange(20_000, 60_000))
        failure = _MappingError("there was no attempt")
        for external in candidates:
            target = (external, protocol, router.lanaddr, port)
            add = partial(router.addportmapping, *target, DESCRIPTION, "", LEASE)
            try:
                await _in_thread(f"the router does not map port {external}", add)
            except _MappingError as exc:
                failure = exc
                continue
            if known is None or known.external_port != external:
                logger.info(
                    "%s port %d of %s leads to port %d here",
                    *(protocol, external, self._external_ip, port),
                )
            self._mappings[protocol, port] = MappedPort(protocol, port, external)
            return
        raise failure

    async def _remove_all(self) -> None:
        router = self._router
        for mapped in self._mappings.values():
            remove = partial(router.deleteportmapping, mapped.external_port, mapped.protocol)
            try:
                await _in_thread("a mapping could not be removed", remove)
            except _MappingError as exc:
                logger.debug("%s", exc)
        self._mappings.clear()


async def _in_thread(what: str, function: Callable[[], T]) -> T:
    """Call the library, which raises bare exceptions.

    Raises:
        _MappingError: `what`, and why.
    """

    def call() -> T:
        try:
            return function()
        except Exception as exc:  # the library has no class of its own
            raise _MappingError(f"{what}: {exc}") from exc

    run_sync: Any = trio.to_thread.run_sync  # its stubs lack `abandon_on_cancel`
    with trio.move_on_after(CALL_TIMEOUT):
        result: T = await run_sync(call, abandon_on_cancel=True, limiter=_threads)
        return result
    raise _MappingError(f"{what}: no answer in {CALL_TIMEOUT:g} s")


def _listening_ports(host: Libp2pHost) -> list[tuple[Literal["TCP", "UDP"], int]]:
    """Return the ports to map: those on which peers can reach us on IPv4 from another machine."""
    ports: list[tuple[Literal["TCP", "UDP"], int]] = []
    for listening in host.libp2p.get_transport_addrs():
        place = ip_place(listening)
        if place is not None and place.ip.version == 4 and not place.ip.is_loopback:
            ports.append(("UDP" if place.is_quic else "TCP", place.port))
    return list(dict.fromkeys(ports))
