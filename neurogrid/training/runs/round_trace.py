"""The trace of a round: what leader and members did for it, and when (docs/observability.md).

Nothing is sent for it. A trace and its first span have ids that follow from run and round, so that all who tell of a
round tell of one trace. The number of a round is known when it ends: what was done is told then.
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

__all__ = ["Timeline", "after_round", "round_trace"]

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


@contextmanager
def after_round(run_id: bytes, number: int, name: str) -> Iterator[None]:
    """Tell of the block as of something that is done for a round that is over."""
    began = time.time_ns()
    try:
        yield
    finally:
        tell_past(round_trace(run_id, number), PastSpan(name, began, time.time_ns(), {}))


class Timeline:
    """What one process does for a run, told round by round.

    Args:
        run_id: 16 bytes.
        attributes: of the span of each round.
    """

    def __init__(self, run_id: bytes, attributes: Attributes) -> None:
        self._run_id, self._attributes = run_id, dict(attributes)
        self._began = time.time_ns()
        self._parts: deque[PastSpan] = deque(maxlen=_MAX_PARTS)

    @contextmanager
    def during(self, name: str) -> Iterator[dict[str, str | int | float | bool]]:
        """Remember the block for the round that comes next.

        Yields:
            Its attributes, to be filled.
        """
        attributes: dict[str, str | int | float | bool] = {}
        began = time.time_ns()
        try:
            yield attributes
        finally:
            self._parts.append(PastSpan(name, began, time.time_ns(), attributes))

    def end(self, number: int, name: str, attributes: Attributes, *, is_root: bool = False) -> None:
        """Tell of what was done since the last round: it was for this one.

        Args:
            number: of the round.
            name: of the span around what was done.
            attributes: of that span.
            is_root: whether all others of the round lie in that span; one process says so.
        """
        ids, now = round_trace(self._run_id, number), time.time_ns()
        whole = PastSpan(
            name, self._began, now, {**self._attributes, "neurogrid.round": number, **attributes}
        )
        if is_root:
            tell_root(ids, whole)
            for part in self._parts:
                tell_past(ids, part)
        else:
            tell_past(ids, whole, self._parts)
        self._parts.clear()
        self._began = now
