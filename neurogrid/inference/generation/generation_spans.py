"""The spans of one generation at its coordinator: from when it was asked for to its last token.

    inference.generate
      inference.prefill            the prompt goes through all stages, and the first token is sampled
      inference.decode             all further tokens, with their number
        inference.step             one of them, in detail: the first `DETAILED_STEPS`, then each `DETAIL_INTERVAL`th

A generation has thousands of steps, and each some ten spans over all machines: so most are told by a number alone,
and their messages go untraced. What goes wrong in any of them is told.

The body of an asynchronous generator runs in the context of the task that asks for the next token. So a span is current
during a step, and never across a `yield`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

from neurogrid.errors import NoRouteError
from neurogrid.p2p.streams.tracing import (
    Attributes,
    layers_name,
    note,
    span,
    with_details,
    without_details,
)

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

__all__ = [
    "DETAILED_STEPS",
    "DETAIL_INTERVAL",
    "GenerationSpans",
    "generation_spans",
    "note_failure",
    "recovery_span",
]

DETAILED_STEPS: Final = 8
DETAIL_INTERVAL: Final = 64

_NOTHING: Final = nullcontext()


class GenerationSpans:
    """A context manager for one generation; this one makes no spans."""

    def __enter__(self) -> GenerationSpans:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        pass

    def step(self, position: int, num_tokens: int) -> AbstractContextManager[None]:
        """A step that takes so many tokens from `position` on; at 0 all tokens that there are by then."""
        return _NOTHING

    def finished(self, reason: str) -> None:
        """The generation has ended by itself."""


_NO_SPANS: Final = GenerationSpans()


def generation_spans(attributes: Attributes) -> GenerationSpans:
    """Spans within the active trace, or of a new one; none where nothing is configured that would take them."""
    if "opentelemetry.trace" not in sys.modules:
        return _NO_SPANS
    from opentelemetry import trace

    root = trace.get_tracer("neurogrid").start_span("inference.generate", attributes=attributes)
    return _Recorded(root) if root.get_span_context().is_valid else _NO_SPANS


class _Recorded(GenerationSpans):
    def __init__(self, root: Span) -> None:
        from opentelemetry import trace

        self._root = root
        self._context: Context = trace.set_span_in_context(root)
        self._decode: Span | None = None
        self._detailed = self._context
        self._undetailed = self._context
        self._num_prefills = 0
        self._num_steps = 0
        self._reason = "closed"

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        from opentelemetry.trace import StatusCode

        if self._decode is not None:
            self._decode.set_attribute("neurogrid.steps", self._num_steps)
            self._decode.end()
        if isinstance(error, Exception):
            self._reason = "failed"
            self._root.record_exception(error)
            self._root.set_status(StatusCode.ERROR, str(error))
        self._root.set_attribute("neurogrid.outcome", self._reason)
        self._root.set_attribute("neurogrid.steps", self._num_prefills + self._num_steps)
        self._root.end()

    def finished(self, reason: str) -> None:
        self._reason = reason

    def step(self, position: int, num_tokens: int) -> AbstractContextManager[None]:
        return self._decoding(position) if position else self._prefilling(num_tokens)

    @contextmanager
    def _prefilling(self, num_tokens: int) -> Iterator[None]:
        self._num_prefills += 1
        with _span("inference.prefill", self._context, {"neurogrid.tokens": num_tokens}):
            yield

    @contextmanager
    def _decoding(self, position: int) -> Iterator[None]:
        if self._decode is None:
            self._begin_decoding(position)
        number = self._num_steps
        self._num_steps += 1
        if number < DETAILED_STEPS or not number % DETAIL_INTERVAL:
            with _span("inference.step", self._detailed, {"neurogrid.position": position}):
                yield
            return
        from opentelemetry import context as contexts

        token = contexts.attach(self._undetailed)
        try:
            yield
        finally:
            contexts.detach(token)

    def _begin_decoding(self, position: int) -> None:
        from opentelemetry import trace

        self._decode = trace.get_tracer("neurogrid").start_span(
            "inference.decode",
            context=self._context,
            attributes={"neurogrid.position": position},
        )
        self._detailed = trace.set_span_in_context(self._decode, self._context)
        self._undetailed = without_details(self._detailed)


def _span(name: str, context: Context, attributes: Attributes) -> AbstractContextManager[Span]:
    from opentelemetry import trace

    return trace.get_tracer("neurogrid").start_as_current_span(
        name, context=context, attributes=attributes
    )


def note_failure(error: NoRouteError) -> None:
    """An event `failure` of the active span: a worker failed a step."""
    note("failure", _told_of(error))


def recovery_span(failure: NoRouteError | None) -> AbstractContextManager[None]:
    """`inference.recover`: an attempt to go on with other workers after `failure`; nothing where there was none."""
    return _NOTHING if failure is None else _recovery_span(failure)


@contextmanager
def _recovery_span(failure: NoRouteError) -> Iterator[None]:
    with with_details(), span("inference.recover", _told_of(failure)):
        yield


def _told_of(error: NoRouteError) -> dict[str, str]:
    told = {"neurogrid.reason": str(error)}
    if error.layers:
        told["neurogrid.layers"] = layers_name(min(error.layers), max(error.layers) + 1)
    if error.peer_id is not None:
        told["neurogrid.peer"] = error.peer_id
    return told
