"""Reservation vouchers: a relay's signed word that it serves a peer until a time.

Source: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md ("Reservation Vouchers"),
RFC 0002 (signed envelopes).
"""

from __future__ import annotations

from typing import Final

from libp2p.peer.envelope import Envelope, make_unsigned
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import Voucher

from neurogrid.p2p.hosts.identity import Identity

__all__ = ["make_voucher"]

DOMAIN: Final = "libp2p-relay-rsvp"
PAYLOAD_TYPE: Final = b"\x03\x02"


def make_voucher(relay: Identity, peer_id: str, expires: int) -> bytes:
    """The voucher of a relay for a peer; `expires` in seconds of Unix time."""
    payload = Voucher(
        relay=ID.from_base58(relay.peer_id).to_bytes(),
        peer=ID.from_base58(peer_id).to_bytes(),
        expiration=expires,
    ).SerializeToString()
    private_key = relay.key_pair.private_key
    return Envelope(
        public_key=private_key.get_public_key(),
        payload_type=PAYLOAD_TYPE,
        raw_payload=payload,
        signature=private_key.sign(make_unsigned(DOMAIN, PAYLOAD_TYPE, payload)),
    ).marshal_envelope()
