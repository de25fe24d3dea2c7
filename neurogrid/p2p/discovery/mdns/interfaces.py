"""Choice of network interfaces for multicast DNS: those that the host listens on, or those of them that were named.

Never loopback: nobody else is there. An address is announced on the interface that has it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface

import ifaddr

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.hosts.host import ip_place

__all__ = ["Choice", "Interface", "check_interfaces", "choose_interfaces", "list_interfaces"]


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this machine.

    Attributes:
        name: the system's, such as `eth0`.
        index: the system's number of it.
        addresses: its IP addresses with their networks.
    """

    name: str
    index: int
    addresses: tuple[IPv4Interface | IPv6Interface, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine is on it."""
        return all(address.ip.is_loopback for address in self.addresses)

    @property
    def ipv4(self) -> IPv4Address | None:
        """Its first IPv4 address."""
        found = (item.ip for item in self.addresses if isinstance(item.ip, IPv4Address))
        return next(found, None)

    def has(self, address: IPv4Address | IPv6Address) -> bool:
        """Whether an address is the interface's own."""
        return any(item.ip == address for item in self.addresses)

    def is_on_link(self, address: IPv4Address | IPv6Address) -> bool:
        """Whether an address is one that a neighbour on this interface can have."""
        if address.is_loopback or address.is_multicast or address.is_unspecified:
            return False
        is_neighbour = address.version == 6 and address.is_link_local
        return is_neighbour or any(
            item.version == address.version and address in item.network for item in self.addresses
        )

    def __str__(self) -> str:
        shown = [str(item.ip) for item in self.addresses if not item.ip.is_link_local]
        return f"{self.name} ({', '.join(shown)})" if shown else self.name


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of `choose_interfaces`.

    Attributes:
        used: the interfaces to announce on, each with the full multiaddrs to announce there.
        unused: the interfaces that were named and cannot be used, each with the reason.
    """

    used: tuple[tuple[Interface, tuple[str, ...]], ...]
    unused: tuple[tuple[str, str], ...] = ()


def list_interfaces() -> list[Interface]:
    """The network interfaces of this machine that have an address."""
    return [
        Interface(
            name=str(adapter.nice_name),
            index=adapter.index,
            addresses=tuple(_with_network(ip) for ip in adapter.ips),
        )
        for adapter in ifaddr.get_adapters()
        if adapter.index is not None and adapter.ips
    ]


def _with_network(ip: ifaddr.IP) -> IPv4Interface | IPv6Interface:
    if isinstance(ip.ip, tuple):
        return IPv6Interface(f"{ip.ip[0].partition('%')[0]}/{ip.network_prefix}")
    return IPv4Interface(f"{ip.ip}/{ip.network_prefix}")


def choose_interfaces(
    interfaces: Iterable[Interface], addresses: Sequence[str], named: Sequence[str] = ()
) -> Choice:
    """Choose where to announce `addresses`, the full multiaddrs of a host.

    Args:
        named: names or IP addresses of interfaces to keep to; all that the host listens on when empty.
    """
    used, unused = [], []
    found = set()
    for interface in interfaces:
        names = {interface.name, *(str(item.ip) for item in interface.addresses)} & set(named)
        found |= names
        if named and not names:
            continue
        own = tuple(
            address
            for address in addresses
            if (place := ip_place(address)) and _is_announced(place.ip) and interface.has(place.ip)
        )
        if interface.is_loopback:
            unused += [(name, "nobody else is on loopback") for name in sorted(names)]
        elif own:
            used.append((interface, own))
        else:
            unused += [(name, f"the host does not listen on {interface}") for name in sorted(names)]
    unused += [(name, "there is no such interface now") for name in named if name not in found]
    return Choice(tuple(used), tuple(unused))


def check_interfaces(interfaces: Sequence[Interface], named: Sequence[str]) -> None:
    """Check that the interfaces that a user named are there.

    Raises:
        ConfigurationError: one is not, by its name or by an address of it.
    """
    there = {
        name
        for item in interfaces
        for name in (item.name, *(str(own.ip) for own in item.addresses))
    }
    for name in named:
        if name not in there:
            raise ConfigurationError(
                f"there is no interface {name!r} here for mDNS: there are "
                + ", ".join(str(item) for item in interfaces)
            )


def _is_announced(ip: IPv4Address | IPv6Address) -> bool:
    # A link-local IPv6 address means nothing without the name of an interface, which differs for each reader.
    return not (ip.is_loopback or ip.is_unspecified or (ip.version == 6 and ip.is_link_local))
