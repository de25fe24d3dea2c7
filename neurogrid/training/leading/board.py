"""Gathers what is known of a run, for whoever shows it: the panel, the page, metrics.

    board = RunBoard(run_file, directory)
    await lead(settings, progress, board=board)      # it is told what happens
    board.status()                                   # also before, and after

What stays comes from the journal, entry by entry, also that of a leader before this one; what is at the moment is
looked at when somebody asks. More than 600 lines, since all of a status is put together from the same few books.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from neurogrid.node.events import EventBus, EventKind, Severity
from neurogrid.node.histogram import WAIT_SECONDS, Histogram
from neurogrid.training.data.dealing import SampleState
from neurogrid.training.leading.look import LeaderLook, PeerLook, StageLook
from neurogrid.training.leading.progress import QuietProgress
from neurogrid.training.leading.status import (
    CheckpointStatus,
    MemberStatus,
    RoundStatus,
    RunStatus,
    SampleCounts,
    StageStatus,
)
from neurogrid.training.runs.alarms import (
    NUM_FLAT,
    Accused,
    Alarm,
    AlarmKind,
    MemberFacts,
    Waiting,
    apart_from,
    find_alarms,
)
from neurogrid.training.runs.changes import run_at
from neurogrid.training.runs.entries import (
    BannedEntry,
    BeganEntry,
    CheckpointEntry,
    DealtEntry,
    EndEntry,
    EpochEntry,
    JoinedEntry,
    LeftEntry,
    ResumedEntry,
    ReturnedEntry,
    RoundEntry,
    RunEntry,
    StoppingEntry,
)
from neurogrid.training.runs.journal import Recorded
from neurogrid.training.runs.learning import Learning, judge_learning
from neurogrid.training.runs.run_directory import Figures
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.state import Phase, RunState
from neurogrid.training.runs.tracker import MemberShare, TrackedRun, TrackerMember, track
from neurogrid.training.wire.runs import Report

__all__ = ["RoundStatistics", "RunBoard"]

NUM_ROUNDS: Final = 40
"""Rounds that a status has."""

NUM_CHECKPOINTS: Final = 20
"""Checkpoints that a status has."""

MAX_FIGURES: Final = 4096
"""Lines of figures that are kept: where there are more, of the older ones each second is left out."""

# Over so many rounds it is judged whether the run learns, and how fast it is.
_NUM_JUDGED: Final = 200
_NUM_PACE: Final = 8
# What comes of claims, that is against the member.
_AGAINST: Final = ("accused", "ejected", "silent", "banned")
# Times what a round usually takes, and seconds at least, after which it is said for whom it waits.
_LATE: Final = 1.3
_LATE_SECONDS: Final = 3.0


@dataclass(slots=True)
class RoundStatistics:
    """Rounds of one leader.

    Attributes:
        seconds: from one decision to the next.
        num_in_time, num_late: contributions that came in time, and members with work that a round went on without.
    """

    seconds: Histogram = field(default_factory=lambda: Histogram(WAIT_SECONDS))
    num_in_time: int = 0
    num_late: int = 0


@dataclass(slots=True)
class _Seat:
    """A seat, as the journal has it: its works are samples that were dealt and are in no round, by work.

    Attributes:
        is_tried: its works are of no round: it was on trial when they were dealt.
        last_told: the last round of which its figures were looked at.
    """

    name: str
    peer: str = ""
    is_tried: bool = False
    works: deque[int] = field(default_factory=deque)
    num_rounds: int = 0
    num_late: int = 0
    late_in_a_row: int = 0
    apart_in_a_row: int = 0
    still_in_a_row: int = 0
    last_told: int = 0


@dataclass(slots=True)
class _Loss:
    """Totals of a member's last report that had new tokens, and the mean loss of those; None before the first one."""

    loss_sum: float = 0.0
    num_tokens: int = 0
    loss: float | None = None


