"""The leader of a witnessed run as a pure machine: the phases of `witnessed`, and by them who sits where and has which
samples, as in any run.

    events -> tick -> an entry with the events -> joined, round, returned, left, dealt -> the journal

What a member is dealt for a round, and witnesses do not agree on, is dealt again in the next one. A member that is lost
keeps its seat until the round is over, for what it has committed to may be agreed on all the same.

Source: protocol_spec/training/witnessed.md.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.entries import (
    DealtEntry,
    Entry,
    EpochEntry,
    JoinedEntry,
    ResumedEntry,
    ReturnedEntry,
    RoundEntry,
)
from neurogrid.training.runs.machine import Rules, RunMachine
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.state import Phase, RunState
from neurogrid.training.wire.runs import MAX_RANGES
from neurogrid.training.witnessed import (
    EpochMember,
    EpochPhase,
    EpochRules,
    EpochState,
    Event,
    Health,
    Stop,
    event_json,
    event_of,
    parts_of,
    tick,
)

__all__ = [
    "WitnessedMachine",
    "begun_epochs",
    "epoch_rules",
    "epochs_of",
    "fold_epochs",
    "resumed_epochs",
]

_WHY: Final = {
    Health.DROPPED: "it was lost, or witnesses had nothing of it",
    Health.WITHDRAWN: "it has withdrawn",
    Health.EJECTED: "it was ejected: there is evidence against it",
}


def epoch_rules(run: RunFile) -> EpochRules:
    """The rules of epochs by a run file. The end of the run follows from its samples and rounds, not from these."""
    epochs = run.epochs
    return EpochRules(
        min_members=run.members.min,
        max_members=run.members.max,
        rounds=epochs.rounds,
        batches=epochs.batches,
        warmup=epochs.warmup,
        train=epochs.train,
        witness=epochs.witness,
        cooldown=epochs.cooldown,
        witnesses=epochs.witnesses,
    )


def begun_epochs() -> EpochState:
    """The state before anything has happened."""
    return EpochState()


def resumed_epochs(state: EpochState, round_number: int) -> EpochState:
    """The state of a run that goes on after a round: nobody is a member, and no seat is given again."""
    return EpochState(
        epoch=state.epoch + 1,
        round=round_number,
        next_batch=state.next_batch,
        next_seat=state.next_seat,
        barred=state.barred,
    )


def epochs_of(rules: EpochRules, entries: Iterable[Entry]) -> Iterator[EpochState]:
    """The states that the entries of a journal come to, one after the other.

    Raises:
        ConfigurationError: an entry says of a state that it follows, and it does not.
    """
    state = begun_epochs()
    for entry in entries:
        if isinstance(entry, ResumedEntry):
            state = resumed_epochs(state, entry.round)
        elif isinstance(entry, EpochEntry):
            try:
                events = [event_of(each) for each in entry.events]
                own = replace(rules, batches=entry.batches)
                state = tick(own, state, entry.time, events, draw=entry.draw)
            except ValueError as exc:
                raise ConfigurationError(f"an entry of an epoch is none: {exc}") from exc
            if state.digest() != entry.digest:
                raise ConfigurationError(
                    f"what happened in epoch {state.epoch} gives another state than the journal says"
                )
        else:
            continue
        yield state


def fold_epochs(rules: EpochRules, entries: Iterable[Entry]) -> EpochState:
    """The last of them; that of the beginning where nothing has happened."""
    return deque((begun_epochs(), *epochs_of(rules, entries)), maxlen=1).pop()


class WitnessedMachine(RunMachine):
    """Leads a witnessed run. What its methods give is to be written into the journal; the states have it already.

    Args:
        rules: of the run, as its run file says.
        epochs: the same of epochs.
        state: where the run stands.
        epoch: the same of epochs.
        rules_at: the rules, once these values of the run file are changed.

    Attributes:
        epoch_rules, epoch: as of now.
        cooldown_draw: the draw of the tick with which the last cooldown began, by which the claims of the epoch's last
            round are drawn; empty before one.
    """

    def __init__(
        self,
        rules: Rules,
        epochs: EpochRules,
        state: RunState,
        epoch: EpochState,
        rules_at: Callable[[Mapping[str, str]], Rules] | None = None,
    ) -> None:
        super().__init__(rules, state, rules_at)
        self.epoch_rules, self.epoch = epochs, epoch
        self.cooldown_draw = b""

    def tick(
        self,
        now: float,
        events: Sequence[Event],
        draw: bytes,
        name_of: Callable[[str], str],
    ) -> bool:
        """Go on by what has happened, and by one arrow if it is time for one; whether something has changed.

        Args:
            now: seconds, of the leader's clock.
            draw: 32 bytes by chance.
            name_of: what people call the machine of a peer.
        """
        before, told = self.epoch, list(events)
        after, batches = self._next(now, told, draw)
        if after == before:
            return False
        self.epoch = after
        if after.going is EpochPhase.COOLDOWN and before.going is not EpochPhase.COOLDOWN:
            self.cooldown_draw = draw
        self._entries.append(
            EpochEntry(now, draw, batches, tuple(map(event_json, told)), after.digest())
        )
        self._seat(after, name_of)
        is_over = before.has_round and (before.seed, before.epoch) != (after.seed, after.epoch)
        if is_over or (before.has_round and not after.has_round):
            self._close(after)
        if after.reason and self.state.phase in (Phase.WAITING, Phase.TRAINING):
            self._finish(after.reason)
        if not after.has_round or after.seed != before.seed:
            self._unseat(after)
        self._go_on()
        if after.has_round and after.seed != before.seed:
            self._deal_round(after)
        return True

    def resume(self, round_number: int) -> None:
        """Go on from the checkpoint after this round; nobody is a member."""
        super().resume(round_number)
        self.epoch = resumed_epochs(self.epoch, round_number)
        for seat in list(self.state.seats):
            self._leave(seat, "the run goes on from a checkpoint")

    # What follows

    def _next(self, now: float, told: list[Event], draw: bytes) -> tuple[EpochState, int]:
        """The next state, with batches for a round that begins as there are samples, and no round once there are
        none: `told` is given the end then."""
        before, batches = self.epoch, self.epoch_rules.batches
        rules = self.epoch_rules
        for _ in range(3):
            after = tick(replace(rules, batches=batches), before, now, told, draw=draw)
            left = self._left_after(before, after)
            reason = self._end_after(before, after, left)
            if reason and not after.reason:
                told.append(Stop(reason))
                continue
            begins = after.has_round and after.seed != before.seed
            most = after.num_batches if left is None else -(-left // self.rules.batch_samples)
            if begins and 0 < most < after.num_batches:
                batches = most
                continue
            break
        return after, batches

    def _left_after(self, before: EpochState, after: EpochState) -> int | None:
        """Samples that nobody has and that are not used once `after` holds; None where there is no end of them."""
        most = self.rules.max_samples
        if most is None:
            return None
        used = self.state.num_used
        if after.made > before.made:
            agreed = {each.seat for each in after.agreed}
            used += sum(
                work.num_samples
                for number, seat in self.state.seats.items()
                if number in agreed
                for work in seat.works
            )
        return max(0, most - used)

    def _end_after(self, before: EpochState, after: EpochState, left: int | None) -> str:
        """The reason why the run is to end once `after` holds; empty where it is not."""
        if after.made == before.made:
            return ""
        if left == 0:
            return f"{self.rules.max_samples} samples were trained on"
        most = self.rules.max_rounds
        return f"{after.made} rounds were made" if most is not None and after.made >= most else ""

    def _seat(self, after: EpochState, name_of: Callable[[str], str]) -> None:
        """Members take seats."""
        for member in after.members:
            if member.seat not in self.state.seats and member.health is Health.HEALTHY:
                name = name_of(member.peer)
                self._note(JoinedEntry(member.seat, member.peer, member.incarnation, name))

    def _unseat(self, after: EpochState) -> None:
        """Seats of those that are members no more are left."""
        members: dict[int, EpochMember] = {each.seat: each for each in after.members}
        for number in list(self.state.seats):
            member = members.get(number)
            if member is None or member.health is not Health.HEALTHY:
                health = member.health if member is not None else Health.DROPPED
                self._leave(number, _WHY[health])

    def _close(self, after: EpochState) -> None:
        """A round is over: what was agreed on is used, and the rest of it comes back."""
        state = self.state
        if after.made > state.round:
            self.change_due()
            contributions = tuple(
                (each.seat, len(state.seats[each.seat].works)) for each in after.agreed
            )
            ranges = tuple(
                each
                for number, _ in contributions
                for work in state.seats[number].works
                for each in work.ranges
            )
            said = b"".join(each.digest() for each in after.agreed)
            digest = hashlib.sha256(said).digest()
            self._note(RoundEntry(after.made, after.made, digest, contributions, ranges))
        for number, seat in sorted(state.seats.items()):
            if seat.works:
                self._note(ReturnedEntry(number))

    def _deal_round(self, after: EpochState) -> None:
        """Deal the samples of a round, in the order of its batches."""
        left = self._left_after(after, after)
        works = []
        for seat, (_, num_batches) in parts_of(self.epoch_rules, after).works.items():
            wanted = num_batches * self.rules.batch_samples
            # What a seat on trial is given counts as used by nobody: it is dealt also where nothing is left.
            most = left if seat not in after.trial_seats else None
            num_samples = wanted if most is None else min(wanted, most)
            work = self.state.deal(
                seat,
                num_samples,
                position=float(self.state.round),
                stride=1.0,
                max_ranges=MAX_RANGES,  # what an Epoch can say, and a claim
            )
            if most is not None:
                left = most - work.num_samples
            if work.weight:
                works.append((seat, work))
        self._entries.append(DealtEntry(tuple(works)))

    def _deal(self) -> bool:
        """Nothing is dealt ahead: who has what in a round is decided by its seed."""
        return False

    def _has_quorum(self) -> bool:
        return len(self.state.occupied()) >= self.rules.min_members
