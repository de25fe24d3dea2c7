"""Forward passes of sessions through the layers of a held model, without gradients.

All functions call torch and block: the worker runs them in its torch thread, one at a time.

B = batch rows (1), T = tokens, D = hidden size, R = rows of as many sessions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch

from neurogrid.errors import ModelError, RequestRefusedError
from neurogrid.inference.sessions.steps import Step
from neurogrid.model.adapters import Adapter
from neurogrid.model.caches.cache import StageCache
from neurogrid.model.files.model_code import MODEL_CODE_ERRORS
from neurogrid.model.stages.stage import Row
from neurogrid.p2p.wire import ErrorCode
from neurogrid.planner import name_range
from neurogrid.worker.held_model import HeldModel

__all__ = ["forward", "forward_rows", "prepare", "run_steps"]

logger = logging.getLogger(__name__)


def run_steps(steps: Sequence[Step], *, chunk: int | None) -> list[torch.Tensor | Exception | None]:
    """Compute what `next_steps` chose; in the torch thread.

    Args:
        chunk: tokens of a prefill that run in one go; None for all of them.

    Returns:
        For each step its result [1, T, D], its error, or None where more chunks are to come.
    """
    for step in steps:
        if step.goes_back:
            step.goes_back = False
            # What cannot go back is refused by its forward, where the position is another than its cache's.
            with suppress(ModelError, ValueError):
                step.cache.go_back(step.position)
    first = steps[0]
    if first.is_decoded:
        rows = [Row(step.hidden, step.position, step.cache, step.adapter) for step in steps]
        results = forward_rows(first.model, rows, start=first.start, stop=first.stop)
        _note_batch(steps, results)
        return results
    assert len(steps) == 1
    is_whole = chunk is None or first.is_whole or not first.model.traits.takes_chunks
    size = first.num_tokens if is_whole else chunk
    try:
        result_BTD = forward(
            first.model,
            first.hidden[:, :size],
            start=first.start,
            stop=first.stop,
            position=first.position,
            cache=first.cache,
            adapter=first.adapter,
        )
    except RequestRefusedError as exc:
        return [exc]
    first.results.append(result_BTD)
    first.position += result_BTD.shape[1]
    first.hidden = first.hidden[:, size:]
    if first.num_tokens:
        return [None]
    return [first.results[0] if len(first.results) == 1 else torch.cat(first.results, dim=1)]


def _note_batch(steps: Sequence[Step], results: Sequence[object]) -> None:
    """Say of the steps of a batch how many of it have a result."""
    done = [
        step
        for step, result in zip(steps, results, strict=True)
        if step.batch and isinstance(result, torch.Tensor)
    ]
    for step in done:
        step.batch = (step.batch[0], len(done)) if len(done) > 1 else ()


def forward(
    model: HeldModel,
    hidden_BTD: torch.Tensor,
    *,
    start: int,
    stop: int,
    position: int,
    cache: StageCache,
    adapter: Adapter | None = None,
) -> torch.Tensor:
    """Run layers [start, stop).

    Args:
        hidden_BTD: [1, T, D] in any float dtype; computed in the model's dtype on its device.
        position: absolute position of the first token; must be the cache's length.
        adapter: of the session; None for none.

    Returns:
        [1, T, D] in the model's dtype, on the CPU.

    Raises:
        RequestRefusedError: the computation failed (COMPUTE_FAILED or OUT_OF_MEMORY).
    """
    try:
        with torch.inference_mode():
            hidden_BTD = hidden_BTD.to(device=model.device, dtype=model.dtype)
            result = model.stage.forward(
                hidden_BTD,
                start=start,
                stop=stop,
                position=position,
                cache=cache,
                adapter=adapter,
            )
            return result.cpu()
    except (torch.OutOfMemoryError, MemoryError) as exc:
        raise RequestRefusedError(
            f"out of memory in {name_range(range(start, stop))}", code=ErrorCode.OUT_OF_MEMORY
        ) from exc
    except (ModelError, RuntimeError, ValueError) as exc:
        raise RequestRefusedError(
            f"{name_range(range(start, stop))} failed: {_first_line(exc)}",
            code=ErrorCode.COMPUTE_FAILED,
        ) from exc


def prepare(model: HeldModel, *, start: int, stop: int, position: int, cache: StageCache) -> None:
    """Do beforehand what `forward` of one token at `position` needs besides its hidden state, if one comes."""
    try:
        model.stage.prepare(start=start, stop=stop, position=position, cache=cache)
    except (ModelError, MemoryError, *MODEL_CODE_ERRORS) as exc:
        # What came before is answered already; the forward meets it again, and raises it.
        logger.debug("could not prepare layers %d to %d: %s", start, stop - 1, exc)


def forward_rows(
    model: HeldModel, rows: Sequence[Row], *, start: int, stop: int
) -> list[torch.Tensor | Exception | None]:
    """Run layers [start, stop) on one token of each of several sessions, together where that goes.

    If the rows of a forward fail together, they are run one after another, so that the one that is at fault
    is the only one that fails.

    Returns:
        For each row [1, 1, D] in the model's dtype, on the CPU, or the RequestRefusedError that `forward` raises.
    """
    results: list[torch.Tensor | Exception | None] = [None] * len(rows)
    groups = [[i] for i in range(len(rows))]
    bounds = model.traits.row_bounds
    if bounds is not None and len(rows) > 1:
        groups = model.stage.group_rows(rows, start=start, stop=stop, bounds=bounds)
    for group in groups:
        if len(group) > 1:
            try:
                together = model.stage.forward_rows(
                    [rows[i] for i in group], start=start, stop=stop
                )
                for i, result in zip(group, _on_cpu(together), strict=True):
                    results[i] = result
                continue
            except (ModelError, RuntimeError, ValueError, MemoryError) as exc:
                logger.warning(
                    "%d sessions failed together, trying each alone: %s",
                    len(group),
                    _first_line(exc),
                )
        for i in group:
            its = rows[i]
            try:
                results[i] = forward(
                    model,
                    its.hidden,
                    start=start,
                    stop=stop,
                    position=its.position,
                    cache=its.cache,
                    adapter=its.adapter,
                )
            except RequestRefusedError as exc:
                results[i] = exc
    return results


def _on_cpu(rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """[1, 1, D] of each row, on the CPU: by one copy for all of them, as long as the device has memory for that.

    The caches have these tokens by now: they cannot be computed again.
    """
    try:
        return torch.cat(list(rows)).cpu().chunk(len(rows))
    except (torch.OutOfMemoryError, MemoryError):
        return [row.cpu() for row in rows]


def _first_line(exc: BaseException) -> str:
    """Return what an error of others says, short enough to be sent."""
    text = str(exc).strip()
    return text.splitlines()[0][:200] if text else type(exc).__name__
