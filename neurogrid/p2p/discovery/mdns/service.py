"""Multicast DNS for a host: the engine on real interfaces.

All of it runs in the caller's own event loop, on sockets that never make it wait; nothing of asyncio and no thread
of `zeroconf`'s is used, and packets are read no faster than `limits.PACKET_RATE`. Which interfaces there are is
looked up every few seconds, since cables, radios and leases come and go.
"""

from __future__ import annotations

import string
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import SystemRandom

import trio

from neurogrid.errors import ConfigurationError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.discovery.mdns.engine import SOURCE, Engine, Packet
from neurogrid.p2p.discovery.mdns.interfaces import (
    Interface,
    check_interfaces,
    choose_interfaces,
    list_interfaces,
)
from neurogrid.p2p.discovery.mdns.limits import (
    DEFAULT_EXPIRY,
    FRAME_BYTES,
    MAX_EXPIRY,
    MIN_EXPIRY,
    PACKET_BURST,
    PACKET_RATE,
)
from neurogrid.p2p.discovery.mdns.sockets import GroupSocket, open_group_socket, versions_of
from neurogrid.p2p.discovery.sighting import Attempt, OnAttempt, OnSighting
from neurogrid.p2p.hosts.host import Host

__all__ = ["open_mdns"]

RESCAN_INTERVAL = 5.0  # seconds
GOODBYE_TIMEOUT = 1.0  # seconds
# Seconds between a goodbye and its repetition: packets that are lost are lost in a row.
GOODBYE_GAP = 0.05
NAME_LENGTH = 32  # what the specification asks for at least

NOTHING_TO_ANNOUNCE = (
    "nothing to announce: this host has addresses on loopback alone, where nobody else is. Listen on an address of"
    " the network, or on all: /ip4/0.0.0.0/tcp/0 (the commands do so with --cluster, --allow or --insecure)"
)


@asynccontextmanager
async def open_mdns(
    host: Host,
    *,
    interfaces: Sequence[str] = (),
    expiry: float = DEFAULT_EXPIRY,
    on_sighting: OnSighting,
    on_attempt: OnAttempt,
) -> AsyncIterator[None]:
    """Announce a host on its local networks and report others, until the block is left.

    It is on the network when the block is entered. On leaving it, also by cancellation, a goodbye is sent.

    Args:
        interfaces: names or IP addresses of interfaces to keep to. By default all that the host listens on, but for
            loopback.
        expiry: seconds after which a peer is lost that was killed, here and, as far as they keep to what we
            announce, there: 2 to 4500.

    Raises:
        ConfigurationError: an interface is named that is not there, or `expiry` is out of its range.
    """
    if not MIN_EXPIRY <= expiry <= MAX_EXPIRY:
        raise ConfigurationError(
            f"peers cannot expire after {expiry:g} s: {MIN_EXPIRY:g} to {MAX_EXPIRY:g}"
        )
    check_interfaces(await _list_interfaces(), interfaces)
    random = SystemRandom()
    name = "".join(random.choices(string.ascii_lowercase + string.digits, k=NAME_LENGTH))
    engine = Engine(
        host.peer_id,
        peer_name=name,
        expiry=expiry,
        random=random,
        on_sighting=on_sighting,
        on_attempt=on_attempt,
    )
    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            service = _Service(host, engine, tuple(interfaces), on_attempt, nursery)
            await service.scan()
            nursery.start_soon(service.keep_scanning)
            nursery.start_soon(service.keep_time)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()
                with trio.move_on_after(GOODBYE_TIMEOUT) as scope:
                    scope.shield = True
                    await service.say_goodbye()
                service.close()


