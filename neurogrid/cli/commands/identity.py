"""`neurogrid identity`: who this peer is, where its key lies, and what it is a member of.

stdout gets the lines, or one JSON object. The private key is read, to see that it can be used, and never shown.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from neurogrid.cli.options.common import (
    ArgumentParser,
    ExitStatus,
    add_output_options,
    run_command,
    set_up_logging,
)
from neurogrid.cli.options.trust import IDENTITY_FILE
from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.p2p.hosts.identity import Identity
    from neurogrid.p2p.trust import Standing, Whereabouts

__all__ = ["add_identity_options", "build_parser", "run"]

NAME: Final = "neurogrid identity"
_COLUMN: Final = 14


def build_parser() -> argparse.ArgumentParser:
    """The options of the command, without the directory."""
    parser = ArgumentParser(prog=NAME, description="", is_whole=False)
    add_identity_options(parser)
    return parser


def add_identity_options(parser: argparse.ArgumentParser) -> None:
    """All options of the command but the directory."""
    group = parser.add_argument_group("identity")
    group.add_argument(
        "--identity",
        type=Path,
        metavar="FILE",
        help=f"the private key of the peer (default: {IDENTITY_FILE} in DIR)",
    )
    group.add_argument(
        "--new",
        action="store_true",
        help="make the key, which must not be there yet: others can be told the peer id before the peer runs",
    )
    group.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, for programs"
    )
    add_output_options(parser)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Do what the options say; returns the exit status."""
    screen = set_up_logging(options.log_level, as_json=options.json_logs)

    async def show() -> int:
        from neurogrid.p2p.trust.private_files import is_there

        directory = _directory_of(options.directory)
        file = options.identity or (directory / IDENTITY_FILE if directory is not None else None)
        if file is None:
            raise ConfigurationError(
                "a peer has a new identity each time that it runs, unless one is kept: name the directory that has it, "
                f"which --cluster names to workers and coordinators ({NAME} DIR), or the file (--identity FILE)"
            )
        if options.new and is_there(file):
            raise ConfigurationError(f"{file} is there already: leave out --new to see it")
        identity = _identity_in(file, is_new=options.new)
        standing, where = _membership_in(directory, identity.peer_id)
        holds_key = directory is not None and is_there(directory / "cluster.key")
        if options.json:
            told = _document(identity, file, standing, where, holds_key=holds_key)
            screen.print(json.dumps(told))
        else:
            for line in _lines(identity, file, directory, standing, where, holds_key=holds_key):
                screen.print(line)
        return ExitStatus.OK

    return run_command(parser.prog, show, screen=screen)


def _directory_of(named: Path | None) -> Path | None:
    """The directory that has identity and membership: of a training run it is the one of the run's cluster.

    Raises:
        ConfigurationError: it is a file.
    """
    from neurogrid.training.runs.run_directory import RunDirectory

    if named is None:
        return None
    if named.is_file():
        raise ConfigurationError(
            f"{named} is a file: --identity names one ({NAME} --identity FILE)"
        )
    run = RunDirectory(named)
    is_of_run = run.cluster.is_dir() and not (named / IDENTITY_FILE).exists()
    return run.cluster if is_of_run else named


def _identity_in(file: Path, *, is_new: bool) -> Identity:
    """Read the identity in a file, or make it.

    Raises:
        ConfigurationError: it is not there, or cannot be read or made.
    """
    from neurogrid.p2p.hosts.identity import Identity
    from neurogrid.p2p.trust.private_files import make_private_directory

    if is_new:
        make_private_directory(file.parent)
        return Identity.load(file)
    identity = Identity.read(file)
    if identity is None:
        raise ConfigurationError(
            f"there is no {file}: a worker or a coordinator makes it when it runs the first time, and --new does now"
        )
    return identity


def _membership_in(
    directory: Path | None, peer_id: str
) -> tuple[Standing | None, Whereabouts | None]:
    """Standing of a peer by the membership in a directory, and whereabouts of its coordinator; None where unknown."""
    from neurogrid.p2p.trust import Membership, Whereabouts, standing_of
    from neurogrid.p2p.trust.private_files import is_there

    if directory is None or not is_there(directory / "membership"):
        return None, None
    membership = Membership.load(directory)
    return standing_of(membership, peer_id, now=time.time()), Whereabouts.read(directory)


def _fingerprint(identity: Identity) -> str:
    """The fingerprint; empty for a key of another kind, as other programs make them."""
    from neurogrid.p2p.hosts.identity import fingerprint_of

    try:
        return fingerprint_of(identity.peer_id)
    except ConfigurationError:
        return ""


def _document(
    identity: Identity,
    file: Path,
    standing: Standing | None,
    where: Whereabouts | None,
    *,
    holds_key: bool,
) -> dict[str, object]:
    member: dict[str, object] | None = None
    if standing is not None:
        member = {
            "cluster_id": standing.cluster_id,
            "state": str(standing.state),
            "role": standing.role or None,
            "not_before": standing.not_before or None,
            "not_after": standing.not_after or None,
            "coordinator": where.peer_id if where is not None else None,
            "addresses": list(where.dial_addresses) if where is not None else [],
        }
    return {
        "peer_id": identity.peer_id,
        "fingerprint": _fingerprint(identity) or None,
        "file": str(file.absolute()),
        "makes_members": holds_key,
        "membership": member,
    }


def _lines(
    identity: Identity,
    file: Path,
    directory: Path | None,
    standing: Standing | None,
    where: Whereabouts | None,
    *,
    holds_key: bool,
) -> Iterator[str]:
    def line(what: str, says: str) -> str:
        return f"{what:<{_COLUMN}}{says}"

    yield line("peer id", identity.peer_id)
    yield line("fingerprint", _fingerprint(identity) or "none: it is no Ed25519 key")
    yield line("key file", str(file.absolute()))
    if directory is None:
        return
    if standing is None:
        yield line(
            "member",
            f"of no cluster: neurogrid join TICKET --cluster {shlex.quote(str(directory))}",
        )
        return
    yield line("member", _said(standing, identity.peer_id))
    if holds_key:
        yield line("cluster key", "here: this peer makes members")
    elif where is not None:
        yield line("coordinator", where.peer_id)
        for address in where.dial_addresses:
            yield line("", address)


def _said(standing: Standing, peer_id: str) -> str:
    """Standing of a peer, for people."""
    from neurogrid.p2p.trust import StandingState
    from neurogrid.p2p.trust.certificate import by_clock, format_span, format_time

    now = time.time()
    cluster, until = f"of cluster {standing.cluster_id}", format_time(standing.not_after)
    as_role = f"{cluster}, as {standing.role}"
    if standing.state is StandingState.WISHED:
        return f"{cluster} when it has met the coordinator: it has no certificate yet"
    if standing.state is StandingState.OF_ANOTHER_PEER:
        return (
            f"no: the certificate is that of {standing.peer_id}, and the key that of {peer_id}; put the key back, or "
            "join again with another directory"
        )
    if standing.state is StandingState.REVOKED:
        return f"no more: {as_role}, until it was revoked; the coordinator can --reinstate it"
    if standing.state is StandingState.NOT_YET_VALID:
        begins = by_clock(now, standing.not_before)
        return f"{as_role}, from {format_time(standing.not_before)} on: {begins}"
    if standing.state is StandingState.EXPIRED:
        ended = by_clock(now, standing.not_after)
        return f"no more: {as_role}, until {until}: {ended}; another ticket makes it one again"
    left = format_span(standing.not_after - now)
    return f"{as_role}, until {until} (for {left}; renewed by itself)"
