"""One OpenTelemetry trace over two programs: the answer is computed within the trace of the question.

    python examples/traces.py            # serves, and prints its address
    python examples/traces.py ADDRESS    # asks within a span

With the API of OpenTelemetry alone, as here, ids travel and nothing is recorded. Where the SDK is configured, each
tensor that was served has a span "p2p.receive" whose parent is "p2p.send" of who asked; `serve` stays as it is.
"""

import secrets
import sys

import trio
from opentelemetry import trace

from neurogrid.p2p import Protocol, TensorMessage, open_host


def active_trace_id() -> str:
    return f"{trace.get_current_span().get_span_context().trace_id:032x}"


def new_span() -> trace.Span:
    """In place of a span that a tracer of the SDK would have started."""
    context = trace.SpanContext(
        trace_id=secrets.randbits(128),
        span_id=secrets.randbits(64),
        is_remote=False,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    return trace.NonRecordingSpan(context)


async def serve() -> None:
    def reverse(message: TensorMessage) -> bytes:
        print(f"served in trace {active_trace_id()}", flush=True)
        return bytes(message.data)[::-1]

    async with open_host() as host:
        Protocol(host).on_activation_received(reverse)
        print(host.addresses[0], flush=True)
        await trio.sleep_forever()


async def ask(address: str) -> None:
    async with open_host() as host:
        protocol = Protocol(host)
        peer_id = await host.connect(address)
        with trace.use_span(new_span()):
            print(f"asked in trace {active_trace_id()}")
            answer = await protocol.request_activation(peer_id, 0, 0, b"abc", timeout=60)
        print(f"answered in trace {answer.trace_context.trace_id.hex()}")


if __name__ == "__main__":
    trio.run(ask, sys.argv[1]) if len(sys.argv) > 1 else trio.run(serve)
