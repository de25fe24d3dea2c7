"""An audit of a run by its journal alone: was each sample of each epoch, and each round, used exactly once. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from neurogrid.training.runs.entries import (
    CheckpointEntry,
    EndEntry,
    Entry,
    MemberEntry,
    ResumedEntry,
    RoundEntry,
    RunEntry,
    UsedEntry,
    UsedRange,
)

__all__ = ["Audit", "audit"]

# Of a journal in which all is wrong the first hundred say enough.
_MAX_PROBLEMS: Final = 100


@dataclass(frozen=True, slots=True)
class Audit:
    """What a journal proves.

    Attributes:
        rounds: how many count, from 1 on without gaps.
        num_samples: of one epoch.
        num_used: samples that are used, of all epochs.
        epochs: how many, from the first, have each sample used exactly once.
        missing: of the epochs that were begun and are not such: how many samples are not used yet, by their number.
        joined, left: how often members did.
        has_ended: the last thing that happened was the end of the run.
        problems: what must not be, each with the round; none in a sound journal.
    """

    rounds: int
    num_samples: int
    num_used: int
    epochs: int
    missing: dict[int, int]
    joined: int
    left: int
    has_ended: bool
    problems: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """No sample of an epoch was used twice, no round is missing or there twice, and all of it fits together."""
        return not self.problems


@dataclass(slots=True)
class _Use:
    round: int
    member: str
    range: UsedRange


@dataclass(slots=True)
class _State:
    slices: tuple[int, ...] = ()
    rounds: int = 0
    # What each contribution is of, as the round's entry says, and as the ranges do.
    samples: dict[tuple[int, str], int] = field(default_factory=dict)
    uses: list[_Use] = field(default_factory=list)
    members: set[str] = field(default_factory=set)
    joined: int = 0
    left: int = 0
    has_ended: bool = False
    problems: list[str] = field(default_factory=list)


def audit(entries: Iterable[Entry]) -> Audit:
    """Prove by the entries of a journal that each sample of each epoch was used exactly once, or name what is wrong."""
    state = _State()
    for entry in entries:
        _take(state, entry)
    accounted: Counter[tuple[int, str]] = Counter()
    for use in state.uses:
        accounted[use.round, use.member] += use.range.stop - use.range.start
    for (number, member), samples in state.samples.items():
        if accounted[number, member] != samples:
            state.problems.append(
                f"round {number}: {member} contributed {samples} samples, of which "
                f"{accounted[number, member]} are accounted for"
            )
    used = _used_once(state)
    num_samples = sum(state.slices)
    whole = 0
    while num_samples and used[whole] == num_samples:
        whole += 1
    return Audit(
        rounds=state.rounds,
        num_samples=num_samples,
        num_used=sum(used.values()),
        epochs=whole,
        missing={
            epoch: num_samples - count
            for epoch, count in sorted(used.items())
            if count < num_samples
        },
        joined=state.joined,
        left=state.left,
        has_ended=state.has_ended,
        problems=tuple(state.problems[:_MAX_PROBLEMS]),
    )


def _take(state: _State, entry: Entry) -> None:
    if not state.slices and not isinstance(entry, RunEntry):
        state.problems.append(f"a journal begins with its run, not with {entry.kind}")
    state.has_ended = isinstance(entry, EndEntry)
    if isinstance(entry, RunEntry):
        if state.slices:
            state.problems.append("a second run begins in the journal")
        state.slices = entry.slices
    elif isinstance(entry, RoundEntry):
        if entry.round != state.rounds + 1:
            state.problems.append(f"round {entry.round} comes after round {state.rounds}")
        state.rounds = entry.round
        for each in entry.contributors:
            if each.member not in state.members:
                state.problems.append(f"round {entry.round}: {each.member} never joined")
            if (entry.round, each.member) in state.samples:
                state.problems.append(f"round {entry.round}: {each.member} contributed twice")
            state.samples[entry.round, each.member] = each.samples
            _use(state, entry.round, each.member, each.ranges)
    elif isinstance(entry, UsedEntry):
        if (entry.round, entry.member) not in state.samples:
            state.problems.append(f"round {entry.round}: {entry.member} is no contributor")
        _use(state, entry.round, entry.member, entry.ranges)
    elif isinstance(entry, MemberEntry):
        if entry.joined:
            state.members.add(entry.member)
            state.joined += 1
        else:
            state.left += 1
    elif isinstance(entry, CheckpointEntry):
        if entry.round > state.rounds:
            state.problems.append(f"a checkpoint has round {entry.round} after {state.rounds}")
    elif isinstance(entry, ResumedEntry):
        if entry.round > state.rounds:
            state.problems.append(f"resumed after round {entry.round}, with {state.rounds} decided")
        state.rounds = min(state.rounds, entry.round)
        state.uses = [use for use in state.uses if use.round <= entry.round]
        state.samples = {
            key: samples for key, samples in state.samples.items() if key[0] <= entry.round
        }


def _use(state: _State, number: int, member: str, ranges: Sequence[UsedRange]) -> None:
    for each in ranges:
        if each.slice >= len(state.slices) or each.stop > state.slices[each.slice]:
            state.problems.append(
                f"round {number}: there are no samples {each.start} to {each.stop} of slice {each.slice}"
            )
        else:
            state.uses.append(_Use(number, member, each))


def _used_once(state: _State) -> Counter[int]:
    """Samples used in each epoch, each counted once."""
    used: Counter[int] = Counter()
    last: _Use | None = None
    for use in sorted(state.uses, key=lambda use: (use.range, use.round)):
        start = use.range.start
        if last is not None and last.range[:2] == use.range[:2] and last.range.stop > start:
            stop = min(last.range.stop, use.range.stop)
            state.problems.append(
                f"samples {start} to {stop} of slice {use.range.slice} were used twice in epoch "
                f"{use.range.epoch}: in round {last.round} by {last.member}, in round {use.round} by {use.member}"
            )
            start = stop
        used[use.range.epoch] += use.range.stop - start
        if start < use.range.stop:
            last = use
    return used
