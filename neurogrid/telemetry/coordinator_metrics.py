"""The metrics of a coordinator: its generations, its workers, what it sends them.

    metrics = CoordinatorMetrics(board)
    async with open_coordinator(settings, board=board) as coordinator:
        with metrics.of(coordinator):
            ...                                          # metrics.registry can be scraped, also before

Source of the values: the board, which is told what happens, and the coordinator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, Protocol

from prometheus_client import CollectorRegistry

from neurogrid.fleet.board.status import Health, PeerStatus
from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.p2p.exchange.counters import TrafficCounters
from neurogrid.p2p.hosts.identity import short_peer_id
from neurogrid.telemetry.build_metrics import BUILD_METRICS, BuildSource
from neurogrid.telemetry.http_metrics import HTTP_METRICS, HttpStatistics
from neurogrid.telemetry.metric import MetricSpec, Reading, make_registry
from neurogrid.telemetry.traffic_metrics import MAX_PEERS, PEERS, TRAFFIC_METRICS, TrafficSource

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

MODEL_STATE: Final = MetricSpec(
    "neurogrid_model_state",
    "gauge",
    "Of several models, 1 where each is: `ready`, `opening`, `idle`, `closing` or `failed`.",
    ("model", "state"),
)
MODEL_RUNNING: Final = MetricSpec(
    "neurogrid_model_requests_running",
    "gauge",
    "Generations of each of several models that have room on the workers.",
    ("model",),
)
MODEL_REQUESTS: Final = MetricSpec(
    "neurogrid_model_requests_total",
    "counter",
    "Generations of each of several models that are over.",
    ("model",),
)
MODEL_TOKENS: Final = MetricSpec(
    "neurogrid_model_generated_tokens_total",
    "counter",
    "Tokens that each of several models generated.",
    ("model",),
)

COORDINATOR_METRICS: Final = (
    *(REQUESTS, RUNNING, WAITING, QUEUE, FIRST_TOKEN, BETWEEN_TOKENS, DURATION),
    *(PROMPT_TOKENS, NEW_TOKENS, PROPOSED, CACHE_RESERVED, CACHE_LIMIT),
    *(FAILURES, RECOVERY, MENDING, PLANS, PLANNING, WEIGHTS),
    *(WORKERS, JOINED, LOST, LAYERS, LAYERS_READY),
    *(VERIFIED, WRONG),
    *(WORKER_LAYERS, WORKER_SESSIONS, WORKER_FREE, WORKER_LATENCY),
    *(MODEL_STATE, MODEL_RUNNING, MODEL_REQUESTS, MODEL_TOKENS),
)


class ModelView(Protocol):
    """One of several models, as far as it is told of."""

    @property
    def name(self) -> str:
        """Name of the model."""

    @property
    def board(self) -> StatusBoard:
        """Board of its coordinator."""

    @property
    def state(self) -> str:
        """State of the model: `idle`, `opening`, `ready`, `closing` or `failed`."""


class CoordinatorMetrics:
    """The metrics of one coordinator, or of those of several models together; some of them for each model, too.

    What is summed over the models counts on also where one is taken away: what it had by then is forgotten with it,
    which a reader of counters takes for a restart.

    Args:
        board: is told what the coordinator does; None where there are several.
        models: there are, at the moment; none where there is one coordinator.

    Attributes:
        http: of the server in front of it; to be told by that.
        registry: what is scraped.
    """

    def __init__(
        self,
        board: StatusBoard | None = None,
        models: Callable[[], Sequence[ModelView]] = tuple,
    ) -> None:
        self.http = HttpStatistics()
        self._board = board
        self._models = models
        self._coordinators: dict[str, Coordinator] = {}
        self._traffic: dict[StatusBoard, TrafficSource] = {}
        self.registry: CollectorRegistry = make_registry(
            {
                BuildSource("coordinator"): BUILD_METRICS,
                self._read: COORDINATOR_METRICS,
                self.http.read: HTTP_METRICS,
                self._read_traffic: TRAFFIC_METRICS,
            }
        )

    @contextmanager
    def of(self, coordinator: Coordinator, name: str = "") -> Iterator[None]:
        """Look at `coordinator` too while the block runs.

        Args:
            name: of its model, where there are several.
        """
        self._coordinators[name] = coordinator
        try:
            yield
        finally:
            del self._coordinators[name]

    def _boards(self) -> list[StatusBoard]:
        return ([self._board] if self._board else []) + [each.board for each in self._models()]

    def _connected(self) -> Collection[str]:
        coordinators = self._coordinators.values()
        return {peer_id for each in coordinators for peer_id in each.host.connected_peers}

    def _read_traffic(self, reading: Reading) -> None:
        boards = self._boards()
        reading.add(PEERS, len(self._connected()))  # of all of them together
        for board in set(self._traffic) - set(boards):
            del self._traffic[board]
        for board in boards:
            if board not in self._traffic:
                self._traffic[board] = TrafficSource(
                    partial(_counters, board), self._connected, counts_peers=False
                )
            self._traffic[board](reading)

    def _read(self, reading: Reading) -> None:
        boards = self._boards()
        for board in boards:
            self._read_generations(reading, board)
            self._read_fleet(reading, board)
        self._read_workers(reading, boards)
        for coordinator in self._coordinators.values():
            reserved, limit = coordinator.cache_bytes
            reading.add(CACHE_RESERVED, reserved)
            reading.add(CACHE_LIMIT, limit)
        for model in self._models():
            generations = model.board.generations
            reading.add(MODEL_STATE, 1, model.name, str(model.state))
            reading.add(MODEL_RUNNING, generations.num_running, model.name)
            reading.add(MODEL_REQUESTS, generations.num_ended, model.name)
            reading.add(MODEL_TOKENS, generations.num_tokens, model.name)

    def _read_generations(self, reading: Reading, board: StatusBoard) -> None:
        generations = board.generations
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
        verified = board.verification
        reading.add(VERIFIED, verified.num_steps - verified.num_differing, "right")
        reading.add(VERIFIED, verified.num_differing, "differing")
        reading.add(VERIFIED, verified.num_unverified, "unverified")

    def _read_fleet(self, reading: Reading, board: StatusBoard) -> None:
        statistics = board.statistics
        reading.add_histogram(MENDING, statistics.mending_seconds)
        reading.add_all(PLANS, statistics.plans)
        reading.add_histogram(PLANNING, statistics.planning)
        reading.add_all(WEIGHTS, statistics.weight_bytes)
        reading.add(JOINED, statistics.num_joined)
        reading.add(LOST, statistics.num_lost)
        reading.add(WRONG, statistics.num_wrong)

    def _read_workers(self, reading: Reading, boards: Sequence[StatusBoard]) -> None:
        """Layers and sessions of all models; the rest, of each worker, as the first says that has it."""
        first: dict[str, PeerStatus] = {}
        named: set[str] = set()
        for board in boards:
            status = board.fleet_status()
            reading.add(LAYERS, status.total_layers)
            reading.add(LAYERS_READY, len(status.loaded_layers))
            for peer in status.peers.values():
                if peer.health is Health.LOST:
                    continue
                label = short_peer_id(peer.peer_id)
                first.setdefault(peer.peer_id, peer)
                if label not in named and len(named) >= MAX_PEERS:
                    continue
                named.add(label)
                reading.add(WORKER_LAYERS, len(peer.layers_held), label)
                reading.add(WORKER_SESSIONS, peer.num_sessions, label)
        by_health = Counter(peer.health for peer in first.values())
        for health in Health:
            if health is not Health.LOST:
                reading.add(WORKERS, by_health[health], health.value)
        by_label = {short_peer_id(peer.peer_id): peer for peer in first.values()}
        for label in named:
            reading.add(WORKER_FREE, by_label[label].memory_free_bytes, label)
            if (latency := by_label[label].latency) is not None:
                reading.add(WORKER_LATENCY, latency, label)


def _counters(board: StatusBoard) -> TrafficCounters | None:
    return board.counters
