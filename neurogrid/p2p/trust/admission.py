"""The interface of admission policies, and the policies that need no cluster.

A policy judges; it does no I/O with peers. `Gate` carries what it shows and what it says.
"""

from __future__ import annotations

import ipaddress
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.trust.limits import RECHECK_INTERVAL
from neurogrid.p2p.trust.messages import Credentials
from neurogrid.p2p.trust.names import ANY_ROLE, is_peer_id, is_role
from neurogrid.p2p.trust.refusal import Refusal, RefusedError

__all__ = ["Admission", "Admitted", "AllowList", "Insecure", "LoopbackOnly", "parse_allow"]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A peer that was admitted.

    Attributes:
        peer_id: whom (base58).
        role: what it may act as; `ANY_ROLE` where nobody decides.
        is_issuer: whether it gives certificates.
        serial: of its certificate; None where it needed none.
        not_after: when its certificate expires, seconds of the Unix epoch; None where it needed none.
        issued: the signed form of a new certificate to hand to it, or nothing.
    """

    peer_id: str
    role: str
    is_issuer: bool = False
    serial: int | None = None
    not_after: int | None = None
    issued: bytes = field(default=b"", repr=False)


class Admission(ABC):
    """One policy, of one host."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []

    def bind(self, peer_id: str) -> None:  # noqa: B027 - by default nothing
        """Learn whose policy this is; called once, by the host.

        Raises:
            ConfigurationError: it is another host's.
        """

    def check_listen(self, addresses: Sequence[str]) -> None:  # noqa: B027 - by default nothing
        """Check that a host with this policy may listen at these multiaddrs.

        Raises:
            ConfigurationError: it may not; says what to type.
        """

    def unseen(self, peer_id: str) -> Admitted | None:
        """The peer as admitted by its id alone; None when it has to show something.

        Raises:
            RefusedError: nothing that it could show would help.
        """
        return None

    def credentials(self, peer_id: str, *, asks: bool = False) -> Credentials:
        """Return what to show to this peer; `asks` in an exchange in which a new certificate may be asked for."""
        return Credentials()

    @abstractmethod
    def judge(self, peer_id: str, shown: Credentials) -> Admitted:
        """Admit a peer by what it shows.

        Raises:
            RefusedError: it is not admitted.
            DirectoryLockedError: that cannot be said at this moment: ask again.
        """

    def verify(self, peer_id: str, role: str, certificate: bytes) -> None:  # noqa: B027 - by default nothing
        """Check that a peer is what it says in something that it signed, whether this host admits that or not.

        Args:
            peer_id: who signed (base58).
            role: what it says that it is.
            certificate: the signed form that came with it, or nothing.

        Raises:
            RefusedError: it is not, or no more.
        """

    @property
    def own_certificate(self) -> bytes | None:
        """The signed form by which others verify this host; empty where none is needed, None while there is none."""
        return b""

    def may_know(self, peer_id: str) -> bool:
        """Whether a peer could pass `verify` at all."""
        return True

    def take_issued(self, data: bytes, giver: Admitted) -> None:  # noqa: B027 - by default nothing
        """Use a certificate that came for this host, if it is of more use than the one here.

        Args:
            data: the signed form.
            giver: who sent it, as judged by what it showed in the same exchange.

        Raises:
            RefusedError: it is no good, or not the giver's to give.
        """

    def remark(self, reason: int, *, is_ours: bool) -> str:
        """Return what else people at this host should know of a refusal; begins with a space, or is empty.

        Args:
            reason: the `Refusal`.
            is_ours: whether this host refused, or the peer did.
        """
        return ""

    def recheck(self, admitted: Admitted) -> None:  # noqa: B027 - by default nothing
        """Check that a peer which was admitted would still be.

        Raises:
            RefusedError: it would not.
        """

    @property
    def recheck_interval(self) -> float:
        """Seconds from one `refresh` to the next."""
        return RECHECK_INTERVAL

    def refresh(self) -> bool:
        """Look at the clock and at the files, every `recheck_interval`.

        Returns:
            Whether an issuer is to be asked for a new certificate.
        """
        return False

    @property
    def edition(self) -> object:
        """The edition of our credentials: peers are shown them again once it differs."""
        return None

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener()` when something changed that peers may have to be shown or judged by."""
        self._listeners.append(listener)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()


class Insecure(Admission):
    """Everybody, in any role: `--insecure`."""

    def unseen(self, peer_id: str) -> Admitted | None:
        return Admitted(peer_id, ANY_ROLE)

    def judge(self, peer_id: str, shown: Credentials) -> Admitted:
        return Admitted(peer_id, ANY_ROLE)


class LoopbackOnly(Insecure):
    """Every process of this machine, and nobody else: what a command does that was told nothing."""

    def check_listen(self, addresses: Sequence[str]) -> None:
        exposed = [address for address in addresses if not _is_loopback(address)]
        if exposed:
            raise ConfigurationError(
                f"cannot listen on {', '.join(exposed)} without knowing who may connect: "
                "add --cluster DIR (a coordinator makes one with --new-cluster DIR), --join TICKET, "
                "--allow PEER_ID=ROLE, or --insecure to serve whoever reaches the port"
            )


class AllowList(Admission):
    """The peers of a list, each in its role, and nobody else.

    Args:
        roles: the role of each peer id.
        admits: which roles are admitted at all; None is every one.

    Raises:
        ConfigurationError: a peer id or a role is none.
    """

    def __init__(self, roles: Mapping[str, str], *, admits: Iterable[str] | None = None) -> None:
        super().__init__()
        self._roles: dict[str, str] = {}
        for peer_id, role in roles.items():
            self.allow(peer_id, role)
        self._admits = None if admits is None else frozenset(admits)

    @classmethod
    def parse(cls, entries: Iterable[str], *, admits: Iterable[str] | None = None) -> AllowList:
        """A list from `PEER_ID=ROLE`, each from one `--allow`.

        Raises:
            ConfigurationError: one has another form, or a peer has two roles.
        """
        roles: dict[str, str] = {}
        for peer_id, role in map(parse_allow, entries):
            if roles.setdefault(peer_id, role) != role:
                raise ConfigurationError(f"{peer_id} is allowed as {roles[peer_id]} and as {role}")
        return cls(roles, admits=admits)

    @property
    def roles(self) -> dict[str, str]:
        """The role of each peer that is on the list."""
        return dict(self._roles)

    def allow(self, peer_id: str, role: str) -> None:
        """Put one more peer on the list.

        Raises:
            ConfigurationError: the peer id or the role is none.
        """
        if not is_peer_id(peer_id) or not is_role(role):
            raise _not_allowable(f"{peer_id}={role}")
        self._roles[peer_id] = role

    def unseen(self, peer_id: str) -> Admitted | None:
        try:
            return self._admit(peer_id)
        except RefusedError:
            return None  # it is told why when it asks

    def judge(self, peer_id: str, shown: Credentials) -> Admitted:
        return self._admit(peer_id)

    def verify(self, peer_id: str, role: str, certificate: bytes) -> None:
        check_said_role(role, self._role_of(peer_id), "the list")

    def may_know(self, peer_id: str) -> bool:
        return peer_id in self._roles

    def _admit(self, peer_id: str) -> Admitted:
        role = self._role_of(peer_id)
        check_role(role, self._admits)
        return Admitted(peer_id, role)

    def _role_of(self, peer_id: str) -> str:
        role = self._roles.get(peer_id)
        if role is None:
            raise RefusedError(
                Refusal.NOT_ON_LIST,
                f"{peer_id} is not on the list of allowed peers (--allow {peer_id}=ROLE)",
            )
        return role


def parse_allow(text: str) -> tuple[str, str]:
    """Split `PEER_ID=ROLE`.

    Raises:
        ConfigurationError: another form.
    """
    peer_id, separator, role = text.partition("=")
    if not separator or not is_peer_id(peer_id) or not is_role(role):
        raise _not_allowable(text)
    return peer_id, role


def check_role(role: str, admits: frozenset[str] | None) -> None:
    """Check that a role is one of those admitted; None admits all.

    Raises:
        RefusedError: ROLE_NOT_ADMITTED.
    """
    if admits is not None and role not in admits:
        raise RefusedError(
            Refusal.ROLE_NOT_ADMITTED,
            f"its role is {role}; admitted here: {', '.join(sorted(admits)) or 'none'}",
        )


def check_said_role(said: str, role: str, source: str) -> None:
    """Check that what a peer says it is agrees with what it is by a certificate or a list.

    Raises:
        RefusedError: ROLE_NOT_ADMITTED.
    """
    if said != role:
        raise RefusedError(
            Refusal.ROLE_NOT_ADMITTED, f"it says that it is a {said}, and {source} says {role}"
        )


def _not_allowable(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"{text!r} allows nobody: expected PEER_ID=ROLE, for example 12D3KooW…=worker"
    )


_IP: Final = ("ip4", "ip6")


def _is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address; one that is not understood counts as exposed."""
    try:
        multiaddr = Multiaddr(address)
        first = next(iter(multiaddr.protocols())).name
        if first == "memory":
            return True
        if first not in _IP:
            return False
        return ipaddress.ip_address(str(multiaddr.value_for_protocol(first))).is_loopback
    except (MultiaddrError, ValueError, StopIteration):
        return False
