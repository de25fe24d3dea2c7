"""Join tokens: the cluster promises a certificate to any peer that shows one, in one role and for a while.

Source: protocol_spec/trust.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from neurogrid.p2p.trust.certificate import by_clock, format_time
from neurogrid.p2p.trust.names import is_role
from neurogrid.p2p.trust.refusal import Refusal, RefusedError
from neurogrid.p2p.trust.signing import JOIN_TOKEN

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
        signed = JOIN_TOKEN.sign(key, role, serial, not_after, max_uses, list_version)
        return cls.decode(signed, key.public_key().public_bytes_raw())

    @classmethod
    def decode(cls, data: bytes, public_key: bytes) -> JoinToken:
        """Read a signed form, which may come from anybody.

        Raises:
            RefusedError: TOKEN_INVALID: not signed by this cluster, or malformed.
        """
        token = cls(*JOIN_TOKEN.read(data, public_key))
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
