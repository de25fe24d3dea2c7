"""The machine of a witnessed run, as a fold: what happened makes a state of the state before. Pure.

A leader gives it all that happens, with the time, and writes down what it gave; whoever folds that again has the same
state. A tick takes in its events, and then at most one arrow between phases: with `due` a leader knows when to tick
again though nothing happens. What comes late, comes again, or comes from somebody who is no member changes nothing.

    waiting_for_members -> warmup -> round_train -> round_witness -> round_train ... -> cooldown -> waiting_for_members
    warmup -> waiting_for_members where members are lost; cooldown -> finished where the run is to end

Source: protocol_spec/training/witnessed.md, "Phases".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from neurogrid.training.witnessed.commitments import Commitment, WitnessProof
from neurogrid.training.witnessed.events import (
    Admitted,
    Checkpointed,
    Committed,
    Eject,
    Event,
    Gone,
    Joined,
    Left,
    Pause,
    Refused,
    Resume,
    Stop,
    Trial,
    Unhealthy,
    Warm,
    Witnessed,
)
from neurogrid.training.witnessed.judging import (
    agree,
    is_complete,
    is_plausible,
    parts_of,
    split,
    took_part,
)
from neurogrid.training.witnessed.phases import (
    MAX_BARRED,
    MAX_MEMBERS,
    MAX_PENDING,
    MAX_TRIALS,
    EpochEnd,
    EpochMember,
    EpochPhase,
    EpochRules,
    EpochState,
    Health,
)

__all__ = ["MAX_EVENTS", "due", "tick"]

MAX_EVENTS: Final = 4096
_SEED: Final = 32


def tick(
    rules: EpochRules, state: EpochState, now: float, events: Sequence[Event], *, draw: bytes
) -> EpochState:
    """The state after these events, and after one arrow if it is time for one; `state` itself where nothing changed.

    Args:
        rules: of the run. What they say of members and batches of a round must not change within one.
        state: before.
        now: seconds, of a clock that goes on over restarts of the leader. Where it stands before the beginning of the
            phase, no time has passed.
        events: in the order in which they happened, at most 4,096.
        draw: 32 bytes that nobody can have known: the seed of the round, if one begins.

    Raises:
        ValueError: the time is not finite, the draw has another length, or the events are too many.
    """
    if not math.isfinite(now):
        raise ValueError(f"the time must be finite, not {now}")
    if len(draw) != _SEED:
        raise ValueError(f"a draw has {_SEED} bytes, not {len(draw)}")
    if len(events) > MAX_EVENTS:
        raise ValueError(f"a tick takes at most {MAX_EVENTS} events, not {len(events)}")
    phase = state.phase
    for event in events:
        if state.phase is not EpochPhase.FINISHED:
            state = _take(rules, state, now, event)
    # Pausing and going on again are arrows, too.
    return state if state.phase is not phase else _go_on(rules, state, now, draw)


def due(rules: EpochRules, state: EpochState) -> float | None:
    """The time from which a tick changes the phase though nothing happens; None where only events do."""
    if _is_done(rules, state):
        return state.began
    limit = rules.limit(state.phase)
    return None if limit is None else state.began + limit


# What happens


def _take(rules: EpochRules, state: EpochState, now: float, event: Event) -> EpochState:
    match event:
        case Joined(peer, incarnation):
            return _joined(state, peer, incarnation)
        case Gone(peer, incarnation):
            return _gone(state, peer, incarnation)
        case Left(seat, why):
            return _leave(state, [seat], why)
        case Warm(seat, epoch):
            if _is_told(state, seat, epoch, EpochPhase.WARMUP) and seat not in state.ready:
                return replace(state, ready=state.ready | {seat})
        case Checkpointed(seat, epoch):
            if _is_told(state, seat, epoch, EpochPhase.COOLDOWN) and seat not in state.checkpointed:
                return replace(state, checkpointed=state.checkpointed | {seat})
        case Committed(commitment, _):
            return _committed(rules, state, commitment)
        case Witnessed(proof, _):
            return _witnessed(rules, state, proof)
        case Unhealthy():
            return _complained(state, event)
        case Eject(seat, _, peer, since):
            return _eject(state, seat, peer, since)
        case Trial(peer):
            return _try(state, peer)
        case Admitted(peer, _):
            if peer in state.trials:
                return _without_trial(state, peer)
        case Refused(peer, _, _):
            if peer in state.trials:
                seats = [each.seat for each in state.members if each.peer == peer]
                state = _without_trial(_leave(state, seats, Health.DROPPED), peer)
                pending = tuple(each for each in state.pending if each[0] != peer)
                return replace(state, pending=pending)
        case Pause():
            if state.paused is None and not state.reason:
                return replace(
                    state,
                    phase=EpochPhase.PAUSED,
                    paused=state.phase,
                    elapsed=max(0.0, now - state.began),
                    began=now,
                )
        case Resume():
            return _resume(state, now)
        case Stop(reason):
            if not state.reason:
                return replace(_resume(state, now), reason=reason)
    return state


def _resume(state: EpochState, now: float) -> EpochState:
    if state.paused is None:
        return state
    return replace(state, phase=state.paused, paused=None, began=now - state.elapsed, elapsed=0.0)


def _joined(state: EpochState, peer: str, incarnation: int) -> EpochState:
    if peer in state.barred or state.reason:
        return state
    for member in state.members:
        if member.peer == peer and member.health is Health.HEALTHY:
            if member.incarnation == incarnation:
                return state
            # The process that was the member is no more.
            state = _leave(state, [member.seat], Health.DROPPED)
    if (peer, incarnation) in state.pending:
        return state
    others = tuple(each for each in state.pending if each[0] != peer)
    if len(others) >= MAX_PENDING:
        return state
    return replace(state, pending=(*others, (peer, incarnation)))


def _gone(state: EpochState, peer: str, incarnation: int) -> EpochState:
    if (peer, incarnation) in state.pending:
        others = tuple(each for each in state.pending if each != (peer, incarnation))
        return replace(state, pending=others)
    seats = [
        each.seat for each in state.members if (each.peer, each.incarnation) == (peer, incarnation)
    ]
    return _leave(state, seats, Health.DROPPED)


def _leave(state: EpochState, seats: Iterable[int], why: Health) -> EpochState:
    """Give members on these seats that are healthy the health `why`."""
    leaving = set(seats) & set(state.healthy)
    if not leaving:
        return state
    members = tuple(
        replace(each, health=why) if each.seat in leaving else each for each in state.members
    )
    return replace(state, members=members)


def _eject(state: EpochState, seat: int, peer: str = "", since: int = 0) -> EpochState:
    """Eject a peer: nothing of it that is not agreed yet counts, and it is taken no more.

    Args:
        since: what it gave from this round on leaves, too, with the next round that is made; 0 for nothing.
    """
    member = state.member(seat)
    if member is not None and peer in ("", member.peer):
        peer = member.peer
    elif member is not None or not peer:
        return state
    if peer in state.barred:
        return state
    seats = {each.seat for each in state.members if each.peer == peer}
    is_known = since and seat in seats and state.going is not EpochPhase.WAITING_FOR_MEMBERS
    return replace(
        state,
        leaving=(*state.leaving, (seat, since))[-MAX_MEMBERS:] if is_known else state.leaving,
        members=tuple(
            replace(each, health=Health.EJECTED) if each.seat in seats else each
            for each in state.members
        ),
        proofs=tuple(each for each in state.proofs if each.seat not in seats),
        pending=tuple(each for each in state.pending if each[0] != peer),
        trials=tuple(each for each in state.trials if each != peer),
        barred=(*state.barred, peer)[-MAX_BARRED:],
    )


def _try(state: EpochState, peer: str) -> EpochState:
    """A peer is on trial, unless it counts already."""
    counts = any(each.peer == peer and each.health is Health.HEALTHY for each in state.members)
    is_known = counts or peer in state.trials or peer in state.barred
    if is_known or state.reason or len(state.trials) >= MAX_TRIALS:
        return state
    return replace(state, trials=(*state.trials, peer))


def _without_trial(state: EpochState, peer: str) -> EpochState:
    return replace(state, trials=tuple(each for each in state.trials if each != peer))


def _is_told(state: EpochState, seat: int, epoch: int, phase: EpochPhase) -> bool:
    """Whether a member says something that belongs to this phase of this epoch."""
    return state.going is phase and epoch == state.epoch and seat in state.healthy


def _is_of_round(state: EpochState, said: Commitment | WitnessProof) -> bool:
    return (
        state.has_round
        and (said.epoch, said.round) == (state.epoch, state.round)
        and said.seat in state.healthy
    )


def _committed(rules: EpochRules, state: EpochState, commitment: Commitment) -> EpochState:
    if not _is_of_round(state, commitment):
        return state
    work = parts_of(rules, state).works.get(commitment.seat, (0, 0))
    if (commitment.first_batch, commitment.num_batches) != work:
        return state
    for before in state.commitments:
        if before.seat == commitment.seat:
            # Who signs two of them lies to somebody.
            return state if before == commitment else _eject(state, commitment.seat)
    found = sorted((*state.commitments, commitment), key=lambda each: each.seat)
    return replace(state, commitments=tuple(found))


def _witnessed(rules: EpochRules, state: EpochState, proof: WitnessProof) -> EpochState:
    if not _is_of_round(state, proof):
        return state
    parts = parts_of(rules, state)
    is_new = all(before.seat != proof.seat for before in state.proofs)
    if not (is_new and proof.seat in parts.witnesses and is_plausible(state, parts, proof)):
        return state
    found = sorted((*state.proofs, proof), key=lambda each: each.seat)
    return replace(state, proofs=tuple(found))


def _complained(state: EpochState, event: Unhealthy) -> EpochState:
    """A member that most others cannot reach is dropped."""
    is_late = (event.epoch, event.round) != (state.epoch, state.round)
    healthy, counted = set(state.healthy), set(state.counted)
    if is_late or state.going is EpochPhase.WAITING_FOR_MEMBERS or event.by_seat not in counted:
        return state
    about = (healthy & set(event.seats)) - {event.by_seat}
    found = {*state.complaints, *((event.by_seat, seat) for seat in about)}
    if len(found) == len(state.complaints):
        return state
    counts = [seat for by_seat, seat in found if by_seat in counted]
    lost = [seat for seat in about if 2 * counts.count(seat) > len(counted)]
    return _leave(replace(state, complaints=tuple(sorted(found))), lost, Health.DROPPED)


# What follows


def _is_done(rules: EpochRules, state: EpochState) -> bool:
    """Whether a phase is over, whatever the time."""
    healthy, counted = state.healthy, state.counted
    match state.phase:
        case EpochPhase.WAITING_FOR_MEMBERS:
            num_coming = sum(peer not in state.trials for peer, _ in state.pending)
            room = max(0, rules.max_members - len(healthy))
            num_there = len(counted) + min(num_coming, room)
            return bool(_reason(rules, state)) or num_there >= rules.min_members
        case EpochPhase.WARMUP:
            is_ready = len(counted) < rules.min_members or state.ready.issuperset(healthy)
            return bool(state.reason) or is_ready
        case EpochPhase.ROUND_TRAIN:
            parts = parts_of(rules, state)
            if len(state.proofs) < parts.quorum:
                return False
            num_complete = sum(is_complete(state, parts, proof) for proof in state.proofs)
            return num_complete >= parts.quorum
        case EpochPhase.ROUND_WITNESS:
            waited = set(parts_of(rules, state).witnesses) & set(healthy)
            return waited <= {proof.seat for proof in state.proofs}
        case EpochPhase.COOLDOWN:
            return 2 * len(state.checkpointed & set(counted)) > len(counted)
    return False


def _reason(rules: EpochRules, state: EpochState) -> str:
    """Reason for which a run is to end; empty where it is not."""
    if not state.reason and rules.max_rounds is not None and state.made >= rules.max_rounds:
        return f"{state.made} rounds were made"
    return state.reason


def _go_on(rules: EpochRules, state: EpochState, now: float, draw: bytes) -> EpochState:
    limit = rules.limit(state.phase)
    is_late = limit is not None and now - state.began >= limit
    if state.phase is EpochPhase.WARMUP and not is_late:
        state = _admit(rules, state)
    if not (is_late or _is_done(rules, state)):
        return state
    match state.phase:
        case EpochPhase.WAITING_FOR_MEMBERS:
            if reason := _reason(rules, state):
                return _enter(replace(state, reason=reason), EpochPhase.FINISHED, now)
            return _enter(_admit(rules, state), EpochPhase.WARMUP, now)
        case EpochPhase.WARMUP:
            return _end_warmup(rules, state, now, draw)
        case EpochPhase.ROUND_TRAIN:
            return _enter(state, EpochPhase.ROUND_WITNESS, now)
        case EpochPhase.ROUND_WITNESS:
            return _end_round(rules, state, now, draw)
        case _:
            return _end_epoch(state, now)


def _enter(state: EpochState, phase: EpochPhase, now: float) -> EpochState:
    return replace(state, phase=phase, began=now)


def _only_healthy(state: EpochState) -> EpochState:
    """Remove members that are not healthy, also from `ready` and `complaints`."""
    members = tuple(each for each in state.members if each.health is Health.HEALTHY)
    if members == state.members:
        return state
    seats = {each.seat for each in members}
    complaints = tuple(each for each in state.complaints if seats.issuperset(each))
    return replace(state, members=members, ready=state.ready & seats, complaints=complaints)


def _admit(rules: EpochRules, state: EpochState) -> EpochState:
    """Make waiting peers members, as long as there is room; peers on trial last."""
    room = rules.max_members - len(state.healthy)
    waiting = sorted(state.pending, key=lambda each: each[0] in state.trials)
    entering = waiting[: max(0, room)]
    if not entering:
        return state
    state = _only_healthy(state)
    fresh = [
        EpochMember(seat, peer, incarnation)
        for seat, (peer, incarnation) in enumerate(entering, state.next_seat)
    ]
    return replace(
        state,
        members=(*state.members, *fresh),
        pending=tuple(each for each in state.pending if each not in entering),
        next_seat=state.next_seat + len(fresh),
    )


def _end_warmup(rules: EpochRules, state: EpochState, now: float, draw: bytes) -> EpochState:
    if state.reason:
        return _enter(state, EpochPhase.FINISHED, now)
    cold = set(state.healthy) - state.ready
    if cold and len(state.counted) >= rules.min_members:
        state = _leave(state, cold, Health.DROPPED)
    state = _only_healthy(state)
    if len(state.counted) < rules.min_members:
        return _enter(state, EpochPhase.WAITING_FOR_MEMBERS, now)
    return _begin_round(rules, state, now, draw)


def _begin_round(rules: EpochRules, state: EpochState, now: float, draw: bytes) -> EpochState:
    seats = state.counted
    num_trainers = max(1, len(seats) - rules.auditors)
    return replace(
        state,
        phase=EpochPhase.ROUND_TRAIN,
        began=now,
        round=state.made + 1,
        round_of_epoch=state.round_of_epoch + 1,
        seed=draw,
        seats=seats,
        trial_seats=tuple(each for each in state.healthy if each not in seats),
        first_batch=state.next_batch,
        num_batches=rules.batches or num_trainers,
        commitments=(),
        proofs=(),
        complaints=(),
    )


def _end_round(rules: EpochRules, state: EpochState, now: float, draw: bytes) -> EpochState:
    parts = parts_of(rules, state)
    has_quorum = len(state.proofs) >= parts.quorum
    found = agree(state, parts)
    agreed, tried = split(state, found)
    lost = set(state.healthy) - took_part(state, parts, found)
    number = state.made + bool(agreed)
    # From here on no round is under way: a round without a result is made again.
    state = replace(
        _leave(state, lost, Health.DROPPED),
        phase=EpochPhase.COOLDOWN,
        began=now,
        round=number,
        agreed=agreed,
        tried=tried,
        taken_back=(),
    )
    if agreed:
        state = replace(
            state,
            next_batch=state.next_batch + state.num_batches,
            taken_back=state.leaving,
            leaving=(),
        )
    state = replace(state, reason=_reason(rules, state))
    if not has_quorum:
        ended = EpochEnd.QUORUM
    elif not agreed:
        ended = EpochEnd.NOTHING_AGREED
    elif state.reason:
        ended = EpochEnd.STOPPED
    elif len(state.counted) < rules.min_members:
        ended = EpochEnd.MEMBERS
    elif state.round_of_epoch >= rules.rounds:
        ended = EpochEnd.ROUNDS
    else:
        return _begin_round(rules, state, now, draw)
    return replace(state, ended=ended)


def _end_epoch(state: EpochState, now: float) -> EpochState:
    if state.reason:
        return _enter(state, EpochPhase.FINISHED, now)
    return replace(
        _only_healthy(state),
        phase=EpochPhase.WAITING_FOR_MEMBERS,
        began=now,
        epoch=state.epoch + 1,
        round_of_epoch=0,
        ready=frozenset(),
        seats=(),
        num_batches=0,
        commitments=(),
        proofs=(),
        complaints=(),
        agreed=(),
        trial_seats=(),
        tried=(),
        leaving=(),
        taken_back=(),
        checkpointed=frozenset(),
        ended=EpochEnd.NONE,
    )