@dataclass
class _Service:
    """The sockets of an engine, and the tasks that serve them."""

    host: Host
    engine: Engine
    named: tuple[str, ...]
    on_attempt: OnAttempt
    nursery: trio.Nursery
    sockets: dict[tuple[Interface, int], GroupSocket] = field(default_factory=dict)
    changed: trio.Event = field(default_factory=trio.Event)
    failing: set[str] = field(default_factory=set)

    async def scan(self) -> None:
        """Look which interfaces there are, and use those that can be used."""
        try:
            interfaces = await _list_interfaces()
        except OSError as exc:
            # As where this process has too many files open: those in use stay, and the next look comes.
            self._report("look for interfaces", _reason(exc))
            return
        choice = choose_interfaces(interfaces, self.host.listen_addresses, self.named)
        for name, reason in choice.unused:
            self._report(f"interface {name}", f"not used: {reason}")
        places = ", ".join(str(interface) for interface, _ in choice.used)
        if places or not choice.unused:
            outcome = f"on {places}" if places else NOTHING_TO_ANNOUNCE
            self._report("announce this host", outcome, is_good=bool(places))
        wanted = {
            (interface, version): addresses
            for interface, addresses in choice.used
            for version in versions_of(interface, addresses)
        }
        for key in self.sockets.keys() - wanted.keys():
            self.sockets.pop(key).close()
        for key in wanted.keys() - self.sockets.keys():
            await self._open(*key)
        used = {interface.index for interface, _ in self.sockets}
        for index in self.engine.indexes - used:
            self.engine.drop_link(index)
        for interface, addresses in choice.used:
            if interface.index in used:
                self.engine.set_link(interface, addresses, trio.current_time())
        self.changed.set()

    async def _open(self, interface: Interface, version: int) -> None:
        what = f"join the mDNS group on {interface}, IPv{version}"
        try:
            socket = await open_group_socket(interface, version)
        except OSError as exc:
            self._report(what, _reason(exc))
            return
        self._report(what, "done", is_good=True)
        self.sockets[interface, version] = socket
        self.nursery.start_soon(self._receive, interface, socket)

    async def keep_scanning(self) -> None:
        """Scan again and again."""
        while True:
            await trio.sleep(RESCAN_INTERVAL)
            await self.scan()

    async def keep_time(self) -> None:
        """Send what is due when it is due."""
        while True:
            self.changed = trio.Event()
            for packet in self.engine.advance(trio.current_time()):
                await self._send(packet)
            with trio.move_on_at(self.engine.next_deadline(trio.current_time())):
                await self.changed.wait()

    async def say_goodbye(self) -> None:
        """Tell all that this host ends, twice."""
        packets = self.engine.goodbye()
        for packet in packets:
            await self._send(packet)
        if packets:
            await trio.sleep(GOODBYE_GAP)
        for packet in packets:
            await self._send(packet)

    def close(self) -> None:
        """Close all sockets."""
        for socket in self.sockets.values():
            socket.close()

    async def _receive(self, interface: Interface, socket: GroupSocket) -> None:
        budget = _Budget()
        while True:
            try:
                data, source = await socket.receive()
            except trio.ClosedResourceError:
                return  # the interface has gone, or has other addresses now
            except OSError as exc:
                # Linux reports it once that an interface went down; what comes after is received.
                self._report(f"receive on {interface}", _reason(exc))
                await trio.sleep(RESCAN_INTERVAL)
                continue
            await budget.spend(len(data))
            self.engine.receive(data, source, interface.index, trio.current_time())
            self.changed.set()

    async def _send(self, packet: Packet) -> None:
        for (interface, version), socket in list(self.sockets.items()):
            if interface.index != packet.index:
                continue
            what = f"send on {interface}, IPv{version}"
            try:
                await socket.send(packet.data)
            except trio.ClosedResourceError:
                continue
            except OSError as exc:
                # A cable may be out. The engine asks again, and less and less often.
                self.failing.add(what)
                self._report(what, _reason(exc))
            else:
                if what in self.failing:
                    self.failing.remove(what)
                    self._report(what, "done, after it had failed", is_good=True)

    def _report(self, what: str, outcome: str, *, is_good: bool = False) -> None:
        self.on_attempt(Attempt(SOURCE, what, outcome, is_good))


class _Budget:
    """Budget of packets to read: a burst, and more as time passes."""

    def __init__(self) -> None:
        self._left = float(PACKET_BURST)
        self._at = trio.current_time()

    async def spend(self, num_bytes: int) -> None:
        """Wait until a packet of so many bytes may be read. What comes in meanwhile, the kernel keeps or drops."""
        now = trio.current_time()
        self._left = min(self._left + (now - self._at) * PACKET_RATE, PACKET_BURST)
        self._at = now
        self._left -= max(1.0, num_bytes / FRAME_BYTES)
        if self._left < 0:
            await trio.sleep(-self._left / PACKET_RATE)


async def _list_interfaces() -> list[Interface]:
    # In a thread: with thousands of interfaces the kernel takes its time.
    return await trio.to_thread.run_sync(list_interfaces)


def _reason(exc: OSError) -> str:
    return exc.strerror or str(exc)
