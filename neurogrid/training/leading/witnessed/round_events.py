"""Events of a witnessed run between two ticks, in order: what members sign is checked before it is one.

Source: protocol_spec/training/witnessed.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import TensorMessage
from neurogrid.training.leading.chains.members import ChainMembers
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.runs.signatures import check_signature
from neurogrid.training.runs.witnessed_machine import WitnessedMachine
from neurogrid.training.wire.runs import RoundCommitment, RoundHealth, RoundProof, RunMessage
from neurogrid.training.witnessed import (
    Commitment,
    Committed,
    EpochMember,
    Event,
    Unhealthy,
    Witnessed,
    WitnessProof,
)

__all__ = ["RoundEvents"]

# Events that wait for the next tick: a round has two for each member, and what comes again counts for nothing.
_MAX_EVENTS: Final = 2048
# Pairs of a peer and what it says in another's name, of which it is said once.
_MAX_SAID: Final = 1024


class RoundEvents:
    """Events that wait for the next tick.

    Args:
        run_id: 16 bytes.
        exchange: of runs.
        machine: that they are for.
        members: workers that are or were here.
        progress: is told of whoever speaks in another's name.

    Attributes:
        on_claim: is given a commitment to a result before it is an event, with its member; raises RemoteProtocolError
            where its claim does not count. None in a run without audits.
    """

    def __init__(
        self,
        run_id: bytes,
        exchange: Exchange,
        machine: WitnessedMachine,
        members: ChainMembers,
        progress: LeaderProgress,
    ) -> None:
        self._run_id, self._machine = run_id, machine
        self._members, self._progress = members, progress
        self._events: list[Event] = []
        self._said: set[tuple[str, str]] = set()
        self.on_claim: Callable[[RoundCommitment, EpochMember], None] | None = None
        for code, handler in (
            (RunMessage.COMMITMENT, self._on_commitment),
            (RunMessage.WITNESS, self._on_witness),
            (RunMessage.HEALTH, self._on_health),
        ):
            exchange.on_message(code, handler)

    def add(self, event: Event) -> None:
        """Something has happened; once is enough."""
        if len(self._events) < 2 * _MAX_EVENTS and event not in self._events:
            self._events.append(event)

    def take(self) -> list[Event]:
        """The first of what has happened, which is taken off."""
        events = self._events[:_MAX_EVENTS]
        del self._events[:_MAX_EVENTS]
        return events

    def _on_commitment(self, message: TensorMessage) -> None:
        said, peer = RoundCommitment.decode(message.data), sender_of(message)
        self._members.heard(message)
        if not self._is_of_round(said):
            return
        commitment = Commitment(
            said.seat, said.epoch, said.round, said.first_batch, said.num_batches, said.result
        )
        signed = commitment.signed_bytes(self._run_id)
        self._check(said.seat, said.signature, signed, peer, "a commitment")
        told = [e.commitment for e in self._events if isinstance(e, Committed)]
        told = [each for each in told if each.seat == said.seat]
        # Two of them show by themselves that a seat lies: a third takes room of what others say once.
        is_more = commitment in told or len(told) >= 2
        if is_more or said.seat not in self._machine.epoch.healthy:
            return
        member = self._machine.epoch.member(said.seat)
        known = next((c for c in self._machine.epoch.commitments if c.seat == said.seat), None)
        is_other = known is not None and known != commitment  # which shows by itself
        is_claimed = bool(said.num_batches) and member is not None and not is_other
        if self.on_claim is not None and is_claimed and member is not None:
            try:
                self.on_claim(said, member)
            finally:
                self._members.changed.set()
        if commitment not in self._machine.epoch.commitments:
            self.add(Committed(commitment, said.signature))
            self._members.changed.set()

    def _on_witness(self, message: TensorMessage) -> None:
        said, peer = RoundProof.decode(message.data), sender_of(message)
        self._members.heard(message)
        if not self._is_of_round(said):
            return
        proof = WitnessProof(
            said.seat, said.epoch, said.round, said.participants, said.results, said.root
        )
        signed = proof.signed_bytes(self._run_id)
        self._check(said.seat, said.signature, signed, peer, "what a witness has")
        told = [e.proof.seat for e in self._events if isinstance(e, Witnessed)]
        told += [each.seat for each in self._machine.epoch.proofs]
        # The first one counts.
        if said.seat not in told and said.seat in self._machine.epoch.healthy:
            self.add(Witnessed(proof, said.signature))
            self._members.changed.set()

    def _on_health(self, message: TensorMessage) -> None:
        said, peer = RoundHealth.decode(message.data), sender_of(message)
        self._members.heard(message)
        member = self._machine.epoch.member(said.seat)
        epoch = self._machine.epoch
        of_now = (said.run, said.epoch, said.round) == (self._run_id, epoch.epoch, epoch.round)
        # It is said again each second, and takes no room of what is said once.
        waits = any(isinstance(e, Unhealthy) and e.by_seat == said.seat for e in self._events)
        if of_now and not waits and member is not None and member.peer == peer:
            self.add(Unhealthy(said.seat, said.seats[:128], said.epoch, said.round))

    def _is_of_round(self, said: RoundCommitment | RoundProof) -> bool:
        epoch = self._machine.epoch
        of_round = (said.epoch, said.round) == (epoch.epoch, epoch.round)
        return said.run == self._run_id and epoch.has_round and of_round

    def _check(self, seat: int, signature: bytes, data: bytes, peer: str, what: str) -> None:
        """Raises RemoteProtocolError where something is not signed by the member on a seat."""
        member = self._machine.epoch.member(seat)
        if member is None:
            raise RemoteProtocolError(f"{what} of seat {seat}, where nobody sits")
        try:
            check_signature(member.peer, signature, data, what)
        except RemoteProtocolError:
            if (peer, what) not in self._said and len(self._said) < _MAX_SAID:
                self._said.add((peer, what))
                self._progress.warn(
                    f"{self._members.called(peer)} sends {what} that is not signed by seat {seat}: it is refused"
                )
            raise
