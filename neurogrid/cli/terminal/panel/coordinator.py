"""The coordinator's panel: which worker holds which layers, what is on its way, what is generated, and what failed.

Made of a `ClusterStatus`, as the page is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from neurogrid.cli.terminal.panel.view import Cell, Column, Note, View, bar, short_ids, span, spark
from neurogrid.cli.terminal.transfer_view import format_bytes, part_of
from neurogrid.fleet.board.status import Health, PeerStatus, Phase, Role
from neurogrid.inference.board.status import ClusterStatus
from neurogrid.node.events import Event, EventKind, Severity
from neurogrid.p2p.hosts.identity import short_peer_id

__all__ = ["coordinator_view"]

COLUMNS: Final = (
    Column("stage"),
    Column("layers"),
    Column("worker"),
    Column("machine", min_width=72),
    Column("state", share=3),
    Column("sessions", is_number=True, min_width=72),
    Column("step", is_number=True, min_width=96),
    Column("memory", is_number=True, min_width=90),
    Column("latency", is_number=True, min_width=100),
    Column("address", min_width=140),
    Column("device", min_width=110, share=1),
)
HEALTH_STYLES: Final = {
    Health.READY: "green",
    Health.RECEIVING: "cyan",
    Health.RESTING: "yellow",
    Health.SUSPECTED: "red",
    Health.LEAVING: "yellow",
    Health.LOST: "red",
}
STYLES: Final = {
    Severity.INFO: "",
    Severity.GOOD: "green",
    Severity.WARNING: "yellow",
    Severity.ERROR: "red",
}
# Characters of a machine's name that are shown.
MAX_MACHINE: Final = 16
# Buckets of half a second that the curve shows.
NUM_SPARKS: Final = 20


def coordinator_view(
    status: ClusterStatus,
    *,
    url: str = "",
    encoding: str = "utf-8",
    models: Sequence[tuple[str, str]] = (),
) -> View:
    """Make the view that the panel has of a cluster.

    Args:
        url: where it is served; empty for nowhere yet.
        encoding: of the terminal.
        models: names and states of all, where there are several; the status is that of the first.
    """
    state, state_style = _state(status)
    model = f" · {status.model}, {status.total_layers} layers" if status.model else ""
    return View(
        title=f"NeuroGrid{model}",
        state=state,
        state_style=state_style,
        columns=COLUMNS,
        rows=tuple(map(_row, sorted(status.peers.values(), key=_place))),
        figures=(_figures(status, encoding), *_model_states(models)),
        notes=tuple(_notes(status.events)),
        foot=" · ".join(filter(None, [url, f"up {span(status.at - status.started_at)}"])),
    )


def _model_states(models: Sequence[tuple[str, str]]) -> list[tuple[str, ...]]:
    return [tuple(f"{name} {state}" for name, state in models)] if models else []


def _state(status: ClusterStatus) -> tuple[str, str]:
    if status.phase is Phase.READY and not status.phase_text:
        return "ready", "green"
    style = "red" if status.phase is Phase.MENDING else "yellow"
    return status.phase_text or status.phase.value, style


def _place(peer: PeerStatus) -> tuple[bool, int, str]:
    return peer.health is Health.LOST, peer.stage or 2**31, peer.peer_id


def _row(peer: PeerStatus) -> tuple[Cell, ...]:
    layers = peer.layers_assigned or peer.layers_held
    role = str(peer.stage) if peer.stage is not None else "-"
    # Both of what layers may take: those that it holds count as free.
    memory = part_of(peer.memory_stage_bytes, peer.memory_free_bytes)
    is_lost = peer.health is Health.LOST
    return (
        role,
        f"{layers.start}-{layers.stop - 1}" if layers else "-",
        short_peer_id(peer.peer_id),
        _cut(peer.machine),
        (_health(peer), HEALTH_STYLES[peer.health]),
        "" if is_lost else str(peer.num_sessions),
        "" if is_lost or peer.step_seconds is None else f"{peer.step_seconds * 1000:.1f} ms",
        "" if is_lost else memory if peer.memory_known else f"{memory}?",
        "" if is_lost or peer.latency is None else f"{peer.latency * 1000:.1f} ms",
        peer.address,
        peer.name,
    )


def _cut(machine: str) -> str:
    """Shorten a machine's name so that the other columns have room."""
    return machine if len(machine) <= MAX_MACHINE else f"{machine[: MAX_MACHINE - 1]}…"


def _health(peer: PeerStatus) -> str:
    transfer = peer.transfer
    if peer.health is Health.LOST:
        return f"lost: {short_ids(peer.lost_reason)}"
    if transfer is not None and not transfer.is_done:
        done = transfer.sent_bytes + transfer.cached_bytes + transfer.from_workers_bytes
        part = done / transfer.planned_bytes if transfer.planned_bytes else 1.0
        if transfer.stalled_seconds is not None:
            return f"{bar(part)} {part:4.0%} stalled {span(transfer.stalled_seconds)}"
        rate = f" {format_bytes(transfer.bytes_per_second)}/s" if transfer.bytes_per_second else ""
        left = transfer.remaining_seconds
        return f"{bar(part)} {part:4.0%}{rate}{f', {span(left)} left' if left else ''}"
    if peer.health is Health.SUSPECTED:
        return peer.suspicion
    if peer.health is Health.READY and peer.role is not Role.STAGE:
        return "stands by" if peer.role is Role.REPLICA else "has no layers"
    return {
        Health.READY: "ready",
        Health.RECEIVING: "gets its layers",
        Health.RESTING: "has refused, is asked again soon",
        Health.LEAVING: "is about to end",
    }[peer.health]


def _figures(status: ClusterStatus, encoding: str) -> tuple[str, ...]:
    if not (status.num_requests or status.num_running or status.num_waiting):
        return ()
    curve = spark(status.tokens_history[-NUM_SPARKS:], encoding)
    figures = [f"{status.tokens_per_second:.1f} tokens/s" + (f" {curve}" if curve else "")]
    figures.append(f"{status.num_running} running")
    if status.num_waiting:
        figures.append(f"{status.num_waiting} waiting")
    figures.append(f"{status.num_requests} done")
    if status.num_failed:
        figures.append(f"{status.num_failed} failed")
    figures.append(f"{status.num_tokens:,} tokens")
    firsts = [r.time_to_first_token for r in status.requests if r.time_to_first_token is not None]
    if firsts:
        figures.append(f"first after {firsts[-1]:.2f} s")
    return tuple(figures)


def _notes(events: Sequence[Event]) -> Iterator[Note]:
    """Make notes of what happened. Generations that went on together after the same failure are one note."""
    told = [event for event in events if event.kind is not EventKind.WORKING]
    for kind, alike in groupby(told, key=lambda event: event.kind):
        several = list(alike)
        if kind is EventKind.SESSION_REROUTED:
            more = f" (and {len(several) - 1} more)" if len(several) > 1 else ""
            first = several[0]
            yield Note(_time(first.at), short_ids(first.text) + more, STYLES[first.severity])
            continue
        for event in several:
            yield Note(_time(event.at), short_ids(event.text), STYLES[event.severity])


def _time(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
