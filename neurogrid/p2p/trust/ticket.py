"""Tickets: one printable line with all that a machine needs to join a cluster, but not the cluster's key.

`ngt1` and then base32 (RFC 4648, lower case, no padding) of: the length of the body (u16, big-endian), the body, the
first 4 bytes of its SHA-256. The body is a msgpack map. So a ticket that was cut says so, and one with a wrong
character too, before anything in it is believed.

Source: protocol_spec/trust.md.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from getpass import getpass
from pathlib import Path
from typing import Final

from libp2p.peer.id import ID
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from neurogrid.errors import ConfigurationError, RemoteProtocolError
from neurogrid.p2p.trust.join_token import JoinToken
from neurogrid.p2p.trust.limits import (
    MAX_ADDRESS_BYTES,
    MAX_ADDRESSES,
    MAX_PEER_ID_CHARS,
    MAX_RELAYS,
    MAX_TICKET_CHARS,
    MAX_TOKEN_BYTES,
)
from neurogrid.p2p.trust.names import is_peer_id
from neurogrid.p2p.trust.signing import KEY_BYTES, cluster_id_of
from neurogrid.p2p.trust.whereabouts import Whereabouts
from neurogrid.p2p.wire.forms import Map, binary, fixed, text

__all__ = ["Ticket", "read_ticket", "to_type"]

PREFIX: Final = "ngt1"
CHECKSUM_BYTES: Final = 4
# What stands before and behind a ticket in a line that is to be typed.
VARIABLE: Final = "NEUROGRID_TICKET"
BEFORE: Final = (f"{VARIABLE}=", "neurogrid-worker --join", "neurogrid join")
BEHIND: Final = "neurogrid join"
_AGAIN = "copy the whole line that the coordinator printed"
_BODY = Map(
    "the ticket",
    {
        "key": fixed(KEY_BYTES),
        "peer": text(MAX_PEER_ID_CHARS),
        "addrs": binary(MAX_ADDRESSES * (MAX_ADDRESS_BYTES + 1)),
        "relays": binary(MAX_RELAYS * (MAX_ADDRESS_BYTES + 1)),
        "token": binary(MAX_TOKEN_BYTES),
    },
    max_bytes=MAX_TICKET_CHARS,
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket, as data.

    Attributes:
        cluster_key: the cluster's public key, 32 B.
        peer_id: the coordinator that gives certificates (base58).
        addresses: where it is: full multiaddrs that end in `/p2p/` and its peer id.
        relays: full multiaddrs of relays through which it can be reached.
        token: what to show to it, and to nobody else.
    """

    cluster_key: bytes
    peer_id: str
    addresses: tuple[str, ...]
    relays: tuple[str, ...]
    token: JoinToken

    @property
    def cluster_id(self) -> str:
        """The cluster that it leads to."""
        return cluster_id_of(self.cluster_key)

    @property
    def whereabouts(self) -> Whereabouts:
        """Whereabouts of the coordinator that the ticket leads to; their time is 0."""
        return Whereabouts(self.peer_id, self.addresses, self.relays, at=0)

    def text(self) -> str:
        """The printable line.

        Raises:
            ConfigurationError: more than 8 addresses or 4 relays, or one that is no full multiaddr.
        """
        addresses = _pack(self.addresses, MAX_ADDRESSES, omit=f"/p2p/{self.peer_id}")
        relays = _pack(self.relays, MAX_RELAYS)
        body = _BODY.encode((self.cluster_key, self.peer_id, addresses, relays, self.token.data))
        packed = len(body).to_bytes(2, "big") + body + _checksum(body)
        return PREFIX + base64.b32encode(packed).decode().rstrip("=").lower()

    @classmethod
    def parse(cls, text: str, *, now: float | None = None) -> Ticket:
        """Read a line; white space in and around it is ignored.

        Args:
            text: as `text()` gives it.
            now: seconds of the Unix epoch; None takes the clock.

        Raises:
            ConfigurationError: no ticket, of another version, cut, altered or expired; says which.
        """
        body = _body_of("".join(text.split()))
        try:
            key, peer_id, packed_addresses, packed_relays, signed_token = _BODY.decode(body)
            if not is_peer_id(peer_id):
                raise RemoteProtocolError("its peer is none")
            ID.from_base58(peer_id)
            token = JoinToken.decode(signed_token, key)
            addresses = _unpack(packed_addresses, MAX_ADDRESSES, suffix=f"/p2p/{peer_id}")
            relays = _unpack(packed_relays, MAX_RELAYS)
        except (RemoteProtocolError, ValueError) as exc:
            raise ConfigurationError(f"the ticket makes no sense: {exc}") from exc
        try:
            token.check(now=time.time() if now is None else now)
        except RemoteProtocolError as exc:
            raise ConfigurationError(f"{exc}, or set this machine's clock if it is wrong") from exc
        return cls(key, peer_id, addresses, relays, token)


def to_type(ticket: str) -> str:
    """The line by which a machine joins: the ticket stands in the environment, which no other user can read."""
    return f"{VARIABLE}={ticket} {BEHIND}"


