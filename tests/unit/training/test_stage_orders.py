"""Members that load their stages over the leader's line: as long as they come further, nobody gives them up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
from transformers import AutoModelForCausalLM, LlamaConfig
from trio.testing import MockClock

from neurogrid.model.files.blob import parse_blob
from neurogrid.training.leading.chains.chain import Chain, ChainBroken
from neurogrid.training.leading.chains.orders import StageOrders
from neurogrid.training.leading.chains.weights import ENDS, ChainWeights

CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    tie_word_embeddings=False,
)
CHAIN = Chain(1, (("first",), ("last",)), (0, 2, 4), 0)


@pytest.fixture
def weights(tmp_path: Path) -> ChainWeights:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(tmp_path)
    return ChainWeights(tmp_path)


class Members:
    """Two members, which fetch a piece of their weights every so many seconds."""

    def __init__(self, weights: ChainWeights, seconds: float) -> None:
        self.weights, self.seconds = weights, seconds
        self.wanted = {
            peer: list(weights.pieces((0, 2, 4), i).values()) for i, peer in enumerate(CHAIN.peers)
        }
        self.address_of = self.called = str

    def has_heard(self, peer_id: str, chain: int) -> bool:
        return True

    def is_ready(self, peer_id: str, chain: int) -> bool:
        return not self.wanted[peer_id]

    async def wait(self, chain: Chain, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await trio.sleep(1)

    async def fetch(self, *, num_pieces: int) -> None:
        for _ in range(num_pieces):
            await trio.sleep(self.seconds)
            for peer_id, wanted in self.wanted.items():
                assert await self.weights.provide(peer_id, wanted.pop()) is not None


def orders_of(members: Any) -> StageOrders:
    facts: Any = SimpleNamespace(run_id=bytes(16))
    return StageOrders(members, facts, members.weights)


async def test_each_piece_has_its_time(weights: ChainWeights, autojump_clock: MockClock) -> None:
    members = Members(weights, 800)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: members.fetch(num_pieces=3))
        await orders_of(members).begin(CHAIN)
    assert 2400 <= trio.current_time() < 2420


async def test_who_asks_for_nothing_any_more_is_given_up(
    weights: ChainWeights, autojump_clock: MockClock
) -> None:
    members = Members(weights, 800)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: members.fetch(num_pieces=1))
        with pytest.raises(ChainBroken, match="first, last: not ready, and nothing was asked for"):
            await orders_of(members).begin(CHAIN)
    assert 1700 <= trio.current_time() < 1720


async def test_the_same_piece_again_is_no_way_further(
    weights: ChainWeights, autojump_clock: MockClock
) -> None:
    members = Members(weights, 1)

    async def ask() -> None:
        while True:
            await trio.sleep(100)
            await weights.provide("first", weights.blobs[ENDS])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        with pytest.raises(ChainBroken):
            await orders_of(members).begin(CHAIN)
        nursery.cancel_scope.cancel()
    assert 1000 <= trio.current_time() < 1020


async def test_what_stands_outside_the_layers_is_read_as_it_is_sent(weights: ChainWeights) -> None:
    source = await weights.provide("first", weights.blobs[ENDS])
    assert source is not None
    data = b"".join(bytes(source.chunk(i)) for i in range(source.num_chunks))
    ends = parse_blob(data)
    assert {name: each.dtype for name, each in ends.items()} == dict.fromkeys(
        ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"), torch.bfloat16
    )
    assert weights.num_elements == sum(
        each.numel() for each in AutoModelForCausalLM.from_config(CONFIG).parameters()
    )
