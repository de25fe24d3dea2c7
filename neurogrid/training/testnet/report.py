"""The report of a testnet: its kills, and what the journal of its run proves. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from neurogrid.training.runs.audit import Audit
from neurogrid.training.runs.entries import JoinedEntry, RoundEntry
from neurogrid.training.runs.journal import Recorded
from neurogrid.training.runs.run_directory import Figures
from neurogrid.training.testnet.network import Lines
from neurogrid.training.testnet.plan import LEADER, Chaos

__all__ = ["ChaosReport", "Ended", "Kill", "Killed", "report_of"]


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended.

    Attributes:
        name: of the process.
        time: when, in seconds since 1970.
        status: its exit status; less than 0 for a signal.
    """

    name: str
    time: float
    status: int


@dataclass(frozen=True, slots=True)
class Killed:
    """A process that was killed.

    Attributes:
        name: of the process.
        time: when, in seconds since 1970.
        is_new: it comes back as a worker that was never there.
    """

    name: str
    time: float
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill.

    Attributes:
        name: of the process.
        seconds: since the testnet began.
        round: the last one that was decided by then; 0 for none.
        next_round_seconds: from the kill to the next round that was decided; None if there was none.
        rejoined_seconds: from the kill until the worker had a seat again; None if it did not come to that, be it
            because it was killed again, and of the leader, which has none.
        is_new: it came back as a worker that was never there.
    """

    name: str
    seconds: float
    round: int
    next_round_seconds: float | None
    rejoined_seconds: float | None
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """A testnet that is over.

    Attributes:
        chaos: what was to happen.
        lines: between the processes; None for loopback.
        seconds: that it took.
        has_ended: the run has reached its end, and its leader has said so by its status.
        kills: that there were: fewer than planned where the run ended before.
        failed: processes that ended by themselves, by name, with seconds since the begin and status.
        audit: what the journal proves; None where there is none that can be read.
        problem: why the run did not end, or the journal cannot be read; empty if neither.
        loss, held_out_loss: the last ones; None where there is none.
        weights_equal, weights_other: digests of weights after a round that members have told: how many were those of
            the leader, and how many were not.
    """

    chaos: Chaos
    lines: Lines | None
    seconds: float
    has_ended: bool
    kills: tuple[Kill, ...]
    failed: tuple[tuple[str, float, int], ...]
    audit: Audit | None
    problem: str
    loss: float | None
    held_out_loss: float | None
    weights_equal: int = 0
    weights_other: int = 0

    @property
    def is_sound(self) -> bool:
        """The run has ended, each sample was used as it should by the journal, and nobody had other weights."""
        is_proven = self.audit is not None and self.audit.is_sound
        return self.has_ended and is_proven and not self.weights_other

    @property
    def num_joins(self) -> int:
        """Kills after which a worker took part again, or a new one in its place."""
        return sum(kill.rejoined_seconds is not None for kill in self.kills)

    def beside(self, undisturbed: ChaosReport) -> str:
        """The held-out loss beside that of the same run without kills, for people."""
        ours, other = self.held_out_loss, undisturbed.held_out_loss
        apart = "" if ours is None or other is None else f": {abs(ours - other):.4f} apart"
        return f"undisturbed  held out {_told(other, '.4f')}, here {_told(ours, '.4f')}{apart}"

    def json(self) -> dict[str, Any]:
        """The report for JSON."""
        audit = self.audit
        return {
            **asdict(self.chaos),
            "lines": None if self.lines is None else asdict(self.lines),
            "seconds": round(self.seconds, 3),
            "is_sound": self.is_sound,
            "has_ended": self.has_ended,
            "problem": self.problem,
            "rounds": 0 if audit is None else audit.rounds,
            "audit": None if audit is None else {"is_sound": audit.is_sound, **asdict(audit)},
            "loss": self.loss,
            "held_out_loss": self.held_out_loss,
            "weights_equal": self.weights_equal,
            "weights_other": self.weights_other,
            "num_joins": self.num_joins,
            "kills": [asdict(kill) for kill in self.kills],
            "failed": [
                {"name": name, "seconds": seconds, "status": status}
                for name, seconds, status in self.failed
            ],
        }

    def rows(self) -> Iterator[str]:
        """The report for people."""
        chaos, audit = self.chaos, self.audit
        planned = chaos.worker_kills + chaos.leader_kills
        yield f"testnet      seed {chaos.seed}, {chaos.num_workers} workers, {self.seconds:.0f} s"
        if self.lines is not None:
            rate = "no limit" if self.lines.rate is None else f"{self.lines.rate / 1e6:g} Mbit/s"
            yield f"lines        {self.lines.delay * 1000:g} ms one way, {rate} for each worker"
        yield f"run          {'ended' if self.has_ended else f'did not end: {self.problem}'}"
        yield from self._journal_lines()
        other = f"{self.weights_other:,} other than those" if self.weights_other else "all those"
        yield f"weights      {self.weights_equal + self.weights_other:,} digests told by members, {other} of the leader"
        yield f"loss         {_told(self.loss, '.4f')}, held out {_told(self.held_out_loss, '.4f')}"
        yield f"kills        {len(self.kills)} of {planned} that were planned"
        num_new = sum(kill.is_new and kill.rejoined_seconds is not None for kill in self.kills)
        yield f"joins        {self.num_joins} after a kill, {num_new} of them by workers that were never there"
        if self.kills:
            yield f"  {'':<12}{'at':>9}{'round':>8}{'next round':>13}{'takes part again':>19}"
        for kill in self.kills:
            again = "" if kill.name == LEADER else _after(kill.rejoined_seconds)
            again += ", as new" if kill.is_new else ""
            yield (
                f"  {kill.name:<12}{kill.seconds:>7.1f} s{kill.round:>8,}{_after(kill.next_round_seconds):>13}"
                f"{again:>19}"
            ).rstrip()
        for name, seconds, status in self.failed:
            yield f"failed       {name} ended by itself at {seconds:.1f} s with status {status}"
        if audit is not None:
            yield from (f"not sound    {problem}" for problem in audit.problems)

    def _journal_lines(self) -> Iterator[str]:
        audit = self.audit
        if audit is None:
            yield f"journal      none that proves anything: {self.problem}"
            return
        if not audit.is_sound:
            yield f"journal      not sound: {len(audit.problems)} problems"
            return
        proven = "no sample twice in an epoch"
        if audit.epochs and not audit.missing:
            proven = f"each sample of {audit.epochs:,} {'epoch' if audit.epochs == 1 else 'epochs'} exactly once"
        yield f"journal      sound: {proven}, {audit.num_used:,} in all"
        yield f"rounds       {audit.rounds:,}; members joined {audit.joined:,}, left {audit.left:,}"


def report_of(
    chaos: Chaos,
    lines: Lines | None,
    recorded: Sequence[Recorded],
    figures: Sequence[Figures],
    *,
    audit: Audit | None,
    began: float,
    over: float,
    killed: Sequence[Killed],
    failed: Sequence[Ended],
    has_ended: bool,
    problem: str,
) -> ChaosReport:
    """The report of a testnet.

    Args:
        recorded: the journal of its run; empty where there is none.
        figures: lines of its metrics, in order.
        audit: of `recorded`.
        began, over: when the testnet began and was over, in seconds since 1970.
        killed: processes that were killed, in order.
        failed: processes that ended by themselves.
        has_ended, problem: as in `ChaosReport`.
    """
    return ChaosReport(
        chaos,
        lines,
        over - began,
        has_ended,
        tuple(
            _kill(each, _next_time(each.name, killed[number:]), recorded, began)
            for number, each in enumerate(killed, 1)
        ),
        tuple((each.name, each.time - began, each.status) for each in failed),
        audit,
        problem,
        _last(figures, "loss"),
        _last(figures, "eval_loss"),
        int(sum(each.get("weights_equal", 0) for each in figures)),
        int(sum(each.get("weights_other", 0) for each in figures)),
    )


def _next_time(name: str, killed: Sequence[Killed]) -> float:
    return next((each.time for each in killed if each.name == name), math.inf)


def _kill(killed: Killed, again: float, recorded: Sequence[Recorded], began: float) -> Kill:
    """One of them; `again` is when the same process was killed the next time."""
    name, time = killed.name, killed.time
    last, next_round, rejoined = 0, None, None
    for each in recorded:
        entry = each.entry
        if isinstance(entry, RoundEntry):
            if each.time <= time:
                last = entry.round
            elif next_round is None:
                next_round = each.time - time
        elif isinstance(entry, JoinedEntry) and entry.name == name and time < each.time < again:
            rejoined = each.time - time if rejoined is None else rejoined
    return Kill(name, time - began, last, next_round, rejoined, killed.is_new)


def _last(figures: Sequence[Figures], key: str) -> float | None:
    return next((each[key] for each in reversed(figures) if key in each), None)


def _told(value: float | None, form: str) -> str:
    return "not known" if value is None else format(value, form)


def _after(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"