class RunBoard(QuietProgress):
    """Status of a run, gathered for people who watch it. Used from the trio thread of its leader.

    Args:
        run_file: of the run.
        clock: Unix time, in seconds.

    Attributes:
        events: what happened, in words.
        tokens_per_sample: of the data; 0 while that is not known.
        round_statistics: of the rounds that it was told of while they were decided.
    """

    def __init__(self, run_file: RunFile, *, clock: Callable[[], float] = time.time) -> None:
        self.run_file = run_file
        self.events = EventBus(clock=clock)
        self.tokens_per_sample = 0
        self.round_statistics = RoundStatistics()
        self._clock = clock
        self._started_at = clock()
        self._look: Callable[[], LeaderLook] | None = None
        self._last: LeaderLook | None = None
        self._run_id = b""
        self._seats: dict[int, _Seat] = {}
        self._bans: dict[str, BannedEntry] = {}
        self._trials: set[str] = set()
        self._rounds: deque[RoundStatus] = deque(maxlen=_NUM_JUDGED)
        self._checkpoints: deque[CheckpointStatus] = deque(maxlen=NUM_CHECKPOINTS)
        self._figures: list[Figures] = []
        self._known_losses: deque[float] = deque(
            maxlen=_NUM_JUDGED
        )  # also such that are not finite
        self._losses: dict[str, _Loss] = {}
        self._recorded: deque[Recorded] = deque(maxlen=1000)
        self._last_at = 0.0  # when a round was decided last, or training began
        self._sent_bytes = 0
        # Of alarms that held lately, when they did last, in lines of figures.
        self._held: dict[tuple[AlarmKind, int | None], int] = {}
        self._num_lines = 0
        self.on_alarm: Callable[[str], None] = lambda text: None
        """Callback for each alarm when it begins, and did not hold for `NUM_FLAT` lines of figures."""

    # What it is told

    def replay(self, recorded: Sequence[Recorded], figures: Sequence[Figures]) -> None:
        """Take what is written down for all that there is: what a leader before this one wrote, or this one."""
        statistics, self.round_statistics = self.round_statistics, RoundStatistics()
        books = (
            *(self._recorded, self._seats, self._bans, self._trials),
            *(self._rounds, self._checkpoints),
        )
        for kept in (*books, self._figures):
            kept.clear()
        self._known_losses.clear()
        for each in recorded:
            self._record(each, is_new=False)
        for line in figures:
            self._add_figures(dict(line))
        self.round_statistics = statistics
        self._seats = {
            number: _Seat(seat.name, seat.peer, works=seat.works)
            for number, seat in self._seats.items()
        }

    def record(self, recorded: Recorded) -> None:
        """Something was written into the journal."""
        self._record(recorded, is_new=True)

    def metrics(self, figures: Mapping[str, float]) -> None:
        """A line of metrics.jsonl was written."""
        self._add_figures(dict(figures))
        self._watch_alarms()

    def say(self, text: str) -> None:
        """Something happened that is worth a line."""
        self.events.publish(EventKind.TOLD, text)

    def warn(self, text: str) -> None:
        """Something went wrong."""
        self.events.publish(EventKind.TOLD, text, severity=Severity.WARNING)

    @contextmanager
    def watching(self, look: Callable[[], LeaderLook]) -> Iterator[None]:
        """Look at the leader this way while the block runs; what was seen last stays."""
        self._look = look
        try:
            yield
        finally:
            self._last = look()
            self._look = None

    # What others look at

    @property
    def figures(self) -> Sequence[Figures]:
        """Lines of metrics.jsonl, oldest first."""
        return self._figures

    @property
    def journal(self) -> Sequence[Recorded]:
        """The last entries of the journal, oldest first."""
        return tuple(self._recorded)

    @property
    def checkpoints(self) -> Sequence[CheckpointStatus]:
        """The last ones, oldest first."""
        return tuple(self._checkpoints)

    @property
    def bans(self) -> Sequence[BannedEntry]:
        """Bans that are in force, the newest of each peer, in the order of their numbers."""
        now = self._clock()
        return sorted(
            (each for each in self._bans.values() if each.is_in_force(now)),
            key=lambda ban: ban.number,
        )

    def status(self) -> RunStatus:
        """Return the state of the run at this moment."""
        now, look = self._clock(), self._seen()
        state = look.state if look is not None else None
        figures, rounds = self._newest_figures(), self._joined_rounds()
        members = self._members(look)
        pace = self._pace()
        part, remaining = self._part(look, figures, pace)
        return RunStatus(
            at=now,
            started_at=self._started_at,
            name=self.run_file.name,
            run_id=self._run_id.hex(),
            peer_id=look.peer_id if look is not None else "",
            method=self.run_file.outer.method,
            phase=state.phase if state is not None else Phase.WAITING,
            waits=self._waits(look, members),
            reason=state.reason if state is not None else "",
            round=state.round if state is not None else 0,
            step=int(figures.get("step", 0)),
            tokens=state.num_used * self.tokens_per_sample if state is not None else 0,
            loss=figures.get("loss"),
            eval_loss=figures.get("eval_loss"),
            seconds=look.seconds if look is not None else figures.get("seconds", 0.0),
            tokens_per_second=pace,
            part=part,
            remaining_seconds=remaining,
            samples=_counts(state),
            num_parameters=look.num_parameters if look is not None else 0,
            members=members,
            rounds=tuple(rounds[-NUM_ROUNDS:]),
            checkpoints=tuple(self._checkpoints),
            alarms=self._find_alarms(members),
            events=self.events.last,
            is_chain=self.run_file.is_chain,
            checks=look.checks if look is not None else None,
        )

    def learning(self) -> Learning:
        """Judge whether the run learns."""
        look = self._seen()
        digests = {
            peer.peer_id: (peer.report.round, peer.report.digest)
            for peer in (look.peers if look is not None else ())
            if peer.is_connected and peer.report is not None and peer.report.digest
        }
        if look is not None and look.digest and digests:
            digests[look.peer_id] = look.applied, look.digest
        return judge_learning(
            tuple(self._known_losses),
            digests,
            differing=look.differing if look is not None else {},
            num_in_time=sum(len(each.seats) for each in self._rounds),
            num_late=sum(len(each.late) for each in self._rounds),
        )

    def tracked(self) -> TrackedRun:
        """Look at the run as a whole: where its figures go, who agrees, what members are worth."""
        look = self._seen()
        differing = look.differing if look is not None else {}
        held = look.state.seats if look is not None else {}
        checks = look.checks if look is not None else None
        worths = {each.seat: each for each in (checks.worths if checks is not None else ())}
        members = [
            TrackerMember(
                each.peer_id,
                each.name,
                each.seat,
                each.round,
                each.num_rounds,
                each.num_late,
                held[each.seat].num_samples if each.seat in held else 0,
                each.cosine,
                differing.get(each.peer_id),
                worths[each.seat].gain if each.seat in worths else None,
                worths[each.seat].advantage if each.seat in worths else None,
            )
            for each in self._members(look)
        ]
        shares = [
            MemberShare(each.round, each.seat_samples) for each in list(self._rounds)[-NUM_ROUNDS:]
        ]
        lines = self._figures[-_NUM_JUDGED:]
        return track(lines, tuple(self._known_losses), shares, members, self.learning())

    # The journal

    def _record(self, recorded: Recorded, *, is_new: bool) -> None:
        self._recorded.append(recorded)
        entry, at = recorded.entry, recorded.time
        told: tuple[EventKind, str, Severity] | None = None
        if isinstance(entry, RunEntry):
            self._run_id = entry.run
        elif isinstance(entry, JoinedEntry):
            held = self._seats.setdefault(entry.seat, _Seat(""))
            held.name, held.peer = entry.name or f"member {entry.seat}", entry.peer
        elif isinstance(entry, LeftEntry):
            told = self._leave(entry)
        elif isinstance(entry, BannedEntry):
            self._bans[entry.peer] = entry  # its leader says so, with what can be done
        elif isinstance(entry, ReturnedEntry):
            if entry.seat in self._seats:
                self._seats[entry.seat].works.clear()
        elif isinstance(entry, BeganEntry):
            self._last_at = at
            told = (EventKind.BEGAN, self._began(entry), Severity.GOOD)
        elif isinstance(entry, DealtEntry):
            for seat, work in entry.works:
                if seat in self._seats:
                    held = self._seats[seat]
                    held.works.append(work.num_samples)
                    held.is_tried = held.peer in self._trials
        elif isinstance(entry, EpochEntry):
            for event in entry.events:
                if event["kind"] == "trial":
                    self._trials.add(str(event["peer"]))
                elif event["kind"] in ("admitted", "refused"):
                    self._trials.discard(str(event["peer"]))
        elif isinstance(entry, RoundEntry):
            self._decide(entry, at)
        elif isinstance(entry, CheckpointEntry):
            self._checkpoints.append(CheckpointStatus(entry.step, entry.round, at))
            after = "" if self.run_file.is_chain else f", after round {entry.round}"
            text = f"wrote the checkpoint of step {entry.step}{after}"
            told = (EventKind.CHECKPOINT, text, Severity.GOOD)
        elif isinstance(entry, ResumedEntry):
            self._resume(entry.round, at)
            self._trials.clear()
            what = "step" if self.run_file.rounds_are_steps else "round"
            told = (EventKind.BEGAN, f"goes on from {what} {entry.round}", Severity.INFO)
        elif isinstance(entry, StoppingEntry):
            told = (EventKind.ENDING, f"deals no more: {entry.reason}", Severity.INFO)
        elif isinstance(entry, EndEntry):
            told = (EventKind.ENDED, f"the run is over: {entry.reason}", Severity.GOOD)
        if told is not None and is_new:
            kind, text, severity = told
            self.events.publish(kind, text, severity=severity)

    def _began(self, entry: BeganEntry) -> str:
        of = f", {entry.num_samples:,} samples in all" if entry.num_samples else ""
        layout = self.run_file.layout
        what = "replica" if layout.replicas > 1 else "member"
        who = f"with {entry.num_members} {what}{'' if entry.num_members == 1 else 's'}"
        if self.run_file.rounds_are_steps:
            who = f"in {layout.stages} stage{'' if layout.stages == 1 else 's'}"
        return f"training begins {who}{of}"

    def _leave(self, entry: LeftEntry) -> tuple[EventKind, str, Severity]:
        seat = self._seats.pop(entry.seat, _Seat(""))
        name = seat.name or f"member {entry.seat}"
        lost = sum(seat.works)
        done = f"; {lost:,} samples that it had are dealt to others" if lost else ""
        return EventKind.MEMBER_LOST, f"{name} is out: {entry.reason}{done}", Severity.WARNING

    def _decide(self, entry: RoundEntry, at: float) -> None:
        in_time = dict(entry.contributions)
        # A member that has no work, or one that does not count, is late for nothing.
        late = [
            number
            for number, seat in self._seats.items()
            if seat.works and not seat.is_tried and not in_time.get(number)
        ]
        seat_samples = dict.fromkeys(late, 0)
        for number, num_works in in_time.items():
            seat = self._seats.get(number)
            if seat is None:
                continue
            done = [seat.works.popleft() for _ in range(min(num_works, len(seat.works)))]
            if num_works:
                seat_samples[number] = sum(done)
            if num_works:
                seat.num_rounds, seat.late_in_a_row = seat.num_rounds + 1, 0
        for number in late:
            self._seats[number].num_late += 1
            self._seats[number].late_in_a_row += 1
        sent = self._sent_since()
        seconds = max(at - self._last_at, 0.0) if self._last_at else 0.0
        self.round_statistics.seconds.observe(seconds)
        self.round_statistics.num_in_time += sum(map(bool, in_time.values()))
        self.round_statistics.num_late += len(late)
        self._rounds.append(
            RoundStatus(
                round=entry.round,
                at=at,
                seconds=seconds,
                seats=tuple(sorted(number for number, works in in_time.items() if works)),
                late=tuple(sorted(late)),
                names={
                    number: self._seats[number].name
                    for number in sorted({*in_time, *late} & self._seats.keys())
                },
                samples=sum(each.num_samples for each in entry.ranges),
                digest=entry.digest.hex(),
                figures={},
                sent_bytes=sent,
                seat_samples=seat_samples,
            )
        )
        self._last_at = at

    def _resume(self, round_number: int, at: float) -> None:
        """Take back what came after a round, as the run does."""
        while self._rounds and self._rounds[-1].round > round_number:
            self._rounds.pop()
        self._figures = [each for each in self._figures if each.get("round", 0) <= round_number]
        for seat in self._seats.values():
            seat.works.clear()
        self._last_at = at

    def _sent_since(self) -> int:
        """Bytes that were sent for averaging since the last call, as far as members have told."""
        look = self._seen()
        if look is None:
            return 0
        reports = [peer.report for peer in look.peers if peer.report is not None]
        total = look.sent_bytes + sum(report.sent_bytes for report in reports)
        since, self._sent_bytes = max(total - self._sent_bytes, 0), total
        return since

    # Figures

    def _add_figures(self, figures: Figures) -> None:
        kept = {name: value for name, value in figures.items() if math.isfinite(value)}
        if "loss" in figures:
            self._known_losses.append(figures["loss"])
        self._figures.append(kept)
        if len(self._figures) > MAX_FIGURES:
            half = MAX_FIGURES // 2
            self._figures = self._figures[:half:2] + self._figures[half:]

    def _newest_figures(self) -> Figures:
        """The newest of each kind."""
        found: Figures = {}
        for line in self._figures[-_NUM_JUDGED:]:
            found.update(line)
        return found

    def _joined_rounds(self) -> list[RoundStatus]:
        by_round: dict[int, Figures] = {}
        for line in self._figures:  # the last round may have another, with what is held out
            if "round" in line:
                by_round[int(line["round"])] = by_round.get(int(line["round"]), {}) | line
        return [
            replace(each, figures=by_round[each.round]) if each.round in by_round else each
            for each in self._rounds
        ]

    def _pace(self) -> float | None:
        """Tokens a second over the last rounds."""
        lines = [
            line for line in self._figures[-_NUM_PACE:] if {"tokens", "seconds"} <= line.keys()
        ]
        if len(lines) < 2:
            return None
        seconds = lines[-1]["seconds"] - lines[0]["seconds"]
        return (lines[-1]["tokens"] - lines[0]["tokens"]) / seconds if seconds > 0 else None

    # What is at the moment

    def _seen(self) -> LeaderLook | None:
        return self._look() if self._look is not None else self._last

    def _members(self, look: LeaderLook | None) -> tuple[MemberStatus, ...]:
        if look is None:
            return ()
        here = {peer.peer_id for peer in look.peers}
        self._losses = {peer: known for peer, known in self._losses.items() if peer in here}
        stages = {stage.peer_id: stage for stage in look.stages}
        found = [
            _as_stage(self._member(look, peer), stages[peer.peer_id])
            if peer.peer_id in stages
            else self._member(look, peer)
            for peer in look.peers
        ]
        return tuple(sorted(found, key=_place_of))

    def _member(self, look: LeaderLook, peer: PeerLook) -> MemberStatus:
        report = peer.report or Report(run=b"", seat=0, state="starting")
        held = look.state.seat_of(peer.peer_id)
        number = held.number if held is not None else peer.seat
        seat = self._seats.get(number) if number is not None else None
        work = (
            next((work for work in held.works if work.number > report.done), None) if held else None
        )
        batch = look.rules.batch_samples
        speed = (
            batch * self.tokens_per_sample / report.batch_seconds if report.batch_seconds else None
        )
        return MemberStatus(
            peer_id=peer.peer_id,
            name=_name_of(peer, number),
            seat=number,
            state=_state_of(peer),
            reason=report.reason,
            round=report.round,
            batches_done=report.batches_done if report.state == "training" else 0,
            batches=-(-work.num_samples // batch) if work is not None else 0,
            batch_seconds=report.batch_seconds or None,
            tokens_per_second=speed,
            loss=self._loss_of(peer.peer_id, report),
            tokens=report.num_tokens,
            memory_bytes=report.memory_bytes,
            micro_batch=report.micro_batch,
            gradient_norm=report.gradient_norm,
            difference_norm=report.difference_norm,
            cosine=report.cosine,
            versions=dict(peer.versions),
            lease_seconds=peer.lease_seconds,
            num_rounds=seat.num_rounds if seat is not None else 0,
            num_late=seat.num_late if seat is not None else 0,
            held_slices=len(look.state.holds.get(number, report.held))
            if number is not None
            else len(report.held),
            sent_bytes=report.sent_bytes,
            received_bytes=report.received_bytes,
        )

    def _loss_of(self, peer_id: str, report: Report) -> float | None:
        """The loss over what a member has told since it had told less."""
        known = self._losses.setdefault(peer_id, _Loss())
        if report.num_tokens < known.num_tokens:
            known.loss_sum, known.num_tokens = 0.0, 0  # it began anew
        if report.num_tokens > known.num_tokens:
            since = report.num_tokens - known.num_tokens
            known.loss = (report.loss_sum - known.loss_sum) / since
            known.loss_sum, known.num_tokens = report.loss_sum, report.num_tokens
        return known.loss

    def _waits(self, look: LeaderLook | None, members: Sequence[MemberStatus]) -> str:
        """Reason why the run does not go on at the moment; empty where it goes on."""
        if look is None:
            return "the model and the data are opened"
        state, least = look.state, look.rules.min_members
        if state.phase is Phase.ENDED:
            return ""
        if look.waits:
            return look.waits
        if vacant := state.vacant():
            names = ", ".join(seat.name or f"member {seat.number}" for seat in vacant)
            return f"waits for those who had a seat: {names}"
        there = len(state.occupied())
        if there < least:
            return f"waits for members: {there} of {least} are there"
        late = self._clock() - self._last_at > max(_LATE * self._usual_seconds(), _LATE_SECONDS)
        if late and any(each.state == "averaging" for each in members):
            busy = _waited_for(members)
            if busy:
                return f"round {state.round + 1} waits for {', '.join(busy)}"
        return ""

    def _part(
        self, look: LeaderLook | None, figures: Figures, pace: float | None
    ) -> tuple[float | None, float | None]:
        """Share of the run that is done, 0 to 1, and the seconds that the rest takes; None for what is not known."""
        if look is None:
            return None, None
        if look.state.phase is Phase.ENDED:
            return 1.0, 0.0
        state, rules = look.state, look.rules
        stop = run_at(self.run_file, state.changes, state.round + 1).stop
        parts, left = [], []
        if rules.max_samples:
            parts.append(state.num_used / rules.max_samples)
            if pace:
                left.append((rules.max_samples - state.num_used) * self.tokens_per_sample / pace)
        if rules.max_rounds:
            parts.append(state.round / rules.max_rounds)
            if usual := self._usual_seconds():
                left.append((rules.max_rounds - state.round) * usual)
        if stop.hours:
            parts.append(look.seconds / (3600 * stop.hours))
            left.append(3600 * stop.hours - look.seconds)
        part = min(max(parts), 1.0) if parts else None
        return part, max(min(left), 0.0) if left else None

    def _usual_seconds(self) -> float:
        last = [each.seconds for each in self._rounds if each.seconds > 0][-NUM_ROUNDS:]
        return median(last) if last else 0.0

    def _facts(self, members: Sequence[MemberStatus]) -> list[MemberFacts]:
        facts = []
        had = self._rounds[-1].seat_samples if self._rounds else {}
        for each in members:
            seat = self._seats.get(each.seat) if each.seat is not None else None
            if each.seat is not None and seat is not None:
                facts.append(
                    MemberFacts(
                        each.seat,
                        each.name,
                        each.gradient_norm,
                        each.difference_norm,
                        each.cosine,
                        each.versions,
                        seat.late_in_a_row,
                        seat.apart_in_a_row,
                        seat.still_in_a_row,
                        had.get(each.seat),
                    )
                )
        return facts

    def _count_odd(self, members: Sequence[MemberStatus]) -> None:
        """Count the rounds in a row in which members were odd, each round for which one has told its figures once."""
        facts = {each.seat: each for each in self._facts(members)}
        apart = apart_from(list(facts.values()))
        for each in members:
            if each.seat is None or each.seat not in facts:
                continue
            seat, told = self._seats[each.seat], facts[each.seat]
            if each.round != seat.last_told:
                seat.last_told = each.round
                seat.apart_in_a_row = seat.apart_in_a_row + 1 if each.seat in apart else 0
                seat.still_in_a_row = seat.still_in_a_row + 1 if told.is_still else 0

    def _find_alarms(self, members: Sequence[MemberStatus]) -> tuple[Alarm, ...]:
        facts = self._facts(members)
        look = self._seen()
        waiting = None
        if look is not None and look.state.phase is Phase.TRAINING and self._last_at:
            waiting = Waiting(
                look.state.round + 1,
                max(self._clock() - self._last_at, 0.0),
                self._usual_seconds(),
                _waited_for(members),
            )
        checks = look.checks if look is not None else None
        accused = [
            Accused(each.seat, each.text)
            for each in (checks.last if checks is not None else ())
            if each.kind in _AGAINST and look is not None
            if look.state.round - each.round <= NUM_FLAT
        ]
        return find_alarms(tuple(self._known_losses), facts, waiting=waiting, accused=accused)

    def _watch_alarms(self) -> None:
        """Say each alarm once, when it begins; one that comes and goes is the same."""
        self._num_lines += 1
        members = self._members(self._seen())
        self._count_odd(members)
        for alarm in self._find_alarms(members):
            if (alarm.kind, alarm.seat) not in self._held:
                self.events.publish(EventKind.ALARM, alarm.text, severity=Severity.WARNING)
                self.on_alarm(alarm.text)
            self._held[alarm.kind, alarm.seat] = self._num_lines
        oldest = self._num_lines - NUM_FLAT
        self._held = {key: at for key, at in self._held.items() if at > oldest}


def _name_of(peer: PeerLook, seat: int | None) -> str:
    """Name of a member for people: its own, else the number of its seat, else the end of its peer id."""
    if peer.name:
        return peer.name
    return f"member {seat}" if seat is not None else f"…{peer.peer_id[-8:]}"


def _state_of(peer: PeerLook) -> str:
    if not peer.is_connected:
        return "away"
    return peer.report.state if peer.report is not None else "asked"


def _as_stage(member: MemberStatus, look: StageLook) -> MemberStatus:
    """A member that is a stage of a chain, as its own report has it."""
    report = look.report
    stage = StageStatus(look.number, look.start, look.stop, waited=look.waited)
    if report is None:
        return replace(member, stage=stage)
    state = {"loading": "starting", "working": "training"}.get(report.state, report.state)
    return replace(
        member,
        stage=replace(
            stage,
            step=report.step,
            micro_batches=report.micro_batches,
            done=report.done,
            under_way=report.under_way,
        ),
        state=member.state if member.state == "away" else state,
        reason=report.reason,
        memory_bytes=report.memory_bytes,
    )


def _place_of(member: MemberStatus) -> tuple[bool, int]:
    """Sort key of members: by stages, or by seats; those that have neither come last."""
    place = member.stage.number if member.stage is not None else member.seat
    return place is None, place or 0


def _waited_for(members: Sequence[MemberStatus]) -> tuple[str, ...]:
    """Members that compute while others are done."""
    return tuple(
        each.name
        for each in members
        if each.seat is not None and each.batches and each.state in ("training", "away", "starting")
    )


def _counts(state: RunState | None) -> SampleCounts | None:
    if state is None:
        return None
    counts = state.dealer.counts()
    return SampleCounts(
        state.dealer.epoch,
        counts[SampleState.AVAILABLE],
        counts[SampleState.ASSIGNED],
        counts[SampleState.USED],
    )
