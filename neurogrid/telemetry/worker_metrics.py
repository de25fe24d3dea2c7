"""The metrics of a worker: what it computes and holds, and what its device has."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from neurogrid.assembly.worker import Worker
from neurogrid.telemetry.build_metrics import BUILD_METRICS, BuildSource
from neurogrid.telemetry.coordinator_metrics import CACHE_LIMIT, CACHE_RESERVED
from neurogrid.telemetry.gpu_metrics import GPU_METRICS, GpuSource
from neurogrid.telemetry.metric import MetricSpec, Reading, make_registry
from neurogrid.telemetry.traffic_metrics import TRAFFIC_METRICS, TrafficSource

__all__ = ["WORKER_METRICS", "worker_registry"]

STAGE: Final = MetricSpec(
    "neurogrid_stage_duration_seconds",
    "histogram",
    "That torch took for one pass through the layers held here: `prefill`, a chunk of a prompt, or `decode`, "
    "one token of each of several sessions.",
    ("phase",),
)
STAGE_TOKENS: Final = MetricSpec(
    "neurogrid_stage_tokens_total", "counter", "Tokens that went through the layers.", ("phase",)
)
ROWS: Final = MetricSpec(
    "neurogrid_batch_rows", "histogram", "Sessions that shared a pass of `decode`."
)
STEP_QUEUE: Final = MetricSpec(
    "neurogrid_step_queue_seconds", "histogram", "For which a session's step waited for its turn."
)
STEPS_WAITING: Final = MetricSpec(
    "neurogrid_steps_waiting", "gauge", "Steps that wait for their turn."
)
SESSIONS: Final = MetricSpec("neurogrid_sessions", "gauge", "Sessions that are open.")
CACHE_USED: Final = MetricSpec(
    "neurogrid_kv_cache_used_bytes", "gauge", "Of the KV caches, by the tokens that are in them."
)
HELD_LAYERS: Final = MetricSpec("neurogrid_held_layers", "gauge", "Layers that are in memory.")
HELD_BYTES: Final = MetricSpec("neurogrid_held_weights_bytes", "gauge", "That their weights take.")
RECEIVED: Final = MetricSpec(
    "neurogrid_weights_received_bytes_total",
    "counter",
    "Weights of layers that were loaded: sent by the `coordinator`, fetched from a `worker`, read from `disk`, or "
    "from this worker's `own` model.",
    ("source",),
)
FREE: Final = MetricSpec(
    "neurogrid_free_bytes",
    "gauge",
    "Memory for layers and caches in all, those that are held included.",
)
IS_SERVING: Final = MetricSpec(
    "neurogrid_serving_coordinator", "gauge", "Coordinators that use this worker, 0 or more."
)
PROMISED: Final = MetricSpec(
    "neurogrid_promised_bytes",
    "gauge",
    "Memory that coordinators were promised for their layers and caches.",
)
GIVEN_WAY: Final = MetricSpec(
    "neurogrid_given_way_total",
    "counter",
    "Coordinators that were idle and whose memory another one got.",
)
WORKER_METRICS: Final = (
    *(STAGE, STAGE_TOKENS, ROWS, STEP_QUEUE, STEPS_WAITING, SESSIONS),
    *(CACHE_USED, CACHE_RESERVED, CACHE_LIMIT, HELD_LAYERS, HELD_BYTES, RECEIVED, FREE, IS_SERVING),
    *(PROMISED, GIVEN_WAY),
)


def worker_registry(worker: Worker) -> CollectorRegistry:
    """The metrics of `worker`."""
    protocol = worker.protocol
    traffic = TrafficSource(lambda: protocol.counters, lambda: protocol.host.connected_peers)

    def read(reading: Reading) -> None:
        _read_work(worker, reading)
        _read_memory(worker, reading)

    return make_registry(
        {
            BuildSource("worker"): BUILD_METRICS,
            read: WORKER_METRICS,
            traffic: TRAFFIC_METRICS,
            GpuSource(worker.device): GPU_METRICS,
        }
    )


def _read_work(worker: Worker, reading: Reading) -> None:
    statistics = worker.sessions.statistics
    for name, phase in (("prefill", statistics.prefill), ("decode", statistics.decode)):
        reading.add_histogram(STAGE, phase.seconds, name)
        reading.add(STAGE_TOKENS, phase.num_tokens, name)
    reading.add_histogram(ROWS, statistics.rows)
    reading.add_histogram(STEP_QUEUE, statistics.queue)
    load = worker.sessions.load
    reading.add(STEPS_WAITING, load.num_waiting)
    reading.add(SESSIONS, load.num_sessions)
    reading.add(CACHE_USED, load.cache_used_bytes)
    reading.add(CACHE_RESERVED, load.cache_reserved_bytes)
    reading.add(CACHE_LIMIT, load.cache_limit_bytes)
    reading.add(IS_SERVING, load.num_coordinators)


def _read_memory(worker: Worker, reading: Reading) -> None:
    reading.add(HELD_LAYERS, len(worker.held_layers))
    reading.add(HELD_BYTES, worker.sessions.load.weight_bytes)
    reading.add(FREE, worker.memory.free_bytes)
    reading.add(PROMISED, worker.promised_bytes)
    reading.add(GIVEN_WAY, worker.num_given_way)
    for source, num_bytes in worker.received_bytes.items():
        reading.add(RECEIVED, num_bytes, source.value)
