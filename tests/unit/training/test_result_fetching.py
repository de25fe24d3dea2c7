"""Results of reductions: their digests, and how they are fetched from those that hold them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from neurogrid.errors import LocalProtocolError, PeerRefusedError
from neurogrid.p2p import TensorMessage, new_request_id
from neurogrid.p2p.memory import Link
from neurogrid.p2p.wire import ErrorCode, chunk_digest
from neurogrid.training.averaging.reductions import (
    MAX_HELD,
    Result,
    ResultUnavailableError,
    result_digest,
)
from neurogrid.training.wire.types import TrainingMessage
from tests.unit.training.reducing import (
    DEADLINE,
    Group,
    Peer,
    open_group,
    plan_of,
    reduce_all,
    vectors,
)
from tests.unit.vectors import in_turn, subject

NUM = 1000


@in_turn("training_result_digest")
def test_a_result_has_the_digest_of_the_vector(name: str, case: Any) -> None:
    digest = result_digest(
        [chunk_digest(bytes.fromhex(chunk)) for chunk in case["chunks"]],
        num_elements=case["num_elements"],
        chunk_elements=case["chunk_elements"],
        codec=case["codec"],
    )
    assert digest.hex() == case["digest"]


def test_no_two_of_the_vectors_have_one_digest() -> None:
    digests = [case["digest"] for case in subject("training_result_digest")["cases"]]
    assert len(set(digests)) == len(digests)


async def hold_everywhere(group: Group, codec: str = "f32", *, holders: int = 3) -> Result:
    """A result that the first peers have and hold."""
    plan = plan_of(group.ids[:holders], NUM, chunk_elements=50, result_codec=codec)
    outcomes = await reduce_all(group.peers[:holders], plan, vectors(holders, NUM))
    for peer, outcome in zip(group.peers, outcomes, strict=False):
        assert outcome.result is not None
        peer.reductions.hold(outcome.result)
    assert outcomes[0].result is not None
    return outcomes[0].result


async def fetch(
    peer: Peer, result: Result, holders: list[str], *, timeout: float = DEADLINE
) -> Result:
    return await peer.reductions.fetch(
        result.digest, holders, NUM, result.chunk_elements, result.codec, timeout=timeout
    )


@pytest.mark.parametrize("codec", ["f32", "int8"])
async def test_a_result_comes_in_pieces_from_all_holders(codec: str) -> None:
    async with open_group(4) as group:
        result = await hold_everywhere(group, codec)
        newcomer = group.peers[3]
        fetched = await fetch(newcomer, result, group.ids[:3])
        assert torch.equal(fetched.values, result.values)
        assert fetched.digest == result.digest
        sent = [
            peer.exchange.counters.snapshot()[newcomer.peer_id]["sent"]["piece"].num_messages
            for peer in group.peers[:3]
        ]
        assert all(sent)
        assert sum(sent) == 20
        # Whoever has fetched it holds it for others.
        newcomer.reductions.hold(fetched)
        again = await fetch(group.peers[0], result, [newcomer.peer_id])
        assert torch.equal(again.values, result.values)


@pytest.mark.parametrize("where", ["digests", "chunks"])
async def test_a_holder_that_lies_is_left(where: str) -> None:
    async with open_group(4) as group:
        result = await hold_everywhere(group)
        liar = group.peers[0]
        liar.reductions.release(result.digest)
        if where == "digests":
            lie = replace(result, chunk_digests=(b"x" * 32, *result.chunk_digests[1:]))
        else:
            lie = replace(result, chunks=(bytes(200),) * 20)
        liar.reductions.hold(lie)
        fetched = await fetch(group.peers[3], result, group.ids[:3])
        assert torch.equal(fetched.values, result.values)
        with pytest.raises(ResultUnavailableError) as unavailable:
            await fetch(group.peers[3], result, [liar.peer_id])
        assert set(unavailable.value.failures) == {liar.peer_id}


async def test_the_error_names_what_was_wrong_with_each_holder(autojump_clock: MockClock) -> None:
    async with open_group(4) as group:
        result = await hold_everywhere(group)
        lacking, gone, refusing, newcomer = group.peers
        lacking.reductions.release(result.digest)
        group.network.cut(gone.host, newcomer.host)
        refusing.admitted.remove(newcomer.peer_id)
        with pytest.raises(ResultUnavailableError) as unavailable:
            await fetch(newcomer, result, group.ids[:3])
        failures = unavailable.value.failures
        assert "no such result is held here" in failures[lacking.peer_id]
        assert "no connection" in failures[gone.peer_id]
        assert "is not of this group" in failures[refusing.peer_id]


async def test_a_holder_that_is_lost_in_the_middle_is_left() -> None:
    async with open_group(3) as group:
        result = await hold_everywhere(group, holders=2)
        lost, _, newcomer = group.peers
        group.network.cut_after(1500, sender=lost.host, receiver=newcomer.host)
        fetched = await fetch(newcomer, result, group.ids[:2])
        assert torch.equal(fetched.values, result.values)


async def test_a_holder_behind_a_slow_line_is_not_left_as_long_as_its_chunks_come(
    autojump_clock: MockClock,
) -> None:
    """Those that it is asked for at once come one after the other, the last of them after more than 15 s."""
    async with open_group(2) as group:
        result = await hold_everywhere(group, holders=1)
        group.network.set_link(Link(bandwidth=60.0))
        fetched = await fetch(group.peers[1], result, group.ids[:1], timeout=250)
        assert torch.equal(fetched.values, result.values)


async def test_a_holder_that_is_silent_is_left_while_the_others_go_on(
    autojump_clock: MockClock,
) -> None:
    async with open_group(3) as group:
        result = await hold_everywhere(group, holders=2)
        silent, _, newcomer = group.peers
        silent.exchange._dispatcher.subscribers._by_type[TrainingMessage.FETCH].clear()
        silent.exchange.on_message(TrainingMessage.FETCH, lambda message: None)
        begun = trio.current_time()
        fetched = await fetch(newcomer, result, group.ids[:2])
        assert torch.equal(fetched.values, result.values)
        assert trio.current_time() - begun == pytest.approx(15, abs=0.1)
        with pytest.raises(ResultUnavailableError, match="silent for 15 s"):
            await fetch(newcomer, result, [silent.peer_id])


async def test_few_holders_are_asked_at_once_and_others_where_they_fail() -> None:
    async with open_group(6) as group:
        result = await hold_everywhere(group, holders=5)
        newcomer = group.peers[5]

        def num_chunks() -> list[int]:
            sent = [peer.exchange.counters.snapshot() for peer in group.peers[:5]]
            to_newcomer = [each.get(newcomer.peer_id, {}).get("sent", {}) for each in sent]
            return [each["piece"].num_messages if "piece" in each else 0 for each in to_newcomer]

        await fetch(newcomer, result, group.ids[:5])
        assert sum(map(bool, num_chunks())) == 4
        for liar in group.peers[:4]:
            liar.reductions.release(result.digest)
            liar.reductions.hold(replace(result, chunks=(bytes(200),) * 20))
        fetched = await fetch(newcomer, result, group.ids[:5])
        assert torch.equal(fetched.values, result.values)
        assert num_chunks()[4] == 20


async def test_a_fetch_ends_in_time(autojump_clock: MockClock) -> None:
    async with open_group(2) as group:
        silent, newcomer = group.peers
        silent.exchange._dispatcher.subscribers._by_type.clear()
        silent.exchange.on_message(TrainingMessage.FETCH_DIGESTS, lambda message: None)
        begun = trio.current_time()
        with pytest.raises(ResultUnavailableError, match="not done within 3 s"):
            await newcomer.reductions.fetch(b"d" * 32, [silent.peer_id], NUM, 50, "f32", timeout=3)
        assert trio.current_time() - begun == pytest.approx(3, abs=1e-3)
        with pytest.raises(LocalProtocolError, match="at least one peer"):
            await newcomer.reductions.fetch(b"d" * 32, [], NUM, 50, "f32", timeout=3)


async def test_a_chunk_that_a_result_has_not_is_refused() -> None:
    async with open_group(2) as group:
        result = await hold_everywhere(group, holders=1)
        message = TensorMessage(TrainingMessage.FETCH, 20, 0, new_request_id(), result.digest)
        with pytest.raises(PeerRefusedError, match="has 20 chunks") as refused:
            await group.peers[1].exchange.request(
                group.ids[0], message, TrainingMessage.PIECE, timeout=DEADLINE
            )
        assert refused.value.code == ErrorCode.POSITION_MISMATCH


async def test_few_results_are_held_at_once() -> None:
    async with open_group(1) as group:
        result = await hold_everywhere(group, holders=1)
        reductions = group.peers[0].reductions
        for number in range(1, MAX_HELD):
            reductions.hold(replace(result, digest=bytes([number]) * 32))
        reductions.hold(result)  # which it is already
        with pytest.raises(LocalProtocolError, match="release one first"):
            reductions.hold(replace(result, digest=b"\xff" * 32))
        reductions.release(result.digest)
        reductions.hold(replace(result, digest=b"\xff" * 32))
