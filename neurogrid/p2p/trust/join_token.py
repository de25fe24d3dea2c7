"""Join tokens: the cluster promises a certificate to any peer that shows one, in one role and for a while.

Source: protocol_spec/trust.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.trust.certificate import by_clock, format_time
from neurogrid.p2p.trust.limits import MAX_ROLE_CHARS, MAX_TIME, MAX_TOKEN_USES
from neurogrid.p2p.trust.names import is_role
from neurogrid.p2p.trust.refusal import Refusal, RefusedError
from neurogrid.p2p.trust.signing import JOIN_TOKEN
from neurogrid.p2p.wire.maps import MAX_U64

__all__ = ["JoinToken"]


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A token whose signature is good.

    Attributes:
        role: of the certificates that it gives.
        serial: u64, at random: what its uses are counted by.
        not_after: when it expires, seconds of the Unix epoch.
        max_uses: how many certificates it gives; 0 is any number.
        list_version: of the newest revocation list when it was made; a later list may make it void.
        data: the signed form. Any peer that has it can join: it is shown to the issuer alone.
    """

    role: str
    serial: int
    not_after: int
    max_uses: int
    list_version: int
    data: bytes = field(repr=False)

    @classmethod
    def sign(
        cls,
        key: Ed25519PrivateKey,
        *,
        role: str,
        serial: int,
        not_after: int,
        max_uses: int = 0,
        list_version: int = 0,
    ) -> JoinToken:
        """Make one.

        Raises:
            RefusedError: a value that nobody would read.
        """
        entries: dict[str, object] = {
            "role": role,
            "serial": serial,
            "until": not_after,
            "uses": max_uses,
        }
        if list_version:
            entries["list"] = list_version
        return cls.decode(JOIN_TOKEN.sign(key, entries), key.public_key().public_bytes_raw())

    @classmethod
    def decode(cls, data: bytes, public_key: bytes) -> JoinToken:
        """Read a signed form, which may come from anybody.

        Raises:
            RefusedError: TOKEN_INVALID: not signed by this cluster, or malformed.
        """
        fields = JOIN_TOKEN.read(data, public_key)
        try:
            token = cls(
                role=fields.text("role", MAX_ROLE_CHARS),
                serial=fields.uint("serial", MAX_U64),
                not_after=fields.uint("until", MAX_TIME),
                max_uses=fields.uint("uses", MAX_TOKEN_USES),
                list_version=fields.optional_uint("list", MAX_U64),
                data=bytes(data),
            )
        except RemoteProtocolError as exc:
            raise JOIN_TOKEN.refused(f"malformed: {exc}") from exc
        if not is_role(token.role):
            raise JOIN_TOKEN.refused("malformed: its role is none")
        return token

    def check(self, *, now: float, clock_skew: float = 0.0) -> None:
        """Check that it has not expired; arguments as of `Certificate.check`.

        Raises:
            RefusedError: TOKEN_EXPIRED.
        """
        if now >= self.not_after + clock_skew:
            raise RefusedError(
                Refusal.TOKEN_EXPIRED,
                f"the ticket expired at {format_time(self.not_after)}: {by_clock(now, self.not_after)}; ask for a "
                "new one (neurogrid-coordinator --ticket)",
            )
