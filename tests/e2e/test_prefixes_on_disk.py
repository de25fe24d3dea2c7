"""`--prefix-cache`: what a prompt shares with a session that had to go is read from the workers' disks, and only what
is as it was written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from tests.e2e.support import DEADLINE, WorkerProcess, reference_tokens, start_worker
from tests.families import FAMILIES, VOCAB_SIZE, save_checkpoint
from tests.ports import free_port

MAX_TOKENS = 8


def prompt(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(3, VOCAB_SIZE - 10, (num_tokens,), generator=generator).tolist()


async def turn(coordinator: Coordinator, token_ids: Sequence[int]) -> tuple[list[int], int]:
    """The tokens that follow, and how many of the prompt were not computed."""
    tokens, num_reused = [], 0
    generating = coordinator.generate_tokens(token_ids, max_tokens=MAX_TOKENS)
    async with aclosing(generating) as generated:
        async for token in generated:
            tokens.append(token.token_id)
            num_reused = token.num_reused
    return tokens, num_reused


def start(directory: Path, number: int, port: int) -> AbstractContextManager[WorkerProcess]:
    """A worker that keeps prefixes, on a disk of its own, and comes back where it was."""
    return start_worker(
        directory,
        *("--port", str(port), "--identity", str(directory / f"{number}.key")),
        *("--cache-dir", str(directory / f"cache-{number}"), "--prefix-cache", "64MiB"),
    )


def files(directory: Path, number: int) -> list[Path]:
    return sorted((directory / f"cache-{number}" / "prefixes").glob("*.blob"))


def settings(directory: Path, workers: Sequence[WorkerProcess], **more: Any) -> CoordinatorSettings:
    return CoordinatorSettings(
        model=directory / "model",
        peers=tuple(worker.address for worker in workers),
        stages=len(workers),
        max_seq_len=800,
        max_sessions=1,
        **more,
    )


# What is rounded is cut where a call ended, on workers that do not say that a token has the same bits in any company.
@pytest.mark.parametrize(
    ("kv_cache_dtype", "of_short", "of_long"), [(None, 399, 699), ("int8", 266, 525)]
)
def test_what_had_to_go_comes_back_from_disk_and_never_broken(
    tmp_path: Path, kv_cache_dtype: str | None, of_short: int, of_long: int
) -> None:
    model = save_checkpoint(FAMILIES[0], tmp_path / "model")
    short, long, longest = (prompt(length) for length in (400, 700, 750))

    async def main() -> None:
        wanted = settings(tmp_path, workers, kv_cache_dtype=kv_cache_dtype)
        async with open_coordinator(wanted) as coordinator:
            answers = {}
            for each in (short, long):  # the second needs the room of the first
                answers[len(each)], num_reused = await turn(coordinator, each)
                assert num_reused == 0
                if kv_cache_dtype is None:
                    assert answers[len(each)] == reference_tokens(model, each, MAX_TOKENS)
            assert [len(files(tmp_path, number)) for number in range(2)] == [1, 1]
            assert await turn(coordinator, short) == (answers[400], of_short)
            assert await turn(coordinator, long) == (answers[700], of_long)
            for path in files(tmp_path, 0):
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
            await turn(coordinator, longest)
            assert await turn(coordinator, long) == (answers[700], 0)
            assert "is damaged: it is dropped" in workers[0].log

    with ExitStack() as stack:
        workers = [stack.enter_context(start(tmp_path, number, free_port())) for number in range(2)]
        run(main)


def test_a_worker_that_is_started_again_has_them_still(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES[0], tmp_path / "model")
    port = free_port()

    async def main() -> None:
        async with open_coordinator(settings(tmp_path, [worker])) as coordinator:
            answer, _ = await turn(coordinator, prompt(400))
            await turn(coordinator, prompt(700))
            await trio.to_thread.run_sync(worker.kill)
            await trio.to_thread.run_sync(stack.enter_context, start(tmp_path, 0, port))
            assert await turn(coordinator, prompt(400)) == (answer, 399)

    with ExitStack() as stack:
        worker = stack.enter_context(start(tmp_path, 0, port))
        run(main)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        with trio.fail_after(DEADLINE):
            await main()

    trio.run(in_time)


def test_without_the_option_nothing_is_written(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES[0], tmp_path / "model")

    async def main() -> None:
        async with open_coordinator(settings(tmp_path, [worker])) as coordinator:
            for length in (400, 700, 400):
                _, num_reused = await turn(coordinator, prompt(length))
                assert num_reused == 0

    with start_worker(tmp_path, "--cache-dir", str(tmp_path / "cache")) as worker:
        run(main)
    assert not (tmp_path / "cache" / "prefixes").exists()
