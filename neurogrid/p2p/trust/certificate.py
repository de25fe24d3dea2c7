"""Certificates: the cluster says that a peer id is a member, in which role, and until when.

Source: protocol_spec/trust.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.trust.names import is_peer_id, is_role
from neurogrid.p2p.trust.refusal import Refusal, RefusedError
from neurogrid.p2p.trust.signing import CERTIFICATE, cluster_id_of
from neurogrid.p2p.wire.maps import printable_line

__all__ = ["Certificate", "by_clock", "format_span", "format_time"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate whose signature is good. Whether it admits anybody now is `check`'s to say.

    Attributes:
        cluster_id: whose key signed it.
        peer_id: whose it is (base58).
        role: what that peer may act as.
        serial: u64, at random: names this certificate in logs and revocations.
        not_before, not_after: when it is valid, seconds of the Unix epoch.
        data: the signed form.
    """

    cluster_id: str
    peer_id: str
    role: str
    serial: int
    not_before: int
    not_after: int
    data: bytes = field(repr=False)

    @classmethod
    def sign(
        cls,
        key: Ed25519PrivateKey,
        *,
        peer_id: str,
        role: str,
        serial: int,
        not_before: int,
        not_after: int,
    ) -> Certificate:
        """Make one.

        Raises:
            RefusedError: a value that nobody would read: no peer id, no role, an empty time.
        """
        public_key = key.public_key().public_bytes_raw()
        cluster_id = cluster_id_of(public_key)
        signed = CERTIFICATE.sign(key, cluster_id, peer_id, role, serial, not_before, not_after)
        return cls.decode(signed, public_key)

    @classmethod
    def decode(cls, data: bytes, public_key: bytes) -> Certificate:
        """Read a signed form, which may come from anybody.

        Args:
            data: as `Certificate.data`.
            public_key: the cluster's, 32 B.

        Raises:
            RefusedError: CERTIFICATE_INVALID; WRONG_CLUSTER if it says itself that it is another cluster's.
        """
        try:
            certificate = cls(*CERTIFICATE.read(data, public_key))
        except RefusedError as exc:
            named = _named_cluster(data)
            ours = cluster_id_of(public_key)
            if named is not None and named != ours:
                raise RefusedError(
                    Refusal.WRONG_CLUSTER, f"the certificate is of cluster {named}, not of {ours}"
                ) from exc
            raise
        if certificate.cluster_id != cluster_id_of(public_key):
            raise CERTIFICATE.refused("signed by one cluster and named after another")
        if not is_peer_id(certificate.peer_id) or not is_role(certificate.role):
            raise CERTIFICATE.refused("malformed: its peer or its role is none")
        if certificate.not_before >= certificate.not_after:
            raise CERTIFICATE.refused("valid at no time: it ends before it begins")
        return certificate

    def check(self, peer_id: str, *, now: float, clock_skew: float) -> None:
        """Check whose it is, and that it is valid now.

        Args:
            peer_id: the peer of the connection.
            now: seconds of the Unix epoch.
            clock_skew: by how much this clock and the cluster's may differ, seconds.

        Raises:
            RefusedError: WRONG_PEER, NOT_YET_VALID or EXPIRED.
        """
        if self.peer_id != peer_id:
            raise RefusedError(Refusal.WRONG_PEER, f"the certificate is that of {self.peer_id}")
        if now < self.not_before - clock_skew:
            raise RefusedError(
                Refusal.NOT_YET_VALID,
                f"the certificate is valid from {format_time(self.not_before)} on: "
                f"{by_clock(now, self.not_before)}",
            )
        if now >= self.not_after + clock_skew:
            raise RefusedError(
                Refusal.EXPIRED,
                f"the certificate expired at {format_time(self.not_after)}: {by_clock(now, self.not_after)}",
            )


def by_clock(now: float, moment: float) -> str:
    """Describe a moment by this host's clock, `now`, for people on either side; both are seconds of the Unix epoch."""
    relation = (
        f"{format_span(now - moment)} ago" if now >= moment else f"in {format_span(moment - now)}"
    )
    return f"{relation}, by the clock of the host that says so ({format_time(now)})"


def format_span(seconds: float) -> str:
    """A time span to be read by people, in its largest unit."""
    for unit, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def format_time(seconds: float) -> str:
    """A moment of the Unix epoch in UTC, to be read by people."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s of the Unix epoch"


def _named_cluster(data: bytes) -> str | None:
    """The cluster that a form says that it is of, which nobody has signed: safe to print, and no more."""
    try:
        return printable_line(CERTIFICATE.peek(data).text("cluster", 32))
    except RemoteProtocolError:
        return None
