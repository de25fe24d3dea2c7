"""Results of a round between members, on a network in memory: who has what, what witnesses say, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.memory import MemoryNetwork, open_memory_network
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.transfer import FetchedBlob, Transfers
from neurogrid.p2p.wire import TensorMessage
from neurogrid.training.data.blob_files import OfferedFiles
from neurogrid.training.data.blobs import Providers, SliceCache
from neurogrid.training.data.own_slices import OwnSlices
from neurogrid.training.members.member_blobs import MemberBlobs
from neurogrid.training.members.witnessed.neighbours import Neighbours
from neurogrid.training.members.witnessed.round_exchange import ResultMissingError, RoundExchange
from neurogrid.training.optimizers.distro import Coefficients
from neurogrid.training.runs.signatures import check_signature, sign
from neurogrid.training.wire.runs import (
    AgreedResult,
    Epoch,
    EpochSeat,
    RoundCommitment,
    RoundProof,
    RoundWork,
    RunMessage,
    SampleRange,
    run_table,
)
from neurogrid.training.witnessed import Commitment, ResultPlan, WitnessProof, seat_item

RUN = bytes(range(16))
PLAN = ResultPlan(((2, 4),), 1, one_bit=True)


def result(seat: int) -> Coefficients:
    return Coefficients(torch.tensor([seat, 4 + seat]), torch.tensor([1.0, -1.0]))


class Member:
    """A host with what a member of a witnessed run has of rounds."""

    def __init__(self, host: Host, leader: str, directory: Path) -> None:
        self.host = host
        exchange = Exchange(host, run_table())
        providers, offered = Providers(), OfferedFiles()
        transfers = Transfers(exchange, providers)
        slices = SliceCache(transfers, directory / "slices", 2**20)
        providers.providers.append(offered)
        self.neighbours = Neighbours(host, exchange)
        self.rounds = RoundExchange(
            RUN,
            leader,
            host.identity,
            exchange,
            MemberBlobs(transfers, slices, OwnSlices(), offered),
            self.neighbours,
            PLAN,
            0,
            directory / "results",
        )
        self.refused: list[str] = []
        exchange.on_message(RunMessage.COMMITMENT, self._on_commitment)

    def _on_commitment(self, message: TensorMessage) -> None:
        try:
            said = RoundCommitment.decode(message.data)
            self.rounds.take_commitment(sender_of(message), said)
        except RemoteProtocolError as exc:
            self.refused.append(str(exc))

    def take(self, told: Epoch) -> None:
        self.neighbours.take(told)
        self.rounds.take(told)


class Ring:
    """Three members and their leader, in the first round of the first epoch."""

    def __init__(self, network: MemoryNetwork, leader: Host, members: list[Member]) -> None:
        self.network, self.leader, self.members = network, leader, members
        self.proofs: dict[int, RoundProof] = {}
        self.commitments: dict[int, RoundCommitment] = {}
        self.exchange = Exchange(leader, run_table())
        self.exchange.on_message(RunMessage.WITNESS, self._on_witness)
        self.exchange.on_message(RunMessage.COMMITMENT, self._on_commitment)
        self.told = Epoch(
            RUN,
            1,
            "round_train",
            round=1,
            left=60.0,
            seed=b"\7" * 32,
            seats=(0, 1, 2),
            batch_samples=1,
            members=tuple(
                EpochSeat(seat, each.host.peer_id, 1, each.host.addresses[:4])
                for seat, each in enumerate(members)
            ),
            works=tuple(
                RoundWork(seat, seat, 1, (SampleRange(0, seat, seat + 1),)) for seat in range(3)
            ),
        )

    def _on_witness(self, message: TensorMessage) -> None:
        proof = RoundProof.decode(message.data)
        self.proofs[proof.seat] = proof

    def _on_commitment(self, message: TensorMessage) -> None:
        said = RoundCommitment.decode(message.data)
        self.commitments[said.seat] = said

    def tell(self, **changes: object) -> Epoch:
        self.told = replace(self.told, number=self.told.number + 1, **changes)  # type: ignore[arg-type]
        for each in self.members:
            each.take(self.told)
        return self.told

    async def publish(self, seat: int) -> bytes:
        return await self.members[seat].rounds.publish(
            self.told, seat, self.told.works[seat], result(seat)
        )

    async def proof(self, seat: int) -> WitnessProof:
        with trio.fail_after(60):
            while seat not in self.proofs:
                await trio.sleep(0.01)
        said = self.proofs[seat]
        proof = WitnessProof(
            seat, said.epoch, said.round, said.participants, said.results, said.root
        )
        peer = self.members[seat].host.peer_id
        check_signature(peer, said.signature, proof.signed_bytes(RUN), "a proof")
        return proof

    def has(self, proof: WitnessProof, seat: int) -> bool:
        said = self.commitments[seat]
        commitment = Commitment(seat, 0, 1, said.first_batch, said.num_batches, said.result)
        heard = seat_item(seat) in proof.participants_filter(self.told.seed)
        assert heard == (commitment.digest() in proof.results_filter(self.told.seed))
        return heard


@asynccontextmanager
async def ring(directory: Path) -> AsyncIterator[Ring]:
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_memory_network())
        leader, *hosts = [await stack.enter_async_context(network.open_host()) for _ in range(4)]
        members = [Member(h, leader.peer_id, directory / str(n)) for n, h in enumerate(hosts)]
        found = Ring(network, leader, members)
        for each in members:
            await each.host.connect(leader.addresses[0])
        nursery = await stack.enter_async_context(trio.open_nursery())
        for each in members:
            nursery.start_soon(each.rounds.run)
            nursery.start_soon(each.neighbours.run)
        found.tell()
        with trio.fail_after(60):
            while not all(len(each.neighbours.peers) == 2 for each in members):
                await trio.sleep(0.01)
        yield found
        nursery.cancel_scope.cancel()


async def test_witnesses_say_what_they_have_once_they_have_all(tmp_path: Path) -> None:
    async with ring(tmp_path) as all_:
        await all_.publish(0)
        await all_.publish(1)
        assert not all_.proofs
        await all_.publish(2)
        for seat in range(3):
            proof = await all_.proof(seat)
            assert all(all_.has(proof, other) for other in range(3))


async def test_a_witness_does_not_wait_for_those_that_are_lost(tmp_path: Path) -> None:
    async with ring(tmp_path) as all_:
        for seat in (0, 1):
            await all_.publish(seat)
        lost = replace(all_.told.members[2], health="dropped")
        all_.tell(members=(*all_.told.members[:2], lost))
        await all_.proof(0)
        assert all_.commitments.keys() == {0, 1}


async def test_when_time_is_over_a_witness_says_what_it_has(tmp_path: Path) -> None:
    async with ring(tmp_path) as all_:
        blob_id = await all_.publish(0)
        with trio.fail_after(60):
            while not all_.members[1].rounds.holds(blob_id):
                await trio.sleep(0.01)
        all_.tell(phase="round_witness", left=5.0)
        proof = await all_.proof(1)
        assert all_.has(proof, 0)
        assert seat_item(2) not in proof.participants_filter(all_.told.seed)


async def test_a_result_that_is_none_is_had_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ring(tmp_path) as all_:
        garbage = all_.members[0].rounds
        monkeypatch.setattr(garbage, "_encode", lambda coefficients: b"\xff" * PLAN.num_bytes)
        for seat in range(3):
            await all_.publish(seat)
        await trio.sleep(0.1)
        all_.tell(phase="round_witness", left=2.0)
        proof = await all_.proof(1)
        assert not all_.has(proof, 0)
        assert all_.has(proof, 2)


async def test_what_is_agreed_comes_from_whoever_has_it(tmp_path: Path) -> None:
    """Its member is gone, and one that was not there gets it from another one."""
    async with ring(tmp_path) as all_:
        first, second, third = all_.members
        all_.network.cut(first.host, third.host)
        blob_id = await all_.publish(0)
        with trio.fail_after(60):
            while not second.rounds.holds(blob_id):
                await trio.sleep(0.01)
        assert not third.rounds.holds(blob_id)
        agreed = (AgreedResult(0, 0, 1, blob_id),)
        (found,) = await third.rounds.results_of(agreed, all_.told, 60.0)
        assert found.positions.tolist() == [0, 4]
        missing = (AgreedResult(1, 1, 1, bytes(32)),)
        with pytest.raises(ResultMissingError, match=r"the result of seat 1, .* within 0\.2 s"):
            await third.rounds.results_of(missing, all_.told, 0.2)


async def test_what_is_said_in_anothers_name_is_refused(tmp_path: Path) -> None:
    async with ring(tmp_path) as all_:
        first, second, _ = all_.members
        commitment = Commitment(0, 0, 1, 0, 1, bytes(32))
        said = RoundCommitment(RUN, 0, 0, 1, 0, 1, bytes(32))
        others = sign(second.host.identity, commitment.signed_bytes(RUN))
        own = sign(first.host.identity, commitment.signed_bytes(RUN))
        of_run = sign(first.host.identity, commitment.signed_bytes(bytes(16)))
        sender = second.host.peer_id
        for signature in (others, of_run, bytes(64)):
            with pytest.raises(RemoteProtocolError, match="a commitment is not signed by"):
                second.rounds.take_commitment(sender, replace(said, signature=signature))
        with pytest.raises(RemoteProtocolError, match="seat 7, where nobody sits"):
            second.rounds.take_commitment(sender, replace(said, seat=7, signature=own))
        moved = Commitment(0, 0, 1, 1, 1, bytes(32))
        signature = sign(first.host.identity, moved.signed_bytes(RUN))
        with pytest.raises(RemoteProtocolError, match="batches that are not its own"):
            second.rounds.take_commitment(sender, replace(said, first_batch=1, signature=signature))
        # Of another run, or of a round before: nothing becomes of it. It may be handed on by anybody.
        second.rounds.take_commitment(sender, replace(said, run=bytes(16)))
        second.rounds.take_commitment(sender, replace(said, signature=own))


async def test_a_commitment_may_come_before_its_round(tmp_path: Path) -> None:
    async with ring(tmp_path) as all_:
        for each in all_.members[:2]:
            each.take(replace(all_.told, number=9, round=2))
        early = replace(all_.told, round=2)
        await all_.members[0].rounds.publish(early, 0, early.works[0], result(0))
        await trio.sleep(0.1)
        all_.members[2].take(replace(all_.told, number=9, round=2))
        with trio.fail_after(60):
            while not all_.members[2].rounds._rounds[-1].had:
                await trio.sleep(0.01)


async def test_a_member_without_batches_says_that_it_is_there(tmp_path: Path) -> None:
    async with ring(tmp_path) as all_:
        all_.members[0].rounds._rounds.clear()
        all_.told = replace(all_.told, works=all_.told.works[:2], round=2)
        all_.tell()
        for seat in (0, 1):
            await all_.publish(seat)
        await trio.sleep(0.05)
        assert not all_.proofs
        assert await all_.members[2].rounds.publish(all_.told, 2, None, None) == bytes(32)
        proof = await all_.proof(0)
        assert seat_item(2) in proof.participants_filter(all_.told.seed)


async def test_what_came_when_its_round_was_over_is_forgotten(tmp_path: Path) -> None:
    """A member that is behind gets what was agreed long ago: it applies that, and keeps it for nobody."""
    async with ring(tmp_path) as all_:
        first, _, third = all_.members
        blob_id = await all_.publish(0)
        agreed = (AgreedResult(0, 0, 1, blob_id),)
        third.take(replace(all_.told, number=9, round=2, step=1))
        third.take(replace(all_.told, number=10, round=3, step=2))
        (found,) = await third.rounds.results_of(agreed, all_.told, 60.0)
        assert found.positions.tolist() == [0, 4]
        third.take(replace(all_.told, number=11, round=4, step=3))
        assert not third.rounds.holds(blob_id)
        assert first.rounds.holds(blob_id)
        assert not list((tmp_path / "2" / "results").iterdir())


async def test_results_that_a_round_takes_away_meanwhile_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two is here and the other comes: that the next rounds begin does not take the first away."""
    async with ring(tmp_path) as all_:
        third = all_.members[2]
        gate, transfers = trio.Event(), third.rounds._blobs.transfers
        fetch_blob = transfers.fetch_blob

        async def fetch_late(peers: list[str], blob_id: bytes, **how: Any) -> FetchedBlob:
            if blob_id != first:
                await gate.wait()
            return await fetch_blob(peers, blob_id, **how)

        monkeypatch.setattr(transfers, "fetch_blob", fetch_late)
        first = await all_.publish(0)
        with trio.fail_after(60):
            while not third.rounds.holds(first):
                await trio.sleep(0.01)
        second = await all_.publish(1)
        agreed = (AgreedResult(0, 0, 1, first), AgreedResult(1, 1, 1, second))
        found: list[Coefficients] = []

        async def fetch() -> None:
            found.extend(await third.rounds.results_of(agreed, all_.told, 60.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch)
            await trio.sleep(0.1)
            for number in (2, 3):
                third.take(replace(all_.told, number=7 + number, round=number, step=number - 1))
            assert not third.rounds.holds(first)
            gate.set()
        assert [each.positions.tolist() for each in found] == [[0, 4], [1, 5]]


async def test_a_result_that_is_on_its_way_is_not_fetched_twice(tmp_path: Path) -> None:
    async with ring(tmp_path) as all_:
        third = all_.members[2]
        all_.network.cut(all_.members[0].host, third.host)
        blob_id = await all_.publish(0)
        with trio.fail_after(60):
            while not all_.members[1].rounds.holds(blob_id):
                await trio.sleep(0.01)
        agreed = (AgreedResult(0, 0, 1, blob_id),)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(third.rounds.results_of, agreed, all_.told, 60.0)
        assert third.rounds.received_bytes == PLAN.num_bytes
