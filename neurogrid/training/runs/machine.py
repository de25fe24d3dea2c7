"""The leader of a run as a pure machine: no clock, no socket, no torch.

It is told who is ready, what the group decided, and how fast members are; it says what goes into the journal, and by
that who is to do what. Each member has the work at hand and the one after it, so that nobody waits for the leader, and
a leader that is away for a round holds up nobody. Where work goes by speed, there is nothing ahead until the speed of
each is known, and a member's first work is a batch: those that are far too long would hold up all for rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from neurogrid.training.joining import ban_seconds
from neurogrid.training.runs.entries import (
    Assignment,
    BannedEntry,
    BeganEntry,
    ChangedEntry,
    DealtEntry,
    EndEntry,
    Entry,
    InvitedEntry,
    JoinedEntry,
    LeftEntry,
    ResumedEntry,
    RoundEntry,
    StoppingEntry,
)
from neurogrid.training.runs.projection import share_batches
from neurogrid.training.runs.state import Occupant, Phase, RunState, Seat, spans_of
from neurogrid.training.wire.runs import MAX_RANGES

__all__ = ["Outcome", "Rules", "RunMachine"]

# Works that a member has: the one at hand, and the one after it.
_NUM_AHEAD: Final = 2
# Into which a batch is cut so that uneven members finish together, at most.
_MAX_PIECES: Final = 4


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a run file: how many members there are, how much work each is dealt, and when the run ends.

    Attributes:
        min_members: below which nothing is dealt.
        max_members: more stand by.
        batch_samples: samples of a batch.
        steps: batches of a round, of a member that takes as many as the run file says.
        num_parts: in which the weights are synced, a round each.
        projected: whether members get batches by their speed.
        max_samples: after which the run ends; None for no such end.
        max_rounds: the same in rounds.
    """

    min_members: int
    max_members: int
    batch_samples: int
    steps: int
    num_parts: int = 1
    projected: bool = True
    max_samples: int | None = None
    max_rounds: int | None = None

    @property
    def total_steps(self) -> int:
        """Inner steps that the schedule counts on; 0 where the run has no end that is known."""
        known = [] if self.max_rounds is None else [self.max_rounds * self.steps]
        if self.max_samples is not None:
            known.append(-(-self.max_samples // (self.batch_samples * self.min_members)))
        return min(known, default=0)

    def num_samples(self, num_members: int) -> int:
        """Samples of a whole run with so many members; 0 where that is not known."""
        known = [] if self.max_samples is None else [self.max_samples]
        if self.max_rounds is not None:
            known.append(self.max_rounds * self.steps * self.batch_samples * num_members)
        return min(known, default=0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A decision of the group, as far as the run cares.

    Attributes:
        index: of the decision.
        round: its number; 0 for a change of members.
        digest: of the aggregate.
        weights: of the contributors, by peer id.
        members: of the group from here on.
    """

    index: int
    round: int
    digest: bytes
    weights: Mapping[str, float]
    members: frozenset[Occupant]


class RunMachine:
    """Leads a run. What its methods give is to be written into the journal; the state has it already.

    Args:
        rules: of the run, as its run file says.
        state: where it stands.
        rules_at: the rules, once these values of the run file are changed; None where none is.

    Attributes:
        rules: as of now.
    """

    def __init__(
        self,
        rules: Rules,
        state: RunState,
        rules_at: Callable[[Mapping[str, str]], Rules] | None = None,
    ) -> None:
        self.rules, self.state = rules, state
        self._rules_at = rules_at or (lambda values: rules)
        # Members have the schedule that the run began with.
        self._total_steps = rules.total_steps
        self._speeds: dict[int, float] = {}
        self._reserved: dict[str, int] = {}
        self._entries: list[Entry] = []
        self._take_rules()

    # What others look at

    def works(self, seat: int) -> tuple[Assignment, ...]:
        """The work of a seat at hand, and those after it; none while seats of a run that goes on are vacant."""
        held = self.state.seats.get(seat) if not self.state.vacant() else None
        return tuple(held.works) if held is not None else ()

    def drain(self) -> list[Entry]:
        """Entries for the journal since the last call."""
        entries, self._entries = self._entries, []
        return entries

    @property
    def wants_members(self) -> bool:
        """Whether members are to be found: while work is dealt, and then for seats whose works wait for somebody."""
        phase = self.state.phase
        if phase is Phase.FINISHING:
            return bool(self.state.vacant())
        return phase is not Phase.ENDED

    @property
    def num_free(self) -> int:
        """Peers without a seat that can get one."""
        most = self.rules.max_members - len(self.state.occupied())
        if self.state.phase is Phase.FINISHING:
            most = min(most, len(self.state.vacant()))
        return most - len(self._reserved)

    def has_room(self, peer: str) -> bool:
        """Whether a peer has a seat, or can get one."""
        has_own = peer in self._reserved or self.state.seat_of(peer) is not None
        return has_own or self.num_free > 0

    # What happens

    def reserve(self, peer: str) -> int:
        """The seat that a peer is going to take: one that is vacant, or a new one."""
        if peer not in self._reserved:
            taken = set(self._reserved.values())
            vacant = [seat for seat in self.state.vacant() if seat.number not in taken]
            # Its own of before, so that the same members go on to the same bits.
            vacant.sort(key=lambda seat: (seat.peer != peer, seat.number))
            fresh = max([self.state.num_seats - 1, *taken]) + 1
            self._reserved[peer] = vacant[0].number if vacant else fresh
        return self._reserved[peer]

    def release(self, peer: str) -> None:
        """A peer does not take the seat that was reserved for it."""
        self._reserved.pop(peer, None)

    def joined(self, seat: int, occupant: Occupant, name: str, holds: Iterable[int] = ()) -> None:
        """A member is ready, on a seat that was reserved for it or that it has.

        Args:
            holds: numbers of the slices that it has on its own disk, rising.
        """
        is_reserved = self._reserved.pop(occupant.peer, None) == seat
        if self.state.phase is Phase.ENDED:
            return
        before = self.state.seat_of(occupant.peer)
        if before is not None:
            if before.occupant == occupant:
                return
            self._note(LeftEntry(before.number, "its process began anew"))
        held = self.state.seats.get(seat)
        is_free = held.occupant is None if held is not None else is_reserved
        if not is_free:
            # Its own seat is gone: what it had was dealt to others.
            seat = max([self.state.num_seats - 1, *self._reserved.values()]) + 1
        spans = tuple(spans_of(holds, self.state.num_slices))
        self._note(JoinedEntry(seat, occupant.peer, occupant.incarnation, name, spans))
        taken = self.state.seats[seat]
        if self.state.phase is Phase.FINISHING and taken.works and taken.works[-1].ranges:
            self._deal_syncs([taken])  # nobody had the seat when the others were dealt theirs
        self._go_on()

    def left(self, seat: int, reason: str) -> None:
        """A member is lost, or a vacant seat is waited for no more."""
        if seat in self.state.seats:
            self._leave(seat, reason)
            self._go_on()

    def ban(self, peer: str, reason: str, *, now: float) -> BannedEntry:
        """A peer did other than it was told: it is not to take part for a while, longer each time.

        Args:
            now: seconds since 1970.
        """
        bans = self.state.bans
        seconds = ban_seconds(len(bans.get(peer, ())))
        entry = BannedEntry(
            peer=peer,
            number=sum(map(len, bans.values())) + 1,
            at=int(now),
            until=0 if seconds is None else int(now) + seconds,
            evidence=b"",
            reason=reason,
        )
        self._note(entry)
        return entry

    def invited(self, peer: str, serial: int) -> None:
        """A peer has come by an invitation that a number of peers may come by."""
        self._note(InvitedEntry(peer, serial))

    def measured(self, seat: int, batch_seconds: float) -> None:
        """A batch takes a member so long."""
        if batch_seconds > 0:
            is_new = seat not in self._speeds
            self._speeds[seat] = batch_seconds
            if is_new:
                self._go_on()

    def decided(self, outcome: Outcome) -> list[str]:
        """The group has decided.

        A round in which no work is does not count, and the state stays that after the round before: there is no going
        on from it, as members have it in their weights.

        Returns:
            Peers whose contributions are not of works that they had: such a member is to be dismissed.
        """
        if outcome.index <= self.state.index:
            return []
        wrong: list[str] = []
        # Where a change has ended the run sooner, members may have agreed on one round more: it is none of the run.
        if outcome.round and self.state.phase is not Phase.ENDED:
            self.change_due()
            contributions = []
            for peer, weight in outcome.weights.items():
                seat = self.state.seat_of(peer)
                if seat is None:
                    wrong.append(peer)
                    continue
                num_works = _num_works(seat.works, weight)
                if sum(work.share for work in seat.works[:num_works]) != weight:
                    wrong.append(peer)
                if num_works:
                    contributions.append((seat.number, num_works))
            if not contributions:
                self.state.index = outcome.index
                return wrong
            ranges = tuple(
                each
                for number, num_works in contributions
                for work in self.state.seats[number].works[:num_works]
                for each in work.ranges
            )
            self._note(
                RoundEntry(
                    outcome.index,
                    outcome.round,
                    outcome.digest,
                    tuple(contributions),
                    ranges,
                )
            )
        else:
            self.state.index = outcome.index
        for seat in self.state.occupied():
            if seat.occupant not in outcome.members:
                self._leave(seat.number, "the group goes on without it")
        self._go_on()
        return wrong

    def resume(self, round_number: int) -> None:
        """Go on from the checkpoint after this round, with members that take the seats anew."""
        self._note(ResumedEntry(round_number))

    def stop(self, reason: str) -> None:
        """Deal nothing more, and end when what was dealt is in."""
        if self.state.phase in (Phase.WAITING, Phase.TRAINING):
            self._finish(reason)
            self._go_on()

    def change(self, changes: Iterable[tuple[str, str]]) -> ChangedEntry:
        """Have other values of the run file hold from the next round on. What was dealt stays as it is."""
        entry = ChangedEntry(self.state.round + 1, tuple(sorted(changes)))
        self._note(entry)
        return entry

    def check(self, values: Mapping[str, str]) -> None:
        """See that values of the run file may be changed to these.

        Raises:
            ConfigurationError: they do not go together with the data.
        """
        self._rules_at(values)

    def change_due(self) -> list[ChangedEntry]:
        """Change what a resumed run has yet to change before its next round; what that is."""
        found = []
        while (entry := self.state.changes.next_due(self.state.round + 1)) is not None:
            self._note(entry)
            found.append(entry)
        return found

    # What follows

    def _note(self, entry: Entry) -> None:
        self.state.apply(entry)
        self._entries.append(entry)
        if isinstance(entry, ChangedEntry | ResumedEntry):
            self._take_rules()

    def _take_rules(self) -> None:
        self.rules = self._rules_at(self.state.changes.at(self.state.round + 1))

    def _leave(self, seat: int, reason: str) -> None:
        self._speeds.pop(seat, None)
        self._note(LeftEntry(seat, reason))

    def _go_on(self) -> None:
        state = self.state
        if state.phase is Phase.WAITING and self._has_quorum():
            num_members = len(state.occupied())
            self._note(BeganEntry(num_members, self.rules.num_samples(num_members)))
        if state.phase is Phase.TRAINING:
            if self._is_trained():
                self._finish(f"{state.num_used} samples were trained on")
            elif self._is_last_round():
                self._finish(f"{state.round} rounds were made")
        if state.phase is Phase.TRAINING and self._has_quorum():
            while self._deal():
                pass
        if state.phase is Phase.FINISHING and not self._waits_to_end():
            for seat in list(state.seats.values()):
                if seat.works:
                    self._leave(seat.number, "its last work came after the last round")
            self._note(EndEntry(state.reason))

    def _has_quorum(self) -> bool:
        return len(self.state.occupied()) >= self.rules.min_members and not self.state.vacant()

    def _is_trained(self) -> bool:
        most = self.rules.max_samples
        return most is not None and self.state.num_used >= most

    def _is_last_round(self) -> bool:
        most = self.rules.max_rounds
        return most is not None and self.state.round >= most

    def _waits_to_end(self) -> bool:
        """Whether a work that was dealt is to be in a round yet. Where rounds are counted, a late one need not."""
        is_counted = self._is_last_round()
        return any(
            not (is_counted and work.ranges)
            for seat in self.state.seats.values()
            for work in seat.works
        )

    def _finish(self, reason: str) -> None:
        """Deal nothing but the syncs of those parts of the weights that had no turn since the last steps."""
        self._note(StoppingEntry(reason))
        self._deal_syncs(self.state.occupied())

    def _deal_syncs(self, seats: Sequence[Seat]) -> None:
        works = [
            (seat.number, self.state.deal(seat.number, 0, weight=1))
            for _ in range(self.rules.num_parts - 1)
            for seat in seats
            if not (self._is_last_round() and any(work.ranges for work in seat.works))
        ]
        if works:
            self._entries.append(DealtEntry(tuple(works)))

    def _deal(self) -> bool:
        """Deal one work to each member that has fewest, if it has too few; whether there was anything to deal."""
        state, rules = self.state, self.rules
        members = state.occupied()
        fewest = min(len(seat.works) for seat in members)
        if fewest >= self._num_ahead(members):
            return False
        left = math.inf if rules.max_samples is None else rules.max_samples - state.num_dealt
        shares = self._shares(members, left)
        position = self._position()
        works: list[tuple[int, Assignment]] = []
        for seat in members:
            share = shares[seat.number]
            num_samples = min(share, left)
            if len(seat.works) > fewest or num_samples <= 0:
                continue
            work = state.deal(
                seat.number,
                int(num_samples),
                position=position,
                stride=self._steps_of(rules.steps * rules.batch_samples * len(members))
                / math.ceil(share / rules.batch_samples),
                max_ranges=MAX_RANGES,  # what an order can say
            )
            if work.num_samples == 0:  # the last epoch is dealt
                break
            left -= work.num_samples
            works.append((seat.number, work))
        if works:
            self._entries.append(DealtEntry(tuple(works)))
        return bool(works)

    def _num_ahead(self, members: Sequence[Seat]) -> int:
        """Works that each member is to have."""
        rules = self.rules
        # All of a round are dealt at once: they are at the same place of the schedule.
        are_known = not rules.projected or all(seat.number in self._speeds for seat in members)
        ahead = _NUM_AHEAD if are_known else 1
        if rules.max_rounds is not None:
            ahead = min(ahead, rules.max_rounds - self.state.round)
        return ahead

    def _shares(self, members: Sequence[Seat], left: float) -> dict[int, int]:
        """Samples of each member in its next work."""
        batch = self.rules.batch_samples
        total = self.rules.steps * len(members)
        total = max(min(total, math.ceil(min(left, 2**53) / batch)), len(members))
        if not self.rules.projected:
            return {seat.number: batch * -(-total // len(members)) for seat in members}
        speeds = [self._speeds.get(seat.number) for seat in members]
        num_pieces = math.gcd(batch, _MAX_PIECES)
        shares = share_batches(speeds, total, num_pieces=num_pieces)
        if len(members) > 1:  # a first batch says how fast a member is
            shares = tuple(
                share if speed is not None else min(share, num_pieces)
                for share, speed in zip(shares, speeds, strict=True)
            )
        numbers = [seat.number for seat in members]
        return {
            number: share * batch // num_pieces
            for number, share in zip(numbers, shares, strict=True)
        }

    def _position(self) -> float:
        """Inner steps of the schedule that are behind what is dealt next."""
        return self._steps_of(self.state.num_dealt)

    def _steps_of(self, num_samples: int) -> float:
        """The inner steps of the schedule that so many samples are."""
        state, rules = self.state, self.rules
        if not (self._total_steps and state.num_samples):
            return num_samples / (rules.batch_samples * max(state.num_members, 1))
        return self._total_steps * num_samples / state.num_samples


def _num_works(works: Sequence[Assignment], weight: float) -> int:
    """The number of works, from the first, that are in a contribution of this weight."""
    total = 0.0
    for number, work in enumerate(works):
        if total + work.share > weight:
            return number
        total += work.share
    return len(works)
