"""Tickets, revocations and copies of a cluster, which `neurogrid-coordinator --cluster DIR` handles, and then ends.

Each changes or reads files in DIR and ends. A coordinator that runs with the same DIR need not be stopped: it leaves
its addresses there, and sees within seconds what was revoked.
"""

from __future__ import annotations

import argparse
import logging
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from neurogrid.cli.options.durations import duration
from neurogrid.cli.options.trust import identity_file, is_loopback, to_ask
from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.p2p.trust import Cluster, Whereabouts

__all__ = ["add_cluster_options", "add_ticket_options", "is_asked", "manage_cluster"]

logger = logging.getLogger(__name__)

_TASKS: Final = ("ticket", "revoke", "void_tickets", "reinstate", "copy_to")


def number_of_uses(text: str) -> int:
    """An argparse type: how many may join by one ticket."""
    from neurogrid.p2p.trust.limits import MAX_TOKEN_USES

    try:
        value = int(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from exc
    if not 1 <= value <= MAX_TOKEN_USES:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {MAX_TOKEN_USES}")
    return value


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """The options that look after a cluster."""
    group = parser.add_argument_group("cluster", "with --cluster DIR, on the machine that made it")
    group.add_argument(
        "--ticket",
        action="store_true",
        help="print the line by which a worker joins, and end; a coordinator that runs goes on",
    )
    add_ticket_options(group)
    group.add_argument(
        "--revoke",
        action="append",
        default=[],
        metavar="PEER_ID",
        help="take this peer's membership away, make all tickets of before void, and end; may be given again",
    )
    group.add_argument(
        "--keep-tickets",
        action="store_true",
        help="with --revoke: leave tickets good, if those who are revoked have none",
    )
    group.add_argument(
        "--void-tickets",
        action="store_true",
        help="make all tickets of before void, and end; who has joined stays a member",
    )
    group.add_argument(
        "--reinstate",
        action="append",
        default=[],
        metavar="PEER_ID",
        help="let a peer that was revoked join again, and end; may be given again",
    )
    group.add_argument(
        "--copy-to",
        type=Path,
        metavar="DIR",
        help="make the directory of another coordinator of this cluster in DIR, and end: what makes members, and not "
        "who this coordinator is; move it to where that one is to run with --cluster DIR",
    )


def add_ticket_options(group: argparse._ActionsContainer) -> None:
    """Add the options of the tickets of a cluster."""
    group.add_argument(
        "--expires",
        type=duration,
        metavar="SPAN",
        help="how long tickets are good for: 30m, 24h, 7d (default 24h)",
    )
    group.add_argument(
        "--uses",
        type=number_of_uses,
        metavar="N",
        help="how many workers may join by a ticket (default: as many as come before it expires)",
    )
    group.add_argument(
        "--ticket-role",
        choices=("worker", "trainer"),
        help="as what machines join by a ticket: a trainer is a member of training runs alone, and no layers of models "
        "that are served are put on it (default worker)",
    )
    group.add_argument(
        "--ticket-file",
        type=Path,
        metavar="FILE",
        help="write the ticket to FILE, which its owner alone can read, and print it nowhere",
    )


def is_asked(options: argparse.Namespace) -> bool:
    """Whether the command is to look after its cluster, and not to generate.

    Raises:
        ConfigurationError: contradicting options.
    """
    asked = [name for name in _TASKS if getattr(options, name)]
    if options.keep_tickets and not options.revoke:
        raise ConfigurationError("--keep-tickets says nothing without --revoke PEER_ID")
    if not asked:
        return False
    others = ("prompt", "prompt_file", "chat", "diagnose", "new_cluster", "insecure", "allow")
    task = f"--{asked[0].replace('_', '-')}"
    for name in (*asked[1:], *others):
        if getattr(options, name) not in (None, False, []):
            raise ConfigurationError(
                f"give {task} or --{name.replace('_', '-')}, not both: {task} ends when it is done"
            )
    if options.cluster is None:
        raise ConfigurationError(
            f"{task} needs --cluster DIR: the directory that --new-cluster DIR made"
        )
    return True


def manage_cluster(options: argparse.Namespace) -> None:
    """Do what `is_asked`.

    Raises:
        ConfigurationError: it cannot be done; says what to do.
    """
    from neurogrid.p2p.trust import Cluster

    cluster = Cluster.load(options.cluster)
    if options.ticket:
        _print_ticket(cluster, options)
    elif options.revoke:
        _revoke(cluster, options)
    elif options.void_tickets:
        version = cluster.revoke().version
        logger.info("all tickets are void that were made until now (list %d)", version)
        logger.info("another: %s", to_ask(cluster.directory))
    elif options.copy_to is not None:
        cluster.copy_to(options.copy_to)
        logger.info(
            "%s is for another coordinator of cluster %s, which takes a key of its own: whoever has it makes members, "
            "so move it as you would a password",
            options.copy_to,
            cluster.cluster_id,
        )
    else:
        unknown = set(options.reinstate) - cluster.revocations().peer_ids
        if unknown:
            raise ConfigurationError(f"never revoked: {', '.join(sorted(unknown))}")
        version = cluster.reinstate(options.reinstate).version
        logger.info("reinstated %s (list %d)", ", ".join(options.reinstate), version)


def _print_ticket(cluster: Cluster, options: argparse.Namespace) -> None:
    from neurogrid.p2p.trust import COORDINATOR, WORKER
    from neurogrid.p2p.trust.certificate import format_time
    from neurogrid.p2p.trust.limits import TICKET_LIFETIME
    from neurogrid.p2p.trust.private_files import write_private
    from neurogrid.p2p.trust.ticket import to_type

    where = _whereabouts(cluster, options)
    is_deputy = getattr(options, "deputy", False)
    role = COORDINATOR if is_deputy else options.ticket_role or WORKER
    ticket = cluster.ticket(
        where.peer_id,
        where.addresses,
        relays=where.relays,
        role=role,
        lifetime=options.expires or TICKET_LIFETIME,
        max_uses=options.uses or 0,
    )
    if all(is_loopback(address) for address in (*where.addresses, *where.relays)):
        logger.warning("the coordinator listens on loopback only: no other machine reaches it")
    logger.info(
        "good until %s%s; leads to %s",
        format_time(ticket.token.not_after),
        f", for {options.uses} {role}s" if options.uses else "",
        ", ".join(where.dial_addresses),
    )
    if options.ticket_file is not None:
        write_private(options.ticket_file, f"{ticket.text()}\n".encode())
        logger.info("the ticket is in %s: neurogrid join @FILE", options.ticket_file)
        return
    if _others_read_stdout():
        logger.warning(
            "others can read the file that the ticket goes to: chmod 600, or --ticket-file FILE"
        )
    print(to_type(ticket.text()))


def _others_read_stdout() -> bool:
    """Whether stdout is a file that others than its owner may read."""
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(mode) and bool(mode & 0o077)


def _whereabouts(cluster: Cluster, options: argparse.Namespace) -> Whereabouts:
    """Whereabouts of the coordinator: as the options say, else as it noted itself when it ran."""
    from neurogrid.p2p.hosts.host import parse_peer_address
    from neurogrid.p2p.hosts.identity import Identity
    from neurogrid.p2p.reach.circuit import circuit_address
    from neurogrid.p2p.trust import Whereabouts

    named = [*options.announce, *options.listen]
    if not named and not options.relay:
        where = cluster.whereabouts()
        if where is None:
            raise ConfigurationError(
                f"no coordinator has run with --cluster {cluster.directory} yet, so nobody knows where it "
                "will be: start it first, or add --listen, --announce or --relay MULTIADDR as you will start it"
            )
        return where
    file = identity_file(options, cluster.directory)
    assert file is not None
    peer_id = Identity.load(file).peer_id
    suffix = f"/p2p/{peer_id}"
    addresses = [address.removesuffix(suffix) + suffix for address in map(_dialable, named)]
    for address in (*addresses, *options.relay):
        parse_peer_address(address)  # for its error
    relayed = (circuit_address(relay, peer_id) for relay in options.relay)
    return Whereabouts.of(peer_id, [*addresses, *relayed])


def _dialable(address: str) -> str:
    """An address to listen at, if others can dial it as it stands."""
    parts = address.split("/")
    if "0.0.0.0" in parts or "::" in parts or "0" in parts[4:5]:
        raise ConfigurationError(
            f"{address} says not yet where others will find the coordinator: name its IP address and port"
        )
    return address


def _revoke(cluster: Cluster, options: argparse.Namespace) -> None:
    if own := _own_peer_ids(cluster, options) & set(options.revoke):
        raise ConfigurationError(
            f"{', '.join(own)} is this cluster's own coordinator: make a new cluster instead"
        )
    version = cluster.revoke(options.revoke, keep_tickets=options.keep_tickets).version
    logger.info("revoked %s (list %d)", ", ".join(options.revoke), version)
    if len(options.revoke) == 1:
        logger.info("until --reinstate %s it gets no certificate, by no ticket", options.revoke[0])
    if options.keep_tickets:
        logger.warning(
            "tickets are as good as before: who was revoked and has one joins again under another peer id"
        )
    else:
        logger.info(
            "all tickets are void that were made until now, whoever has them; another: %s",
            to_ask(cluster.directory),
        )


def _own_peer_ids(cluster: Cluster, options: argparse.Namespace) -> set[str]:
    from neurogrid.p2p.hosts.identity import Identity
    from neurogrid.p2p.trust.private_files import is_there

    file = identity_file(options, cluster.directory)
    where = cluster.whereabouts()
    known = {where.peer_id} if where is not None else set()
    return known | ({Identity.load(file).peer_id} if file is not None and is_there(file) else set())
