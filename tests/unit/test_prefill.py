"""A long prompt in chunks: how it is cut, who has which chunk when, and what becomes of the others when one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import NoRouteError
from neurogrid.inference.pipeline.prefill import (
    MAX_CHUNK,
    MAX_PIECE_BYTES,
    MIN_CHUNK,
    Prefill,
    chunk_lengths,
    max_piece,
)


@given(num_tokens=st.integers(1, 200_000), num_stages=st.integers(2, 64))
def test_chunks_make_up_the_prompt_and_are_neither_small_nor_large(
    num_tokens: int, num_stages: int
) -> None:
    lengths = chunk_lengths(num_tokens, num_stages, max_tokens=MAX_CHUNK)
    assert sum(lengths) == num_tokens
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= MAX_CHUNK
    assert len(lengths) == 1 or min(lengths) >= MIN_CHUNK


@pytest.mark.parametrize(
    ("num_tokens", "num_stages", "lengths"),
    [
        (5_000, 1, [5_000]),
        (5_100, 1, [510] * 10),
        (255, 2, [255]),
        (256, 2, [128, 128]),
        (1_024, 2, [256] * 4),
        (1_024, 8, [128] * 8),
        (4_096, 2, [512] * 8),
    ],
)
def test_how_a_prompt_is_cut(num_tokens: int, num_stages: int, lengths: list[int]) -> None:
    assert chunk_lengths(num_tokens, num_stages, max_tokens=5_000) == lengths


@given(
    num_tokens=st.integers(1, 200_000),
    num_stages=st.integers(1, 64),
    row_bytes=st.integers(2, 1 << 28),
)
def test_no_chunk_is_more_than_a_message_may_be(
    num_tokens: int, num_stages: int, row_bytes: int
) -> None:
    max_tokens = max_piece(row_bytes)
    assert max_tokens == 1 or max_tokens * row_bytes <= MAX_PIECE_BYTES
    num_tokens = min(num_tokens, 1_000 * max_tokens)
    lengths = chunk_lengths(num_tokens, num_stages, max_tokens=max_tokens)
    assert sum(lengths) == num_tokens
    assert 1 <= min(lengths) <= max(lengths) <= max_tokens
    assert num_stages > 1 or num_tokens > max_tokens or lengths == [num_tokens]


class GatedChain:
    """A chain whose stages give back a chunk when the test says so, and note what came."""

    def __init__(self, num_stages: int) -> None:
        self.stages = (None,) * num_stages
        self.entered: list[int] = []
        self.left: list[int] = []
        self.gates: dict[int, trio.Event] = {}
        self.sends_at_once = True
        self.error: Exception | None = None

    async def forward(
        self,
        session_id: int,
        hidden_BTD: torch.Tensor,
        *,
        position: int,
        on_sent: Callable[[], None],
    ) -> torch.Tensor:
        self.entered.append(position)
        gate = self.gates.setdefault(position, trio.Event())
        if len(self.stages) > 1 and self.sends_at_once:
            on_sent()
        await gate.wait()
        if self.error is not None:
            raise self.error
        self.left.append(position)
        return hidden_BTD + 1

    def let_go(self, position: int) -> None:
        self.gates[position].set()


CHUNKS = [(start, start + 10) for start in range(0, 80, 10)]


async def make_hidden(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop, dtype=torch.float32).view(1, -1, 1)


async def started(nursery: trio.Nursery, *chains: GatedChain) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []

    async def run() -> None:
        prefill = Prefill(cast(Any, chains), 1, CHUNKS, make_hidden)
        results.append(await prefill.run())

    nursery.start_soon(run)
    await trio.testing.wait_all_tasks_blocked()
    return results


async def test_each_stage_has_a_chunk_and_one_more_is_on_its_way() -> None:
    chain = GatedChain(3)
    async with trio.open_nursery() as nursery:
        results = await started(nursery, chain)
        assert chain.entered == [0, 10, 20, 30]
        for position in range(0, 80, 10):
            chain.let_go(position)
            await trio.testing.wait_all_tasks_blocked()
            assert chain.entered == [*range(0, min(position + 50, 80), 10)]
    assert results[0].flatten().tolist() == [*range(71, 81)]


async def test_what_is_not_sent_yet_is_not_overtaken() -> None:
    chain = GatedChain(3)
    chain.sends_at_once = False
    async with trio.open_nursery() as nursery:
        await started(nursery, chain)
        for position in range(0, 80, 10):
            assert chain.entered == [*range(0, position + 10, 10)]
            chain.let_go(position)
            await trio.testing.wait_all_tasks_blocked()


async def test_one_stage_after_the_other_where_all_goes_through_the_coordinator() -> None:
    chains = GatedChain(1), GatedChain(1)
    async with trio.open_nursery() as nursery:
        results = await started(nursery, *chains)
        assert (chains[0].entered, chains[1].entered) == ([0], [])
        chains[0].let_go(0)
        await trio.testing.wait_all_tasks_blocked()
        # Both have one to compute, and no more.
        assert (chains[0].entered, chains[1].entered) == ([0, 10], [0])
        chains[0].let_go(10)
        await trio.testing.wait_all_tasks_blocked()
        assert (chains[0].entered, chains[1].entered) == ([0, 10, 20], [0])
        for chain in (*chains, *chains):
            for position in range(0, 80, 10):
                chain.gates.setdefault(position, trio.Event()).set()
    assert chains[1].left == [*range(0, 80, 10)]
    assert results[0].flatten().tolist() == [*range(72, 82)]


async def test_the_first_failure_is_raised_as_itself_and_the_others_are_given_up() -> None:
    chain = GatedChain(3)
    chain.error = NoRouteError("lost layers 1 to 2", layers=range(1, 3), peer_id="somebody")
    with trio.testing.RaisesGroup(trio.testing.Matcher(NoRouteError, match="lost layers 1 to 2")):
        async with trio.open_nursery() as nursery:
            await started(nursery, chain)
            # As where a stream is lost: all that wait for it learn of it at once.
            for position in (0, 10):
                chain.let_go(position)
    assert chain.left == []
