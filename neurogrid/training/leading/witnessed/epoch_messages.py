"""The Epoch that all members of a witnessed run are told: made of where the run stands. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from neurogrid.training.leading.witnessed.common_weights import CommonWeights
from neurogrid.training.runs.witnessed_machine import WitnessedMachine
from neurogrid.training.wire.runs import AgreedResult, Epoch, EpochSeat, RoundWork
from neurogrid.training.witnessed import Commitment, EpochPhase, parts_of

__all__ = ["epoch_message", "round_works"]

_MAX_ADDRESSES = 4


def epoch_message(
    run: bytes,
    number: int,
    machine: WitnessedMachine,
    weights: CommonWeights,
    addresses_of: Callable[[str], Sequence[str]],
    offers: Callable[[str], bool],
    sources: Sequence[str],
    left: float,
    watched: Sequence[int] = (),
) -> Epoch:
    """Make the message that tells members where their run stands.

    Args:
        number: greater than of any before.
        addresses_of: where a member can be dialled, by its peer id.
        offers: whether a member offers the pieces of the weights.
        sources: addresses of data nodes.
        left: seconds until the phase ends at the latest; 0 where it has no end.
        watched: seats by whom the claims of the last agreed round were drawn.
    """
    state = machine.epoch
    is_cold = state.going in (EpochPhase.WAITING_FOR_MEMBERS, EpochPhase.WARMUP)
    has_pieces = is_cold and weights.round == state.made
    is_cooldown = state.going is EpochPhase.COOLDOWN
    is_drawn = state.has_round or is_cooldown
    return Epoch(
        run=run,
        number=number,
        phase=str(state.phase),
        epoch=state.epoch,
        round=state.round,
        step=state.made,
        left=max(left, 0.0),
        seed=(machine.cooldown_draw if is_cooldown else state.seed) if is_drawn else b"",
        seats=state.seats if is_drawn else (),
        batch_samples=machine.rules.batch_samples,
        members=tuple(
            EpochSeat(
                each.seat,
                each.peer,
                each.incarnation,
                tuple(addresses_of(each.peer)[:_MAX_ADDRESSES]),
                str(each.health),
                has_pieces=has_pieces and offers(each.peer),
            )
            for each in state.members
        ),
        works=round_works(machine) if state.has_round else (),
        agreed=tuple(map(_agreed, state.agreed)),
        pieces_step=weights.round if has_pieces else 0,
        pieces_digest=weights.digest if has_pieces else b"",
        names=weights.names if has_pieces else (),
        blobs=weights.blobs if has_pieces else (),
        sources=tuple(sources),
        ends=bool(state.reason),
        tried=tuple(map(_agreed, state.tried)),
        taken_back=tuple(each for pair in state.taken_back for each in pair),
        watched=tuple(watched) if is_drawn else (),
    )


def round_works(machine: WitnessedMachine) -> tuple[RoundWork, ...]:
    """Works of the round under way: for each seat that has any, its batches and the ranges of their samples."""
    found = []
    for seat, (first, number) in parts_of(machine.epoch_rules, machine.epoch).works.items():
        held = machine.state.seats.get(seat)
        ranges = tuple(each for work in (held.works if held else ()) for each in work.ranges)
        if ranges:
            found.append(RoundWork(seat, first, number, ranges))
    return tuple(found)


def _agreed(each: Commitment) -> AgreedResult:
    return AgreedResult(each.seat, each.first_batch, each.num_batches, each.result)
