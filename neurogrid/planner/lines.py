"""Several lines of stages side by side, each with the whole model: what trains in data parallel, or serves twice.

A line is a plan of its own, on peers that no other line has, and is explained and replanned as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from neurogrid.errors import CapacityError, ConfigurationError
from neurogrid.planner.plan import Plan
from neurogrid.planner.planning import make_plan, make_replicas
from neurogrid.planner.world import Links, ModelSize, PeerCapacity

__all__ = ["make_lines"]


def make_lines(
    model: ModelSize,
    peers: Sequence[PeerCapacity],
    links: Links | None = None,
    *,
    num_lines: int | None = None,
    num_stages: int | None = None,
    generation: int = 1,
) -> tuple[Plan, ...]:
    """Plan one line after the other on the peers that are left; the first has the best of them.

    Peers that no line needs stand by for the first line that has a stage that they can hold.

    Args:
        num_lines: that many lines exactly; None for as many as fit, at least one.
        num_stages, generation: of each line, as for `make_plan`.

    Raises:
        ConfigurationError: as `make_plan`, for the first line; or no line was asked for.
        CapacityError: the same; or fewer lines fit than were asked for.
    """
    if num_lines is not None and num_lines < 1:
        raise ConfigurationError(f"{num_lines} lines were asked for")
    lines: list[Plan] = []
    left = list(peers)
    while num_lines is None or len(lines) < num_lines:
        # Fewer peers than stages hold no line either; with none at all, `make_plan` says what is wrong.
        if lines and len(left) < (num_stages or 1):
            if num_lines is None:
                break
            raise CapacityError(
                f"{len(lines)} of {num_lines} lines fit, and {len(left)} workers are left: add workers",
                needed=num_lines * _total_bytes(model),
                available=sum(peer.usable_bytes(model.workspace_bytes) for peer in peers),
            )
        try:
            plan = make_plan(model, left, links, num_stages=num_stages, generation=generation)
        except CapacityError as exc:
            if lines and num_lines is None:
                break
            if not lines:
                raise
            raise CapacityError(
                f"{len(lines)} of {num_lines} lines fit; for the next, {exc}",
                needed=exc.needed,
                available=exc.available,
            ) from exc
        lines.append(replace(plan, replicas=()))
        left = [peer for peer in left if plan.stage_of(peer.peer_id) is None]
    for number, line in enumerate(lines):
        own = [peer for peer in peers if line.stage_of(peer.peer_id)]
        found = make_replicas(model, [*own, *left], line.stages)
        lines[number] = replace(line, replicas=found)
        standing_by = {replica.peer_id for replica in found}
        left = [peer for peer in left if peer.peer_id not in standing_by]
    return tuple(lines)


def _total_bytes(model: ModelSize) -> int:
    return sum(layer.total_bytes for layer in model.layers)
