"""Addresses in TXT records: `dnsaddr=` and a full multiaddr, and which of a stranger's we believe.

mDNS speaks for one link, so an announcement is believed for addresses on that link alone: by others a
stranger could make us dial any host. All name the same peer, which only a connection can prove. What we cannot dial
is told apart from what we do not believe: the first is worth a line to the user.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from libp2p.peer.id import ID

from neurogrid.p2p.discovery.mdns.interfaces import Interface
from neurogrid.p2p.discovery.mdns.limits import MAX_ADDRESSES, MAX_TEXT_BYTES

__all__ = ["Announced", "decode_text", "encode_text", "read_addresses"]

_KEY = b"dnsaddr="
_MAX_STRING_BYTES = 255
# Multihashes: of a key of up to 42 B, the key itself; of longer ones the SHA-256.
_IDENTITY, _SHA256 = 0x00, 0x12
_MAX_INLINE_BYTES = 42
_DIALABLE = frozenset({("tcp", ()), ("udp", ("quic-v1",))})


@dataclass(frozen=True, slots=True)
class Announced:
    """A peer as an announcement names it.

    Attributes:
        peer_id: the announced one; empty if the announcement says nothing that can be believed.
        addresses: full multiaddrs on the link that can be dialled.
        reason: why there is no peer id, or no address; empty if there is one.
    """

    peer_id: str
    addresses: tuple[str, ...]
    reason: str = ""


def encode_text(addresses: Iterable[str]) -> bytes:
    """The TXT data that announces full multiaddrs; those that find no room are left out."""
    text = b""
    for address in addresses:
        string = _KEY + address.encode()
        if len(string) <= _MAX_STRING_BYTES and len(text) + 1 + len(string) <= MAX_TEXT_BYTES:
            text += bytes([len(string)]) + string
    return text or b"\0"  # RFC 6763, section 6.1: never empty


def decode_text(text: bytes) -> list[str]:
    """The multiaddrs in TXT data, unchecked; other attributes and what is cut or cannot be printed are left out."""
    values = (
        string[len(_KEY) :].decode()
        for string in _strings(text)
        if string[: len(_KEY)].lower() == _KEY and string.isascii()
    )
    return [value for value in values if value.isprintable()]


def _strings(text: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        end = start + 1 + text[start]
        if end > len(text):
            return
        yield text[start + 1 : end]
        start = end


def read_addresses(texts: Sequence[str], interface: Interface) -> Announced:
    """Read the multiaddrs of one announcement that came in on `interface`."""
    peers, believed, other = set(), [], []
    for text in texts[:MAX_ADDRESSES]:
        place, separator, peer_id = text.rpartition("/p2p/")
        if not separator or not _is_peer_id(peer_id):
            return Announced("", (), "it announces an address without a peer id")
        peers.add(peer_id)
        parts = place.split("/")
        if not _is_on_link(parts, interface):
            continue
        if _is_dialable(parts):
            believed.append(
                f"/{parts[1]}/{ip_address(parts[2])}/{'/'.join(parts[3:])}/p2p/{peer_id}"
            )
        else:
            other.append(place)
    if len(peers) > 1:
        return Announced("", (), f"it announces {len(peers)} peers under one name")
    if not peers:
        return Announced("", (), "it announces no address")
    peer_id = peers.pop()
    if believed:
        return Announced(peer_id, tuple(dict.fromkeys(believed)))
    if other:
        return Announced(peer_id, (), f"no common transport: it announces {other[0]}")
    return Announced(peer_id, (), f"no route: none of its addresses is on {interface}")


def _is_on_link(parts: Sequence[str], interface: Interface) -> bool:
    if len(parts) < 5 or parts[0] or parts[1] not in ("ip4", "ip6"):
        return False
    try:
        ip = ip_address(parts[2])
    except ValueError:
        return False
    # A link-local IPv6 address cannot be dialled without the name of the interface.
    has_zone = ip.version == 6 and (ip.is_link_local or "%" in parts[2])
    return f"ip{ip.version}" == parts[1] and not has_zone and interface.is_on_link(ip)


def _is_dialable(parts: Sequence[str]) -> bool:
    port = parts[4]
    return (
        (parts[3], tuple(parts[5:])) in _DIALABLE
        and port.isdecimal()
        and len(port) <= 5
        and 0 < int(port) < 2**16
    )


def _is_peer_id(text: str) -> bool:
    try:
        multihash = ID.from_base58(text).to_bytes()
    except ValueError:
        return False
    if len(multihash) < 2 or len(multihash) - 2 != multihash[1]:
        return False
    code, size = multihash[0], multihash[1]
    return (code == _SHA256 and size == 32) or (code == _IDENTITY and 0 < size <= _MAX_INLINE_BYTES)
