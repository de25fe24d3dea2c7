"""Results of the rounds of an epoch, as one member has them: its own, those of others, and what a witness says of them.

    commitment of a member -> its blob, from it or from whoever has it by now -> coefficients -> filters of a witness

A commitment is taken once it is signed by the member whose it is, and of the work that the leader has given that one. A
blob of another length is not fetched, and one that does not read as a result is had by nobody. What is here is offered
to others. What a result is applied to, and when, is not known here.

Source: protocol_spec/training/witnessed.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
import trio

from neurogrid.errors import (
    NeuroGridError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.wire import TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.members.member_blobs import MemberBlobs
from neurogrid.training.members.witnessed.auditing import Auditing
from neurogrid.training.members.witnessed.neighbours import Neighbours
from neurogrid.training.optimizers.distro import Coefficients
from neurogrid.training.runs.signatures import check_signature, sign
from neurogrid.training.wire.runs import (
    MAX_EPOCH_SEATS,
    AgreedResult,
    Epoch,
    RoundCommitment,
    RoundHealth,
    RoundProof,
    RoundWork,
    RunMessage,
)
from neurogrid.training.witnessed import Commitment, ResultPlan, WitnessProof, witnesses

__all__ = ["ResultMissingError", "RoundExchange"]

logger = logging.getLogger(__name__)

# Seconds between two times that the same thing is said or asked for.
_RETRY: Final = 0.5
_HEARTBEAT: Final = 1.0
# Of what a witness has when the leader waits no more for others: it waits for what is on its way, but not longer.
_SLACK: Final = 1.0
# Rounds whose results are kept: the one under way, and the one that is applied meanwhile.
_NUM_KEPT: Final = 2


class ResultMissingError(NeuroGridError):
    """A result that all apply is not to be had here; the text says whose."""


@dataclass
class _Round:
    """A round, as this member has it.

    Attributes:
        told: what the leader said of it last.
        commitments: that were taken, by seat.
        had: seats whose results are here.
        refused: seats whose results are none.
        passed_on: seats of which the leader was told that they have committed to two results.
        proof: what this member says as a witness; None while it has not.
    """

    told: Epoch
    commitments: dict[int, Commitment] = field(default_factory=dict)
    had: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    passed_on: set[int] = field(default_factory=set)
    proof: RoundProof | None = None
    witness_since: float | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.told.epoch, self.told.round

    @property
    def works(self) -> dict[int, RoundWork]:
        return {work.seat: work for work in self.told.works}


class RoundExchange:
    """Results of rounds. Keep `run` running.

    Args:
        run_id: 16 bytes.
        leader: its peer id.
        identity: of this peer, which signs.
        exchange: of runs.
        blobs: what comes from other peers, and what they may fetch.
        neighbours: the other members.
        plan: of results.
        num_witnesses: of a round; 0 for all members.
        directory: for results.
        auditing: claims of results, where a run has audits.

    Attributes:
        received_bytes, sent_bytes: of results, those that others were told of counted once for each.
    """

    def __init__(
        self,
        run_id: bytes,
        leader: str,
        identity: Identity,
        exchange: Exchange,
        blobs: MemberBlobs,
        neighbours: Neighbours,
        plan: ResultPlan,
        num_witnesses: int,
        directory: Path,
        auditing: Auditing | None = None,
    ) -> None:
        self._auditing = auditing
        self._run_id, self._leader, self._identity = run_id, leader, identity
        self._exchange, self._blobs, self._neighbours = exchange, blobs, neighbours
        self._plan, self._num_witnesses, self._directory = plan, num_witnesses, directory
        self._rounds: list[_Round] = []
        # Of rounds that this member has yet to hear of, the last of each peer.
        self._early: dict[str, RoundCommitment] = {}
        # Of the last round, by seat, while this member has yet to come to the weights that it begins with.
        self._waiting: dict[int, tuple[str, RoundCommitment]] = {}
        self._results: dict[bytes, Coefficients] = {}
        self._files: dict[bytes, Path] = {}
        # Those that are on their way.
        self._fetching: dict[bytes, trio.Lock] = {}
        self._changed = RenewedEvent()
        self._nursery: trio.Nursery | None = None
        self.received_bytes = self.sent_bytes = 0

    # What is known of rounds

    def take(self, told: Epoch) -> None:
        """The leader says where the run is."""
        current = self._rounds[-1] if self._rounds else None
        if current is not None and current.key == (told.epoch, told.round):
            current.told = told
        elif told.phase in ("round_train", "round_witness"):
            current = _Round(told)
            self._rounds.append(current)
            del self._rounds[:-_NUM_KEPT]
            self._forget()
            early, self._early, self._waiting = self._early, {}, {}
            for sender, each in early.items():
                with suppress(RemoteProtocolError):
                    self.take_commitment(sender, each)
        if current is not None and told.phase == "round_witness" and current.witness_since is None:
            current.witness_since = trio.current_time()
        self._changed.set()

    def take_commitment(self, sender: str, said: RoundCommitment) -> None:
        """A member commits itself to a result.

        Raises:
            RemoteProtocolError: it is not signed by that member, or of no work that it has.
        """
        if said.run != self._run_id or not self._rounds:
            return
        round_ = self._rounds[-1]
        if (said.epoch, said.round) > round_.key:
            if len(self._early) < MAX_EPOCH_SEATS or sender in self._early:
                self._early[sender] = said
            return
        if (said.epoch, said.round) != round_.key:
            return
        known = round_.commitments.get(said.seat)
        if known is not None and (known == commitment_of(said) or said.seat in round_.passed_on):
            return
        member = next((each for each in round_.told.members if each.seat == said.seat), None)
        if member is None:
            raise RemoteProtocolError(f"a commitment of seat {said.seat}, where nobody sits")
        commitment = commitment_of(said)
        signed = commitment.signed_bytes(self._run_id)
        check_signature(member.peer, said.signature, signed, "a commitment")
        if known is not None:
            # Two of them, each signed: the leader has one, and needs the other.
            round_.passed_on.add(said.seat)
            if self._nursery is not None:
                message = TensorMessage(RunMessage.COMMITMENT, data=said.encode())
                self._nursery.start_soon(self._tell, round_, self._leader, message, 0)
            raise RemoteProtocolError(f"seat {said.seat} has committed to two results of a round")
        work = round_.works.get(said.seat)
        wanted = (work.first_batch, work.num_batches) if work is not None else (0, 0)
        if (said.first_batch, said.num_batches) != wanted:
            raise RemoteProtocolError(
                f"seat {said.seat} commits to batches that are not its own: {said.first_batch}, {said.num_batches}"
            )
        if self._auditing is not None and work is not None:
            if not self._auditing.is_at(round_.told):
                self._waiting[said.seat] = sender, said
                return
            self._auditing.take_claim(round_.told, member, said)
        round_.commitments[said.seat] = commitment
        if said.num_batches and said.result not in self._results and self._nursery is not None:
            self._nursery.start_soon(self._fetch, round_, said.seat, member.peer, said.result)
        elif said.result in self._results:
            round_.had.add(said.seat)
        self._changed.set()

    def take_waiting(self) -> None:
        """This member has the weights of the round, and can see what commitments are worth."""
        waiting, self._waiting = self._waiting, {}
        for sender, said in waiting.values():
            with suppress(RemoteProtocolError):
                self.take_commitment(sender, said)

    def holds(self, result: bytes) -> bool:
        """Whether a result is here."""
        return result in self._results

    # What this member has come to

    async def publish(
        self, told: Epoch, seat: int, work: RoundWork | None, coefficients: Coefficients | None
    ) -> bytes:
        """Commit to a result, and offer it; of a member without work that it is there.

        Args:
            told: of the round.

        Returns:
            The blob that it is; zeros where there is none.
        """
        blob_id, num_bytes = bytes(32), 0
        if coefficients is not None:
            data = await trio.to_thread.run_sync(self._encode, coefficients)
            num_bytes = len(data)
            path = self._directory / f"{told.epoch}-{told.round}-{seat}.own"
            await trio.to_thread.run_sync(_write, path, data)
            blob_id = await self._blobs.offered.offer(path)
            self._results[blob_id], self._files[blob_id] = coefficients, path
        commitment = Commitment(
            seat,
            told.epoch,
            told.round,
            work.first_batch if work is not None else 0,
            work.num_batches if work is not None else 0,
            blob_id,
        )
        said = RoundCommitment(
            self._run_id,
            seat,
            told.epoch,
            told.round,
            commitment.first_batch,
            commitment.num_batches,
            blob_id,
            sign(self._identity, commitment.signed_bytes(self._run_id)),
            self._auditing.sign(told, blob_id) if self._auditing and work is not None else b"",
        )
        round_ = next((each for each in self._rounds if each.key == (told.epoch, told.round)), None)
        if round_ is None or self._nursery is None:
            return blob_id
        round_.commitments[seat] = commitment
        if commitment.num_batches:
            round_.had.add(seat)
        message = TensorMessage(RunMessage.COMMITMENT, data=said.encode())
        self._nursery.start_soon(self._tell, round_, self._leader, message, 0)
        for member in round_.told.members:
            if member.seat != seat and member.health == "healthy":
                self._nursery.start_soon(self._tell, round_, member.peer, message, num_bytes)
        self._changed.set()
        return blob_id

    async def results_of(
        self, agreed: Sequence[AgreedResult], told: Epoch, timeout: float
    ) -> list[Coefficients]:
        """Results that all apply, in their order; those that are not here are fetched from peers that have them.

        Raises:
            ResultMissingError: nobody gave one in time.
        """
        peers = {each.seat: each.peer for each in told.members}
        # Of rounds before the last ones nothing is kept for anybody else.
        found = {each.result: self._results.get(each.result) for each in agreed}
        with trio.move_on_after(timeout):
            async with trio.open_nursery() as nursery:
                for each in agreed:
                    if found[each.result] is None:
                        peer = peers.get(each.seat)
                        nursery.start_soon(self._fetch_now, each, peer, found)
        results = []
        for each in agreed:
            result = found[each.result]
            if result is None:
                raise ResultMissingError(
                    f"the result of seat {each.seat}, which all apply, is not to be had within {timeout:g} s"
                )
            results.append(result)
        return results

    # Tasks

    async def run(self) -> None:
        """Fetch results, bear witness, and say who cannot be reached."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._bear_witness)
            await self._tell_health()

    async def _tell(self, round_: _Round, peer: str, message: TensorMessage, size: int) -> None:
        """Tell one peer something of a round, until that has heard it or the round is over."""
        while round_ in self._rounds:
            try:
                await self._exchange.send(peer, message)
                self.sent_bytes += size
                return
            except TransportError as exc:
                logger.debug("%s cannot be told: %s", peer, exc)
            await trio.sleep(_RETRY)

    async def _fetch(self, round_: _Round, seat: int, peer: str, result: bytes) -> None:
        """Get a result that a member has committed itself to, as long as that is of use."""
        while round_ in self._rounds:
            if await self._fetch_once(result, seat, peer):
                round_.had.add(seat)
                self._changed.set()
                return
            if seat in round_.refused:
                return
            await trio.sleep(_RETRY)

    async def _fetch_now(
        self, agreed: AgreedResult, peer: str | None, found: dict[bytes, Coefficients | None]
    ) -> None:
        while not await self._fetch_once(agreed.result, agreed.seat, peer):
            await trio.sleep(_RETRY)
        found[agreed.result] = self._results[agreed.result]

    async def _fetch_once(self, result: bytes, seat: int, peer: str | None) -> bool:
        """Try to get a result from its member, or whoever else has it; whether it is here."""
        # One at a time: a second one would fetch it again, and write into the file that is being given.
        lock = self._fetching.setdefault(result, trio.Lock())
        async with lock:
            try:
                return await self._fetch_alone(result, seat, peer)
            finally:
                if not lock.statistics().tasks_waiting:
                    self._fetching.pop(result, None)

    async def _fetch_alone(self, result: bytes, seat: int, peer: str | None) -> bool:
        if result in self._results:
            return True
        others = self._neighbours.peers
        peers = [*(each for each in others if each == peer), *(e for e in others if e != peer)]
        if not peers:
            return False
        most = self._plan.num_bytes
        try:
            fetched = await self._blobs.transfers.fetch_blob(peers, result, max_bytes=most)
        except NeuroGridError as exc:
            logger.debug("the result of seat %d is not to be had: %s", seat, exc)
            return False
        data = bytes(fetched.blob.data)
        try:
            coefficients = await trio.to_thread.run_sync(self._decode, data)
        except ValueError as exc:
            for round_ in self._rounds:
                mine = round_.commitments.get(seat)
                if mine is not None and mine.result == result and seat not in round_.refused:
                    round_.refused.add(seat)
                    logger.warning(
                        "what seat %d has committed itself to is no result: %s", seat, exc
                    )
            return False
        self.received_bytes += len(data)
        path = self._directory / f"{result.hex()}.result"
        await trio.to_thread.run_sync(_write, path, data)
        await self._blobs.offered.offer(path)
        self._results[result], self._files[result] = coefficients, path
        return True

    async def _bear_witness(self) -> None:
        """Say what is here, where this member is a witness: when all is, or the leader waits no more."""
        sent_at = -math.inf
        while True:
            changed, pause = self._changed.next, _HEARTBEAT
            round_ = self._rounds[-1] if self._rounds else None
            if round_ is not None and (seat := self._seat_as_witness(round_)) is not None:
                now = trio.current_time()
                if round_.proof is None and (pause := self._until_witness(round_)) <= 0:
                    round_.proof, sent_at = self._proof(round_, seat), -math.inf
                if round_.proof is not None and now - sent_at >= _HEARTBEAT:
                    sent_at, data = now, round_.proof.encode()
                    with suppress(TransportError):
                        await self._exchange.send(
                            self._leader, TensorMessage(RunMessage.WITNESS, data=data)
                        )
                if round_.proof is not None:
                    pause = _HEARTBEAT
            with trio.move_on_after(min(max(pause, 0.05), _HEARTBEAT)):
                await changed.wait()

    def _seat_as_witness(self, round_: _Round) -> int | None:
        told = round_.told
        if told.phase not in ("round_train", "round_witness"):
            return None
        # Those that were members when the round began: that is what its seed has chosen of.
        seats = told.seats
        own = next((m.seat for m in told.members if m.peer == self._identity.peer_id), None)
        if own is None or own not in witnesses(told.seed, seats, self._num_witnesses):
            return None
        return own

    def _until_witness(self, round_: _Round) -> float:
        """Seconds until a witness says what it has; 0 where it has all that there will be."""
        told = round_.told
        healthy = {each.seat for each in told.members if each.health == "healthy"}
        wanted = {work.seat for work in told.works} & healthy
        others = healthy & set(told.seats) - {work.seat for work in told.works}
        if wanted <= round_.had and others <= round_.commitments.keys():
            return 0.0
        if round_.witness_since is None:
            return _HEARTBEAT
        slack = min(_SLACK, told.left / 2) if round_.commitments.keys() - round_.had else 0.0
        return round_.witness_since + slack - trio.current_time()

    def _proof(self, round_: _Round, seat: int) -> RoundProof:
        told = round_.told
        had = [
            each
            for number, each in round_.commitments.items()
            if number in round_.had or not each.num_batches
        ]
        proof = WitnessProof.of(seat, told.seed, told.epoch, told.round, had)
        return RoundProof(
            self._run_id,
            seat,
            told.epoch,
            told.round,
            proof.participants,
            proof.results,
            proof.root,
            sign(self._identity, proof.signed_bytes(self._run_id)),
        )

    async def _tell_health(self) -> None:
        while True:
            lost, round_ = self._neighbours.lost(), self._rounds[-1] if self._rounds else None
            own = None
            if round_ is not None:
                members = round_.told.members
                own = next((m.seat for m in members if m.peer == self._identity.peer_id), None)
            if lost and round_ is not None and own is not None:
                said = RoundHealth(self._run_id, own, *round_.key, lost)
                with suppress(TransportError):
                    await self._exchange.send(
                        self._leader, TensorMessage(RunMessage.HEALTH, data=said.encode())
                    )
            await trio.sleep(_HEARTBEAT)

    # Bytes

    def _encode(self, coefficients: Coefficients) -> bytes:
        return self._plan.encode(coefficients.positions.numpy(), coefficients.values.numpy())

    def _decode(self, data: bytes) -> Coefficients:
        positions, values = self._plan.decode(data)
        return Coefficients(torch.from_numpy(positions), torch.from_numpy(values))

    def _forget(self) -> None:
        """Results of rounds before the last ones are offered no more, nor those that came when these were over."""
        kept = {each.result for round_ in self._rounds for each in round_.commitments.values()}
        for result in self._files.keys() - kept:
            path = self._files.pop(result)
            self._results.pop(result, None)
            self._blobs.offered.withdraw(path)
            path.unlink(missing_ok=True)


def commitment_of(said: RoundCommitment) -> Commitment:
    """Convert a commitment from its message to the form that the state machine has."""
    return Commitment(
        said.seat, said.epoch, said.round, said.first_batch, said.num_batches, said.result
    )


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
