"""The record by which a member of a cluster says what it is: signed by its key, and good for minutes only.

The DHT says no more than that a peer claims to belong to a cluster; the record says the rest. Whether one is
believed is decided in `records_book`, how it travels in `records_exchange`. Here are its bytes.

Source: `protocol_spec/discovery.md`, "Member record".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from neurogrid.errors import ConfigurationError, RemoteProtocolError
from neurogrid.p2p.discovery.dht_key import CLUSTER_KEY_BYTES
from neurogrid.p2p.hosts.identity import Identity, signing_key
from neurogrid.p2p.wire import ErrorCode
from neurogrid.p2p.wire.control import ROLES, ControlPayload
from neurogrid.p2p.wire.forms import Map, array, binary, fixed, line, one_of, optional, text, uint
from neurogrid.p2p.wire.limits import MAX_ADDRESS_CHARS, MAX_LAYERS, MAX_PEER_ID_CHARS
from neurogrid.p2p.wire.maps import MAX_U64, printable_line
from neurogrid.p2p.wire.messages import Data

__all__ = [
    "MAX_ADDRESSES",
    "MAX_CERTIFICATE_BYTES",
    "MAX_LAYER_RANGES",
    "MAX_MODEL_CHARS",
    "MAX_RECORD_BYTES",
    "MemberRecord",
    "RecordFault",
    "RecordRefusedError",
    "SignedRecord",
    "layer_ranges",
    "names_peer",
    "open_record",
    "sign_record",
]

MAX_ADDRESSES: Final = 16
"""Addresses in a record: some for each interface, each transport and each relay; more are never dialled."""

MAX_MODEL_CHARS: Final = 256
"""Characters of a model id."""

MAX_LAYER_RANGES: Final = 64
"""Ranges of layers held: a worker holds one, or a few after several plans."""

MAX_CERTIFICATE_BYTES: Final = 4096
"""Bytes of a certificate: an id, a role, times and a signature need some hundred."""

MAX_RECORD_BYTES: Final = 16 * 1024
"""Bytes of a signed record: sixteen long addresses and the largest certificate fit."""

# Before the record's bytes when they are signed, so that no signature made for anything else will do.
_DOMAIN: Final = b"neurogrid/member-record/1\x00"
_SIGNATURE_BYTES: Final = 64


class RecordFault(Enum):
    """Reason for which a record is refused; the value is the word that the log has for it."""

    MALFORMED = "malformed"
    FORGED = "forged"
    FOREIGN = "of another cluster"
    EXPIRED = "expired"
    REPLAYED = "replayed"
    UNTRUSTED = "not trusted"
    SURPLUS = "one too many"


class RecordRefusedError(RemoteProtocolError):
    """A record is not believed.

    Attributes:
        fault: why.
    """

    def __init__(self, fault: RecordFault, text: str) -> None:
        super().__init__(f"{fault.value}: {text}", code=ErrorCode.PROTOCOL_VIOLATION)
        self.fault = fault


def _pairs(bounds: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    rising = all(low < high for low, high in pairwise(bounds))
    if len(bounds) % 2 or not rising:
        raise _malformed("its layers are no ranges in order")
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class MemberRecord(ControlPayload):
    """A member's record of itself.

    Attributes:
        cluster: the key of its cluster (`cluster_key`).
        peer_id: its own (base58); an Ed25519 key.
        sequence: u64 from 1; each record of a peer has a larger one than the record before it.
        expires: Unix time in whole seconds after which it counts no more.
        role: one of `ROLES`.
        addresses: full multiaddrs that end in `/p2p/` and the peer id, the most useful first, at most 16.
        model: the id of the model that it serves or holds; empty when there is none.
        free_memory: bytes that it has left for layers.
        layers: the layers that it holds, as ranges [start, stop) in order, none touching the next.
        certificate: proof that it belongs to the cluster, in a form that is not known here; may be empty.
    """

    cluster: bytes
    peer_id: str
    sequence: int
    expires: int
    role: str
    addresses: tuple[str, ...]
    model: str = ""
    free_memory: int = 0
    layers: tuple[tuple[int, int], ...] = ()
    certificate: bytes = b""

    _map = Map(
        "a member record",
        {
            "cluster": fixed(CLUSTER_KEY_BYTES),
            "peer": text(MAX_PEER_ID_CHARS),
            "sequence": uint(MAX_U64, smallest=1),
            "expires": uint(MAX_U64),
            "role": one_of(ROLES),
            "addresses": array(text(MAX_ADDRESS_CHARS), MAX_ADDRESSES),
            "model": line(MAX_MODEL_CHARS),
            "free_memory": uint(MAX_U64),
            "layers": replace(
                array(uint(MAX_LAYERS), 2 * MAX_LAYER_RANGES),
                read=_pairs,
                write=lambda spans: [bound for span in spans for bound in span],
            ),
            "certificate": optional(binary(MAX_CERTIFICATE_BYTES), is_written=True),
        },
        max_bytes=MAX_RECORD_BYTES,
    )

    def _check(self) -> None:
        public_key(self.peer_id)
        for address in self.addresses:
            if not names_peer(address, self.peer_id):
                raise _malformed(f"{printable_line(address)!r} is no address of its peer")


@dataclass(frozen=True, slots=True)
class SignedRecord(ControlPayload):
    """The bytes of a record, and its member's signature over them.

    Attributes:
        record: the encoded `MemberRecord`.
        signature: Ed25519, 64 bytes, over the domain and `record`.
    """

    record: bytes
    signature: bytes

    _map = Map(
        "a signed record",
        {"record": binary(MAX_RECORD_BYTES), "signature": fixed(_SIGNATURE_BYTES)},
        max_bytes=MAX_RECORD_BYTES,
    )


def sign_record(record: MemberRecord, identity: Identity) -> bytes:
    """The encoded `SignedRecord` of a record, signed by its member.

    Raises:
        LocalProtocolError: a value of the record is out of its range.
    """
    encoded = record.encode()
    signature = identity.key_pair.private_key.sign(_DOMAIN + encoded)
    return SignedRecord(encoded, signature).encode()


def open_record(data: Data) -> MemberRecord:
    """Decode a signed record whose signature is its member's.

    Raises:
        RecordRefusedError: MALFORMED, or FORGED.
    """
    try:
        signed = SignedRecord.decode(data)
        record = MemberRecord.decode(signed.record)
    except RecordRefusedError:
        raise
    except RemoteProtocolError as exc:
        raise RecordRefusedError(RecordFault.MALFORMED, str(exc)) from exc
    try:
        public_key(record.peer_id).verify(signed.signature, _DOMAIN + signed.record)
    except InvalidSignature as exc:
        raise RecordRefusedError(
            RecordFault.FORGED, f"the signature is not that of {record.peer_id}"
        ) from exc
    return record


def public_key(peer_id: str) -> Ed25519PublicKey:
    """The key that a peer id is.

    Raises:
        RecordRefusedError: MALFORMED: it is none of an Ed25519 key.
    """
    try:
        return signing_key(peer_id)
    except ConfigurationError as exc:
        raise _malformed(str(exc)) from exc


def names_peer(address: str, peer_id: str) -> bool:
    """Whether an address is a multiaddr that ends in this peer's id."""
    try:
        multiaddr = Multiaddr(address)
    except (MultiaddrError, ValueError):
        return False
    return str(multiaddr) == address and address.endswith(f"/p2p/{peer_id}")


def layer_ranges(layers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Layer ids as ranges [start, stop), in order; the form that `MemberRecord.layers` has."""
    ranges: list[tuple[int, int]] = []
    for layer in sorted(set(layers)):
        if ranges and ranges[-1][1] == layer:
            ranges[-1] = (ranges[-1][0], layer + 1)
        else:
            ranges.append((layer, layer + 1))
    return tuple(ranges)


def _malformed(text: str) -> RecordRefusedError:
    return RecordRefusedError(RecordFault.MALFORMED, text)
