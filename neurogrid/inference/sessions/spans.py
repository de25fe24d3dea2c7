"""The span of a step at a worker: what it says (docs/observability.md).

It is made within the trace that is active, and costs some tens of nanoseconds where none is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from neurogrid.inference.sessions.steps import Step
from neurogrid.p2p.streams.tracing import (
    current_trace_context,
    layers_name,
    session_name,
    span,
)

__all__ = ["stage_span"]

_NOTHING: Final = nullcontext()


def stage_span(step: Step, session_id: int) -> AbstractContextManager[None]:
    """`inference.stage`: a worker's share of one step of a session, from when it came until it is computed."""
    return _NOTHING if current_trace_context() is None else _stage_span(step, session_id)


@contextmanager
def _stage_span(step: Step, session_id: int) -> Iterator[None]:
    told: dict[str, str | int] = {
        "neurogrid.session": session_name(session_id),
        "neurogrid.layers": layers_name(step.start, step.stop),
        "neurogrid.position": step.position,
        "neurogrid.tokens": step.num_tokens,
        "neurogrid.phase": "decode" if step.is_decoded else "prefill",
    }
    with span("inference.stage", told) as current:
        try:
            yield
        finally:
            if current is not None and step.calls:
                # One call serves rows of several traces: its number is the same in the spans of all of them.
                last = step.calls[-1]
                current.set_attribute("neurogrid.call", last.number)
                current.set_attribute("neurogrid.rows", last.num_rows)
                current.set_attribute("neurogrid.chunks", len(step.calls))
                seconds = sum(call.seconds for call in step.calls)
                current.set_attribute("neurogrid.compute_seconds", seconds)
                current.set_attribute("neurogrid.queue_seconds", step.queue_seconds)
