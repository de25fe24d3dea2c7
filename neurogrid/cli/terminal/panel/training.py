"""The leader's panel of a training run: members and what they do, rounds and who was late, loss, what went wrong.

Of a model in stages: which layers each has, and the members of each with how far they are, how many micro-batches they
have under way, and how long they wait for the others.

Made of a `RunStatus`, as the page is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

from neurogrid.cli.terminal.panel.view import Cell, Column, Note, View, bar, short_ids, span, spark
from neurogrid.cli.terminal.transfer_view import format_bytes
from neurogrid.node.events import Event, EventKind, Severity
from neurogrid.training.leading.status import (
    MemberStatus,
    RoundStatus,
    RunStatus,
    StageStatus,
)
from neurogrid.training.runs.state import Phase

__all__ = ["training_view"]

COLUMNS: Final = (
    Column("seat"),
    Column("member", share=2),
    Column("state", share=3),
    Column("tokens/s", is_number=True),
    Column("loss", is_number=True),
    Column("round", is_number=True, min_width=80),
    Column("late", is_number=True, min_width=80),
    Column("cosine", is_number=True, min_width=96),
    Column("memory", is_number=True, min_width=96),
    Column("lease", is_number=True, min_width=110),
    Column("batch", is_number=True, min_width=120),
)
STAGE_COLUMNS: Final = (
    Column("stage"),
    Column("member", share=2),
    Column("layers", min_width=50),
    Column("state", share=3),
    Column("under way", is_number=True, min_width=90),
    Column("step", is_number=True, min_width=50),
    Column("waits", is_number=True, min_width=60),
    Column("memory", is_number=True, min_width=80),
    Column("lease", is_number=True, min_width=110),
)
STYLES: Final = {
    Severity.INFO: "",
    Severity.GOOD: "green",
    Severity.WARNING: "yellow",
    Severity.ERROR: "red",
}
STATE_STYLES: Final = {
    "training": "green",
    "averaging": "cyan",
    "ready": "green",
    "failed": "red",
    "away": "red",
}
# Rounds that the curve of the loss shows.
NUM_SPARKS: Final = 30


def training_view(status: RunStatus, *, url: str = "", encoding: str = "utf-8") -> View:
    """Make the view that the panel has of a run.

    Args:
        url: where its page is; empty for nowhere.
        encoding: of the terminal.
    """
    state, style = _state(status)
    return View(
        title=f"NeuroGrid training · {status.name}",
        state=state,
        state_style=style,
        columns=STAGE_COLUMNS if status.is_chain else COLUMNS,
        rows=tuple(_stage_rows(status.members) if status.is_chain else map(_row, status.members)),
        figures=tuple(
            filter(
                None,
                (
                    _progress(status),
                    _losses(status, encoding),
                    (_last_step if status.is_chain else _last_round)(status.rounds),
                ),
            )
        )
        + tuple((f"! {alarm.text}",) for alarm in status.alarms),
        notes=tuple(_notes(status.events)),
        foot=" · ".join(filter(None, [url, f"up {span(status.at - status.started_at)}"])),
    )


def _state(status: RunStatus) -> tuple[str, str]:
    if status.phase is Phase.ENDED:
        return f"ended: {status.reason}", "green"
    if status.phase is Phase.FINISHING:
        return f"finishes: {status.reason}", "cyan"
    if status.phase is Phase.WAITING or status.waits:
        return status.waits or "waits", "yellow"
    return ("trains, with alarms", "yellow") if status.alarms else ("trains", "green")


def _row(member: MemberStatus) -> tuple[Cell, ...]:
    is_idle = member.seat is None
    return (
        str(member.seat) if member.seat is not None else "-",
        member.name,
        (_doing(member), "dim" if is_idle else STATE_STYLES.get(member.state, "yellow")),
        f"{member.tokens_per_second:,.0f}" if member.tokens_per_second is not None else "",
        f"{member.loss:.4f}" if member.loss is not None else "",
        str(member.round) if member.round else "",
        str(member.num_late) if member.num_late else "",
        f"{member.cosine:.2f}" if member.cosine is not None else "",
        format_bytes(member.memory_bytes) if member.memory_bytes else "",
        f"{member.lease_seconds:.0f} s" if member.lease_seconds is not None else "",
        str(member.micro_batch) if member.micro_batch else "",
    )


def _stage_rows(members: Sequence[MemberStatus]) -> Iterator[tuple[Cell, ...]]:
    """Members by stage; what is the stage's stands at the first of them."""
    before = None
    for member in members:
        number = member.stage.number if member.stage is not None else None
        yield _stage_row(member, is_first=number is None or number != before)
        before = number


