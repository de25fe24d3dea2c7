"""The metrics of a coordinator: its generations, its workers, what it sends them.

    metrics = CoordinatorMetrics(board)
    async with open_coordinator(settings, board=board) as coordinator:
        with metrics.of(coordinator):
            ...                                          # metrics.registry can be scraped, also before

Source of the values: the board, which is told what happens, and the coordinator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry

from neurogrid.fleet.board.status import Health, PeerStatus
from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.p2p.hosts.identity import short_peer_id
from neurogrid.telemetry.build_metrics import BUILD_METRICS, BuildSource
from neurogrid.telemetry.http_metrics import HTTP_METRICS, HttpStatistics
from neurogrid.telemetry.metric import MetricSpec, Reading, make_registry
from neurogrid.telemetry.traffic_metrics import MAX_PEERS, TRAFFIC_METRICS, TrafficSource

__all__ = ["COORDINATOR_METRICS", "CoordinatorMetrics"]

REQUESTS: Final = MetricSpec(
    "neurogrid_requests_total",
    "counter",
    "Generations that are over: `stop`, the model ended it; `length`, there was no place for more; `closed`, "
    "whoever read it wanted no more; `failed`.",
    ("outcome",),
)
RUNNING: Final = MetricSpec(
    "neurogrid_requests_running", "gauge", "Generations that have room on the workers."
)
WAITING: Final = MetricSpec("neurogrid_requests_waiting", "gauge", "Generations that wait for it.")
QUEUE: Final = MetricSpec(
    "neurogrid_request_queue_seconds",
    "histogram",
    "For which a generation waited for room.",
)
FIRST_TOKEN: Final = MetricSpec(
    "neurogrid_time_to_first_token_seconds",
    "histogram",
    "From when a generation was asked for to its first token, the wait for room included.",
)
BETWEEN_TOKENS: Final = MetricSpec(
    "neurogrid_time_between_tokens_seconds",
    "histogram",
    "From each token of a generation to its next one.",
)
DURATION: Final = MetricSpec(
    "neurogrid_request_duration_seconds",
    "histogram",
    "From when a generation was asked for to its end.",
)
PROMPT_TOKENS: Final = MetricSpec(
    "neurogrid_prompt_tokens_total", "counter", "Tokens of prompts that were taken up."
)
NEW_TOKENS: Final = MetricSpec(
    "neurogrid_generated_tokens_total", "counter", "Tokens that were generated."
)
PROPOSED: Final = MetricSpec(
    "neurogrid_proposed_tokens_total",
    "counter",
    "Tokens that were proposed before the model chose: `accepted`, it chose them; `rejected`.",
    ("outcome",),
)
CACHE_RESERVED: Final = MetricSpec(
    "neurogrid_kv_cache_reserved_bytes",
    "gauge",
    "Of the KV caches, set aside for open sessions at their greatest length.",
)
CACHE_LIMIT: Final = MetricSpec(
    "neurogrid_kv_cache_limit_bytes", "gauge", "That KV caches may take in all."
)
FAILURES: Final = MetricSpec(
    "neurogrid_step_failures_total",
    "counter",
    "Steps of generations that a worker failed: `lost`, `timeout`, `cut_off` (its predecessor cannot reach it), "
    "`refused`, `protocol`, `not_finite`; `no_worker`, nobody was ready in time.",
    ("kind",),
)
RECOVERY: Final = MetricSpec(
    "neurogrid_recovery_duration_seconds",
    "histogram",
    "From a failed step until the generation went on with other workers.",
)
MENDING: Final = MetricSpec(
    "neurogrid_mend_duration_seconds",
    "histogram",
    "From when nobody held some layers until all were placed again.",
)
PLANS: Final = MetricSpec(
    "neurogrid_plans_total",
    "counter",
    "Runs of the planner: `made` or `impossible`.",
    ("outcome",),
)
PLANNING: Final = MetricSpec(
    "neurogrid_plan_duration_seconds", "histogram", "That a run of the planner took."
)
WEIGHTS: Final = MetricSpec(
    "neurogrid_weights_bytes_total",
    "counter",
    "Weights that came to workers: sent by the `coordinator`, passed on by a `worker`, or there already (`cache`).",
    ("source",),
)
WORKERS: Final = MetricSpec(
    "neurogrid_workers",
    "gauge",
    "Workers that are there: `ready`, `receiving` layers, `resting` after a refusal, `suspected` of keeping "
    "steps waiting, `leaving`.",
    ("health",),
)
JOINED: Final = MetricSpec("neurogrid_workers_joined_total", "counter", "Workers that came.")
LOST: Final = MetricSpec("neurogrid_workers_lost_total", "counter", "Workers that went.")
LAYERS: Final = MetricSpec("neurogrid_layers", "gauge", "Layers of the model.")
LAYERS_READY: Final = MetricSpec(
    "neurogrid_layers_ready", "gauge", "Layers that a worker is ready for."
)
WORKER_LAYERS: Final = MetricSpec(
    "neurogrid_worker_layers", "gauge", "Layers that a worker is ready for.", ("peer",)
)
WORKER_SESSIONS: Final = MetricSpec(
    "neurogrid_worker_sessions", "gauge", "Generations that go through a worker.", ("peer",)
)
WORKER_FREE: Final = MetricSpec(
    "neurogrid_worker_free_bytes",
    "gauge",
    "Memory that a worker can give to layers and caches in all, those that it holds included.",
    ("peer",),
)
WORKER_LATENCY: Final = MetricSpec(
    "neurogrid_worker_latency_seconds", "gauge", "That a message takes to a worker.", ("peer",)
)
VERIFIED: Final = MetricSpec(
    "neurogrid_verified_steps_total",
    "counter",
    "Steps that --verify had computed again: `right`, or `differing`; `unverified`, it could not be done.",
    ("outcome",),
)
WRONG: Final = MetricSpec(
    "neurogrid_workers_wrong_total",
    "counter",
    "Workers that were found to compute wrong, and were excluded.",
)

COORDINATOR_METRICS: Final = (
    *(REQUESTS, RUNNING, WAITING, QUEUE, FIRST_TOKEN, BETWEEN_TOKENS, DURATION),
    *(PROMPT_TOKENS, NEW_TOKENS, PROPOSED, CACHE_RESERVED, CACHE_LIMIT),
    *(FAILURES, RECOVERY, MENDING, PLANS, PLANNING, WEIGHTS),
    *(WORKERS, JOINED, LOST, LAYERS, LAYERS_READY),
    *(VERIFIED, WRONG),
    *(WORKER_LAYERS, WORKER_SESSIONS, WORKER_FREE, WORKER_LATENCY),
)


class CoordinatorMetrics:
    """The metrics of one coordinator.

    Args:
        board: is told what the coordinator does.

    Attributes:
        http: of the server in front of it; to be told by that.
        registry: what is scraped.
    """

    def __init__(self, board: StatusBoard) -> None:
        self.http = HttpStatistics()
        self._board = board
        self._coordinator: Coordinator | None = None
        traffic = TrafficSource(lambda: board.counters, self._connected)
        self.registry: CollectorRegistry = make_registry(
            {
                BuildSource("coordinator"): BUILD_METRICS,
                self._read: COORDINATOR_METRICS,
                self.http.read: HTTP_METRICS,
                traffic: TRAFFIC_METRICS,
            }
        )

    @contextmanager
    def of(self, coordinator: Coordinator) -> Iterator[None]:
        """Look at `coordinator` too while the block runs."""
        self._coordinator = coordinator
        try:
            yield
        finally:
            self._coordinator = None

    def _connected(self) -> Collection[str]:
        return self._coordinator.host.connected_peers if self._coordinator is not None else ()

    def _read(self, reading: Reading) -> None:
        self._read_generations(reading)
        self._read_fleet(reading)
        self._read_workers(reading)
        if self._coordinator is not None:
            reserved, limit = self._coordinator.cache_bytes
            reading.add(CACHE_RESERVED, reserved)
            reading.add(CACHE_LIMIT, limit)

    def _read_generations(self, reading: Reading) -> None:
        generations = self._board.generations
        reading.add_all(REQUESTS, generations.outcomes)
        reading.add(RUNNING, generations.num_running)
        reading.add(WAITING, generations.num_waiting)
        reading.add_histogram(QUEUE, generations.queue)
        reading.add_histogram(FIRST_TOKEN, generations.first_token)
        reading.add_histogram(BETWEEN_TOKENS, generations.between_tokens)
        reading.add_histogram(DURATION, generations.duration)
        reading.add(PROMPT_TOKENS, generations.num_prompt_tokens)
        reading.add(NEW_TOKENS, generations.num_tokens)
        num_rejected = generations.num_proposed - generations.num_accepted
        outcomes = {"accepted": generations.num_accepted, "rejected": num_rejected}
        reading.add_all(PROPOSED, outcomes)
        reading.add_all(FAILURES, generations.failures)
        reading.add_histogram(RECOVERY, generations.recovery)
        verified = self._board.verification
        reading.add(VERIFIED, verified.num_steps - verified.num_differing, "right")
        reading.add(VERIFIED, verified.num_differing, "differing")
        reading.add(VERIFIED, verified.num_unverified, "unverified")

    def _read_fleet(self, reading: Reading) -> None:
        statistics = self._board.statistics
        reading.add_histogram(MENDING, statistics.mending_seconds)
        reading.add_all(PLANS, statistics.plans)
        reading.add_histogram(PLANNING, statistics.planning)
        reading.add_all(WEIGHTS, statistics.weight_bytes)
        reading.add(JOINED, statistics.num_joined)
        reading.add(LOST, statistics.num_lost)
        reading.add(WRONG, statistics.num_wrong)

    def _read_workers(self, reading: Reading) -> None:
        status = self._board.fleet_status()
        there = [peer for peer in status.peers.values() if peer.health is not Health.LOST]
        by_health = Counter(peer.health for peer in there)
        for health in Health:
            if health is not Health.LOST:
                reading.add(WORKERS, by_health[health], health.value)
        reading.add(LAYERS, status.total_layers)
        reading.add(LAYERS_READY, len(status.loaded_layers))
        named: dict[str, PeerStatus] = {short_peer_id(peer.peer_id): peer for peer in there}
        for label, peer in list(named.items())[:MAX_PEERS]:
            reading.add(WORKER_LAYERS, len(peer.layers_held), label)
            reading.add(WORKER_SESSIONS, peer.num_sessions, label)
            reading.add(WORKER_FREE, peer.memory_free_bytes, label)
            if peer.latency is not None:
                reading.add(WORKER_LATENCY, peer.latency, label)