def read_ticket(argument: str, *, now: float | None = None) -> Ticket:
    """The ticket that `--join` names: `-` is standard input, `@FILE` a file, anything else the ticket.

    What is read may be the whole line that was printed to be typed. A terminal does not show what is typed.

    Args:
        argument: as above.
        now: seconds of the Unix epoch; None takes the clock, 0 takes tickets that have expired.

    Raises:
        ConfigurationError: the file cannot be read, or as `Ticket.parse`.
    """
    if argument == "-":
        return Ticket.parse(_argument_of(_read_stdin()), now=now)
    if not argument.startswith("@"):
        return Ticket.parse(argument, now=now)
    try:
        with Path(argument[1:]).open(encoding="ascii", errors="replace") as file:
            return Ticket.parse(_argument_of(file.read(2 * MAX_TICKET_CHARS)), now=now)
    except OSError as exc:
        raise ConfigurationError(
            f"cannot read the ticket in {argument[1:]}: {exc.strerror}"
        ) from exc


def _argument_of(text: str) -> str:
    """The ticket of a line that was printed to be typed."""
    text = text.strip()
    for words in BEFORE:
        text = text.removeprefix(words)
    return text.removesuffix(BEHIND)


def _read_stdin() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.read(2 * MAX_TICKET_CHARS)
    try:
        return getpass("ticket: ")
    except EOFError:
        return ""


def _body_of(text: str) -> bytes:
    """The body of a ticket whose length and checksum are right."""
    if not text.startswith(PREFIX):
        if text[:3] == PREFIX[:3]:
            raise ConfigurationError(
                f"a ticket that begins with {text[:4]} is of another version; this program reads {PREFIX}"
            )
        raise ConfigurationError(f"this is no ticket: one begins with {PREFIX}")
    encoded = text[len(PREFIX) :]
    if len(text) > MAX_TICKET_CHARS:
        raise ConfigurationError(f"a ticket has at most {MAX_TICKET_CHARS} characters; {_AGAIN}")
    data = _decode_base32(encoded)
    num_bytes = int.from_bytes(data[:2], "big") + 2 + CHECKSUM_BYTES
    if len(data) < 2 or len(data) < num_bytes:
        missing = max(0, -(-num_bytes * 8 // 5) - len(encoded))
        raise ConfigurationError(
            f"the ticket is cut or altered: {missing} characters are missing; {_AGAIN}"
        )
    body = data[2:-CHECKSUM_BYTES]
    canonical = base64.b32encode(data).decode().rstrip("=").lower()
    if len(data) > num_bytes or data[-CHECKSUM_BYTES:] != _checksum(body) or canonical != encoded:
        raise ConfigurationError(f"the ticket is altered (its checksum is wrong); {_AGAIN}")
    return body


def _decode_base32(encoded: str) -> bytes:
    """Decode the characters, as far as they make whole bytes."""
    if encoded != encoded.lower():
        raise ConfigurationError(f"the ticket is altered (it has capital letters); {_AGAIN}")
    whole = encoded[: len(encoded) - (len(encoded) % 8 in (1, 3, 6))]
    try:
        return base64.b32decode(whole.upper() + "=" * (-len(whole) % 8))
    except (binascii.Error, ValueError) as exc:
        raise ConfigurationError(
            f"the ticket is altered (it has characters that none has); {_AGAIN}"
        ) from exc


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:CHECKSUM_BYTES]


def _pack(addresses: Iterable[str], max_items: int, *, omit: str = "") -> bytes:
    """Each address in binary form, after its length in one byte."""
    packed = bytearray()
    listed = tuple(addresses)
    if len(listed) > max_items:
        raise ConfigurationError(
            f"a ticket names at most {max_items} addresses of a kind, not {len(listed)}"
        )
    for address in listed:
        if "/p2p/" not in address or not address.endswith(omit):
            raise ConfigurationError(f"{address!r} does not end in /p2p/ and the peer id")
        try:
            data = Multiaddr(address.removesuffix(omit)).to_bytes()
        except (MultiaddrError, ValueError) as exc:
            raise ConfigurationError(f"{address!r} is not a multiaddr") from exc
        if not 0 < len(data) <= MAX_ADDRESS_BYTES:
            raise ConfigurationError(f"{address!r} is too long for a ticket")
        packed += bytes([len(data)]) + data
    return bytes(packed)


def _unpack(packed: bytes, max_items: int, *, suffix: str = "") -> tuple[str, ...]:
    addresses: list[str] = []
    at = 0
    while at < len(packed):
        if len(addresses) == max_items:
            raise RemoteProtocolError(f"it names more than {max_items} addresses of a kind")
        end = at + 1 + packed[at]
        if end > len(packed) or end == at + 1:
            raise RemoteProtocolError("an address in it is cut short")
        try:
            addresses.append(str(Multiaddr(packed[at + 1 : end])) + suffix)
        except (MultiaddrError, ValueError, KeyError, IndexError) as exc:
            raise RemoteProtocolError("an address in it is none") from exc
        at = end
    return tuple(addresses)
