"""The state of a run at one moment, as plain data: what the panel, the page and metrics show.

Units: seconds, bytes, Unix time for moments. What is not known is None, or 0 where that says the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from neurogrid.node.events import Event
from neurogrid.training.leading.look import ChecksLook
from neurogrid.training.runs.alarms import Alarm
from neurogrid.training.runs.run_directory import Figures
from neurogrid.training.runs.state import Phase

__all__ = [
    "CheckpointStatus",
    "MemberStatus",
    "RoundStatus",
    "RunStatus",
    "SampleCounts",
    "StageStatus",
]


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Samples of the epoch that is under way.

    Attributes:
        epoch: its number, from 0.
        available, assigned, used: samples that nobody has, that a member has, and that are in the weights.
    """

    epoch: int
    available: int
    assigned: int
    used: int


@dataclass(frozen=True, slots=True)
class StageStatus:
    """Stage of a member in a chain, and its progress with the step under way.

    Attributes:
        number: of the stage, from 1.
        start, stop: its layers, from `start` to before `stop`.
        step: that its state has made.
        waited: the share of its last step in which it waited for others, 0 to 1; None while it is not known.
        micro_batches: of the step that is under way, those that go through this member; 0 where none is.
        done: of those, that it is through with.
        under_way: of those, that it has computed forward and not backward yet.
    """

    number: int
    start: int
    stop: int
    step: int = 0
    waited: float | None = None
    micro_batches: int = 0
    done: int = 0
    under_way: int = 0


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A worker that takes part, or is about to.

    Attributes:
        peer_id: its peer id (base58).
        name: what people call its machine; its own word, which proves nothing.
        seat: its number in the run; None while it has none.
        state: what it does, as it says; `asked` before it was started, `away` where it cannot be reached.
        reason: why it failed, or what it waits for.
        round: the last that is in its weights.
        batches_done, batches: of the work at hand.
        batch_seconds: a moving mean of what a batch takes; None while it is not known.
        tokens_per_second: while it computes; None while it is not known.
        loss: over what it trained on last; None while it is not known.
        tokens: label tokens since it joined.
        memory_bytes: that its trainer has taken at most.
        micro_batch: samples that it computes at once.
        gradient_norm, difference_norm, cosine: of its last batch and its last difference; the cosine is that to the
            aggregate.
        versions: of what it computes with, by library.
        lease_seconds: until its lease ends, if it is not renewed; None where it has none.
        num_rounds, num_late: rounds that it took part in, and that went on without it while it had work.
        held_slices: slices of the data that it has.
        sent_bytes, received_bytes: of its averaging since it joined.
        stage: what it is in a chain; None where it is none, and has a whole model or stands by.
    """

    peer_id: str
    name: str
    seat: int | None
    state: str
    reason: str = ""
    round: int = 0
    batches_done: int = 0
    batches: int = 0
    batch_seconds: float | None = None
    tokens_per_second: float | None = None
    loss: float | None = None
    tokens: int = 0
    memory_bytes: int = 0
    micro_batch: int = 0
    gradient_norm: float | None = None
    difference_norm: float | None = None
    cosine: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    lease_seconds: float | None = None
    num_rounds: int = 0
    num_late: int = 0
    held_slices: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    stage: StageStatus | None = None


@dataclass(frozen=True, slots=True)
class RoundStatus:
    """A round that was decided.

    Attributes:
        round: its number, from 1.
        at: when it was decided.
        seconds: since the one before, or since training began.
        seats: that took part.
        late: seats that had work and are not in it.
        names: of machines, by seat.
        samples: that were used by it.
        digest: of the aggregate, in hex: the same for all members.
        figures: of metrics.jsonl: loss, held-out loss, step, tokens; empty until they are there.
        sent_bytes: that the members and the leader sent for averaging since the round before.
        seat_samples: samples of each seat that had work, by seat; 0 for one that was late.
    """

    round: int
    at: float
    seconds: float
    seats: tuple[int, ...]
    late: tuple[int, ...]
    names: Mapping[int, str]
    samples: int
    digest: str
    figures: Figures
    sent_bytes: int = 0
    seat_samples: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """A checkpoint that was written whole. Whether it is still kept is the run file's to say."""

    step: int
    round: int
    at: float


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run.

    Attributes:
        at: the moment.
        started_at: when this leader began to lead it.
        name: of the run.
        run_id: in hex; empty before it has begun.
        peer_id: of the leader.
        method: the outer method.
        phase: what it does.
        waits: why nothing goes on, or what for; empty where nothing is waited for.
        reason: why it stops, or has ended.
        round, step, tokens: that are behind it; steps are those of an even member.
        loss, eval_loss: the newest; None while there is none.
        seconds: that the run has taken, over all its leaders.
        tokens_per_second: lately, of all members together.
        part: of the run that is done, 0 to 1; None where its end is not known beforehand.
        remaining_seconds: until that, at the pace of late.
        samples: of the epoch.
        num_parameters: that are trained; 0 while that is not known.
        members: those with a seat first; of a chain those of each stage in order, and then those that stand by.
        rounds: the last ones, oldest first.
        checkpoints: the same.
        alarms: what makes it doubtful that the run learns.
        events: what happened, in words; what failed, and what was done.
        is_chain: whether members have a stage each of one model; a round is a step then.
        checks: what members computed again of what others claimed; None in a run that has none.
    """

    at: float
    started_at: float
    name: str
    run_id: str
    peer_id: str
    method: str
    phase: Phase
    waits: str
    reason: str
    round: int
    step: int
    tokens: int
    loss: float | None
    eval_loss: float | None
    seconds: float
    tokens_per_second: float | None
    part: float | None
    remaining_seconds: float | None
    samples: SampleCounts | None
    num_parameters: int
    members: tuple[MemberStatus, ...]
    rounds: tuple[RoundStatus, ...]
    checkpoints: tuple[CheckpointStatus, ...]
    alarms: tuple[Alarm, ...]
    events: tuple[Event, ...]
    is_chain: bool = False
    checks: ChecksLook | None = None
