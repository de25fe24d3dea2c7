"""What the tests share: a good model, its worker in trouble, and a real coordinator on it."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import trio

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.p2p import PROTOCOL_V10, PROTOCOL_V11, MessageType
from neurogrid.p2p.wire import (
    serialize_config,
)
from tests.e2e.bad_input_peer.peer import BadPeer, Model, connect
from tests.e2e.support import (
    Outcome,
    WorkerProcess,
    generate,
    reference_tokens,
    run_coordinator,
)
from tests.families import Family, save_checkpoint

VERSIONS = [PROTOCOL_V11, PROTOCOL_V10]
PROMPT = [5, 17, 200, 33]
MAX_TOKENS = 6
MEMORY_LIMIT = 64 * 1024 * 1024
MAX_SEQ_LEN = 64
MAX_WORKER_BYTES = 2 * 1024**3
# Two layers of three chunks each.
WIDE = Family(
    "llama-wide",
    lambda: transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=None,
    ),
)


class Good:
    """A good model, and the tokens that it writes."""

    def __init__(self, path: Path, *, seed: int) -> None:
        model = save_checkpoint(WIDE, path, seed=seed)
        self.path = path
        self.expected = reference_tokens(model, PROMPT, MAX_TOKENS)
        self.model = Model.open(path, max_seq_len=MAX_SEQ_LEN)

    def settings(self, address: str, **more: Any) -> CoordinatorSettings:
        return CoordinatorSettings(
            model=self.path, peers=(address,), max_seq_len=MAX_SEQ_LEN, **more
        )

    def check_on(self, address: str, **more: Any) -> Outcome:
        """A real coordinator gets the right tokens from the worker at `address`."""
        outcome = run_coordinator(self.settings(address, **more), [PROMPT], MAX_TOKENS)
        assert outcome.tokens == [self.expected]
        return outcome


@asynccontextmanager
async def generation_on(good: Good, address: str) -> AsyncIterator[Outcome]:
    """A real coordinator that has the worker for as long as the block runs."""
    async with open_coordinator(good.settings(address)) as coordinator:
        yield await generate(coordinator, [PROMPT], MAX_TOKENS)


Scenario = Callable[[BadPeer], Awaitable[None]]


def with_peer(worker: WorkerProcess, scenario: Scenario, version: str = PROTOCOL_V11) -> None:
    async def main() -> None:
        async with connect(worker.address, version) as peer:
            await scenario(peer)

    trio.run(main)


def raw_chunk(index: int, total: int, data: bytes = b"x") -> bytes:
    """Also those that `WeightsChunk` would not encode."""
    return struct.pack(">II", index, total) + data


async def configured(peer: BadPeer, good: Good, version: str) -> int:
    """Config, and over 1.1.0 assignment and an offer of layer 0 that the worker does not hold.

    Returns the request id of the transfer, 0 over 1.0.0.
    """
    if version == PROTOCOL_V10:
        await peer.send(MessageType.MODEL_CONFIG, serialize_config(good.model.config))
        return 0
    await peer.configure(serialize_config(good.model.config))
    await peer.assign(0, 2)
    return await peer.offer(0, good.model.layers[0])


def hidden(good: Good) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 3, good.model.hidden_size, generator=generator)
