"""Prompts that go through the stages in chunks: the tokens of the whole model, in any company and whoever dies.

All families are in test_families.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.inference.pipeline import prefill
from neurogrid.inference.pipeline.prefill import MAX_CHUNK, chunk_lengths
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.wire import MessageType
from tests.e2e.support import (
    DEADLINE,
    WorkerProcess,
    generate,
    reference_tokens,
    start_worker,
)
from tests.families import FAMILIES, VOCAB_SIZE, save_checkpoint

MAX_TOKENS = 8


def prompt(num_tokens: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE - 10, (num_tokens,), generator=generator).tolist()


def settings(path: Path | None, addresses: Sequence[str], **more: Any) -> CoordinatorSettings:
    # Activations are counted, and a guess would save some.
    more = {"stages": len(addresses), "max_seq_len": 900, "speculate": "off", **more}
    return CoordinatorSettings(model=path, peers=tuple(addresses), **more)


def num_activations(coordinator: Coordinator, peer_id: str) -> int:
    """Activations that went from the coordinator to a worker."""
    total = coordinator.counters.total(
        Direction.SENT, peer_id=peer_id, msg_type=MessageType.ACTIVATION
    )
    return total.num_messages


def num_chunks(token_ids: Sequence[int], num_stages: int) -> int:
    return len(chunk_lengths(len(token_ids), num_stages, max_tokens=MAX_CHUNK))


@pytest.mark.parametrize("routing", ["chain", "star"])
def test_several_at_once_beside_those_that_decode(
    workers: list[WorkerProcess], tmp_path: Path, routing: str
) -> None:
    prompts = [prompt(length, seed=length) for length in (4, 600, 300, 5, 700)]
    model = save_checkpoint(FAMILIES[0], tmp_path)
    expected = [reference_tokens(model, each, 24) for each in prompts]
    addresses = [worker.address for worker in workers]

    async def main() -> None:
        outcomes: dict[int, list[list[int]]] = {}

        async def one(index: int) -> None:
            outcomes[index] = (await generate(coordinator, [prompts[index]], 24)).tokens

        more = {"routing": routing, "max_sessions": 8, "prefix_reuse": False}
        with trio.fail_after(DEADLINE):
            async with open_coordinator(settings(tmp_path, addresses, **more)) as coordinator:
                async with trio.open_nursery() as nursery:
                    for index in range(len(prompts)):
                        nursery.start_soon(one, index)
                first = coordinator.stages[0].peer_id
                steps = sum(num_chunks(each, 3) + 23 for each in prompts)
                assert num_activations(coordinator, first) == steps
        assert [outcomes[index][0] for index in range(len(prompts))] == expected

    trio.run(main)


def test_one_stage_gets_in_pieces_what_is_too_much_for_a_message(
    workers: list[WorkerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_checkpoint(FAMILIES[0], tmp_path)
    expected = reference_tokens(model, prompt(300), MAX_TOKENS)
    row_bytes = model.config.hidden_size * 4
    monkeypatch.setattr(prefill, "MAX_PIECE_BYTES", 64 * row_bytes)

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_coordinator(settings(tmp_path, [workers[0].address])) as coordinator:
                outcome = await generate(coordinator, [prompt(300)], MAX_TOKENS)
                assert outcome.tokens == [expected]
                # 300 tokens of which 64 go at once, and each new one but the last.
                assert num_activations(coordinator, workers[0].peer_id) == 5 + MAX_TOKENS - 1

    trio.run(main)


async def disturbed(
    coordinator: Coordinator, token_ids: Sequence[int], first: str, victim: WorkerProcess
) -> list[int]:
    """Generate, and kill a worker as soon as the first one has got something."""
    tokens: list[list[int]] = []

    async def write() -> None:
        tokens.extend((await generate(coordinator, [token_ids], 16)).tokens)

    before = num_activations(coordinator, first)
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            while num_activations(coordinator, first) == before:
                await trio.lowlevel.checkpoint()
            victim.kill()
    return tokens[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_dies_while_the_prompt_is_under_way(tmp_path: Path, dtype: str) -> None:
    """Others take over, and repeat it in the same chunks where sums depend on that."""
    text = "def first(items):\n    return items[0]\n\n" * 28

    async def main() -> None:
        addresses = [worker.address for worker in workers]
        more = {"stages": 2, "dtype": dtype, "max_seq_len": 512, "prefix_reuse": False}
        async with open_coordinator(settings(None, addresses, **more)) as coordinator:
            token_ids = coordinator.model.tokenizer.encode(text)
            assert num_chunks(token_ids, 2) > 1
            (expected,) = (await generate(coordinator, [token_ids], 16)).tokens
            with trio.fail_after(DEADLINE):
                while len(coordinator.fleet.holdings) < len(workers):
                    await trio.sleep(0.02)
            first, second = coordinator.stages
            for victim in (second, first):
                tokens = await disturbed(
                    coordinator, token_ids, first.peer_id, by_id[victim.peer_id]
                )
                assert tokens == expected

    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path, "--no-cache")) for _ in range(4)]
        by_id = {worker.peer_id: worker for worker in workers}
        trio.run(main)
