"""The worker's panel: its coordinators, what it holds and computes, what it trains, and what passes between it and its
peers.
"""

from __future__ import annotations

from typing import Final

from neurogrid.cli.terminal.panel.view import Cell, Column, View, bar, span
from neurogrid.cli.terminal.transfer_view import format_bytes, part_of
from neurogrid.inference.sessions.board import PeerTraffic, TenantStatus, WorkerStatus
from neurogrid.p2p.hosts.identity import short_peer_id
from neurogrid.p2p.hosts.machine import named_peer
from neurogrid.training.members.status import PartStatus
from neurogrid.worker.state import WeightSource

__all__ = ["worker_view"]

COLUMNS: Final = (
    Column("peer"),
    Column("machine", min_width=72),
    Column("address", min_width=90),
    Column("is", share=1),
    Column("received", is_number=True),
    Column("per second", is_number=True, min_width=70),
    Column("sent", is_number=True),
    Column("per second", is_number=True, min_width=70),
)
SOURCES: Final = {
    WeightSource.COORDINATOR: "from the coordinator",
    WeightSource.WORKER: "from other workers",
    WeightSource.DISK: "from disk",
    WeightSource.OWN: "from the own model",
}

DOES: Final = {
    "starting": "is about to train",
    "ready": "is ready to train",
    "training": "trains",
    "averaging": "averages",
    "waiting": "waits for work of",
    "failed": "cannot train",
}


def worker_view(
    status: WorkerStatus,
    part: PartStatus | None = None,
    *,
    trains: bool = False,
    serves: bool = True,
) -> View:
    """Make the view that the panel has of a worker.

    Args:
        part: of it in a training run; None while it takes part in none.
        trains, serves: what its owner lends it to.
    """
    state, state_style = _state(status, part, trains=trains, serves=serves)
    return View(
        title=f"NeuroGrid worker · {status.name}",
        state=state,
        state_style=state_style,
        columns=COLUMNS,
        rows=tuple(map(_row, status.peers)),
        figures=tuple(
            filter(
                None,
                (
                    _trained(part),
                    *_tenants(status),
                    _held(status),
                    _computed(status),
                    _came(status),
                ),
            )
        ),
        notes=(),
        foot=f"{named_peer(status.peer_id, status.machine)} · up {span(status.uptime)}",
    )


def _state(
    status: WorkerStatus, part: PartStatus | None, *, trains: bool, serves: bool
) -> tuple[str, str]:
    if not status.tenants and part is not None:
        is_well = part.state != "failed"
        return f"{DOES[part.state]} {part.run}", "green" if is_well else "red"
    if not status.tenants:
        kinds = [
            kind for kind, is_lent in (("coordinator", serves), ("training run", trains)) if is_lent
        ]
        return f"waits for a {' or a '.join(kinds)}", "yellow"
    if not all(tenant.is_ready for tenant in status.tenants):
        return "gets its layers", "cyan"
    if len(status.tenants) > 1:
        return f"serves {len(status.tenants)} coordinators", "green"
    (tenant,) = status.tenants
    return f"serves {named_peer(tenant.coordinator, tenant.machine)}", "green"


def _row(peer: PeerTraffic) -> tuple[Cell, ...]:
    kind = "coordinator" if peer.is_coordinator else "peer"
    style = "" if peer.is_connected else "dim"
    return (
        (short_peer_id(peer.peer_id), style),
        (peer.machine, style),
        (peer.address, style),
        (kind if peer.is_connected else "not connected", style),
        (format_bytes(peer.received_bytes), style),
        (_rate(peer.received_bytes_per_second), style),
        (format_bytes(peer.sent_bytes), style),
        (_rate(peer.sent_bytes_per_second), style),
    )


def _rate(bytes_per_second: float) -> str:
    return format_bytes(bytes_per_second) if bytes_per_second >= 1 else "-"


