"""Many generations at once over real workers: the same tokens as alone, in turn where there is no room."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import trio

from neurogrid import Coordinator, CoordinatorSettings, SamplingParams, open_coordinator
from tests.e2e.support import DEADLINE, WorkerProcess, reference_tokens
from tests.families import FAMILIES, save_checkpoint

MAX_TOKENS = 12
PROMPTS = [[5, 17, 200, 33][: 1 + i % 4] + list(range(40, 40 + 9 * (i % 5))) for i in range(24)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("llama")
    return path, save_checkpoint(FAMILIES[0], path)


def settings(path: Path, workers: list[WorkerProcess], **more: Any) -> CoordinatorSettings:
    peers = tuple(worker.address for worker in workers)
    return CoordinatorSettings(
        model=path, peers=peers, stages=len(peers), **{"max_seq_len": 128, **more}
    )


def with_coordinator(
    chosen: CoordinatorSettings, use: Callable[[Coordinator], Awaitable[list[list[int]]]]
) -> list[list[int]]:
    async def main() -> list[list[int]]:
        with trio.fail_after(DEADLINE):
            async with open_coordinator(chosen) as coordinator:
                return await use(coordinator)

    return trio.run(main)


async def at_once(
    coordinator: Coordinator,
    prompts: list[list[int]],
    sampling: Sequence[SamplingParams] = (SamplingParams(),),
) -> list[list[int]]:
    """The tokens of all prompts, generated at the same time; the ways to sample them take turns."""
    tokens: list[list[int]] = [[] for _ in prompts]

    async def generate(i: int) -> None:
        params = sampling[i % len(sampling)]
        async for token in coordinator.generate(prompts[i], max_tokens=MAX_TOKENS, sampling=params):
            tokens[i].append(token)

    async with trio.open_nursery() as nursery:
        for i in range(len(prompts)):
            nursery.start_soon(generate, i)
    return tokens


@pytest.mark.parametrize("routing", ["chain", "star"])
def test_sessions_at_once_give_the_tokens_of_each_alone(
    workers: list[WorkerProcess], llama: tuple[Path, Any], routing: str
) -> None:
    path, model = llama
    # Each has a state of its own for what it repeats, whoever shares its forward passes.
    options: list[dict[str, Any]] = [{}, {"repetition_penalty": 3.0}, {"repetition_penalty": 0.5}]
    expected = [
        reference_tokens(model, prompt, MAX_TOKENS, **options[i % 3])
        for i, prompt in enumerate(PROMPTS)
    ]
    plain = [reference_tokens(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert sum(a != b for a, b in zip(expected, plain, strict=True)) > len(PROMPTS) / 3

    async def use(coordinator: Coordinator) -> list[list[int]]:
        return await at_once(coordinator, PROMPTS, [SamplingParams(**given) for given in options])

    # More than there is room for: short ones take less than what is agreed for each, and the rest waits.
    chosen = settings(path, workers[:2], max_sessions=4, routing=routing)
    assert with_coordinator(chosen, use) == expected


def test_a_client_that_goes_makes_room_at_once(
    workers: list[WorkerProcess], llama: tuple[Path, Any]
) -> None:
    path, model = llama

    async def use(coordinator: Coordinator) -> list[list[int]]:
        for num_tokens in range(3):
            async with aclosing(coordinator.generate(PROMPTS[0], max_tokens=100)) as tokens:
                for _ in range(num_tokens):
                    await anext(tokens)
            with trio.move_on_after(0.05):  # or is cancelled, wherever that finds it
                async for _ in coordinator.generate(PROMPTS[1], max_tokens=100):
                    pass
        # There is room for one of this length: had another stayed open, this would be refused.
        return await at_once(coordinator, [[*PROMPTS[4], *range(3, 63)]])

    chosen = settings(path, workers[:2], max_sessions=1)
    prompt = [*PROMPTS[4], *range(3, 63)]
    assert with_coordinator(chosen, use) == [reference_tokens(model, prompt, MAX_TOKENS)]
