"""A host's membership: its cluster's public key, its certificate, the newest revocations; in memory and in a file.

DIR/membership       a msgpack map, 0600: the key, the certificate and the list as they were signed
"""

from __future__ import annotations

from pathlib import Path

from neurogrid.errors import ConfigurationError, RemoteProtocolError
from neurogrid.p2p.trust.certificate import Certificate
from neurogrid.p2p.trust.limits import MAX_CERTIFICATE_BYTES, MAX_REVOCATION_BYTES
from neurogrid.p2p.trust.private_files import (
    is_there,
    make_private_directory,
    read_private,
    write_private,
)
from neurogrid.p2p.trust.revocation import RevocationList
from neurogrid.p2p.trust.signing import KEY_BYTES, cluster_id_of
from neurogrid.p2p.wire.forms import Map, binary, fixed, optional

__all__ = ["Membership"]

_MAX_BYTES = MAX_CERTIFICATE_BYTES + MAX_REVOCATION_BYTES + 256
_FILE = Map(
    "membership",
    {
        "key": fixed(KEY_BYTES),
        "certificate": optional(binary(MAX_CERTIFICATE_BYTES)),
        "revocations": optional(binary(MAX_REVOCATION_BYTES)),
    },
    max_bytes=_MAX_BYTES,
)


class Membership:
    """A membership, or the wish for one (`certificate` is None).

    Args:
        cluster_key: the cluster's public key, 32 B.
        certificate: this host's own.
        revocations: the newest list that it knows.
        directory: where each change is kept; None keeps it in memory.
    """

    def __init__(
        self,
        cluster_key: bytes,
        certificate: Certificate | None = None,
        *,
        revocations: RevocationList | None = None,
        directory: Path | None = None,
    ) -> None:
        self.cluster_key = cluster_key
        self.cluster_id = cluster_id_of(cluster_key)
        self.certificate = certificate
        self.revocations = revocations or RevocationList()
        self._directory = directory
        self._is_unsaved = False

    @classmethod
    def load(cls, directory: Path) -> Membership:
        """Read what `save` wrote; later changes go to the same place.

        Raises:
            ConfigurationError: there is none, or it is not what was written.
        """
        path = directory / "membership"
        data = read_private(path, _MAX_BYTES)
        if data is None:
            raise ConfigurationError(
                f"there is no {path}: join a cluster first (neurogrid join TICKET)"
            )
        try:
            key, certificate, revocations = _FILE.decode(data)
            return cls(
                key,
                Certificate.decode(certificate, key) if certificate else None,
                revocations=RevocationList.decode(revocations, key) if revocations else None,
                directory=directory,
            )
        except RemoteProtocolError as exc:
            raise ConfigurationError(f"{path} is damaged: {exc}") from exc

    @classmethod
    def resume(cls, directory: Path, cluster_key: bytes) -> Membership:
        """The membership in `directory`, or the wish for one in this cluster, which is then kept there.

        Raises:
            ConfigurationError: as `load`, or the one there is of another cluster.
        """
        if not is_there(directory / "membership"):
            return cls(cluster_key, directory=directory)
        membership = cls.load(directory)
        if membership.cluster_key != cluster_key:
            raise ConfigurationError(
                f"{directory} has a membership in cluster {membership.cluster_id}, not in "
                f"{cluster_id_of(cluster_key)}: name another directory"
            )
        return membership

    def save(self) -> None:
        """Write it to its directory (0700), if it has one.

        Raises:
            ConfigurationError: it cannot be written.
        """
        if self._directory is None:
            return
        self._is_unsaved = True
        make_private_directory(self._directory)
        certificate = self.certificate.data if self.certificate is not None else b""
        entries = self.cluster_key, certificate, self.revocations.data
        write_private(self._directory / "membership", _FILE.encode(entries))
        self._is_unsaved = False

    def save_again(self) -> None:
        """Write it if that failed the last time; as `save`."""
        if self._is_unsaved:
            self.save()

    def save_to(self, directory: Path) -> None:
        """Write it to another directory (0700), and every change from now on.

        Raises:
            ConfigurationError: it cannot be written.
        """
        self._directory = directory
        self.save()

    def take_certificate(self, certificate: Certificate) -> None:
        """Use a certificate that the cluster gave to this host.

        Raises:
            ConfigurationError: it cannot be written; it is used all the same.
        """
        self.certificate = certificate
        self.save()

    def take_revocations(self, revocations: RevocationList) -> bool:
        """Use a list if it is newer than the one here; whether it was.

        Raises:
            ConfigurationError: it cannot be written; it is in force all the same.
        """
        if revocations.version <= self.revocations.version:
            return False
        self.revocations = revocations
        self.save()
        return True
