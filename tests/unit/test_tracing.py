"""The trace context between OpenTelemetry and the traced header; without OpenTelemetry nothing is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio
from opentelemetry import context as otel_context
from opentelemetry import trace

from neurogrid.p2p import (
    PROTOCOL_V10,
    PROTOCOL_V11,
    MessageType,
    Protocol,
    TensorMessage,
    TraceContext,
)
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.tracing import continued_trace, current_trace_context

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
def test_the_trace_in_which_a_peer_was_opened_is_not_that_of_its_messages(version: str) -> None:
    seen: list[TraceContext | None] = []

    async def answer(message: TensorMessage) -> bytes:
        seen.append(current_trace_context())
        return b""

    async def main() -> None:
        async with (
            open_memory_network() as network,
            network.open_host() as host,
            network.open_host() as peer_host,
        ):
            protocol = Protocol(host, versions=[version])
            peer = Protocol(peer_host, versions=[version])
            protocol.on_activation_received(answer)
            with trace.use_span(span()):
                await host.connect(peer_host.addresses[0])
                await protocol.open(peer_host.peer_id)
            reply = await peer.request_activation(host.peer_id, 0, 0, b"", timeout=60)
            assert (reply.msg_type, reply.trace_context) == (MessageType.RESPONSE, None)

    trio.run(main)
    assert seen == [None]


def test_a_context_without_a_span_id_is_none() -> None:
    with continued_trace(message(TraceContext(REMOTE.trace_id, bytes(8), 1))):
        assert current_trace_context() is None


def test_nothing_is_imported_for_a_program_without_traces() -> None:
    program = (
        "import sys, neurogrid.p2p\n"
        "from neurogrid.p2p.tracing import current_trace_context\n"
        "assert current_trace_context() is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
