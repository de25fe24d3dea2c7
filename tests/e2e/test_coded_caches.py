"""`--kv-cache-dtype int8` over workers: sessions together and alone, a worker that dies, and who is not asked."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.errors import NoRouteError
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.p2p.wire import PROTOCOL_V10
from tests.e2e.support import DEADLINE, WorkerProcess, generate, run_coordinator, start_worker
from tests.families import FAMILIES, save_checkpoint

TEXTS = (
    "def first(items):\n    return items[0]\n\n" * 12,
    "The ",
    "import os\n\n\ndef main() -> None:\n    print(",
    "class Node:\n    def __init__(self, value):\n" * 3,
)
MAX_TOKENS = 12


def settings(path: Path | None, addresses: list[str], **more: Any) -> CoordinatorSettings:
    more = {"stages": len(addresses), "max_seq_len": 512, "prefix_reuse": False, **more}
    return CoordinatorSettings(model=path, peers=tuple(addresses), kv_cache_dtype="int8", **more)


async def together(coordinator: Coordinator, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of all, written at once."""
    tokens: dict[int, list[int]] = {}

    async def one(index: int) -> None:
        (tokens[index],) = (await generate(coordinator, [prompts[index]], MAX_TOKENS)).tokens

    async with trio.open_nursery() as nursery:
        for index in range(len(prompts)):
            nursery.start_soon(one, index)
    return [tokens[index] for index in range(len(prompts))]


def test_sessions_together_are_what_they_are_alone_and_one_that_dies_changes_nothing(
    tmp_path: Path,
) -> None:
    """In less room; computed again by others, and found right."""

    async def main() -> None:
        addresses = [worker.address for worker in workers]
        more = {"stages": 2, "max_sessions": 4, "verify": 1.0}
        with trio.fail_after(DEADLINE):
            async with open_coordinator(settings(None, addresses, **more)) as coordinator:
                prompts = [coordinator.model.tokenizer.encode(text) for text in TEXTS]
                alone = (await generate(coordinator, prompts, MAX_TOKENS)).tokens
                assert await together(coordinator, prompts) == alone
                while len(coordinator.fleet.holdings) < len(workers):
                    await trio.sleep(0.02)
                victim = coordinator.stages[1].peer_id
                written: list[list[int]] = []

                async def write() -> None:
                    written.extend(await together(coordinator, prompts))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(write)
                    await trio.sleep(0.05)
                    by_id[victim].kill()
                assert written == alone
                assert coordinator.fleet.infos.keys() == by_id.keys() - {victim}
                _, limit = coordinator.cache_bytes
        more = {"stages": 2, "max_sessions": 4}
        left = [worker.address for worker in workers if worker.is_alive()]
        with trio.fail_after(DEADLINE):
            plain = CoordinatorSettings(peers=tuple(left), max_seq_len=512, **more)
            async with open_coordinator(plain) as coordinator:
                size = 8 * coordinator.model.dtype.itemsize
                assert limit < 1.1 * 8.5 / size * coordinator.cache_bytes[1]

    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path)) for _ in range(4)]
        by_id = {worker.peer_id: worker for worker in workers}
        trio.run(main)


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_windows_and_convolutions(workers: list[WorkerProcess], tmp_path: Path, name: str) -> None:
    save_checkpoint(next(family for family in FAMILIES if family.name == name), tmp_path)
    prompts = [[5, 17, 200, 33] * 6, [9, 8, 7]]
    one = run_coordinator(settings(tmp_path, [workers[0].address]), prompts)
    two = run_coordinator(settings(tmp_path, [each.address for each in workers[:2]]), prompts)
    assert two.tokens == one.tokens


def test_a_worker_that_knows_of_no_codes_is_not_used(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    save_checkpoint(FAMILIES[0], tmp_path)
    wanted = settings(tmp_path, [workers[0].address], protocol_versions=(PROTOCOL_V10,))
    with pytest.raises(NoRouteError, match="does not know of --kv-cache-dtype"):
        run_coordinator(wanted, [[5, 17]])
