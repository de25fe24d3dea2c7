"""The load that a worker has taken on at one moment, for display."""

from __future__ import annotations

from dataclasses import dataclass

from neurogrid.inference.sessions.table import SessionTable
from neurogrid.worker.state import WorkerState

__all__ = ["WorkerLoad", "worker_load"]


@dataclass(frozen=True)
class WorkerLoad:
    """Load of a worker at one moment.

    Attributes:
        num_coordinators: that use it.
        num_sessions: that are open.
        num_waiting: steps whose turn has not come.
        weight_bytes: of the layers that are held.
        cache_used_bytes: of KV caches, by the tokens that are in them.
        cache_reserved_bytes: set aside for the open sessions at their greatest length.
        cache_limit_bytes: that were agreed for all of them.
    """

    num_coordinators: int
    num_sessions: int
    num_waiting: int
    weight_bytes: int
    cache_used_bytes: int
    cache_reserved_bytes: int
    cache_limit_bytes: int


def worker_load(state: WorkerState, sessions: SessionTable, *, num_waiting: int) -> WorkerLoad:
    """Return the load at this moment, counted as `SessionService` counts it when it opens a session."""
    used = reserved = limit = 0
    for session in sessions:
        layers = (session.start, session.stop)
        used += session.model.cache_bytes(*layers, session.length)
        reserved += session.model.cache_bytes(*layers, session.max_length)
    for tenant in state.tenants.values():
        model, assignment = tenant.model, tenant.assignment
        if model is not None and assignment is not None:
            one = model.cache_bytes(assignment.start, assignment.stop, assignment.max_length)
            limit += assignment.max_sessions * one
    return WorkerLoad(
        num_coordinators=len(state.tenants),
        num_sessions=len(sessions),
        num_waiting=num_waiting,
        weight_bytes=state.held_bytes,
        cache_used_bytes=used,
        cache_reserved_bytes=reserved,
        cache_limit_bytes=limit,
    )
