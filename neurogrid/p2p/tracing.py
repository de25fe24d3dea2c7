"""W3C trace context between OpenTelemetry and the traced header.

A program that never imported OpenTelemetry has no active context, so nothing is looked up then, and nothing is
imported before the first traced message arrives.

Source: protocol_spec/framing.md, traced header; https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from neurogrid.p2p.wire import TensorMessage, TraceContext

__all__ = ["current_trace_context", "continued_trace"]


def current_trace_context() -> TraceContext | None:
    """The context of the active span, or None when there is none."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return TraceContext(
        trace_id=context.trace_id.to_bytes(16, "big"),
        span_id=context.span_id.to_bytes(8, "big"),
        flags=int(context.trace_flags),
    )


def continued_trace(message: TensorMessage) -> AbstractContextManager[None]:
    """Serve `message` within its sender's trace, in a span of its own where a tracer is configured; or in none.

    A task has the context of whoever started it, and the reader of a stream that of whoever opened the stream: the
    trace that was active then is not that of the messages which come later.
    """
    if message.trace_context is not None:
        return _server_span(message, message.trace_context)
    return nullcontext() if current_trace_context() is None else _no_trace()


@contextmanager
def _no_trace() -> Iterator[None]:
    from opentelemetry import trace

    with trace.use_span(trace.INVALID_SPAN):
        yield


@contextmanager
def _server_span(message: TensorMessage, remote: TraceContext) -> Iterator[None]:
    from opentelemetry import trace

    parent = trace.SpanContext(
        trace_id=int.from_bytes(remote.trace_id, "big"),
        span_id=int.from_bytes(remote.span_id, "big"),
        is_remote=True,
        trace_flags=trace.TraceFlags(remote.flags),
    )
    tracer = trace.get_tracer("neurogrid.p2p")
    attributes: dict[str, str | int] = {
        "neurogrid.peer_id": message.from_peer or "",
        "neurogrid.layer_id": message.layer_id,
        "neurogrid.data_bytes": len(message.data),
    }
    with tracer.start_as_current_span(
        "p2p.serve",
        context=trace.set_span_in_context(trace.NonRecordingSpan(parent)),
        kind=trace.SpanKind.SERVER,
        attributes=attributes,
    ):
        yield
