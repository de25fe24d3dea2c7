"""Backend as torch knows it: its name, and the making of a process group. Imports no more of ours until then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

if TYPE_CHECKING:
    from neurogrid.training.distributed.node import NodeThread, Places
    from neurogrid.training.distributed.process_group import NeuroGridProcessGroup
    from neurogrid.training.distributed.store import ServedStore

__all__ = ["BACKEND", "LISTEN_VARIABLE", "RELAY_VARIABLE", "register_backend"]

BACKEND: Final = "neurogrid"
LISTEN_VARIABLE: Final = "NEUROGRID_LISTEN"
"""Multiaddrs to listen on, separated by commas; a free port of every interface by default."""

RELAY_VARIABLE: Final = "NEUROGRID_RELAY"
"""Full multiaddrs of relays to be reached through, separated by commas; for a rank 0 that nobody can dial."""

LISTEN: Final = "/ip4/0.0.0.0/tcp/0"

# The node of this process, and the store that it was found with. Torch has the C++ half of that alone.
_thread: NodeThread | None = None
_store: ServedStore | None = None


def register_backend() -> None:
    """Tell torch of the backend. Again: nothing happens."""
    if BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])
    register_rendezvous_handler("neurogrid", _rendezvous)
    # A ticket by itself: what no other rendezvous takes.
    register_rendezvous_handler("", _rendezvous)


def node_thread() -> NodeThread:
    """The node of this process; opened if there is none, with peers admitted once a group names them."""
    from neurogrid.p2p.hosts.identity import Identity
    from neurogrid.p2p.trust import AllowList
    from neurogrid.training.distributed.node import NodeThread

    global _thread, _store
    if _thread is None or not _thread.is_here or not _thread.is_open:
        _thread, _store = NodeThread(_places(), Identity.generate(), AllowList({})), None
    return _thread


def _places() -> Places:
    from neurogrid.training.distributed.node import Places

    listen = os.environ.get(LISTEN_VARIABLE, LISTEN).split(",")
    return Places(listen, list(filter(None, os.environ.get(RELAY_VARIABLE, "").split(","))))


def _rendezvous(
    url: str, *, timeout: timedelta = dist.default_pg_timeout, **_: object
) -> Iterator[tuple[object, int, int]]:
    """Find the store of rank 0; called by torch with what `init_method` is."""
    from neurogrid.training.distributed.rendezvous import find_store

    global _thread, _store
    _thread, _store, rank, size = find_store(url, _places(), timeout)
    yield _store, rank, size


def _make_group(options: Any, backend_options: object) -> NeuroGridProcessGroup:
    """Make a process group; called by torch on each of its ranks, with the same store."""
    from neurogrid.training.distributed.meeting import meet
    from neurogrid.training.distributed.process_group import NeuroGridProcessGroup
    from neurogrid.training.distributed.rendezvous import note_met

    thread = node_thread()
    thread.hold()
    timeout = options.timeout.total_seconds()
    size = options.group_size
    try:
        group = meet(
            thread,
            options.store,
            options.group_rank,
            size,
            timeout=timeout,
            name=f"process group {options.group_id}",
            global_ranks=options.global_ranks_in_group or range(size),
        )
        # Its rank 0, which has the store: the others may find that gone, where a program is very short.
        if _store is not None and options.group_rank == 0:
            note_met(_store)
    except BaseException:
        thread.release()
        raise
    return NeuroGridProcessGroup(thread, group, timeout)
