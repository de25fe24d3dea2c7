"""Many generations at once that begin alike, some left at any moment: each as if it were alone, none left open."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
import trio

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.assembly.worker import Worker, WorkerSettings, open_worker
from tests.e2e.support import DEADLINE, reference_tokens
from tests.families import FAMILIES, save_checkpoint

MAX_TOKENS = 4
NUM_CLIENTS = 12
# Of them are left after some tokens, or after so many seconds at most, wherever they are then.
LEFT_AFTER_TOKENS, LEFT_AFTER_SECONDS, LATEST = 0.2, 0.2, 0.15
FAMILY = {family.name: family for family in FAMILIES}


class Clients:
    """Who generates from a few beginnings: the same again, a part of it with another end, or what follows it."""

    def __init__(
        self,
        coordinator: Coordinator,
        expected: dict[tuple[int, ...], list[int]],
        num_generations: int,
    ) -> None:
        self._coordinator = coordinator
        self._expected = expected
        self._num_generations = num_generations
        self._random = random.Random(len(expected))
        self.num_finished = self.num_left = 0

    async def run(self) -> None:
        for _ in range(self._num_generations):
            prompt = self._random.choice([*self._expected])
            kind = self._random.random()
            if kind < LEFT_AFTER_TOKENS:
                await self._generate(prompt, leave_after=self._random.randrange(MAX_TOKENS))
            elif kind < LEFT_AFTER_TOKENS + LEFT_AFTER_SECONDS:
                with trio.move_on_after(self._random.random() * LATEST) as early:
                    await self._generate(prompt)
                self.num_left += early.cancelled_caught
            else:
                await self._generate(prompt)

    async def _generate(self, prompt: tuple[int, ...], leave_after: int | None = None) -> None:
        tokens: list[int] = []
        generating = self._coordinator.generate(prompt, max_tokens=MAX_TOKENS)
        with trio.fail_after(DEADLINE / 2):
            async with aclosing(generating):
                async for token in generating:
                    tokens.append(token)
                    assert tokens == self._expected[prompt][: len(tokens)]
                    if len(tokens) == leave_after:
                        self.num_left += 1
                        return
        assert tokens == self._expected[prompt]
        self.num_finished += 1


def beginnings(model: object) -> dict[tuple[int, ...], list[int]]:
    """Prompts of which many share a part, each with what transformers writes."""
    whole = [3, *range(40, 70)]
    answer = reference_tokens(model, whole, MAX_TOKENS)
    # The last two go on from all that a session has, and from all but its end.
    prompts = [
        whole,
        [*whole[:20], 5, 6],
        [*whole[:12], 9],
        [*whole, *answer, 7],
        [*whole, *answer[:2], 8],
    ]
    return {tuple(prompt): reference_tokens(model, prompt, MAX_TOKENS) for prompt in prompts}


@pytest.mark.parametrize("num_generations", [7, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("family", "max_sessions"), [("llama-tied", 3), ("llama-tied", 6), ("lfm2", 4)]
)
def test_none_is_lost_none_mixed_up_and_none_left_open(
    tmp_path: Path, family: str, max_sessions: int, num_generations: int
) -> None:
    expected = beginnings(save_checkpoint(FAMILY[family], tmp_path))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            workers = [
                await stack.enter_async_context(open_worker(WorkerSettings(device="cpu")))
                for _ in range(2)
            ]
            settings = CoordinatorSettings(
                model=tmp_path,
                peers=tuple(worker.addresses[0] for worker in workers),
                stages=2,
                max_seq_len=128,
                max_sessions=max_sessions,
            )
            coordinator = await stack.enter_async_context(open_coordinator(settings))
            clients = Clients(coordinator, expected, num_generations)
            async with trio.open_nursery() as nursery:
                for _ in range(NUM_CLIENTS):
                    nursery.start_soon(clients.run)
            assert clients.num_finished > NUM_CLIENTS * num_generations / 3
            assert clients.num_left > NUM_CLIENTS
            await only_kept_ones_are_open(coordinator, workers)

    trio.run(main)


async def only_kept_ones_are_open(coordinator: Coordinator, workers: Sequence[Worker]) -> None:
    """Wait until the workers have no session open but those that the coordinator keeps, and then none."""
    kept = coordinator._kept
    with trio.fail_after(DEADLINE):
        for _ in range(2):
            ids = {each.pipeline.session_id for each in kept._kept}
            while any(
                {s.session_id for s in worker.sessions._sessions} != ids for worker in workers
            ):
                await trio.sleep(0.02)
            await kept.evict_all()
    assert kept.room.reserved_bytes == 0
    assert not any(member.num_sessions for member in coordinator.fleet.members)
