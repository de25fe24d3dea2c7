"""What do metrics and traces cost a token?

    python benchmarks/telemetry.py

First what each call costs that is on the way of a token while nobody watches: OpenTelemetry not imported, then its
SDK configured and no trace active. Then the CPU time of a token of the embedded model, of coordinator and two workers,
all in this process, with the hooks as they are and with the hooks taken out; and once more with every generation
traced. They take turns, a generation each, so that what else the machine does hits them alike; the median of the
ratios of neighbours is told, and beside it that of a generation with one that is no different: the noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
import trio

import neurogrid.inference.generation.coordinator as coordinator_module
from neurogrid import (
    Coordinator,
    CoordinatorSettings,
    WorkerSettings,
    open_coordinator,
    open_worker,
)
from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.inference.generation import ends_queue, generation_spans, token_session
from neurogrid.inference.sessions import service as worker_sessions
from neurogrid.inference.sessions.statistics import ComputeStatistics
from neurogrid.node.histogram import COMPUTE_SECONDS, Histogram
from neurogrid.p2p.exchange import dispatcher, exchange, subscribers
from neurogrid.p2p.streams.tracing import answer_received, continued_trace, sending, span
from neurogrid.p2p.wire import MessageType, TensorMessage

NUM_CALLS = 200_000
_NOTHING = nullcontext()


def micros(call: Callable[[], object]) -> float:
    """Microseconds of a call: the best of five."""
    return min(timeit.repeat(call, number=NUM_CALLS // 5, repeat=5)) / (NUM_CALLS // 5) * 1e6


def show_calls() -> None:
    message = TensorMessage(MessageType.ACTIVATION)
    histogram = Histogram(COMPUTE_SECONDS)
    computed = ComputeStatistics()
    told = StatusBoard()
    told.generation_queued(1, 3)
    told.generation_opened(1)

    def enter(context: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
        def call() -> None:
            with context():
                pass

        return call

    calls: dict[str, Callable[[], object]] = {
        "a histogram observes": lambda: histogram.observe(0.003),
        "a worker counts a pass": lambda: computed.called(
            is_decoded=True, num_rows=4, num_tokens=4, seconds=0.003
        ),
        "a coordinator counts a token": lambda: told.token_generated(1),
        "a span that is none": enter(lambda: span("inference.sample")),
        "a message is sent": enter(lambda: sending("peer", message)),
        "a message is served": enter(lambda: continued_trace(message)),
        "an answer came": lambda: answer_received(message),
    }
    for name, call in calls.items():
        print(f"  {name:<32} {micros(call):6.2f} us")


@contextmanager
def without_hooks() -> Iterator[None]:
    """Take the hooks out: nothing is counted, nothing looks for a trace."""
    no_spans = generation_spans.GenerationSpans()
    call = ComputeStatistics().called(is_decoded=True, num_rows=1, num_tokens=1, seconds=0.0)
    targets: list[tuple[object, str, object]] = [
        (coordinator_module, "generation_spans", lambda told: no_spans),
        (coordinator_module, "past_span", lambda *told: None),
        (ends_queue, "span", lambda *told: _NOTHING),
        (token_session, "recovery_span", lambda failure: _NOTHING),
        (exchange, "sending", lambda *told: _NOTHING),
        (subscribers, "continued_trace", lambda message: _NOTHING),
        (dispatcher, "answer_received", lambda message: None),
        (Histogram, "observe", lambda self, value: None),
        (ComputeStatistics, "called", lambda self, **told: call),
        (StatusBoard, "token_generated", lambda self, number: None),
    ]
    for module in (worker_sessions, _worker_steps()):
        if hasattr(module, "stage_span"):
            targets.append((module, "stage_span", lambda *told: _NOTHING))
    with ExitStack() as stack:
        for target, name, replacement in targets:
            stack.enter_context(patch.object(target, name, replacement))
        yield


def _worker_steps() -> object:
    try:
        from neurogrid.inference.sessions import step_queue as worker_steps
    except ImportError:
        return None
    return worker_steps


async def seconds_per_token(coordinator: Coordinator, num_tokens: int) -> float:
    """CPU seconds of a token, by one generation after its first token."""
    times = []
    async for _ in coordinator.generate([5, 6, 7], max_tokens=num_tokens):
        times.append(time.process_time())
    return (times[-1] - times[0]) / (len(times) - 1)


async def compare(
    coordinator: Coordinator,
    others: dict[str, Callable[[], AbstractContextManager[object]]],
    *,
    num_rounds: int,
    num_tokens: int,
) -> None:
    """Print how much longer a token takes as things are than under each of `others`."""
    ratios: dict[str, list[float]] = {name: [] for name in others}
    own = []
    for number in range(num_rounds + 1):
        base = await seconds_per_token(coordinator, num_tokens)
        if number:  # the first one warms up
            own.append(base)
        for name, context in others.items():
            with context():
                other = await seconds_per_token(coordinator, num_tokens)
            if number:
                ratios[name].append(base / other)
    print(f"  a token takes {statistics.median(own) * 1e3:.3f} ms of the CPU")
    for name, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(
            f"  against {name}: {100 * (middle - 1):+.2f} % (quartiles {100 * (low - 1):+.2f} to "
            f"{100 * (high - 1):+.2f} %)"
        )


async def run(num_rounds: int, num_tokens: int) -> None:
    async with (
        open_worker(WorkerSettings(memory_limit=2**30)) as first,
        open_worker(WorkerSettings(memory_limit=2**30)) as second,
    ):
        peers = (first.addresses[0], second.addresses[0])
        settings = CoordinatorSettings(peers=peers, stages=2)
        async with open_coordinator(settings) as coordinator:
            rounds = {"num_rounds": num_rounds, "num_tokens": num_tokens}
            print("tokens, without OpenTelemetry")
            others: dict[str, Callable[[], object]] = {
                "itself": nullcontext,
                "the same without hooks": without_hooks,
            }
            await compare(coordinator, others, **rounds)
            _configure_sdk()
            print("calls, the SDK configured, no trace active")
            show_calls()
            print("tokens, every generation traced")
            await compare(coordinator, others, **rounds)


def _configure_sdk() -> None:
    """Configure the SDK as --otlp-endpoint does it, with an exporter that drops what it gets."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Dropping(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Dropping()))
    trace.set_tracer_provider(provider)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("calls, without OpenTelemetry")
    show_calls()
    trio.run(run, options.rounds, options.tokens)


if __name__ == "__main__":
    main()
