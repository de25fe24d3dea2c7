"""W3C trace context between OpenTelemetry and the traced header, and spans that cost nothing without a trace.

A program that never imported OpenTelemetry has no active context, so nothing is looked up then, and nothing is
imported before the first traced message arrives. Where a trace is active, a message that carries a tensor takes it
along: `p2p.send` is the sender's span, `p2p.receive` its child at the receiver, which lasts as long as the
message is served, and in which the receiver sends what follows from it. Without an SDK there are no spans, and the
context is passed on as it came.

Source: protocol_spec/framing.md, traced header; https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from neurogrid.p2p.wire import TensorMessage, TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, SpanKind

__all__ = [
    "Attributes",
    "PastSpan",
    "answer_received",
    "continued_trace",
    "current_trace_context",
    "given_ids",
    "layers_name",
    "note",
    "past_span",
    "sending",
    "session_name",
    "span",
    "tell_past",
    "tell_root",
    "with_details",
    "without_details",
]

Attributes: TypeAlias = Mapping[str, str | int | float | bool]

_NOTHING: Final = nullcontext(None)
# Says that what happens in this context is told by a span around it, and by no spans of its own.
_WITHOUT_DETAILS: Final = "neurogrid-without-details"

given_ids: ContextVar[TraceContext | None] = ContextVar("given_ids", default=None)
"""The ids of the root span that is about to be made, for a provider whose generator of ids has `takes_given_ids`."""


class PastSpan(NamedTuple):
    """Something that is over.

    Attributes:
        name: of its span.
        started, ended: nanoseconds of the Unix epoch.
        attributes: of its span.
    """

    name: str
    started: int
    ended: int
    attributes: Attributes


def current_trace_context() -> TraceContext | None:
    """The context of the active span, or None when there is none, or one without details (`without_details`)."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import context as contexts
    from opentelemetry import trace

    active = contexts.get_current()
    context = trace.get_current_span(active).get_span_context()
    if not context.is_valid or _WITHOUT_DETAILS in active:
        return None
    return _wire_context(context)


def without_details(context: Context) -> Context:
    """`context` in such a way that `span` makes none in it, and messages go untraced.

    For what happens thousands of times within one span.
    """
    from opentelemetry import context as contexts

    return contexts.set_value(_WITHOUT_DETAILS, True, context)


def with_details() -> AbstractContextManager[None]:
    """Make spans again within the block, although what is around it is `without_details`."""
    return _with_details() if "opentelemetry.trace" in sys.modules else nullcontext()


@contextmanager
def _with_details() -> Iterator[None]:
    from opentelemetry import context as contexts

    active = contexts.get_current()
    kept = {key: value for key, value in active.items() if key != _WITHOUT_DETAILS}
    token = contexts.attach(contexts.Context(kept))
    try:
        yield
    finally:
        contexts.detach(token)


def note(event: str, attributes: Attributes) -> None:
    """Tell the active span, with or without details, that something happened."""
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import trace

        trace.get_current_span().add_event(event, attributes)


def span(name: str, attributes: Attributes | None = None) -> AbstractContextManager[Span | None]:
    """A span within the active trace; None, for some tens of nanoseconds, where no trace is active."""
    if "opentelemetry.trace" not in sys.modules or current_trace_context() is None:
        return _NOTHING
    from opentelemetry import trace

    return trace.get_tracer("neurogrid").start_as_current_span(name, attributes=attributes)


def past_span(name: str, started: int, ended: int) -> None:
    """Tell the active trace, if there is one, of something that is over.

    Args:
        started, ended: nanoseconds of the Unix epoch.
    """
    if "opentelemetry.trace" not in sys.modules or current_trace_context() is None:
        return
    from opentelemetry import trace

    trace.get_tracer("neurogrid").start_span(name, start_time=started).end(ended)


def tell_past(parent: TraceContext, whole: PastSpan, parts: Iterable[PastSpan] = ()) -> None:
    """Tell a trace of something that is over, and of its parts; nobody, where OpenTelemetry was never imported."""
    if "opentelemetry.trace" not in sys.modules:
        return
    from opentelemetry import trace

    tracer = trace.get_tracer("neurogrid")
    span = tracer.start_span(
        whole.name, _remote(parent), attributes=whole.attributes, start_time=whole.started
    )
    around = trace.set_span_in_context(span)
    for part in parts:
        tracer.start_span(
            part.name, around, attributes=part.attributes, start_time=part.started
        ).end(part.ended)
    span.end(whole.ended)


