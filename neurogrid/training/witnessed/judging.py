"""Judging a round by its witnesses' proofs: the members that took part, and the results that all apply. Pure.

Source: protocol_spec/training/witnessed.md, "Counting".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

from neurogrid.training.witnessed.assigning import assign
from neurogrid.training.witnessed.commitments import Commitment, WitnessProof, seat_item
from neurogrid.training.witnessed.filters import NUM_HASHES, BloomFilter
from neurogrid.training.witnessed.merkle import merkle_root
from neurogrid.training.witnessed.phases import MAX_MEMBERS, EpochRules, EpochState, Health
from neurogrid.training.witnessed.selection import committee, quorum, witnesses

__all__ = ["Parts", "agree", "is_complete", "is_plausible", "parts_of", "split", "took_part"]


@dataclass(frozen=True, slots=True)
class Parts:
    """Trainers, auditors and witnesses of a round, and the batches of each seat.

    Attributes:
        trainers: seats, in the committee's order.
        auditors: seats that compute again what trainers have.
        witnesses: seats.
        works: the first batch and the number of batches of each seat that has any, ascending by batch. Seats on trial
            have one each, after those of the round.
        quorum: witnesses that must say a thing for it to count.
    """

    trainers: tuple[int, ...]
    auditors: tuple[int, ...]
    witnesses: tuple[int, ...]
    works: Mapping[int, tuple[int, int]]
    quorum: int


def parts_of(rules: EpochRules, state: EpochState) -> Parts:
    """The `Parts` of the round under way, or of the last one."""
    return _parts(
        state.seed,
        state.seats,
        rules.auditors,
        rules.witnesses,
        state.first_batch,
        state.num_batches,
        state.trial_seats,
    )


@lru_cache(maxsize=64)
def _parts(
    seed: bytes,
    seats: tuple[int, ...],
    num_auditors: int,
    num_witnesses: int,
    first_batch: int,
    num_batches: int,
    trial_seats: tuple[int, ...],
) -> Parts:
    trainers, auditors = committee(seed, seats, num_auditors)
    chosen = witnesses(seed, seats, num_witnesses)
    works = assign(trainers, first_batch, num_batches)
    for number, seat in enumerate(trial_seats, first_batch + num_batches):
        works[seat] = number, 1
    return Parts(trainers, auditors, chosen, works, quorum(len(chosen)))


def is_plausible(state: EpochState, parts: Parts, proof: WitnessProof) -> bool:
    """Whether an honest witness of this round can have sent a proof: its filters have no bits that nothing explains."""
    if proof.results_filter(state.seed).num_set > NUM_HASHES * len(parts.works):
        return False
    heard = proof.participants_filter(state.seed)
    there = sorted((*state.seats, *state.trial_seats))
    items = [item for item in map(seat_item, there) if item in heard]
    salted = BloomFilter.of(heard.salt, items)
    return bytes(salted) == proof.participants and seat_item(proof.seat) in heard


def is_complete(state: EpochState, parts: Parts, proof: WitnessProof) -> bool:
    """Whether a witness has the results of all that are still to be waited for, as the root of its tree shows."""
    committed = {each.seat for each in state.commitments}
    waited = set(parts.works).intersection(state.healthy)
    # Most proofs are asked about while somebody still computes.
    if not waited <= committed:
        return False
    had = _had(state, proof)
    if not waited <= {each.seat for each in had.commitments}:
        return False
    return proof.root == had.root


def agree(state: EpochState, parts: Parts) -> tuple[Commitment, ...]:
    """The results that enough witnesses have, but for those of liars, in the order of their batches.

    Those of seats on trial are among them: `split` takes them apart.
    """
    counts = dict.fromkeys(state.commitments, 0)
    for proof in state.proofs:
        for commitment in _had(state, proof).commitments:
            counts[commitment] += 1
    ejected = {each.seat for each in state.members if each.health is Health.EJECTED}
    found = [
        each for each, count in counts.items() if count >= parts.quorum and each.seat not in ejected
    ]
    return tuple(sorted(found, key=lambda each: each.first_batch))


def split(
    state: EpochState, found: Collection[Commitment]
) -> tuple[tuple[Commitment, ...], tuple[Commitment, ...]]:
    """Split results that enough witnesses have into those that are applied, and those of seats on trial."""
    return (
        tuple(each for each in found if each.seat not in state.trial_seats),
        tuple(each for each in found if each.seat in state.trial_seats),
    )


def took_part(state: EpochState, parts: Parts, agreed: Collection[Commitment]) -> frozenset[int]:
    """Seats that did what they were to do in the round.

    Those are seats that enough witnesses heard of, and whose results are agreed where they had batches: of a member
    that tells the leader of another result than it gives away, witnesses do hear. Without batches it is enough to have
    committed to none, or witnessed; and where the proofs are fewer than the quorum, for all to have done either.
    """
    shown = {each.seat for each in state.commitments} | {each.seat for each in state.proofs}
    if len(state.proofs) < parts.quorum:
        return frozenset(shown)
    found = {seat for seat in shown if seat not in parts.works}
    done = {each.seat for each in agreed}
    filters = [proof.participants_filter(state.seed) for proof in state.proofs]
    for seat in (*state.seats, *state.trial_seats):
        item = seat_item(seat)
        is_heard = sum(item in each for each in filters) >= parts.quorum
        if is_heard and (seat in done or seat not in parts.works):
            found.add(seat)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Had:
    """Results that a witness has, by its filter: commitments to them, and the root of the tree over these."""

    commitments: tuple[Commitment, ...]
    root: bytes


def _had(state: EpochState, proof: WitnessProof) -> _Had:
    return _had_of(state.seed, proof, _with_batches(state.commitments))


@lru_cache(maxsize=8)
def _with_batches(
    commitments: tuple[Commitment, ...],
) -> tuple[tuple[bytes, Commitment], ...]:
    return tuple((each.digest(), each) for each in commitments if each.num_batches)


@lru_cache(maxsize=4 * MAX_MEMBERS)
def _had_of(
    seed: bytes, proof: WitnessProof, digests: tuple[tuple[bytes, Commitment], ...]
) -> _Had:
    results = proof.results_filter(seed)
    found = [(digest, each) for digest, each in digests if digest in results]
    return _Had(tuple(each for _, each in found), merkle_root(digest for digest, _ in found))
