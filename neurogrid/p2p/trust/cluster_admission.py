"""Members of one cluster, by their certificates: `--cluster` and `--join`.

A host shows its certificate and judges those of others by the cluster's public key, the clock, and the newest
revocations that anybody showed it. One that has the cluster's key besides gives certificates: to peers that show a
join token, and to members whose certificate has lived half of its life.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.trust.admission import Admission, Admitted, check_role, check_said_role
from neurogrid.p2p.trust.certificate import Certificate, format_span, format_time
from neurogrid.p2p.trust.cluster import Cluster
from neurogrid.p2p.trust.join_token import JoinToken
from neurogrid.p2p.trust.limits import (
    CERTIFICATE_LIFETIME,
    CLOCK_SKEW,
    ISSUER_RECHECK_INTERVAL,
    MAX_JOINED,
    RECHECK_INTERVAL,
)
from neurogrid.p2p.trust.membership import Membership
from neurogrid.p2p.trust.messages import Credentials
from neurogrid.p2p.trust.names import is_role
from neurogrid.p2p.trust.private_files import DirectoryLockedError
from neurogrid.p2p.trust.refusal import Refusal, RefusedError
from neurogrid.p2p.trust.revocation import RevocationList
from neurogrid.p2p.trust.ticket import Ticket

__all__ = ["ClusterAdmission"]

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class ClusterAdmission(Admission):
    """The policy of a member, or of a host that wants to become one.

    Args:
        membership: the cluster and this host's certificate.
        admits: the roles of the peers that are admitted.
        issuer: the cluster with its key, on hosts that give certificates.
        ticket: on a host without a certificate: where to get one, and by what.
        lifetime: of the certificates that it gives, seconds.
        clock: gives seconds of the Unix epoch.
        clock_skew: by how much clocks may differ, seconds.

    Raises:
        ConfigurationError: the parts are of different clusters, or `admits` names no role.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        admits: Iterable[str],
        issuer: Cluster | None = None,
        ticket: Ticket | None = None,
        lifetime: float = CERTIFICATE_LIFETIME,
        clock: Clock = time.time,
        clock_skew: float = CLOCK_SKEW,
    ) -> None:
        super().__init__()
        self.membership = membership
        self._admits = frozenset(admits)
        self._issuer = issuer
        self._ticket = ticket
        self._lifetime = lifetime
        self._clock = clock
        self._clock_skew = clock_skew
        # By the token's serial and the peer id: the certificate by which a token made a peer a member.
        self._joined: OrderedDict[tuple[int, str], Certificate] = OrderedDict()
        self._peer_id = ""
        self._complaint = ""
        if not self._admits or not all(map(is_role, self._admits)):
            raise ConfigurationError(f"no roles: {', '.join(self._admits) or 'none are admitted'}")
        for part in (issuer, ticket):
            if part is not None and part.cluster_id != membership.cluster_id:
                raise ConfigurationError(
                    f"this host is a member of cluster {membership.cluster_id}, not of {part.cluster_id}"
                )

    def bind(self, peer_id: str) -> None:
        certificate = self.membership.certificate
        if certificate is not None and certificate.peer_id != peer_id:
            raise ConfigurationError(
                f"the certificate is that of {certificate.peer_id}, and this host is {peer_id}: "
                "use the identity that it was made for (--identity)"
            )
        self._peer_id = peer_id
        if certificate is not None and self._ticket is None:
            try:
                self._check(peer_id, certificate)
            except RefusedError as exc:
                logger.warning(
                    "nobody will admit this host: %s%s", exc, self.remark(exc.reason, is_ours=True)
                )

    def enrol(self, peer_id: str, role: str) -> Membership:
        """The membership of another host that whoever runs this one has started.

        Raises:
            ConfigurationError: the cluster's key is not here; or no peer id or role, or revoked.
        """
        if self._issuer is None:
            raise ConfigurationError(
                f"{peer_id} needs a certificate of cluster {self.membership.cluster_id}, and the cluster's key is "
                "not on this machine: start it with neurogrid join TICKET instead of --local-workers"
            )
        certificate = self._issuer.issue(peer_id, role, lifetime=self._lifetime, now=self._clock())
        return Membership(
            self.membership.cluster_key, certificate, revocations=self.membership.revocations
        )

    # What is shown

    def credentials(self, peer_id: str, *, asks: bool = False) -> Credentials:
        certificate = self.membership.certificate
        # The token is as good as a certificate to any peer that has it: the one that gave it alone may see it.
        is_joining = self._ticket is not None and self._ticket.peer_id == peer_id
        if certificate is not None and self._is_good(self._peer_id, certificate):
            # Others allow for clocks that differ: while that is needed, both are shown.
            is_joining = is_joining and self._clock() >= certificate.not_after
        return Credentials(
            certificate=certificate.data if certificate is not None else b"",
            token=self._ticket.token.data if is_joining and self._ticket is not None else b"",
            revocations=self.membership.revocations.data,
            is_issuer=self._issuer is not None,
            asks_renewal=asks and certificate is not None and self._wants_renewal(certificate),
        )

    @property
    def edition(self) -> object:
        certificate = self.membership.certificate
        serial = certificate.serial if certificate is not None else None
        return serial, self.membership.revocations.version

    # Who is admitted

    def judge(self, peer_id: str, shown: Credentials) -> Admitted:
        if shown.token and self._is_without(peer_id, shown):
            return self._judge_token(peer_id, shown)
        if not shown.certificate:
            raise RefusedError(
                Refusal.CERTIFICATE_REQUIRED,
                f"no certificate of cluster {self.membership.cluster_id} was shown: join it "
                "(neurogrid join TICKET)",
            )
        certificate = Certificate.decode(shown.certificate, self.membership.cluster_key)
        if shown.revocations:
            self._learn(shown.revocations)
        self._check(peer_id, certificate)
        check_role(certificate.role, self._admits)
        renewed = self._renew(certificate) if shown.asks_renewal else None
        if renewed is None:
            return _admitted(certificate, is_issuer=shown.is_issuer)
        return _admitted(renewed, is_issuer=shown.is_issuer, is_new=True)

    def _renew(self, certificate: Certificate) -> Certificate | None:
        """The certificate after one that is good; None if it is none of our business, too early, or cannot be made.

        Raises:
            RefusedError: REVOKED, by a list that another process made a moment ago.
        """
        if self._issuer is None or not self._wants_renewal(certificate):
            return None
        try:
            renewed = self._issuer.sign_for(
                certificate.peer_id, certificate.role, now=self._clock(), lifetime=self._lifetime
            )
        except ConfigurationError as exc:
            # The one that it has is good by what is known here; it asks again.
            self._complain(str(exc))
            return None
        logger.info("renewed the certificate of %s (%s)", certificate.peer_id, certificate.role)
        return renewed

    def verify(self, peer_id: str, role: str, certificate: bytes) -> None:
        if not certificate:
            raise RefusedError(Refusal.CERTIFICATE_REQUIRED, "no certificate came with it")
        shown = Certificate.decode(certificate, self.membership.cluster_key)
        self._check(peer_id, shown)
        check_said_role(role, shown.role, "its certificate")

    @property
    def own_certificate(self) -> bytes | None:
        certificate = self.membership.certificate
        return None if certificate is None else certificate.data

    def recheck(self, admitted: Admitted) -> None:
        if admitted.not_after is None or admitted.serial is None:
            return
        certificate = Certificate(
            self.membership.cluster_id,
            admitted.peer_id,
            admitted.role,
            admitted.serial,
            not_before=0,
            not_after=admitted.not_after,
            data=b"",
        )
        self._check(admitted.peer_id, certificate)

    def remark(self, reason: int, *, is_ours: bool) -> str:
        if reason not in (Refusal.NOT_YET_VALID, Refusal.EXPIRED, Refusal.TOKEN_EXPIRED):
            return ""
        now, own = self._clock(), self.membership.certificate
        if own is not None and now < own.not_before - self._clock_skew:
            # The cluster signed it when that was the time.
            return (
                f". This machine's clock ({format_time(now)}) is behind the cluster's by "
                f"{format_span(own.not_before - now)} or more: set it (timedatectl), or join again by a ticket if the "
                "cluster's was ahead then"
            )
        if own is not None and now >= own.not_after + self._clock_skew:
            return (
                f". This machine's clock ({format_time(now)}) ends this host's own certificate, too: set the clock if "
                "it is ahead (timedatectl), or join again by a ticket"
            )
        if is_ours:
            return ". If this machine's clock is wrong, set it (timedatectl); else that host needs a new ticket"
        if reason == Refusal.TOKEN_EXPIRED and (
            self._ticket is None or now >= self._ticket.token.not_after
        ):
            return ""
        return (
            f". By this machine's clock ({format_time(now)}) it is valid: one of the two clocks is wrong, set it "
            "(timedatectl)"
        )

    def _check(self, peer_id: str, certificate: Certificate) -> None:
        certificate.check(peer_id, now=self._clock(), clock_skew=self._clock_skew)
        self.membership.revocations.check(certificate)

    def _is_without(self, peer_id: str, shown: Credentials) -> bool:
        """Whether a peer has no certificate that would do."""
        try:
            certificate = Certificate.decode(shown.certificate, self.membership.cluster_key)
        except RefusedError:
            return True
        return not self._is_good(peer_id, certificate)

    def _is_good(self, peer_id: str, certificate: Certificate) -> bool:
        try:
            self._check(peer_id, certificate)
        except RefusedError:
            return False
        return True

    def _judge_token(self, peer_id: str, shown: Credentials) -> Admitted:
        if self._issuer is None:
            raise RefusedError(
                Refusal.NO_ISSUER, "this host gives no certificates: join where the ticket leads to"
            )
        token = JoinToken.decode(shown.token, self.membership.cluster_key)
        token.check(now=self._clock())
        check_role(token.role, self._admits)
        certificate = self._joined.get((token.serial, peer_id))
        try:
            # Another process may have made it void a moment ago.
            self._issuer.revocations().check_token(token)
            if certificate is None or not self._is_good(peer_id, certificate):
                certificate = self._redeem(self._issuer, token, peer_id)
        except DirectoryLockedError:
            raise
        except ConfigurationError as exc:
            logger.error("cannot give %s a certificate: %s", peer_id, exc)
            raise RefusedError(
                Refusal.NO_ISSUER, "the issuer cannot use its directory; its log says why"
            ) from exc
        return _admitted(certificate, is_issuer=False, is_new=True)

    def _redeem(self, issuer: Cluster, token: JoinToken, peer_id: str) -> Certificate:
        certificate = issuer.redeem(
            token.data, peer_id, now=self._clock(), lifetime=self._lifetime, patience=0.0
        )
        logger.info("%s has joined as %s, by a ticket", peer_id, certificate.role)
        self._joined[token.serial, peer_id] = certificate
        if len(self._joined) > MAX_JOINED:
            self._joined.popitem(last=False)
        return certificate

    # What changes with time

    def take_issued(self, data: bytes, giver: Admitted) -> None:
        certificate = Certificate.decode(data, self.membership.cluster_key)
        held = self.membership.certificate
        if certificate == held:
            return  # of two exchanges that crossed, both bring it
        # Old certificates of ours are known to every peer that was shown them.
        if not giver.is_issuer:
            raise RefusedError(
                Refusal.NO_ISSUER,
                "it sent a certificate for us, and says itself that it gives none",
            )
        is_held_good = held is not None and self._is_good(self._peer_id, held)
        try:
            self._check(self._peer_id, certificate)
        except RefusedError as exc:
            if exc.reason not in (Refusal.NOT_YET_VALID, Refusal.EXPIRED) or not is_held_good:
                raise
            logger.warning("%s sent a certificate that is left: %s", giver.peer_id, exc)
            return
        wanted = self._ticket.token if self._ticket is not None and not is_held_good else held
        if wanted is not None and certificate.role != wanted.role:
            raise RefusedError(
                Refusal.CERTIFICATE_INVALID,
                f"it made us a {certificate.role}, and we are a {wanted.role}",
            )
        if is_held_good and held is not None and certificate.not_after <= held.not_after:
            logger.debug("%s sent a certificate that is not valid longer", giver.peer_id)
            return
        with _tried_again("the certificate"):
            self.membership.take_certificate(certificate)
        logger.info(
            "certificate as %s until %s", certificate.role, format_time(certificate.not_after)
        )
        self._changed()

    @property
    def recheck_interval(self) -> float:
        return RECHECK_INTERVAL if self._issuer is None else ISSUER_RECHECK_INTERVAL

    def refresh(self) -> bool:
        complaint, asks_renewal = "", False
        try:
            asks_renewal = self._refresh()
            self.membership.save_again()
        except (ConfigurationError, RefusedError) as exc:
            complaint = str(exc)
        self._complain(complaint)
        return asks_renewal

    def _complain(self, text: str) -> None:
        """Say what is wrong with the files of the membership, once; nothing is the end of it."""
        if text and text != self._complaint:
            logger.warning("cannot keep up the membership: %s", text)
        self._complaint = text

    def _refresh(self) -> bool:
        if self._issuer is not None:
            revocations = self._issuer.revocations()
            if self.membership.take_revocations(revocations):
                _log_news(revocations)
            elif revocations.version < self.membership.revocations.version:
                self._issuer.learn(self.membership.revocations, patience=0.0)
        certificate = self.membership.certificate
        if certificate is None:
            return False
        if self._issuer is None:
            return self._wants_renewal(certificate)
        # One that begins later was signed while the clock was ahead: nobody takes it until then.
        if self._clock() >= certificate.not_before and not self._wants_renewal(certificate):
            return False
        self.membership.take_certificate(
            self._issuer.sign_for(
                certificate.peer_id, certificate.role, now=self._clock(), lifetime=self._lifetime
            )
        )
        return False

    def _wants_renewal(self, certificate: Certificate) -> bool:
        return self._clock() >= (certificate.not_before + certificate.not_after) / 2

    def _learn(self, data: bytes) -> None:
        """Take a list of revocations that a peer showed, if it is newer."""
        revocations = RevocationList.decode(data, self.membership.cluster_key)
        if revocations.version <= self.membership.revocations.version:
            return
        with _tried_again("the revocations"):
            self.membership.take_revocations(revocations)
        if self._issuer is not None:
            with _tried_again("the revocations"):
                self._issuer.learn(revocations, patience=0.0)
        _log_news(revocations)
        self._changed()


@contextmanager
def _tried_again(what: str) -> Iterator[None]:
    """Go on with what counts already, although it cannot be written: `refresh` tries that again."""
    try:
        yield
    except ConfigurationError as exc:
        logger.error("%s will be lost when this host ends: %s; it is tried again", what, exc)


def _log_news(revocations: RevocationList) -> None:
    logger.info("revocations of the cluster: list %d is new", revocations.version)


def _admitted(certificate: Certificate, *, is_issuer: bool, is_new: bool = False) -> Admitted:
    return Admitted(
        certificate.peer_id,
        certificate.role,
        is_issuer=is_issuer,
        serial=certificate.serial,
        not_after=certificate.not_after,
        issued=certificate.data if is_new else b"",
    )
