"""The trace context between OpenTelemetry and the traced header; without OpenTelemetry nothing is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from neurogrid.p2p import (
    PROTOCOL_V10,
    PROTOCOL_V11,
    MessageType,
    Protocol,
    TensorMessage,
    TraceContext,
)
from neurogrid.p2p.streams import tracing
from neurogrid.p2p.streams.tracing import continued_trace, current_trace_context
from tests.unit.blocking_pair import open_two
from tests.unit.forked import told_by

REMOTE = TraceContext(bytes(range(1, 17)), bytes(range(0x11, 0x19)), 1)


def message(context: TraceContext | None) -> TensorMessage:
    return TensorMessage(
        msg_type=MessageType.TRACED_ACTIVATION, trace_context=context, from_peer="somebody"
    )


def test_there_is_no_context_outside_of_a_span() -> None:
    assert current_trace_context() is None


def span() -> trace.Span:
    return trace.NonRecordingSpan(
        trace.SpanContext(
            trace_id=int.from_bytes(REMOTE.trace_id, "big"),
            span_id=int.from_bytes(REMOTE.span_id, "big"),
            is_remote=False,
            trace_flags=trace.TraceFlags(1),
        )
    )


def test_the_active_span_is_the_context() -> None:
    token = otel_context.attach(trace.set_span_in_context(span()))
    try:
        assert current_trace_context() == REMOTE
    finally:
        otel_context.detach(token)
    assert current_trace_context() is None


def test_a_message_is_served_in_its_senders_trace() -> None:
    with continued_trace(message(REMOTE)):
        current = current_trace_context()
        assert current is not None
        assert current.trace_id == REMOTE.trace_id
        assert current.flags == REMOTE.flags
    assert current_trace_context() is None


def test_a_message_without_a_trace_starts_none() -> None:
    with continued_trace(message(None)):
        assert current_trace_context() is None


def test_a_message_without_a_trace_is_served_in_none() -> None:
    with trace.use_span(span()):
        with continued_trace(message(None)):
            assert current_trace_context() is None
        assert current_trace_context() == REMOTE


@pytest.mark.parametrize("version", [PROTOCOL_V11, PROTOCOL_V10])
async def test_the_trace_in_which_a_peer_was_opened_is_not_that_of_its_messages(
    version: str,
) -> None:
    seen: list[TraceContext | None] = []

    async def answer(message: TensorMessage) -> bytes:
        seen.append(current_trace_context())
        return b""

    async with open_two() as (host, peer_host):
        protocol = Protocol(host, versions=[version])
        peer = Protocol(peer_host, versions=[version])
        protocol.on_activation_received(answer)
        with trace.use_span(span()):
            await host.connect(peer_host.addresses[0])
            await protocol.open(peer_host.peer_id)
        reply = await peer.request_activation(host.peer_id, 0, 0, b"", timeout=60)
        assert (reply.msg_type, reply.trace_context) == (MessageType.RESPONSE, None)
    assert seen == [None]


def test_a_context_without_a_span_id_is_none() -> None:
    with continued_trace(message(TraceContext(REMOTE.trace_id, bytes(8), 1))):
        assert current_trace_context() is None


def test_nothing_is_imported_for_a_program_without_traces() -> None:
    program = (
        "import sys, neurogrid.p2p\n"
        "from neurogrid.p2p.streams.tracing import current_trace_context\n"
        "assert current_trace_context() is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def record_spans() -> None:
    """Ask and answer with the SDK; the provider is one for the whole process, and stays."""
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)

    async def answer(message: TensorMessage) -> bytes:
        with tracing.span("computed", {"neurogrid.rows": 1}):
            return bytes(message.data)[::-1]

    async def main() -> None:
        async with open_two() as (a, b):
            Protocol(b).on_activation_received(answer)
            asking = Protocol(a)
            await a.connect(b.addresses[0])
            with tracing.span("of nobody") as nothing:
                assert nothing is None
            await asking.request_activation(b.peer_id, 4, 0, b"abc", timeout=60)
            assert spans.get_finished_spans() == ()
            with trace.get_tracer("test").start_as_current_span("asked"):
                await asking.request_activation(b.peer_id, 4, 0, b"abc", timeout=60)
                token = otel_context.attach(tracing.without_details(otel_context.get_current()))
                await asking.request_activation(b.peer_id, 4, 0, b"abc", timeout=60)
                with tracing.with_details(), tracing.span("seen"):
                    pass
                with tracing.span("not seen") as nothing:
                    assert nothing is None
                otel_context.detach(token)
        found = {item.context.span_id: item for item in spans.get_finished_spans()}
        for item in sorted(found.values(), key=lambda item: item.start_time):
            parent = found[item.parent.span_id].name if item.parent else None
            told = {k: v for k, v in item.attributes.items() if k != "neurogrid.peer"}
            here = {a.peer_id: "a", b.peer_id: "b"}.get(item.attributes.get("neurogrid.peer"))
            print(item.name, "<-", parent, here, told)
        assert len({item.context.trace_id for item in found.values()}) == 1

    trio.run(main)


def test_spans_of_a_question_and_its_answer() -> None:
    assert told_by(record_spans).splitlines() == [
        "asked <- None None {}",
        "p2p.send <- asked b {'neurogrid.bytes': 3, 'neurogrid.layers': '4', 'neurogrid.position': 0}",
        "p2p.receive <- p2p.send a {'neurogrid.bytes': 3, 'neurogrid.layers': '4', 'neurogrid.position': 0}",
        "computed <- p2p.receive None {'neurogrid.rows': 1}",
        "p2p.send <- p2p.receive a {'neurogrid.bytes': 3, 'neurogrid.layers': '4', 'neurogrid.position': 0}",
        "p2p.receive <- p2p.send b {'neurogrid.bytes': 3, 'neurogrid.layers': '4', 'neurogrid.position': 0}",
        "seen <- asked None {}",
    ]
