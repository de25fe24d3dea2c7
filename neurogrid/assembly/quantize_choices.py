"""Choices of quantization: what a model would take of the workers that are there, in each form of its layers.

For whoever looks at a plan before anything is sent: as it is, and with each method of `--quantize`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from neurogrid.assembly.planned_fleet import PlannedFleet
from neurogrid.errors import CapacityError, ModelError
from neurogrid.fleet.worker_questions import capacities, links
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.files.quantization import METHODS
from neurogrid.planner import explain

__all__ = ["QuantizeChoice", "quantize_choices"]


@dataclass(frozen=True)
class QuantizeChoice:
    """One form of a model's layers, on the workers of a plan.

    Attributes:
        method: a key of `METHODS`; None for as they are.
        is_chosen: whether the plan is for it.
        weight_bytes: of all layers; 0 where they cannot have that form.
        largest_bytes: weights of the stage that has most of them; None where the layers do not fit.
        tokens_per_second: expected of one session; None where that is not known, or the layers do not fit.
        refused: why the layers cannot have that form; empty if they can.
    """

    method: str | None
    is_chosen: bool
    weight_bytes: int
    largest_bytes: int | None = None
    tokens_per_second: float | None = None
    refused: str = ""


def quantize_choices(
    planned: PlannedFleet, *, max_sessions: int, ends_seconds: float = 0.0
) -> tuple[QuantizeChoice, ...]:
    """Plan for each form with what the workers said; none where the checkpoint has codes itself. Blocks for a while.

    Args: as of `PlannedFleet.explain`.
    """
    return tuple(_choices(planned, max_sessions, ends_seconds))


def _choices(
    planned: PlannedFleet, max_sessions: int, ends_seconds: float
) -> Iterator[QuantizeChoice]:
    model = planned.model
    chosen = model.quantization.method if model.quantization else None
    if chosen is not None and chosen not in METHODS:
        return
    for method in (None, *METHODS):
        try:
            other = model if method == chosen else model.with_quantization(method)
        except ModelError as exc:
            yield QuantizeChoice(method, method == chosen, 0, refused=str(exc))
        else:
            yield _choice(planned, other, method == chosen, max_sessions, ends_seconds)


def _choice(
    planned: PlannedFleet,
    model: LoadedModel,
    is_chosen: bool,
    max_sessions: int,
    ends_seconds: float,
) -> QuantizeChoice:
    method = model.quantization.method if model.quantization else None
    weights = [cost.weight_bytes for cost in model.costs]
    size = model.size(
        num_sessions=max_sessions,
        ends_seconds=ends_seconds,
        beside_bytes=planned.adapters.layer_bytes(len(model.costs)),
    )
    infos = planned.infos
    if not is_chosen:
        # What they have is in the form of the plan.
        infos = tuple(replace(info, model_layers=frozenset()) for info in infos)
    try:
        plan = planned.plan if is_chosen else replace(planned.planning, size=size).first(infos)
    except CapacityError:
        return QuantizeChoice(method, is_chosen, sum(weights))
    told = explain(plan, size, capacities(infos, len(model.costs)), links(infos))
    return QuantizeChoice(
        method,
        is_chosen,
        sum(weights),
        max(sum(weights[stage.start : stage.stop]) for stage in plan.stages),
        told.tokens_per_second,
    )
