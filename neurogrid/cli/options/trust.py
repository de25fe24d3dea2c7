"""Trust, which says what peers may use this one: from `--cluster`, `--join`, `--allow` or `--insecure` to an admission.

A cluster's directory holds all that a member needs: its identity, its certificate, and, where the cluster was made,
the cluster's key.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from multiaddr import Multiaddr

from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.p2p.trust import Admission, Cluster, Membership, Ticket, Whereabouts

__all__ = [
    "TICKET_VARIABLE",
    "Trust",
    "add_trust_options",
    "existing_trust",
    "identity_file",
    "is_checked",
    "is_loopback",
    "take_ticket",
    "to_ask",
    "trust_of",
]

IDENTITY_FILE = "identity.key"
TICKET_FILE = "ticket"
TICKET_VARIABLE = "NEUROGRID_TICKET"


@dataclass(frozen=True)
class Trust:
    """The trust that the options come to.

    Attributes:
        admission: which peers are admitted; None for all that reach the port.
        identity_file: where the key pair of this peer lives; None for a new one each time.
        bootstrap: where the coordinator is, by the ticket, or by the one that this worker joined with.
        cluster: the cluster, where its key is at hand.
        ticket_lifetime: of the tickets to it, seconds.
        ticket_uses: how many may join by each; 0 for any number.
        ticket_role: of whoever joins by one.
        ticket_file: where one is to be written when the coordinator listens; None for nowhere.
        is_new: whether the cluster was made just now, so that nobody can have joined it.
        role: that this peer has, or is promised by its ticket; empty where nobody says.
    """

    admission: Admission | None = None
    identity_file: Path | None = None
    bootstrap: tuple[str, ...] = ()
    cluster: Cluster | None = None
    ticket_lifetime: float | None = None
    ticket_uses: int = 0
    ticket_role: str = "worker"
    ticket_file: Path | None = None
    is_new: bool = False
    role: str = ""

    def held(self) -> AbstractContextManager[None]:
        """Keep the cluster's directory from every other coordinator, where there is one.

        Raises:
            DirectoryInUseError: another one runs with it.
            ConfigurationError: it cannot be written to.
        """
        return nullcontext() if self.cluster is None else self.cluster.held()

    def beside(self, peer_id: str) -> Admission:
        """An admission of another coordinator of the cluster, which gives no certificates.

        Raises:
            ConfigurationError: no certificate can be made for it.
        """
        from neurogrid.p2p.trust import COORDINATOR, WORKER, ClusterAdmission

        assert isinstance(self.admission, ClusterAdmission)
        return ClusterAdmission(self.admission.enrol(peer_id, COORDINATOR), admits={WORKER})

    def invite(self, peer_id: str, addresses: Sequence[str], is_terminal: bool) -> str:
        """Say how workers join this peer, which has the cluster's key.

        A ticket is a secret: it is shown where somebody reads it and nothing keeps it, or written for its owner
        alone; and made when there is nobody yet, or when it was asked for.
        """
        from neurogrid.p2p.trust.private_files import write_private
        from neurogrid.p2p.trust.ticket import to_type

        assert self.cluster is not None
        where = self._note_whereabouts(peer_id, addresses)
        directory = self.cluster.directory
        if self.ticket_file is None and not self.is_new:
            return f"for a ticket by which workers join: {to_ask(directory)}"
        ticket = self._ticket(where)
        if self.ticket_file is None and is_terminal:
            return to_type(ticket)
        file = self.ticket_file or directory / TICKET_FILE
        write_private(file, f"{ticket}\n".encode())
        return f"the ticket by which workers join is in {file}: neurogrid join @{file}, where it was copied to"

    def _note_whereabouts(self, peer_id: str, addresses: Sequence[str]) -> Whereabouts:
        """Leave word in the directory, so that `--ticket` makes more tickets that lead to the same place."""
        from neurogrid.p2p.trust import Whereabouts

        assert self.cluster is not None
        # Elsewhere our loopback is nobody, and it is all there is when nobody else can come.
        reachable = [address for address in addresses if not is_loopback(address)] or addresses
        where = Whereabouts.of(peer_id, reachable)
        self.cluster.note_whereabouts(where)
        return where

    def _ticket(self, where: Whereabouts) -> str:
        from neurogrid.p2p.trust.limits import TICKET_LIFETIME

        assert self.cluster is not None
        return self.cluster.ticket(
            where.peer_id,
            where.addresses,
            relays=where.relays,
            role=self.ticket_role,
            lifetime=self.ticket_lifetime or TICKET_LIFETIME,
            max_uses=self.ticket_uses,
        ).text()


def add_trust_options(group: argparse._ArgumentGroup, *, is_worker: bool) -> None:
    """The options of both commands, and those of one."""
    group.add_argument(
        "--cluster",
        type=Path,
        metavar="DIR",
        help="be a member of the cluster whose membership is kept in DIR",
    )
    if is_worker:
        group.add_argument(
            "--join",
            metavar="TICKET",
            help="join the cluster of the coordinator that printed this ticket: @FILE reads it from a file, - from "
            f"standard input (default: {TICKET_VARIABLE}, if it is set). What stands on the command line every user "
            "of the machine can read",
        )
    else:
        group.add_argument(
            "--new-cluster",
            type=Path,
            metavar="DIR",
            help="make a cluster in DIR and use it; later runs say --cluster DIR",
        )
    group.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PEER_ID=ROLE",
        help=f"admit this peer as {'coordinator' if is_worker else 'worker'}, and nobody who is not named; "
        "may be given again",
    )


def take_ticket(options: argparse.Namespace) -> None:
    """Let NEUROGRID_TICKET stand for `--join` where that is not given; no process that is started gets to see it."""
    ticket = os.environ.pop(TICKET_VARIABLE, "")
    options.join = options.join or ticket or None


def to_ask(directory: Path) -> str:
    """Return what to type for a ticket to the cluster in a directory."""
    return f"neurogrid ticket {shlex.quote(str(directory))}"


def is_loopback(address: str) -> bool:
    """Whether a multiaddr is reached from this machine alone."""
    multiaddr = Multiaddr(address)
    host = str(multiaddr.value_for_protocol(next(iter(multiaddr.protocols())).name))
    return host.startswith("127.") or host == "::1"


def is_checked(options: argparse.Namespace) -> bool:
    """Whether peers are checked before they are served, so that it may listen beyond loopback.

    Raises:
        ConfigurationError: contradicting options.
    """
    ways = {
        "--insecure": options.insecure,
        "--allow": bool(options.allow),
        f"--cluster, --new-cluster, --join or {TICKET_VARIABLE}": bool(
            options.cluster
            or getattr(options, "new_cluster", None)
            or getattr(options, "join", None)
        ),
    }
    chosen = [name for name, is_chosen in ways.items() if is_chosen]
    if len(chosen) > 1:
        raise ConfigurationError(
            f"give one of {', '.join(chosen)}: each says alone who is admitted"
        )
    new_cluster = getattr(options, "new_cluster", None)
    if options.cluster and new_cluster:
        raise ConfigurationError("give either --cluster or --new-cluster, not both")
    for name in ("expires", "uses", "ticket_role", "ticket_file"):
        if getattr(options, name, None) and not (options.cluster or new_cluster):
            raise ConfigurationError(
                f"--{name.replace('_', '-')} is of tickets, and there are none without --cluster DIR"
            )
    return bool(chosen) and not options.insecure


def trust_of(options: argparse.Namespace, *, is_worker: bool, leads_run: bool = False) -> Trust:
    """Read or make what the options name. An identity is read, if it is there.

    Args:
        is_worker: whether it is that of a worker, which admits its fellows too.
        leads_run: whether a coordinator leads a training run, of whose members some may do nothing else; a deputy of it
            is another coordinator.

    Raises:
        ConfigurationError: it is not there, damaged, or of another cluster.
    """
    from neurogrid.p2p.hosts.identity import Identity

    trust = _trust_of(options, is_worker=is_worker, leads_run=leads_run)
    if trust.identity_file is not None:
        Identity.read(trust.identity_file)  # for its errors
    return trust


def _trust_of(options: argparse.Namespace, *, is_worker: bool, leads_run: bool) -> Trust:
    from neurogrid.p2p.trust import COORDINATOR, RUN_ROLES, WORKER, AllowList

    admits = {*RUN_ROLES} if is_worker or leads_run else {WORKER}
    if is_worker or leads_run:
        # Workers hand activations on to each other, and are served nothing else; members of runs average.
        admits.add(COORDINATOR)
    if options.allow:
        return Trust(AllowList.parse(options.allow, admits=admits), options.identity)
    if not is_checked(options):
        return Trust(None, options.identity)
    return _as_worker(options, admits) if is_worker else _as_coordinator(options, admits)


def existing_trust(options: argparse.Namespace) -> Trust | None:
    """As `trust_of`, of a coordinator; None for a cluster that has still to be made: `trust_of` makes it, last of all.

    Raises:
        ConfigurationError: as `trust_of`, or there is a cluster already where a new one was asked for.
    """
    if not options.new_cluster:
        return trust_of(options, is_worker=False)
    from neurogrid.p2p.hosts.identity import Identity
    from neurogrid.p2p.trust import Cluster

    Cluster.check_new(options.new_cluster)
    if options.identity is not None:
        Identity.read(options.identity)  # for its errors
    return None


def _as_worker(options: argparse.Namespace, admits: set[str]) -> Trust:
    from neurogrid.p2p.trust import ClusterAdmission, Membership, Whereabouts, read_ticket

    directory: Path | None = options.cluster
    where: Whereabouts | None
    ticket = None
    if options.join:
        # A member needs no ticket: that it has expired since then is no mistake.
        ticket = read_ticket(options.join, now=0.0 if _is_member(directory) else None)
    if directory is None:
        assert ticket is not None
        membership, where = Membership(ticket.cluster_key), ticket.whereabouts
    elif ticket is not None:
        membership, where = Membership.resume(directory, ticket.cluster_key), ticket.whereabouts
        where.write(directory)
    else:
        membership, where = Membership.load(directory), Whereabouts.read(directory)
    return Trust(
        ClusterAdmission(membership, admits=admits, ticket=ticket),
        identity_file(options, directory),
        bootstrap=where.dial_addresses if where else (),
        role=_role_of(membership, ticket),
    )


def _role_of(membership: Membership, ticket: Ticket | None) -> str:
    """The role of a member, or the one that its ticket promises."""
    if membership.certificate is not None:
        return membership.certificate.role
    return ticket.token.role if ticket is not None else ""


def _is_member(directory: Path | None) -> bool:
    from neurogrid.p2p.trust import Membership
    from neurogrid.p2p.trust.private_files import is_there

    if directory is None or not is_there(directory / "membership"):
        return False
    return Membership.load(directory).certificate is not None


def _as_coordinator(options: argparse.Namespace, admits: set[str]) -> Trust:
    from neurogrid.p2p.hosts.identity import Identity
    from neurogrid.p2p.trust import COORDINATOR, WORKER, Cluster, ClusterAdmission

    role = options.ticket_role or WORKER
    if role not in admits:
        raise ConfigurationError(
            f"--ticket-role {role} is for training runs (neurogrid train): a coordinator that serves admits workers"
        )
    directory: Path = options.new_cluster or options.cluster
    cluster = Cluster.create(directory) if options.new_cluster else Cluster.load(directory)
    file = identity_file(options, directory)
    assert file is not None
    peer_id = Identity.load(file).peer_id
    membership = cluster.enrol(peer_id, COORDINATOR)
    admission = ClusterAdmission(membership, admits=admits, issuer=cluster)
    return Trust(
        admission,
        file,
        cluster=cluster,
        ticket_lifetime=options.expires,
        ticket_uses=options.uses or 0,
        ticket_role=role,
        ticket_file=options.ticket_file,
        is_new=bool(options.new_cluster),
    )


def identity_file(options: argparse.Namespace, directory: Path | None) -> Path | None:
    """File of this peer's key pair: a certificate is made for one key, so the key is kept with it."""
    file: Path | None = options.identity
    return file or (directory / IDENTITY_FILE if directory else None)
