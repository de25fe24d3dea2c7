"""The payloads of 1.1.0 by which a blob travels: asked for, offered, accepted, resumed.

Source: `protocol_spec/transfers.md`. The chunks themselves are Weights (`payloads`). Which blobs a
peer has, and what it does with one, is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.wire.blob_id import BLOB_ID_BYTES, DIGEST_BYTES, blob_id, num_chunks
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.forms import BOOLEAN, Map, array, binary, fixed, optional, text, uint
from neurogrid.p2p.wire.limits import (
    DEFAULT_LIMITS,
    MAX_ADDRESS_CHARS,
    MAX_BITMAP_BYTES,
    MAX_BLOB_BYTES,
    MAX_LAYERS,
    MAX_SOURCES,
)
from neurogrid.p2p.wire.types import ErrorCode

__all__ = [
    "TransferRequest",
    "TransferOffer",
    "TransferAccept",
    "encode_bitmap",
    "decode_bitmap",
]

_LAYER_ID: Final = uint(MAX_LAYERS - 1)
_BLOB_ID: Final = fixed(BLOB_ID_BYTES)


@dataclass(frozen=True, slots=True)
class TransferRequest(ControlPayload):
    """Send me this blob. A TransferOffer with the same request id answers, or Error BLOB_UNKNOWN.

    Attributes:
        blob_id: 32 bytes, see `neurogrid.p2p.wire.blob_id`.
    """

    blob_id: bytes

    _map = Map("TransferRequest", {"blob": _BLOB_ID})


@dataclass(frozen=True, slots=True)
class TransferOffer(ControlPayload):
    """A blob is to be had, with the digest of every chunk, so that each can be verified alone.

    Attributes:
        layer_id: 0 to `MAX_LAYERS` - 1.
        num_bytes: length of the blob, at most `MAX_BLOB_BYTES`.
        blob_id: 32 bytes, the BLAKE3 of `digests`.
        digests: the BLAKE3 of every chunk in order, 32 bytes each.
        sources: full multiaddrs of other peers that have the blob, at most `MAX_SOURCES`; a peer that takes
            the offer may fetch it there first.
    """

    layer_id: int
    num_bytes: int
    blob_id: bytes
    digests: bytes
    sources: tuple[str, ...] = ()

    _map = Map(
        "TransferOffer",
        {
            "layer": _LAYER_ID,
            "bytes": uint(MAX_BLOB_BYTES),
            "blob": _BLOB_ID,
            # Any that fits a message: a list of the wrong length is TRANSFER_INVALID, however long.
            "digests": binary(DEFAULT_LIMITS.transfer_offer),
            "sources": optional(array(text(MAX_ADDRESS_CHARS), MAX_SOURCES)),
        },
        max_bytes=DEFAULT_LIMITS.transfer_offer,
    )

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the blob; at least one."""
        return num_chunks(self.num_bytes)

    def chunk_digest(self, index: int) -> bytes:
        """The digest that chunk `index` must have, 32 bytes."""
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def _check(self) -> None:
        for address in self.sources:
            _, is_full, peer_id = address.rpartition("/p2p/")
            if not is_full or not peer_id:
                raise violation("a source of TransferOffer names no peer")
        if len(self.digests) != DIGEST_BYTES * self.num_chunks:
            raise _invalid(
                f"{len(self.digests)} bytes of digests for a blob of {self.num_chunks} chunks"
            )
        if blob_id((self.digests,)) != self.blob_id:
            raise _invalid(
                "the digests of an offer are not those of its blob: it was damaged, or its sender hashes "
                "otherwise, as those before revision r6 of the protocol do"
            )


@dataclass(frozen=True, slots=True)
class TransferAccept(ControlPayload):
    """The answer to an offer.

    Attributes:
        layer_id: that of the offer.
        needed: True asks for the bytes; False says that this very blob is held, and was verified.
        have: which chunks the receiver has already and has verified, as `encode_bitmap` writes
            them; empty for none. It says nothing where the blob is not needed. Whether its length
            fits the offer is for `decode_bitmap` to say.
    """

    layer_id: int
    needed: bool
    have: bytes = b""

    _map = Map(
        "TransferAccept",
        {"layer": _LAYER_ID, "needed": BOOLEAN, "have": optional(binary(MAX_BITMAP_BYTES))},
    )


def encode_bitmap(chunks: Iterable[int], total_chunks: int) -> bytes:
    """The bitmap of a TransferAccept: the highest bit of the first byte is chunk 0.

    Returns:
        ceil(total_chunks / 8) bytes, or none where there is no chunk to name.

    Raises:
        LocalProtocolError: a chunk is not below `total_chunks`.
    """
    bitmap = bytearray(-(-total_chunks // 8))
    for index in chunks:
        if not 0 <= index < total_chunks:
            raise LocalProtocolError(f"no chunk {index} of {total_chunks}")
        bitmap[index >> 3] |= 0x80 >> (index & 7)
    return bytes(bitmap) if any(bitmap) else b""


def decode_bitmap(bitmap: bytes, total_chunks: int) -> frozenset[int]:
    """The chunks that a bitmap names.

    Raises:
        RemoteProtocolError: its length is not that of `total_chunks` chunks, or a bit past the last
            chunk is set (TRANSFER_INVALID).
    """
    if not bitmap:
        return frozenset()
    if len(bitmap) != -(-total_chunks // 8):
        raise _invalid(f"a bitmap of {len(bitmap)} bytes for {total_chunks} chunks")
    if bitmap[-1] & (0xFF >> (total_chunks - 1) % 8 + 1):
        raise _invalid(f"a bitmap names a chunk past the last of {total_chunks}")
    return frozenset(
        index for index in range(total_chunks) if bitmap[index >> 3] & 0x80 >> (index & 7)
    )


def _invalid(text: str) -> RemoteProtocolError:
    return RemoteProtocolError(text, code=ErrorCode.TRANSFER_INVALID)
