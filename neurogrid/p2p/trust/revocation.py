"""Revocations: the cluster says which peers and certificates are members no more. The newest list counts.

Source: protocol_spec/trust.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.trust.certificate import Certificate
from neurogrid.p2p.trust.join_token import JoinToken
from neurogrid.p2p.trust.limits import MAX_REVOKED
from neurogrid.p2p.trust.names import is_peer_id
from neurogrid.p2p.trust.refusal import Refusal, RefusedError
from neurogrid.p2p.trust.signing import REVOCATIONS, cluster_id_of

__all__ = ["RevocationList"]


@dataclass(frozen=True, slots=True)
class RevocationList:
    """A list whose signature is good, or the empty one that every cluster begins with.

    Attributes:
        version: u64; a list replaces those of lower versions. 0 is the empty one, which has no signed form.
        peer_ids: none of their certificates is valid any more.
        serials: these certificates are not.
        void_below: join tokens that were made under a list of a lower version give nothing.
        data: the signed form.
    """

    version: int = 0
    peer_ids: frozenset[str] = frozenset()
    serials: frozenset[int] = frozenset()
    void_below: int = 0
    data: bytes = field(default=b"", repr=False)

    @classmethod
    def sign(
        cls,
        key: Ed25519PrivateKey,
        *,
        version: int,
        peer_ids: Iterable[str],
        serials: Iterable[int],
        void_below: int = 0,
    ) -> RevocationList:
        """Make one.

        Raises:
            ConfigurationError: more than 512 entries.
            RefusedError: a value that nobody would read.
        """
        peers, numbers = sorted(set(peer_ids)), sorted(set(serials))
        if len(peers) + len(numbers) > MAX_REVOKED:
            raise ConfigurationError(
                f"more than {MAX_REVOKED} revocations: take those off the list whose certificates have expired"
            )
        public_key = key.public_key().public_bytes_raw()
        cluster_id = cluster_id_of(public_key)
        signed = REVOCATIONS.sign(key, cluster_id, version, peers, numbers, void_below)
        return cls.decode(signed, public_key)

    @classmethod
    def decode(cls, data: bytes, public_key: bytes) -> RevocationList:
        """Read a signed form, which may come from anybody.

        Raises:
            RefusedError: not signed by this cluster, or malformed (MALFORMED).
        """
        values = REVOCATIONS.read(data, public_key)
        cluster_id, version, peers, serials, void_below, signed = values
        if void_below > version:
            raise REVOCATIONS.refused(
                f"malformed: of version {version}, and makes tokens below {void_below} void"
            )
        if len(peers) + len(serials) > MAX_REVOKED or not all(map(is_peer_id, peers)):
            raise REVOCATIONS.refused("malformed: too many entries, or one that is no peer id")
        if cluster_id != cluster_id_of(public_key):
            raise REVOCATIONS.refused("signed by one cluster and named after another")
        return cls(version, frozenset(peers), frozenset(serials), void_below, signed)

    def check(self, certificate: Certificate) -> None:
        """Check that a certificate is not on the list.

        Raises:
            RefusedError: REVOKED.
        """
        if certificate.peer_id in self.peer_ids or certificate.serial in self.serials:
            raise RefusedError(
                Refusal.REVOKED,
                f"the certificate (serial {certificate.serial:016x}) was revoked by the cluster",
            )

    def check_token(self, token: JoinToken) -> None:
        """Check that a join token was not made void.

        Raises:
            RefusedError: TOKEN_VOID.
        """
        if token.list_version < self.void_below:
            raise RefusedError(
                Refusal.TOKEN_VOID,
                "the ticket was made void after it was printed, as all are when a member is revoked: ask for a new "
                "one (neurogrid-coordinator --ticket)",
            )
