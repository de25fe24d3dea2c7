"""Records that the leader of a run signs with its identity: invitations, and bans.

64 B of Ed25519 signature and then a body, a msgpack map. The body is read only after its signature was found good, and
what is signed names its purpose, so that a signature over an invitation is none over a ban.

Source: protocol_spec/training/joining.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidSignature

from neurogrid.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.hosts.identity import Identity, signing_key
from neurogrid.p2p.trust.limits import MAX_PEER_ID_CHARS, MAX_TIME, MAX_TOKEN_USES
from neurogrid.p2p.trust.names import is_peer_id
from neurogrid.p2p.wire import ErrorCode
from neurogrid.p2p.wire.forms import BOOLEAN, Form, Map, array, binary, fixed, one_of, text, uint
from neurogrid.p2p.wire.maps import MAX_U64

__all__ = ["MAX_BAN_BYTES", "MAX_INVITATION_BYTES", "Ban", "Invitation"]

SIGNATURE_BYTES: Final = 64
VERSION: Final = 1
RUN_BYTES: Final = 16
EVIDENCE_BYTES: Final = 32

MAX_INVITATION_BYTES: Final = 12 * 1024  # 16 addresses of 512 characters, which are ASCII, and room
"""Bytes of a signed invitation, at most."""

MAX_BAN_BYTES: Final = 1024
"""Bytes of a signed ban, at most."""

_MAX_ADDRESSES: Final = 16
_MAX_ADDRESS_CHARS: Final = 512


def _malformed(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, code=ErrorCode.PROTOCOL_VIOLATION)


class _Record:
    """One kind of record.

    Args:
        name: what is signed, in the signature and in errors.
        max_bytes: the longest, signature and all.
        forms: of the entries of its body, `v` not among them.
    """

    def __init__(self, name: str, max_bytes: int, forms: Mapping[str, Form]) -> None:
        self.name, self._max_bytes = name, max_bytes
        self._body = Map(f"the {name}", forms, max_bytes=max_bytes, version=VERSION)

    def sign(self, identity: Identity, *values: object) -> bytes:
        """The signed form of a body with these values, one for each of the forms.

        Raises:
            LocalProtocolError: it would be longer than may be read.
        """
        body = self._body.encode(values)
        if SIGNATURE_BYTES + len(body) > self._max_bytes:
            raise LocalProtocolError(f"the {self.name} of {len(body)} B is too long to be read")
        return identity.key_pair.private_key.sign(self._domain + body) + body

    def open(self, data: bytes, leader: str) -> list[Any]:
        """The values in a signed form.

        Raises:
            RemoteProtocolError: as the records' own `open`.
        """
        if not SIGNATURE_BYTES < len(data) <= self._max_bytes:
            raise _malformed(f"the {self.name} is of {len(data)} B, which is no length of one")
        signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
        try:
            signing_key(leader).verify(signature, self._domain + body)
        except (InvalidSignature, ConfigurationError) as exc:
            raise RemoteProtocolError(
                f"the {self.name} was not signed by {leader}", code=ErrorCode.UNAUTHORIZED
            ) from exc
        return self._body.decode(body)

    @property
    def _domain(self) -> bytes:
        return f"neurogrid/joining/1/{self.name}\0".encode()


_INVITATION: Final = _Record(
    "invitation",
    MAX_INVITATION_BYTES,
    {
        "run": fixed(RUN_BYTES),
        "leader": text(MAX_PEER_ID_CHARS),
        "serial": uint(MAX_U64),
        "from": uint(MAX_TIME),
        "until": uint(MAX_TIME),
        "uses": uint(MAX_TOKEN_USES),
        "role": one_of(("worker", "trainer")),
        "open": BOOLEAN,
        "addrs": array(text(_MAX_ADDRESS_CHARS, smallest=1), _MAX_ADDRESSES),
    },
)
_BAN: Final = _Record(
    "ban",
    MAX_BAN_BYTES,
    {
        "run": fixed(RUN_BYTES),
        "leader": text(MAX_PEER_ID_CHARS),
        "peer": text(MAX_PEER_ID_CHARS),
        "number": uint(MAX_U64, smallest=1),
        "at": uint(MAX_TIME),
        "until": uint(MAX_TIME),
        "evidence": binary(EVIDENCE_BYTES),
    },
)


@dataclass(frozen=True, slots=True)
class Invitation:
    """An invitation into one run.

    Attributes:
        run: the id of the run, 16 bytes.
        leader: the peer id that signs it (base58).
        serial: u64, at random: what its uses are counted by.
        not_before, not_after: between which it is good, seconds of the Unix epoch.
        max_uses: peers that may come by it, up to 4,096; 0 for any number.
        role: `worker`, or `trainer`, which trains alone.
        is_open: whether who comes by it is on trial first.
        addresses: of the leader, full multiaddrs, at most 16.
    """

    run: bytes
    leader: str
    serial: int
    not_before: int
    not_after: int
    max_uses: int = 0
    role: str = "worker"
    is_open: bool = False
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not is_peer_id(self.leader):
            raise _malformed("the leader of the invitation is no peer id")
        if self.not_before >= self.not_after:
            raise _malformed("the invitation is good at no time: it ends before it begins")
        if not all(each.endswith(f"/p2p/{self.leader}") for each in self.addresses):
            raise _malformed("an address of the invitation is not its leader's")

    def sign(self, identity: Identity) -> bytes:
        """The signed form, of at most `MAX_INVITATION_BYTES`.

        Args:
            identity: that of `leader`.
        """
        assert identity.peer_id == self.leader
        return _INVITATION.sign(
            identity,
            *(self.run, self.leader, self.serial, self.not_before, self.not_after),
            *(self.max_uses, self.role, self.is_open, self.addresses),
        )

    @classmethod
    def open(cls, data: bytes, leader: str) -> Invitation:
        """Read a signed form, which may come from anybody.

        Args:
            leader: the peer id whose key must have signed it.

        Raises:
            RemoteProtocolError: it is not signed by that key, or names another leader (UNAUTHORIZED), or it is
                malformed (PROTOCOL_VIOLATION).
        """
        invitation = cls(*_INVITATION.open(data, leader))
        _check_leader("invitation", invitation.leader, leader)
        return invitation


@dataclass(frozen=True, slots=True)
class Ban:
    """A peer may not take part in a run.

    Attributes:
        run: the id of the run, 16 bytes.
        leader: the peer id that signs it (base58).
        peer: who may not (base58).
        number: of the bans of the run, from 1: a later one about the same peer replaces an earlier one.
        at: when it was made, seconds of the Unix epoch.
        until: it is in force before that; 0 for as long as the run lasts.
        evidence: SHA-256 of the evidence that it goes by; empty where its leader saw it.
    """

    run: bytes
    leader: str
    peer: str
    number: int
    at: int
    until: int = 0
    evidence: bytes = b""

    def __post_init__(self) -> None:
        if not is_peer_id(self.leader) or not is_peer_id(self.peer) or self.leader == self.peer:
            raise _malformed("the ban is not of one peer about another")
        if self.until and self.until <= self.at:
            raise _malformed("the ban is in force at no time: it ends before it begins")
        if len(self.evidence) not in (0, EVIDENCE_BYTES):
            raise _malformed(f"the evidence of the ban is no digest of {EVIDENCE_BYTES} bytes")

    def sign(self, identity: Identity) -> bytes:
        """The signed form, of at most `MAX_BAN_BYTES`.

        Args:
            identity: that of `leader`.
        """
        assert identity.peer_id == self.leader
        return _BAN.sign(
            identity,
            *(self.run, self.leader, self.peer, self.number, self.at, self.until, self.evidence),
        )

    @classmethod
    def open(cls, data: bytes, leader: str) -> Ban:
        """Read a signed form; as `Invitation.open`."""
        ban = cls(*_BAN.open(data, leader))
        _check_leader("ban", ban.leader, leader)
        return ban

    def is_in_force(self, now: float) -> bool:
        """Whether it holds at this moment, in seconds of the Unix epoch."""
        return not self.until or now < self.until


def _check_leader(what: str, named: str, leader: str) -> None:
    if named != leader:
        raise RemoteProtocolError(
            f"the {what} names another leader than who signed it", code=ErrorCode.UNAUTHORIZED
        )