def _trained(part: PartStatus | None) -> tuple[str, ...]:
    """Say what the worker trains, and how far it is."""
    if part is None:
        return ()
    figures = [f"{DOES[part.state]} {part.run}, seat {part.seat}"]
    if part.state == "training" and part.batches:
        done = min(part.batches_done, part.batches)
        figures.append(f"{bar(done / part.batches)} {done} of {part.batches} batches")
    if part.round:
        figures.append(f"round {part.round}")
    if part.tokens_per_second is not None:
        figures.append(f"{part.tokens_per_second:,.0f} tokens/s")
    if part.loss is not None:
        figures.append(f"loss {part.loss:.4f}")
    if part.num_samples:
        figures.append(f"{part.num_samples:,} samples")
    if part.memory_bytes:
        figures.append(f"memory {format_bytes(part.memory_bytes)}")
    if part.micro_batch:
        figures.append(f"{part.micro_batch} samples at once")
    if part.sent_bytes or part.received_bytes:
        passed = (
            f"{format_bytes(part.sent_bytes)} sent, {format_bytes(part.received_bytes)} received"
        )
        figures.append(passed)
    if part.reason:
        figures.append(part.reason)
    return tuple(figures)


def _tenants(status: WorkerStatus) -> list[tuple[str, ...]]:
    """Say of each of several coordinators what it has; of one alone, `_held` does."""
    if len(status.tenants) < 2:
        return []
    return [
        (
            named_peer(tenant.coordinator, tenant.machine),
            *_placed(tenant),
            f"{tenant.num_sessions} session{'s' * (tenant.num_sessions != 1)}",
            f"memory {format_bytes(tenant.promised_bytes)}",
        )
        for tenant in status.tenants
    ]


def _placed(tenant: TenantStatus) -> list[str]:
    layers = tenant.layers_assigned
    figures = [tenant.model] if tenant.model else []
    if not tenant.is_ready:
        part = tenant.num_confirmed / len(layers)
        figures.append(
            f"layers {_range(layers)} {bar(part)} {tenant.num_confirmed} of {len(layers)}"
        )
    elif layers:
        figures.append(f"layers {_range(layers)} of {tenant.total_layers}")
    elif tenant.has_given_way:
        figures.append("gave way while it was idle")
    return figures


def _held(status: WorkerStatus) -> tuple[str, ...]:
    """Say what the worker holds, and what that takes."""
    load = status.load
    figures: list[str] = []
    if not status.tenants:
        figures += status.kept_models[-1:]
    if len(status.tenants) == 1:
        figures += _placed(status.tenants[0])
    if status.layers_held and not any(tenant.layers_assigned for tenant in status.tenants):
        held = len(status.layers_held)
        figures.append(f"{held} layer{'s' * (held != 1)} kept for the next coordinator")
    if load.weight_bytes:
        figures.append(f"weights {format_bytes(load.weight_bytes)}")
    if load.cache_limit_bytes:
        figures.append(f"KV caches {part_of(load.cache_used_bytes, load.cache_limit_bytes)}")
    figures.append(f"memory {format_bytes(status.memory_free_bytes)}")
    return tuple(figures)


def _computed(status: WorkerStatus) -> tuple[str, ...]:
    """Say what the worker computes; nothing where it has nothing to compute."""
    load = status.load
    if not (any(tenant.layers_assigned for tenant in status.tenants) or load.num_sessions):
        return ()
    figures = [f"{load.num_sessions} session{'s' * (load.num_sessions != 1)}"]
    if load.num_waiting:
        figures.append(f"{load.num_waiting} steps wait")
    figures.append(f"{status.tokens_per_second:.1f} tokens/s")
    if status.rows_per_pass:
        figures.append(f"{status.rows_per_pass:.1f} at once")
    if status.prompt_tokens_per_second >= 1:
        figures.append(f"{status.prompt_tokens_per_second:.0f} prompt tokens/s")
    figures.append(f"busy {min(status.busy, 1.0):.0%}")
    return tuple(figures)


def _came(status: WorkerStatus) -> tuple[str, ...]:
    """Say where the worker's weights came from, and how much its cache has of its limit."""
    figures = [
        f"{format_bytes(num_bytes)} {SOURCES[source]}"
        for source, num_bytes in status.weights_from.items()
        if num_bytes
    ]
    if status.disk_bytes is not None and status.disk_limit_bytes is not None:
        figures.append(f"cache {part_of(status.disk_bytes, status.disk_limit_bytes)}")
    return tuple(figures)


def _range(layers: range) -> str:
    return f"{layers.start}-{layers.stop - 1}"
