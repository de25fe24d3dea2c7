"""A cluster: a key pair in a directory, and what is signed with it.

    DIR/cluster.key      the private key (PKCS #8, PEM), 0600; it is read by this module and by nothing else
    DIR/revocations      the newest revocation list, signed
    DIR/token-uses       the certificates that limited tickets gave
    DIR/whereabouts      where the host listens, or listened, that runs with this directory
    DIR/ticket           one that was made and not shown (`neurogrid.cli.options.trust`)
    DIR/running          held by the host that runs with this directory (`directory_lock`)
    DIR/lock             held while one of these is changed
    DIR/membership       what the host that runs with this directory shows (`Membership`)

The holder of this directory is the cluster: it can make members of any role. Others hold a `Membership`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.trust.certificate import Certificate
from neurogrid.p2p.trust.directory_lock import held
from neurogrid.p2p.trust.join_token import JoinToken
from neurogrid.p2p.trust.key_files import check_owner_alone
from neurogrid.p2p.trust.limits import (
    CERTIFICATE_LIFETIME,
    MAX_REVOCATION_BYTES,
    MAX_TOKEN_USES,
    TICKET_LIFETIME,
)
from neurogrid.p2p.trust.membership import Membership
from neurogrid.p2p.trust.names import WORKER, is_peer_id, is_role
from neurogrid.p2p.trust.private_files import (
    LOCK_TIMEOUT,
    check_writable,
    is_there,
    locked,
    make_private_directory,
    read_private,
    write_private,
)
from neurogrid.p2p.trust.refusal import RefusedError
from neurogrid.p2p.trust.revocation import RevocationList
from neurogrid.p2p.trust.signing import cluster_id_of
from neurogrid.p2p.trust.ticket import Ticket
from neurogrid.p2p.trust.token_uses import TokenUses
from neurogrid.p2p.trust.whereabouts import Whereabouts

__all__ = ["Cluster"]

MAX_KEY_FILE_BYTES: Final = 4096  # 119 B are written


class Cluster:
    """A cluster whose key is here. Made by `create` and `load`.

    Attributes:
        directory: where the key is.
        public_key: 32 B of Ed25519; the cluster's id follows from it.
        cluster_id: 32 characters.
    """

    def __init__(self, directory: Path, key: Ed25519PrivateKey) -> None:
        self.directory = directory
        self.public_key = key.public_key().public_bytes_raw()
        self.cluster_id = cluster_id_of(self.public_key)
        self._key = key
        self._uses = TokenUses(directory / "token-uses")

    @classmethod
    def create(cls, directory: Path) -> Cluster:
        """Make a new key pair in `directory`, which is made (0700) if it is not there.

        Raises:
            ConfigurationError: there is a cluster in it already, or it cannot be written to.
        """
        cls.check_new(directory)
        make_private_directory(directory)
        key = Ed25519PrivateKey.generate()
        with locked(directory):
            cls.check_new(directory)
            write_private(directory / "cluster.key", _pem(key))
        return cls(directory, key)

    @staticmethod
    def check_new(directory: Path) -> None:
        """Check that there is no cluster in `directory` yet; makes nothing.

        Raises:
            ConfigurationError: there is one, or none can be made there.
        """
        path = directory / "cluster.key"
        if is_there(path):
            raise ConfigurationError(
                f"{path} is there already: use it (--cluster {directory}), or name another directory"
            )
        check_writable(directory)

    def copy_to(self, directory: Path) -> Cluster:
        """Make the directory of another coordinator of this cluster, which takes a key of its own when it runs.

        What is copied is the cluster's: its key, its revocations, and which uses of tickets are spent. The identity,
        certificate and whereabouts of the coordinator here are not. From then on each counts uses by itself.

        Returns:
            The cluster as it is there.

        Raises:
            ConfigurationError: there is a cluster in it already, a file cannot be read, or it cannot be written to.
        """
        self.check_new(directory)
        make_private_directory(directory)
        with locked(self.directory), locked(directory):
            self.check_new(directory)
            revocations = self.revocations()
            if revocations.version:
                write_private(directory / "revocations", revocations.data)
            self._uses.copy_to(directory / self._uses.path.name)
            # Last: without it the directory is none of a cluster.
            write_private(directory / "cluster.key", _pem(self._key))
        return Cluster(directory, self._key)

    @classmethod
    def load(cls, directory: Path) -> Cluster:
        """Read the key pair in `directory`.

        Raises:
            ConfigurationError: there is none, others than its owner can read it, or it cannot be read.
        """
        path = directory / "cluster.key"
        pem = read_private(path, MAX_KEY_FILE_BYTES)
        if pem is None:
            raise ConfigurationError(
                f"there is no {path}: make a cluster with neurogrid-coordinator --new-cluster {directory}"
            )
        check_owner_alone(path, "which makes members")
        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
            raise ConfigurationError(f"{path} is no private key: {exc}") from exc
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigurationError(f"{path} is no Ed25519 key")
        return cls(directory, key)

    # Members

    def issue(
        self,
        peer_id: str,
        role: str,
        *,
        lifetime: float = CERTIFICATE_LIFETIME,
        now: float | None = None,
    ) -> Certificate:
        """Make a certificate.

        Args:
            peer_id: whose (base58).
            role: "coordinator", "worker", or another that those who read it know.
            lifetime: seconds until it expires.
            now: seconds of the Unix epoch; None takes the clock.

        Raises:
            ConfigurationError: no peer id or no role, or revoked.
        """
        if not is_peer_id(peer_id) or not is_role(role):
            raise ConfigurationError(
                f"no certificate for {peer_id!r} as {role!r}: no peer id or role"
            )
        try:
            return self.sign_for(
                peer_id, role, now=time.time() if now is None else now, lifetime=lifetime
            )
        except RefusedError as exc:
            raise ConfigurationError(f"{peer_id} was revoked: reinstate it first") from exc

    def enrol(
        self,
        peer_id: str,
        role: str,
        *,
        lifetime: float = CERTIFICATE_LIFETIME,
        now: float | None = None,
    ) -> Membership:
        """The membership of a host that runs with this directory, kept in it; as `issue`.

        A certificate that is there already is kept if it is this peer's, in this role, and not half used up.
        """
        moment = time.time() if now is None else now
        membership = Membership.resume(self.directory, self.public_key)
        membership.take_revocations(self.revocations())
        held = membership.certificate
        if (
            held is None
            or (held.peer_id, held.role) != (peer_id, role)
            or not held.not_before <= moment < (held.not_before + held.not_after) / 2
        ):
            membership.take_certificate(self.issue(peer_id, role, lifetime=lifetime, now=moment))
        return membership

    def redeem(
        self,
        data: bytes,
        peer_id: str,
        *,
        now: float,
        lifetime: float,
        patience: float = LOCK_TIMEOUT,
    ) -> Certificate:
        """The certificate that a join token promises to a peer that shows it.

        A token with a limited number of uses gives a peer that shows it again the same certificate again, while that
        is valid, and no use is spent. One without a limit gives another each time.

        Args:
            patience: seconds to wait, and block, while another process changes the directory.

        Raises:
            RefusedError: the token is none of ours, expired, void or used up, or the peer or its certificate was
                revoked.
            DirectoryLockedError: another process changes the directory.
            ConfigurationError: the directory cannot be read or written.
        """
        token = JoinToken.decode(data, self.public_key)
        token.check(now=now, clock_skew=0.0)  # the clock that it was made by
        with locked(self.directory, patience=patience):
            revocations = self.revocations()
            revocations.check_token(token)
            given = self._given(token, peer_id, now=now)
            if given is not None:
                revocations.check(given)
                return given
            certificate = self.sign_for(peer_id, token.role, now=now, lifetime=lifetime)
            self._uses.spend(token, certificate, now=now)
            return certificate

    def _given(self, token: JoinToken, peer_id: str, *, now: float) -> Certificate | None:
        """Return the certificate that a token with limited uses gave to this peer; None if there is no valid one."""
        data = self._uses.given(token, peer_id)
        if data is None:
            return None
        try:
            given = Certificate.decode(data, self.public_key)
        except RefusedError as exc:
            raise ConfigurationError(
                f"{self.directory / 'token-uses'} does not count uses of tickets: {exc}"
            ) from exc
        try:
            given.check(peer_id, now=now, clock_skew=0.0)
        except RefusedError:
            return None
        return given

    def sign_for(self, peer_id: str, role: str, *, now: float, lifetime: float) -> Certificate:
        """As `issue`, for what a peer asks for.

        Raises:
            RefusedError: REVOKED.
        """
        certificate = Certificate.sign(
            self._key,
            peer_id=peer_id,
            role=role,
            serial=secrets.randbits(63),
            not_before=int(now),
            not_after=int(now) + max(1, int(lifetime)),
        )
        self.revocations().check(certificate)
        return certificate

    # Tickets

    def ticket(
        self,
        peer_id: str,
        addresses: Sequence[str],
        *,
        relays: Sequence[str] = (),
        role: str = WORKER,
        lifetime: float = TICKET_LIFETIME,
        max_uses: int = 0,
        now: float | None = None,
    ) -> Ticket:
        """Make a ticket that leads to a host which holds this cluster.

        Args:
            peer_id, addresses, relays: as in `Ticket`; `Whereabouts.of` sorts a host's addresses so.
            role: of the certificates that it gives.
            lifetime: seconds until it expires.
            max_uses: how many certificates it gives, up to 4,096; 0 is any number.
            now: seconds of the Unix epoch; None takes the clock.

        Raises:
            ConfigurationError: a value out of its range.
        """
        if not is_role(role) or not 0 <= max_uses <= MAX_TOKEN_USES or lifetime < 1:
            raise ConfigurationError(
                f"no ticket for {role!r}, {max_uses} uses and {lifetime:g} s: expected a role, "
                f"at most {MAX_TOKEN_USES} uses and a second or more"
            )
        token = JoinToken.sign(
            self._key,
            role=role,
            serial=secrets.randbits(63),
            not_after=int((time.time() if now is None else now) + lifetime),
            max_uses=max_uses,
            list_version=self.revocations().version,
        )
        return Ticket(self.public_key, peer_id, tuple(addresses), tuple(relays), token)

    def whereabouts(self) -> Whereabouts | None:
        """Return the last whereabouts of the host that runs with this directory; None if none has run yet.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        return Whereabouts.read(self.directory)

    def note_whereabouts(self, whereabouts: Whereabouts) -> None:
        """Keep where the host is that runs with this directory: for tickets that another process makes.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        whereabouts.write(self.directory)

    def held(self) -> AbstractContextManager[None]:
        """Run with this directory, and no other host does, until the block is left or the process has ended.

        Raises:
            DirectoryInUseError: one does; says which process, and since when.
            ConfigurationError: the directory cannot be written to.
        """
        return held(self.directory)

    # Revocations

    def revocations(self) -> RevocationList:
        """The newest list, read anew: another process may have made it.

        Raises:
            ConfigurationError: the file cannot be read, or is not this cluster's.
        """
        path = self.directory / "revocations"
        try:
            data = read_private(path, MAX_REVOCATION_BYTES)
            return (
                RevocationList() if data is None else RevocationList.decode(data, self.public_key)
            )
        except ConfigurationError as exc:
            raise ConfigurationError(f"cannot tell who was revoked: {exc}") from exc
        except RefusedError as exc:
            raise ConfigurationError(f"cannot tell who was revoked: {path}: {exc}") from exc

    def revoke(
        self,
        peer_ids: Iterable[str] = (),
        *,
        serials: Iterable[int] = (),
        keep_tickets: bool = False,
    ) -> RevocationList:
        """Make peers and certificates members no more, from the moment that the others know of it.

        Tickets that were made until now give nothing any more: a peer that is revoked may have kept the one that it
        joined by, and would join again by it under another peer id.

        Args:
            peer_ids: whom (base58); nobody, to make tickets void and nothing else.
            serials: of certificates.
            keep_tickets: leave the tickets as they are: none of the revoked peers can have one.

        Returns:
            The new list; hosts that hold this cluster hand it on within half a minute.

        Raises:
            ConfigurationError: no peer id, too many entries, or the file cannot be written.
        """
        peers, numbers = frozenset(peer_ids), frozenset(serials)
        for peer_id in peers:
            if not is_peer_id(peer_id):
                raise ConfigurationError(f"{peer_id!r} is no peer id")
        with locked(self.directory):
            old = self.revocations()
            return self._sign_list(
                old.peer_ids | peers,
                old.serials | numbers,
                old=old,
                void_below=old.void_below if keep_tickets else old.version + 1,
            )

    def reinstate(
        self, peer_ids: Iterable[str] = (), *, serials: Iterable[int] = ()
    ) -> RevocationList:
        """Take peers and certificates off the list; as `revoke`. Tickets that are void stay so."""
        peers, numbers = frozenset(peer_ids), frozenset(serials)
        with locked(self.directory):
            old = self.revocations()
            return self._sign_list(
                old.peer_ids - peers, old.serials - numbers, old=old, void_below=old.void_below
            )

    def learn(self, revocations: RevocationList, *, patience: float = LOCK_TIMEOUT) -> None:
        """Go on from a list that another host which holds this cluster has made, if it is newer.

        Args:
            patience: seconds to wait, and block, while another process changes the directory.

        Raises:
            ConfigurationError: the directory cannot be read or written, or another process changes it.
        """
        with locked(self.directory, patience=patience):
            if revocations.version > self.revocations().version:
                write_private(self.directory / "revocations", revocations.data)

    def _sign_list(
        self,
        peer_ids: frozenset[str],
        serials: frozenset[int],
        *,
        old: RevocationList,
        void_below: int,
    ) -> RevocationList:
        """The list after `old`, written in its place. The caller holds the lock."""
        new = RevocationList.sign(
            self._key,
            version=old.version + 1,
            peer_ids=peer_ids,
            serials=serials,
            void_below=void_below,
        )
        write_private(self.directory / "revocations", new.data)
        return new


def _pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
