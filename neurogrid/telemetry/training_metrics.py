"""The metrics of a training run, at its leader: how far it is, what it learns, who takes part.

    metrics = TrainingMetrics(board)
    make_app(metrics_routes(metrics.registry), ...)

Source of the values: the board, which is told what happens.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from neurogrid.p2p.hosts.identity import short_peer_id
from neurogrid.telemetry.build_metrics import BUILD_METRICS, BuildSource
from neurogrid.telemetry.http_metrics import HTTP_METRICS, HttpStatistics
from neurogrid.telemetry.metric import MetricSpec, Reading, make_registry
from neurogrid.telemetry.traffic_metrics import MAX_PEERS
from neurogrid.training.leading.board import RunBoard
from neurogrid.training.leading.status import MemberStatus, RunStatus
from neurogrid.training.runs.alarms import AlarmKind
from neurogrid.training.runs.state import Phase

__all__ = ["TRAINING_METRICS", "TrainingMetrics"]

PHASE: Final = MetricSpec(
    "neurogrid_training_phase",
    "gauge",
    "1 for what the run does: `waiting` for members, `training`, `finishing`, `ended`; else 0.",
    ("phase",),
)
ROUNDS: Final = MetricSpec(
    "neurogrid_training_rounds_total", "counter", "Rounds that were decided since the run began."
)
ROUND_SECONDS: Final = MetricSpec(
    "neurogrid_training_round_duration_seconds",
    "histogram",
    "From the decision of a round to that of the next one, of this leader.",
)
CONTRIBUTIONS: Final = MetricSpec(
    "neurogrid_training_contributions_total",
    "counter",
    "What members with work did with the rounds of this leader: `in_time` or `late`.",
    ("when",),
)
STEPS: Final = MetricSpec(
    "neurogrid_training_steps_total", "counter", "Inner steps of an even member."
)
TOKENS: Final = MetricSpec(
    "neurogrid_training_tokens_total", "counter", "Tokens that are in the common weights."
)
LOSS: Final = MetricSpec(
    "neurogrid_training_loss", "gauge", "Of the last round, over its label tokens."
)
EVAL_LOSS: Final = MetricSpec(
    "neurogrid_training_eval_loss", "gauge", "Of the common weights, on held-out data."
)
SAMPLES: Final = MetricSpec(
    "neurogrid_training_samples",
    "gauge",
    "Samples of the epoch: `available`, `assigned` to a member, `used`.",
    ("state",),
)
MEMBERS: Final = MetricSpec(
    "neurogrid_training_members", "gauge", "Workers by what they do.", ("state",)
)
ALARMS: Final = MetricSpec(
    "neurogrid_training_alarms",
    "gauge",
    "What makes it doubtful that the run learns, each by how many say it: the run, or a member.",
    ("kind",),
)
AGREEMENT: Final = MetricSpec(
    "neurogrid_training_agreement_ratio",
    "gauge",
    "Of the members, the share whose weights have the digest that most have after the same round.",
)
CHECKPOINTS: Final = MetricSpec(
    "neurogrid_training_checkpoint_step", "gauge", "The step of the last checkpoint."
)
CHECKPOINT_TIME: Final = MetricSpec(
    "neurogrid_training_checkpoint_timestamp_seconds", "gauge", "When that was written."
)
MEMBER_RATE: Final = MetricSpec(
    "neurogrid_training_member_tokens_per_second",
    "gauge",
    "Of a member while it computes.",
    ("peer",),
)
MEMBER_LOSS: Final = MetricSpec(
    "neurogrid_training_member_loss", "gauge", "Over what a member trained on last.", ("peer",)
)
MEMBER_COSINE: Final = MetricSpec(
    "neurogrid_training_member_cosine",
    "gauge",
    "Between what a member learned and what all learned, in its last round.",
    ("peer",),
)
MEMBER_MEMORY: Final = MetricSpec(
    "neurogrid_training_member_memory_bytes",
    "gauge",
    "That the trainer of a member has taken at most.",
    ("peer",),
)
MEMBER_LATE: Final = MetricSpec(
    "neurogrid_training_member_late_rounds_total",
    "counter",
    "Rounds that went on without a member that had work, as this leader saw.",
    ("peer",),
)
MEMBER_BYTES: Final = MetricSpec(
    "neurogrid_training_member_bytes_total",
    "counter",
    "Of averaging, that a member has `sent` and `received` since it joined.",
    ("peer", "direction"),
)

TRAINING_METRICS: Final = (
    *(PHASE, ROUNDS, ROUND_SECONDS, CONTRIBUTIONS, STEPS, TOKENS, LOSS, EVAL_LOSS, SAMPLES),
    *(MEMBERS, ALARMS, AGREEMENT, CHECKPOINTS, CHECKPOINT_TIME),
    *(MEMBER_RATE, MEMBER_LOSS, MEMBER_COSINE, MEMBER_MEMORY, MEMBER_LATE, MEMBER_BYTES),
)
STATES: Final = ("asked", "starting", "ready", "training", "averaging", "waiting", "failed", "away")


class TrainingMetrics:
    """The metrics of one run.

    Args:
        board: is told what the leader does.

    Attributes:
        http: of the server in front of it; to be told by that.
        registry: what is scraped.
    """

    def __init__(self, board: RunBoard) -> None:
        self.http = HttpStatistics()
        self._board = board
        self.registry: CollectorRegistry = make_registry(
            {
                BuildSource("leader"): BUILD_METRICS,
                self._read: TRAINING_METRICS,
                self.http.read: HTTP_METRICS,
            }
        )

    def _read(self, reading: Reading) -> None:
        status = self._board.status()
        for phase in Phase:
            reading.add(PHASE, float(status.phase is phase), phase.value)
        self._read_run(reading, status)
        for state in STATES:
            reading.add(MEMBERS, sum(each.state == state for each in status.members), state)
        for kind in AlarmKind:
            reading.add(ALARMS, sum(alarm.kind is kind for alarm in status.alarms), kind.value)
        for member in status.members[:MAX_PEERS]:
            _read_member(reading, member)

    def _read_run(self, reading: Reading, status: RunStatus) -> None:
        rounds = self._board.round_statistics
        reading.add(ROUNDS, status.round)
        reading.add_histogram(ROUND_SECONDS, rounds.seconds)
        reading.add(CONTRIBUTIONS, rounds.num_in_time, "in_time")
        reading.add(CONTRIBUTIONS, rounds.num_late, "late")
        reading.add(STEPS, status.step)
        reading.add(TOKENS, status.tokens)
        if status.loss is not None:
            reading.add(LOSS, status.loss)
        if status.eval_loss is not None:
            reading.add(EVAL_LOSS, status.eval_loss)
        if status.samples is not None:
            for state in ("available", "assigned", "used"):
                reading.add(SAMPLES, getattr(status.samples, state), state)
        agreement = self._board.learning().hash_agreement_rate
        if agreement is not None:
            reading.add(AGREEMENT, agreement)
        if status.checkpoints:
            reading.add(CHECKPOINTS, status.checkpoints[-1].step)
            reading.add(CHECKPOINT_TIME, status.checkpoints[-1].at)


def _read_member(reading: Reading, member: MemberStatus) -> None:
    label = short_peer_id(member.peer_id)
    for spec, value in (
        (MEMBER_RATE, member.tokens_per_second),
        (MEMBER_LOSS, member.loss),
        (MEMBER_COSINE, member.cosine),
    ):
        if value is not None:
            reading.add(spec, value, label)
    reading.add(MEMBER_MEMORY, member.memory_bytes, label)
    reading.add(MEMBER_LATE, member.num_late, label)
    reading.add(MEMBER_BYTES, member.sent_bytes, label, "sent")
    reading.add(MEMBER_BYTES, member.received_bytes, label, "received")
