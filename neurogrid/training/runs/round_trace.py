"""The trace of a round, or of a step of a chain: what leader and members did for it, and when (docs/observability.md).

Nothing is sent for it. A trace and its first span have ids that follow from the run and the round, or from chain and
step, so that all who tell of it tell of one trace. The number of a round is known when it ends: what was done is told
then.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from neurogrid.p2p.streams.tracing import Attributes, PastSpan, tell_past, tell_root
from neurogrid.p2p.wire import TraceContext

__all__ = ["MAX_STEP_PARTS", "Timeline", "after_round", "round_trace", "step_trace"]

MAX_STEP_PARTS: Final = 1024
"""Parts of a step that a member of a chain tells of: half of what an exporter holds until it sends."""

# Of one round; a member that waits for hours takes in many rounds, and does little in each.
_MAX_PARTS: Final = 64
_SAMPLED: Final = 1


def round_trace(run_id: bytes, number: int) -> TraceContext:
    """The trace of a round, and the span that all others of it lie in.

    Args:
        run_id: 16 bytes.
        number: of the round, u64.
    """
    digest = hashlib.sha256(b"neurogrid round" + run_id + number.to_bytes(8, "big")).digest()
    return TraceContext(trace_id=digest[:16], span_id=digest[16:24], flags=_SAMPLED)


def step_trace(run_id: bytes, chain: int, step: int) -> TraceContext:
    """The trace of a step of a chain, and the span that all others of it lie in.

    Args:
        run_id: 16 bytes.
        chain: the number of the arrangement, u64: a step that another one made before is another.
        step: u64, that its messages name.
    """
    told = b"neurogrid step" + run_id + chain.to_bytes(8, "big") + step.to_bytes(8, "big")
    digest = hashlib.sha256(told).digest()
    return TraceContext(trace_id=digest[:16], span_id=digest[16:24], flags=_SAMPLED)


@contextmanager
def after_round(run_id: bytes, number: int, name: str) -> Iterator[None]:
    """Tell of the block as of something that is done for a round that is over."""
    began = time.time_ns()
    try:
        yield
    finally:
        tell_past(round_trace(run_id, number), PastSpan(name, began, time.time_ns(), {}))


class Timeline:
    """Spans of what one process does for a run, told round by round, or step by step.

    Args:
        attributes: of the span of each.
        max_parts: that are remembered of one; of more the last.
    """

    def __init__(self, attributes: Attributes, *, max_parts: int = _MAX_PARTS) -> None:
        self._attributes = dict(attributes)
        self._began = time.time_ns()
        self._parts: deque[PastSpan] = deque(maxlen=max_parts)

    def begin(self) -> None:
        """Let go of what was remembered: what is told next begins now."""
        self._parts.clear()
        self._began = time.time_ns()

    @contextmanager
    def during(
        self, name: str, told: Attributes | None = None
    ) -> Iterator[dict[str, str | int | float | bool]]:
        """Remember the block for what is told next.

        Args:
            told: attributes of it.

        Yields:
            Its attributes, to be filled.
        """
        attributes: dict[str, str | int | float | bool] = dict(told or {})
        began = time.time_ns()
        try:
            yield attributes
        finally:
            self._parts.append(PastSpan(name, began, time.time_ns(), attributes))

    def end(
        self, ids: TraceContext, name: str, attributes: Attributes, *, is_root: bool = False
    ) -> None:
        """Tell of what was done since the last time: it was for this trace.

        Args:
            ids: of `round_trace`, or `step_trace`.
            name: of the span around what was done.
            attributes: of that span.
            is_root: whether all others of the trace lie in that span; one process says so.
        """
        now = time.time_ns()
        whole = PastSpan(name, self._began, now, {**self._attributes, **attributes})
        if is_root:
            tell_root(ids, whole)
            for part in self._parts:
                tell_past(ids, part)
        else:
            tell_past(ids, whole, self._parts)
        self._parts.clear()
        self._began = now