def tell_root(ids: TraceContext, whole: PastSpan) -> None:
    """Begin a trace with something that is over, under ids that others give as the parent of theirs.

    A provider that draws its ids itself gets a span within that parent instead, which then nobody tells of.
    """
    if "opentelemetry.trace" not in sys.modules:
        return
    from opentelemetry import context as contexts
    from opentelemetry import trace

    generator = getattr(trace.get_tracer_provider(), "id_generator", None)
    if not getattr(generator, "takes_given_ids", False):
        tell_past(ids, whole)
        return
    token = given_ids.set(ids)
    try:
        span = trace.get_tracer("neurogrid").start_span(
            whole.name,
            contexts.Context(),
            attributes=whole.attributes,
            start_time=whole.started,
        )
    finally:
        given_ids.reset(token)
    span.end(whole.ended)


def sending(peer_id: str, message: TensorMessage) -> AbstractContextManager[Span | None]:
    """A span around the sending of a message that takes the active trace along; None for others."""
    code = message.msg_type
    if code is None or code.traced is None or "opentelemetry.trace" not in sys.modules:
        return _NOTHING
    if current_trace_context() is None:
        return _NOTHING
    from opentelemetry import trace

    return _span("p2p.send", trace.SpanKind.PRODUCER, peer_id, message)


def continued_trace(message: TensorMessage) -> AbstractContextManager[Span | None]:
    """Serve `message` within its sender's trace, in a span of its own where a tracer is configured; or in none.

    A task has the context of the task that started it, and the reader of a stream that of the task that opened the
    stream: the trace that was active then is not that of the messages which come later.
    """
    if message.trace_context is None and current_trace_context() is None:
        return _NOTHING
    from opentelemetry import trace

    if message.trace_context is None:
        return trace.use_span(trace.INVALID_SPAN)
    kind, sender = trace.SpanKind.CONSUMER, message.from_peer or ""
    return _span("p2p.receive", kind, sender, message, _remote(message.trace_context))


def answer_received(message: TensorMessage) -> None:
    """Tell the trace of an answer when it came: it is served by nobody, somebody waits for it."""
    if message.trace_context is None or "opentelemetry.trace" not in sys.modules:
        return
    from opentelemetry import trace

    trace.get_tracer("neurogrid").start_span(
        "p2p.receive",
        context=_remote(message.trace_context),
        kind=trace.SpanKind.CONSUMER,
        attributes=_attributes(message.from_peer or "", message),
    ).end()


def _span(
    name: str,
    kind: SpanKind,
    peer_id: str,
    message: TensorMessage,
    parent: Context | None = None,
) -> AbstractContextManager[Span]:
    from opentelemetry import trace

    return trace.get_tracer("neurogrid").start_as_current_span(
        name, context=parent, kind=kind, attributes=_attributes(peer_id, message)
    )


def _attributes(peer_id: str, message: TensorMessage) -> dict[str, str | int]:
    """Return the attributes of a message's span."""
    told: dict[str, str | int] = {"neurogrid.peer": peer_id}
    envelope = message.envelope
    if envelope is None:
        told["neurogrid.bytes"] = memoryview(message.data).nbytes
        told["neurogrid.layers"] = str(message.layer_id)
        return told
    told["neurogrid.bytes"] = memoryview(envelope.data).nbytes
    told["neurogrid.layers"] = layers_name(envelope.start_layer, envelope.stop_layer)
    told["neurogrid.position"] = envelope.position
    if envelope.session_id:
        told["neurogrid.session"] = session_name(envelope.session_id)
    return told


def layers_name(start: int, stop: int) -> str:
    """Layers [start, stop) as spans call them: `4-7`, or `4`."""
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def session_name(session_id: int) -> str:
    """The beginning of a session's id: enough to find the spans of one."""
    return f"{session_id >> 32:08x}"


def _wire_context(context: SpanContext) -> TraceContext:
    return TraceContext(
        trace_id=context.trace_id.to_bytes(16, "big"),
        span_id=context.span_id.to_bytes(8, "big"),
        flags=int(context.trace_flags),
    )


def _remote(remote: TraceContext) -> Context:
    from opentelemetry import trace

    parent = trace.SpanContext(
        trace_id=int.from_bytes(remote.trace_id, "big"),
        span_id=int.from_bytes(remote.span_id, "big"),
        is_remote=True,
        trace_flags=trace.TraceFlags(remote.flags),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent))
