"""Workers that compute wrong are found by computing again what they computed, named, and excluded; no honest one is."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from neurogrid import open_coordinator
from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.inference.generation.coordinator import Coordinator
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker
from tests.e2e.test_recovery import generate, holders, settings


def start(stack: ExitStack, directory: Path, *kinds: str) -> list[WorkerProcess]:
    """Workers that are wrong in these ways, as their files `0`, `1`, ... say, which may be written anew."""
    workers = []
    for number, kind in enumerate(kinds):
        file = directory / str(number)
        file.write_text(kind)
        command = (sys.executable, "-m", "tests.e2e.wrong_worker", str(file))
        workers.append(stack.enter_context(start_worker(directory, command=command)))
    return workers


async def verified(coordinator: Coordinator) -> None:
    """Wait until all that is over is verified."""
    assert coordinator.verification is not None
    with trio.fail_after(DEADLINE):
        while coordinator.verification.num_waiting:
            await trio.sleep(0.02)


async def generate_until_named(
    coordinator: Coordinator, board: StatusBoard, *, at_most: int
) -> tuple[str, ...]:
    """The workers that were found wrong after so many generations at most."""
    for _ in range(at_most):
        await generate(coordinator)
        await verified(coordinator)
        if board.verification.wrong:
            break
    return board.verification.wrong


def test_each_kind_is_named(tmp_path: Path) -> None:
    """In whichever stage, and where it stands by and verifies the others."""

    async def main(workers: Sequence[WorkerProcess]) -> None:
        async with open_coordinator(settings(workers)) as coordinator:
            expected = await generate(coordinator)
            places = [stage.peer_id for stage in coordinator.stages]
        numbers = {worker.peer_id: number for number, worker in enumerate(workers)}
        (spare,) = numbers.keys() - {*places}
        for kind, odd in (
            ("flip", places[0]),
            ("noise", places[1]),
            ("later:20", places[1]),
            ("sometimes:20", places[0]),
            ("flip", spare),
        ):
            (tmp_path / str(numbers[odd])).write_text(kind)
            board = StatusBoard()
            wanted = settings(workers, verify=1.0)
            async with open_coordinator(wanted, board=board) as coordinator:
                await holders(coordinator, 3)
                assert await generate_until_named(coordinator, board, at_most=8) == (odd,), kind
                assert await generate(coordinator) == expected
                assert not coordinator.fleet.is_member(odd)
                await verified(coordinator)
            assert board.verification.wrong == (odd,)
            (tmp_path / str(numbers[odd])).write_text("")

    with ExitStack() as stack:
        trio.run(main, start(stack, tmp_path, "", "", ""))


@pytest.mark.parametrize("kind", ["skip", "stale"])
def test_wrong_weights_are_named_without_a_replica(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The coordinator computes all of it itself; the worker that is left gets all layers."""

    async def main(workers: Sequence[WorkerProcess]) -> None:
        board = StatusBoard()
        async with open_coordinator(settings(workers, verify=1.0), board=board) as coordinator:
            wrong = await generate_until_named(coordinator, board, at_most=1)
            assert wrong == (workers[0].peer_id,)
            with trio.fail_after(DEADLINE):
                while {stage.peer_id for stage in coordinator.stages} != {workers[1].peer_id}:
                    await trio.sleep(0.05)
                # It is dialled again, since it was named, and is not used all the same.
                while "is here again, and is not used" not in caplog.text:
                    await trio.sleep(0.05)
            await generate(coordinator)
            await verified(coordinator)
            assert board.verification.wrong == wrong

    caplog.set_level(logging.INFO, "neurogrid")
    with ExitStack() as stack:
        trio.run(main, start(stack, tmp_path, kind, ""))


def test_one_that_is_wrong_in_chains_alone_is_a_suspect_and_does_no_harm(tmp_path: Path) -> None:
    async def main(workers: Sequence[WorkerProcess]) -> None:
        board = StatusBoard()
        wanted = settings(workers, verify=1.0)
        async with open_coordinator(settings(workers)) as coordinator:
            expected = await generate(coordinator)
        (tmp_path / "0").write_text("chain")
        async with open_coordinator(wanted, board=board) as coordinator:
            assert await generate(coordinator) != expected
            await verified(coordinator)
            assert coordinator.verification is not None
            suspicion = coordinator.verification.suspicion
            assert suspicion.suspects == {worker.peer_id for worker in workers}
            assert await generate(coordinator) == expected
            await verified(coordinator)
            assert board.verification.wrong == ()
            # It thinks that it is safe, and goes on.
            (tmp_path / "0").write_text("noise")
            wrong = await generate_until_named(coordinator, board, at_most=1)
            assert wrong == (workers[0].peer_id,)
            assert not suspicion.suspects

    with ExitStack() as stack:
        trio.run(main, start(stack, tmp_path, "", ""))


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        ("float32", {"routing": "star"}),
        ("bfloat16", {}),
        ("bfloat16", {"quantize": "int8", "wire_dtype": "int8"}),
    ],
)
def test_honest_workers_are_right(tmp_path: Path, dtype: str, more: dict[str, str]) -> None:
    """Also in sessions that go on from others, and by the coordinator's own computation."""

    async def main(workers: Sequence[WorkerProcess]) -> None:
        board = StatusBoard()
        wanted = settings(workers, dtype=dtype, verify=1.0, **more)
        async with open_coordinator(wanted, board=board) as coordinator:
            prompt = coordinator.model.tokenizer.encode("A function definition")
            for _ in range(3):
                tokens = [t async for t in coordinator.generate(prompt, max_tokens=20)]
                prompt = [*prompt, *tokens]
                await verified(coordinator)
        known = board.verification
        assert (known.num_differing, known.num_unverified, known.wrong) == (0, 0, ())
        num_segments = 2 if more.get("routing") == "star" else 1
        assert known.num_steps == 3 * 20 * num_segments

    with ExitStack() as stack:
        trio.run(main, [stack.enter_context(start_worker(tmp_path)) for _ in range(3)])
