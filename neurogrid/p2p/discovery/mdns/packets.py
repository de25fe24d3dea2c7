"""The messages of multicast DNS as libp2p uses it, to bytes and back, over the DNS codec of `zeroconf`.

What comes in is reduced to what concerns us: questions for our service types, and announcements of instances
of them. All else on the wire (printers, televisions) is nobody's concern, and most of it is not even parsed.

js-libp2p takes the last PTR record of a packet for the only one, and looks at the first question alone. So each
service type has its packets, the first question is libp2p's, and a goodbye has no TXT record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from itertools import islice

from zeroconf import (  # type: ignore[attr-defined]  # exported, and left out of its `__all__`
    DNSAddress,
    DNSIncoming,
    DNSOutgoing,
    DNSPointer,
    DNSQuestion,
    DNSService,
    DNSText,
)

from neurogrid.p2p.discovery.mdns.addresses import decode_text, encode_text
from neurogrid.p2p.discovery.mdns.limits import (
    MAX_ADDRESSES,
    MAX_HOST_ADDRESSES,
    MAX_INSTANCES_IN_PACKET,
    MAX_KNOWN_ANSWERS,
    MAX_PACKET_BYTES,
)

__all__ = [
    "Announcement",
    "Query",
    "SERVICES",
    "decode_packet",
    "encode_announcement",
    "encode_directory",
    "encode_goodbye",
    "encode_query",
    "host_name",
    "instance_name",
]

# Libp2p's first: see above.
SERVICES = ("_p2p._udp.local.", "_neurogrid._tcp.local.")
_DIRECTORY = "_services._dns-sd._udp.local."
# A packet that is for us has one of these labels in it, in one piece: nothing before it could be compressed.
_LABELS = (b"\x04_p2p", b"\x0a_neurogrid", b"\x07_dns-sd")

_QUERY, _RESPONSE = 0x0000, 0x8400  # RFC 1035, section 4.1.1: the latter with QR and AA
_IN, _UNIQUE = 0x0001, 0x8001  # RFC 6762, section 10.2: the records of this name are these alone
_A, _PTR, _TXT, _AAAA, _SRV, _ANY = 1, 12, 16, 28, 33, 255
_HEADER_BYTES = 12
# What can be written as it was read. Names with other characters are not listed as known, and answer again.
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")


@dataclass(frozen=True, slots=True)
class Query:
    """A question of somebody's.

    Attributes:
        services: the service types whose instances are asked for.
        names: other names that are asked for: of an instance, or of a host.
        is_for_directory: whether it asks which service types there are.
        known: the instances that the asker knows, with the seconds that it will know them for.
    """

    services: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    is_for_directory: bool = False
    known: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Announcement:
    """The announcement of one instance in a packet.

    Attributes:
        service: its service type.
        addresses: the multiaddrs in its TXT records, unchecked; None if there is no such record.
        lifetime: seconds that this holds for; 0 is a goodbye.
    """

    service: str
    lifetime: int
    addresses: list[str] | None = None


def instance_name(peer_name: str, service: str) -> str:
    """The name of an instance of a service type."""
    return f"{peer_name}.{service}"


def host_name(peer_name: str) -> str:
    """The name of a peer's host."""
    return f"{peer_name}.p2p.local."


def encode_query(services: Sequence[str], known: Iterable[tuple[str, str, int]] = ()) -> bytes:
    """Ask for all instances of these service types.

    Args:
        known: instances that need not answer: service type, name, and remaining seconds.
    """
    out = DNSOutgoing(_QUERY)
    for service in services:
        out.add_question(DNSQuestion(service, _PTR, _IN))
    writable = (item for item in known if _LABEL.fullmatch(item[1].removesuffix(f".{item[0]}")))
    for service, name, lifetime in islice(writable, MAX_KNOWN_ANSWERS):
        out.add_answer_at_time(DNSPointer(service, _PTR, _IN, lifetime, name), 0)
    return _packet(out)


