"""The rendezvous of `init_method="neurogrid://…"`: rank 0 makes a cluster and a ticket to it, and the others join it.

    neurogrid://            rank 0 shows a ticket; the others find it in NEUROGRID_TICKET
    neurogrid://@FILE       rank 0 writes the ticket to a file, the others read it there once it is
    neurogrid://ngt1…       the ticket itself, for the others; without `neurogrid://`, too

The cluster lives as long as rank 0, its key in a temporary directory. Whoever has the ticket is let in, by all ranks.
Rank 0 relays between those that cannot reach each other.

Once the ranks have met, the store says so: a process that finds it by the ticket then is of a later run, and waits for
another ticket in the file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

import trio

from neurogrid.errors import (
    ConfigurationError,
    NeuroGridError,
    PeerUnreachableError,
)
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.reach.relay_service import RelayLimits
from neurogrid.p2p.trust import (
    COORDINATOR,
    WORKER,
    Cluster,
    ClusterAdmission,
    Membership,
    Ticket,
    Whereabouts,
)
from neurogrid.p2p.trust.private_files import read_private, write_private
from neurogrid.temporary import temporary_directory
from neurogrid.training.distributed.errors import RankError
from neurogrid.training.distributed.node import Node, NodeThread, Places
from neurogrid.training.distributed.store import ServedStore, serve_store

__all__ = ["TICKET_VARIABLE", "find_store", "note_met"]

TICKET_VARIABLE: Final = "NEUROGRID_TICKET"

MAX_TICKET_FILE_BYTES: Final = 16 * 1024
# The key that is there once the ranks have met.
MET_KEY: Final = "neurogrid/met"
# Seconds between two looks for the file, and between two tries to reach rank 0.
LOOK_INTERVAL: Final = 0.05
DIAL_INTERVAL: Final = 0.5
# Of what rank 0 relays, in seconds, and in each direction: no group comes to it.
YEAR: Final = 365 * 86_400
MAX_CIRCUIT_BYTES: Final = 2**60


def find_store(
    url: str, places: Places, timeout: timedelta
) -> tuple[NodeThread, ServedStore, int, int]:
    """Find rank 0 by what stands in `init_method`, or be it.

    Args:
        url: as above, with `rank` and `world_size` behind a question mark.
        places: where this process is to be reached.
        timeout: for all of it.

    Returns:
        The node of this process, the store, its rank, and how many ranks there are.

    Raises:
        ConfigurationError: the address names no ticket, or a wrong one.
        RankError: rank 0 is not there in time.
    """
    address, rank, size = _split(url)
    seconds = timeout.total_seconds()
    if rank == 0:
        thread = _lead(address, places, size, seconds)
        return thread, ServedStore(thread, thread.identity.peer_id, seconds), rank, size
    return *_find(address, rank, places, seconds), rank, size


def note_met(store: ServedStore) -> None:
    """Have the store say that the ranks have met."""
    store.set(MET_KEY, b"1")


def _split(url: str) -> tuple[str, int, int]:
    # Torch takes the slashes away where nothing stands behind them.
    address, _, query = url.removeprefix("neurogrid:").removeprefix("//").partition("?")
    numbers = {key: values[-1] for key, values in parse_qs(query).items()}
    try:
        rank, size = int(numbers["rank"]), int(numbers["world_size"])
    except (KeyError, ValueError):
        raise ConfigurationError(
            "init_process_group wants rank= and world_size= with init_method neurogrid://"
        ) from None
    if not 0 <= rank < size:
        raise ConfigurationError(f"rank {rank} is none of {size}")
    return address, rank, size


# Rank 0


def _lead(address: str, places: Places, size: int, seconds: float) -> NodeThread:
    if address and not address.startswith("@"):
        raise ConfigurationError(
            "rank 0 makes the ticket: give it init_method neurogrid://, or neurogrid://@FILE to all ranks"
        )
    with ExitStack() as stack:
        directory = stack.enter_context(temporary_directory("neurogrid-ranks-"))
        cluster = Cluster.create(directory)
        identity = Identity.generate()
        membership = cluster.enrol(identity.peer_id, COORDINATOR)
        admission = ClusterAdmission(membership, admits={WORKER}, issuer=cluster)
        places = replace(places, relay=relay_limits(size))
        # The ticket stands for a cluster whose key is there.
        thread = NodeThread(places, identity, admission, keep=stack.pop_all())
    try:
        addresses = thread.call_sync(partial(_serve, thread.node))
        where = Whereabouts.of(identity.peer_id, addresses)
        ticket = cluster.ticket(
            identity.peer_id, where.addresses, relays=where.relays, lifetime=max(seconds, 1.0)
        )
        _show(ticket, address, directory, size)
    except BaseException:
        thread.close()
        raise
    return thread


def relay_limits(size: int) -> RelayLimits:
    """Limits of what rank 0 relays: enough for each pair of so many ranks, all at once, for as long as they are there.

    Nobody else has the ticket, and what is cut would end the group.
    """
    of = RelayLimits()
    return RelayLimits(
        max_reservations=max(of.max_reservations, 2 * size),  # of one address: three quarters
        max_circuits=max(of.max_circuits, size * size),
        max_circuits_per_peer=max(of.max_circuits_per_peer, 2 * size),
        circuit_time=YEAR,
        circuit_bytes=MAX_CIRCUIT_BYTES,
        max_requests=max(of.max_requests, size * size),
        max_requests_per_peer=max(of.max_requests_per_peer, 2 * size),
    )


def _serve(node: Node) -> tuple[str, ...]:
    serve_store(node.exchange)
    return node.host.addresses


def _show(ticket: Ticket, address: str, directory: Path, size: int) -> None:
    """Give the ticket to whoever starts the other ranks: a secret, so to nobody else."""
    line = ticket.text()
    if address:
        write_private(Path(address[1:]), f"{line}\n".encode())
        return
    if size == 1:
        return
    told = f"{TICKET_VARIABLE}={line}"
    if not sys.stderr.isatty():
        file = directory / "ticket"
        write_private(file, f"{line}\n".encode())
        told = f"{TICKET_VARIABLE}=$(cat {file}), on a machine where that file was copied to"
    print(f"the other {size - 1} ranks find this one with {told}", file=sys.stderr, flush=True)


# The others


def _find(
    address: str, rank: int, places: Places, seconds: float
) -> tuple[NodeThread, ServedStore]:
    """Reach rank 0 by the ticket, or by that which it writes to the file later: there may be one of an earlier run."""
    deadline = time.monotonic() + seconds
    old = None
    while True:
        text = _ticket(address, rank, deadline, seconds, old)
        ticket = Ticket.parse(text)
        thread = _join(ticket, places, deadline, seconds, partial(_is_other, address, text))
        if thread is None:
            continue
        store = ServedStore(thread, ticket.peer_id, seconds)
        try:
            has_met = store.check([MET_KEY])
        except BaseException:
            thread.close()
            raise
        if not has_met:
            return thread, store
        thread.close()
        if not address.startswith("@"):
            raise RankError(
                f"the ranks of this ticket have met without rank {rank}: each run has a ticket of its own, which its "
                "rank 0 makes",
                ranks=[rank],
            )
        old = text


def _ticket(address: str, rank: int, deadline: float, seconds: float, old: str | None) -> str:
    if address.startswith("@"):
        return _read_file(Path(address[1:]), deadline, seconds, old)
    text = address or os.environ.get(TICKET_VARIABLE, "")
    if not text:
        raise ConfigurationError(
            f"rank {rank} needs the ticket that rank 0 shows: set {TICKET_VARIABLE}, or give "
            "init_method neurogrid://TICKET"
        )
    return text


def _read_file(path: Path, deadline: float, seconds: float, old: str | None) -> str:
    while (text := _content(path)) is None or text == old or _has_expired(text):
        if time.monotonic() > deadline:
            if text is not None and text != old:
                return text
            met = "" if text is None else ": the ranks of the ticket that is there have met before"
            raise RankError(f"waited {seconds:g} s for rank 0 to write {path}{met}", ranks=[0])
        time.sleep(LOOK_INTERVAL)
    return text


def _content(path: Path) -> str | None:
    data = read_private(path, MAX_TICKET_FILE_BYTES)
    return data.decode("ascii", "replace") if data is not None else None


def _has_expired(text: str) -> bool:
    return Ticket.parse(text, now=0.0).token.not_after <= time.time()


def _is_other(address: str, text: str) -> bool:
    """Whether the file with the ticket, if there is one, has another by now."""
    return address.startswith("@") and _content(Path(address[1:])) not in (None, text)


def _join(
    ticket: Ticket, places: Places, deadline: float, seconds: float, is_old: Callable[[], bool]
) -> NodeThread | None:
    """The node of this process, connected to rank 0; None where there is another ticket to reach it by."""
    membership = Membership(ticket.cluster_key)
    admission = ClusterAdmission(membership, admits={COORDINATOR, WORKER}, ticket=ticket)
    thread = NodeThread(places, Identity.generate(), admission)
    is_reached = False
    try:
        is_reached = thread.call(
            partial(_dial, thread.node, ticket, deadline - time.monotonic(), seconds, is_old)
        )
    finally:
        if not is_reached:
            thread.close()
    return thread if is_reached else None


async def _dial(
    node: Node, ticket: Ticket, left: float, seconds: float, is_old: Callable[[], bool]
) -> bool:
    """Reach rank 0, which may not listen yet; False where the ticket is old."""
    addresses = ticket.whereabouts.dial_addresses
    error: NeuroGridError | None = None
    with trio.move_on_after(max(0.0, left)):
        while True:
            try:
                await node.host.connect_any(addresses)
                await node.exchange.open(ticket.peer_id)
            except PeerUnreachableError as exc:
                error = exc
            else:
                await node.use_relays(ticket.addresses[:1])
                return True
            if is_old():
                return False
            await trio.sleep(DIAL_INTERVAL)
    raise RankError(
        f"rank 0 ({ticket.peer_id}) was not reached within {seconds:g} s: {error}", ranks=[0]
    ) from error