def _stage_row(member: MemberStatus, *, is_first: bool) -> tuple[Cell, ...]:
    stage = member.stage
    doing = _doing(member)
    if stage is not None and member.state == "training" and stage.micro_batches:
        doing = f"{bar(stage.done / stage.micro_batches)} {stage.done} of {stage.micro_batches}"
    if stage is None:
        is_ready = member.state in ("ready", "waiting") and not member.reason
        doing = "stands by" if is_ready else doing
    return (
        (str(stage.number) if stage is not None else "-") if is_first else "",
        member.name,
        _layers(stage) if stage is not None and is_first else "",
        (doing, "dim" if stage is None else STATE_STYLES.get(member.state, "yellow")),
        str(stage.under_way) if stage is not None and stage.micro_batches else "",
        f"{stage.step:,}" if stage is not None else "",
        f"{stage.waited:.0%}" if stage is not None and stage.waited is not None else "",
        format_bytes(member.memory_bytes) if member.memory_bytes else "",
        f"{member.lease_seconds:.0f} s" if member.lease_seconds is not None else "",
    )


def _layers(stage: StageStatus) -> str:
    last = stage.stop - 1
    return f"{stage.start} to {last}" if last > stage.start else str(last)


def _doing(member: MemberStatus) -> str:
    if member.state == "training" and member.batches:
        done = min(member.batches_done, member.batches)
        return f"{bar(done / member.batches)} {done} of {member.batches}"
    what = {"asked": "is asked", "away": "cannot be reached", "ready": "ready"}
    said = what.get(member.state, member.state)
    return f"{said}: {member.reason}" if member.reason else said


def _progress(status: RunStatus) -> tuple[str, ...]:
    figures = []
    if status.part is not None:
        figures.append(f"{bar(status.part, cells=20)} {status.part:.0%}")
    figures += [] if status.is_chain else [f"round {status.round}"]
    figures += [f"step {status.step:,}", f"{status.tokens:,} tokens"]
    if status.tokens_per_second:
        figures.append(f"{status.tokens_per_second:,.0f} tokens/s")
    if status.remaining_seconds and status.phase is Phase.TRAINING:
        figures.append(f"{span(status.remaining_seconds)} left")
    samples = status.samples
    if samples is not None:
        in_all = samples.available + samples.assigned + samples.used
        figures.append(f"epoch {samples.epoch + 1}: {samples.used:,} of {in_all:,} samples")
    return tuple(figures)


def _losses(status: RunStatus, encoding: str) -> tuple[str, ...]:
    figures = []
    if status.loss is not None:
        last = [each.figures["loss"] for each in status.rounds if "loss" in each.figures]
        last = last[-NUM_SPARKS:]
        # Above the lowest: a curve from zero would be a block.
        low = min(last, default=0.0)
        curve = spark([loss - low for loss in last], encoding)
        figures.append(f"loss {status.loss:.4f}" + (f" {curve}" if curve else ""))
    if status.eval_loss is not None:
        figures.append(f"held-out loss {status.eval_loss:.4f}")
    if status.checkpoints:
        figures.append(f"checkpoint of step {status.checkpoints[-1].step:,}")
    return tuple(figures)


def _last_round(rounds: Sequence[RoundStatus]) -> tuple[str, ...]:
    if not rounds:
        return ()
    last = rounds[-1]
    figures = [
        f"round {last.round} took {last.seconds:.1f} s",
        f"{len(last.seats)} of {len(last.seats) + len(last.late)} took part",
    ]
    if last.late:
        figures.append("late: " + ", ".join(last.names.get(seat, str(seat)) for seat in last.late))
    if last.sent_bytes:
        figures.append(f"{format_bytes(last.sent_bytes)} sent")
    return tuple(figures)


def _last_step(rounds: Sequence[RoundStatus]) -> tuple[str, ...]:
    """Figures of the last step of a chain, in which a round is a step; empty before the first."""
    if not rounds:
        return ()
    figures = [f"step {rounds[-1].round} took {rounds[-1].seconds:.1f} s"]
    # Its figures come a moment later.
    told = next((each.figures for each in reversed(rounds) if "stages" in each.figures), {})
    if (num_stages := int(told.get("stages", 0))) > 1:
        figures += [
            f"{num_stages} stages",
            f"they waited {told.get('waited', 0.0):.0%} of the time",
        ]
        if "bubble" in told:
            figures.append(f"{told['bubble']:.0%} by the order alone")
    elif num_stages:
        figures.append("1 stage")
    return tuple(figures)


def _notes(events: Sequence[Event]) -> Iterator[Note]:
    for event in events:
        if event.kind is not EventKind.ALARM:  # those stand above, for as long as they hold
            at = time.strftime("%H:%M:%S", time.localtime(event.at))
            yield Note(at, short_ids(event.text), STYLES[event.severity])