def encode_announcement(
    service: str,
    peer_name: str,
    addresses: Sequence[str],
    ips: Iterable[IPv4Address | IPv6Address],
    lifetime: int,
) -> bytes:
    """Say where an instance is: `addresses` are full multiaddrs, `ips` those of the host."""
    name, host = instance_name(peer_name, service), host_name(peer_name)
    out = DNSOutgoing(_RESPONSE)
    out.add_answer_at_time(DNSPointer(service, _PTR, _IN, lifetime, name), 0)
    out.add_additional_answer(DNSText(name, _TXT, _UNIQUE, lifetime, encode_text(addresses)))
    port = int(addresses[0].split("/")[4]) if addresses else 0
    out.add_additional_answer(DNSService(name, _SRV, _UNIQUE, lifetime, 0, 0, port, host))
    for ip in islice(ips, MAX_HOST_ADDRESSES):
        kind = _A if ip.version == 4 else _AAAA
        out.add_additional_answer(DNSAddress(host, kind, _UNIQUE, lifetime, ip.packed))
    return _packet(out)


def encode_goodbye(service: str, peer_name: str) -> bytes:
    """Say that an instance is no more."""
    out = DNSOutgoing(_RESPONSE)
    out.add_answer_at_time(DNSPointer(service, _PTR, _IN, 0, instance_name(peer_name, service)), 0)
    return _packet(out)


def encode_directory(lifetime: int) -> bytes:
    """Say which service types there are."""
    out = DNSOutgoing(_RESPONSE)
    for service in SERVICES:
        out.add_answer_at_time(DNSPointer(_DIRECTORY, _PTR, _IN, lifetime, service), 0)
    return _packet(out)


def _packet(out: DNSOutgoing) -> bytes:
    packets: list[bytes] = out.packets()
    assert len(packets) == 1, "the bounds of what goes into a packet leave room"
    return packets[0]


def decode_packet(data: bytes) -> Query | dict[str, Announcement] | None:
    """Read a packet from anybody: a query, or announcements by the name of their instance.

    None if nothing in it concerns us, or it is no DNS message. Names come in lower case.
    """
    if not _HEADER_BYTES <= len(data) <= MAX_PACKET_BYTES:
        return None
    lower = data.lower()
    if not any(label in lower for label in _LABELS):
        return None
    incoming = DNSIncoming(data)
    if not incoming.valid:
        return None
    if incoming.is_query():
        return _read_query(incoming)
    return _read_announcements(incoming) or None


def _read_query(incoming: DNSIncoming) -> Query | None:
    services: set[str] = set()
    names: set[str] = set()
    is_for_directory = False
    for question in incoming.questions:
        name = str(question.name).lower()
        is_for_pointers = question.type in (_PTR, _ANY)
        if name in SERVICES and is_for_pointers:
            services.add(name)
        elif name == _DIRECTORY and is_for_pointers:
            is_for_directory = True
        elif len(names) < MAX_INSTANCES_IN_PACKET:
            names.add(name)
    if not (services or names or is_for_directory):
        return None
    known = {
        record.alias.lower(): int(record.ttl)
        for record in incoming.answers()
        if isinstance(record, DNSPointer) and record.name.lower() in services
    }
    return Query(frozenset(services), frozenset(names), is_for_directory, known)


def _read_announcements(incoming: DNSIncoming) -> dict[str, Announcement]:
    announcements: dict[str, Announcement] = {}
    for record in incoming.answers():
        if isinstance(record, DNSPointer):
            name = record.alias.lower()
        elif isinstance(record, DNSText):
            name = record.name.lower()
        else:
            continue
        service = _service_of(name)
        if service is None or len(announcements) >= MAX_INSTANCES_IN_PACKET:
            continue
        if isinstance(record, DNSPointer) and record.name.lower() != service:
            continue
        lifetime = int(record.ttl)
        announcement = announcements.setdefault(name, Announcement(service, lifetime))
        announcement.lifetime = min(announcement.lifetime, lifetime)
        if isinstance(record, DNSText):
            known = announcement.addresses or []
            announcement.addresses = (known + decode_text(record.text))[:MAX_ADDRESSES]
    return announcements


def _service_of(name: str) -> str | None:
    for service in SERVICES:
        if name.endswith(f".{service}"):
            return service
    return None
