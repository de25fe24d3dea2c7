"""A journal's epochs, gone through again: that each state follows, and that members have signed what is said of them.

What members sign is in the journal: commitments, what witnesses have, claims, and what others find about these. So it
is seen without asking anybody that nobody was put out or let in, and nothing was agreed on, by the leader's word alone.

Source: protocol_spec/training/witnessed.md, "The journal".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from neurogrid.errors import ConfigurationError, RemoteProtocolError
from neurogrid.training.checks.claims import Claim
from neurogrid.training.checks.evidence import Evidence, Finding
from neurogrid.training.checks.verdicts import open_proof, open_verdict
from neurogrid.training.runs.entries import Entry, EpochEntry, JoinedEntry, ResumedEntry
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.signatures import check_signature
from neurogrid.training.runs.witnessed_machine import begun_epochs, epoch_rules, epochs_of
from neurogrid.training.witnessed import (
    Admitted,
    Committed,
    Eject,
    EpochState,
    Event,
    Refused,
    Witnessed,
    event_of,
)

__all__ = ["fault_of_epochs"]

_Seats = tuple[dict[int, str], set[str]]
"""Peers of a round: the one on each seat, and those that counted when it began."""


def fault_of_epochs(run: RunFile | None, run_id: bytes, entries: Iterable[Entry]) -> str:
    """The first fault of the epochs of a journal, as text; empty if there is none.

    Args:
        run: the run file. None where it is not there: then only what members have signed is checked, by the seats that
            the journal gives them.
        run_id: 16 bytes.
    """
    known = list(entries)
    if run is None:
        return _fault_of_signatures(run_id, known)
    told = (each for each in known if isinstance(each, EpochEntry))
    before, rounds = begun_epochs(), dict[tuple[int, int], _Seats]()
    try:
        for state, entry in _with_entries(run, known):
            if entry is not None:
                for event in map(event_of, next(told).events):
                    _check(run_id, before, rounds, event)
            if state.has_round:
                members = {each.seat: each.peer for each in state.members}
                counted = {members[seat] for seat in state.seats if seat in members}
                rounds[state.epoch, state.round] = members, counted
            before = state
    except (ConfigurationError, RemoteProtocolError, ValueError) as exc:
        return str(exc)
    return ""


def _fault_of_signatures(run_id: bytes, entries: Iterable[Entry]) -> str:
    # A seat is never given again: whoever had it once has it in all that is said of it.
    seats: dict[int, str] = {}
    try:
        for entry in entries:
            if isinstance(entry, JoinedEntry):
                seats[entry.seat] = entry.peer
            for event in map(event_of, entry.events if isinstance(entry, EpochEntry) else ()):
                _check_by_seats(run_id, seats, event)
    except (RemoteProtocolError, ValueError) as exc:
        return str(exc)
    return ""


def _check_by_seats(run_id: bytes, seats: dict[int, str], event: Event) -> None:
    """Raises ValueError or RemoteProtocolError where an event says what nobody has signed."""
    match event:
        case Committed(said, signature) if said.seat in seats:
            what = f"what seat {said.seat} says in round {said.round}"
            check_signature(seats[said.seat], signature, said.signed_bytes(run_id), what)
        case Witnessed(proof, signature) if proof.seat in seats:
            what = f"what seat {proof.seat} says in round {proof.round}"
            check_signature(seats[proof.seat], signature, proof.signed_bytes(run_id), what)
        case Eject(seat, evidence, peer) if peer or seat in seats:
            _check_named(run_id, evidence, peer or seats[seat], lambda claim: set(seats.values()))
        case Refused(peer, _, evidence) if evidence:
            _check_named(run_id, evidence, peer, lambda claim: set(seats.values()))
        case Admitted(peer, evidence):
            claim, findings = open_proof(evidence, peer)
            if claim.run != run_id or seats.get(claim.seat) != peer:
                raise ValueError(f"{peer} is admitted by a claim that is none of this run")
            if strangers := findings.keys() - set(seats.values()):
                raise ValueError(f"{peer} is admitted by {min(strangers)}, who was no member")


def _with_entries(
    run: RunFile, entries: list[Entry]
) -> Iterable[tuple[EpochState, EpochEntry | None]]:
    ours = [each for each in entries if isinstance(each, EpochEntry | ResumedEntry)]
    for state, entry in zip(epochs_of(epoch_rules(run), ours), ours, strict=True):
        yield state, entry if isinstance(entry, EpochEntry) else None


def _check(
    run_id: bytes,
    before: EpochState,
    rounds: dict[tuple[int, int], _Seats],
    event: Event,
) -> None:
    """Raises ValueError or RemoteProtocolError where an event says what nobody has signed."""
    match event:
        case Committed(said, signature) if before.member(said.seat) is not None:
            _check_signed(before, said.seat, signature, said.signed_bytes(run_id))
        case Witnessed(proof, signature) if before.member(proof.seat) is not None:
            _check_signed(before, proof.seat, signature, proof.signed_bytes(run_id))
        case Eject(seat, evidence, peer):
            member = before.member(seat)
            if peer or member is not None:
                named = peer or (member.peer if member is not None else "")
                _check_named(run_id, evidence, named, lambda claim: _seats_of(rounds, claim)[1])
        case Refused(peer, _, evidence) if evidence:
            _check_named(run_id, evidence, peer, lambda claim: _seats_of(rounds, claim)[1])
        case Admitted(peer, evidence):
            _check_admitted(run_id, rounds, peer, evidence)


def _check_signed(state: EpochState, seat: int, signature: bytes, data: bytes) -> None:
    member = state.member(seat)
    assert member is not None
    check_signature(member.peer, signature, data, f"what seat {seat} says in round {state.round}")


def _seats_of(rounds: dict[tuple[int, int], _Seats], claim: Claim) -> _Seats:
    return rounds.get((claim.round >> 32, claim.round & 0xFFFFFFFF), ({}, set()))


def _check_named(
    run_id: bytes, evidence: bytes, peer: str, judges: Callable[[Claim], set[str]]
) -> None:
    """See that a peer is put out by what others have signed.

    Args:
        judges: peers that may have judged a claim.
    """
    if not evidence:
        raise ValueError(f"{peer} is put out, and there is no evidence")
    found, findings = open_verdict(evidence)
    if found.claim.run != run_id:
        raise ValueError(f"{peer} is put out by evidence of another run")
    said = set(findings) if found.finding is None else {found.accuser, *findings}
    if strangers := said - judges(found.claim):
        raise ValueError(f"{peer} is put out by {min(strangers)}, who was no member that counted")
    if peer not in _named_by(found, findings):
        raise ValueError(f"{peer} is put out by evidence that is not against it")


def _named_by(evidence: Evidence, findings: Mapping[str, Finding]) -> set[str]:
    """Peers that evidence is against: of a result, by what most have found, and never by the word of one."""
    if evidence.finding is None:
        return {evidence.accused}
    said = {**findings, evidence.accuser: evidence.finding}
    num_hold = sum(each.holds for each in said.values())
    num_confirm = len(said) - num_hold
    if max(num_hold, num_confirm) < 2 or num_hold == num_confirm:
        return set()
    if num_confirm > num_hold:
        return {evidence.accused, *(peer for peer, each in said.items() if each.holds)}
    return {peer for peer, each in said.items() if each.accuses}


def _check_admitted(
    run_id: bytes,
    rounds: dict[tuple[int, int], _Seats],
    peer: str,
    evidence: bytes,
) -> None:
    claim, findings = open_proof(evidence, peer)
    seats, counted = _seats_of(rounds, claim)
    if claim.run != run_id or seats.get(claim.seat) != peer:
        raise ValueError(f"{peer} is admitted by a claim that is none of this run")
    if strangers := findings.keys() - counted:
        raise ValueError(f"{peer} is admitted by {min(strangers)}, who was no member that counted")
