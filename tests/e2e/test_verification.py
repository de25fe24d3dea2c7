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
    """Workers that are wrong in these ways; an empty one is none."""
    return [
        stack.enter_context(
            start_worker(
                directory,
                command=(sys.executable, "-m", "tests.e2e.wrong_worker", kind),
            )
            if kind
            else start_worker(directory)
        )
        for kind in kinds
    ]


async def verified(coordinator: Coordinator) -> None:
    """Wait until all that is over is verified."""
    assert coordinator.verification is not None
    with trio.fail_after(DEADLINE):
        while coordinator.verification.num_waiting:
            await trio.sleep(0.02)


async def generate_until_named(
    coordinator: Coordinator, board: StatusBoard, *, at_most: int
) -> tuple[str, ...]:
    for _ in range(at_most):
        await generate(coordinator)
        await verified(coordinator)
        if board.verification.wrong:
            break
    return board.verification.wrong


@pytest.mark.parametrize("kind", ["flip", "noise", "skip", "stale", "later:20", "sometimes:20"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_named(tmp_path: Path, kind: str, place: int) -> None:
    async def main(workers: Sequence[WorkerProcess]) -> None:
        board = StatusBoard()
        async with open_coordinator(settings(workers, verify=1.0), board=board) as coordinator:
            await holders(coordinator, 3)
            wrong = await generate_until_named(coordinator, board, at_most=8)
            assert wrong == (workers[place].peer_id,)
            print(kind, place, board.verification, [e.text for e in board.events.last])

    kinds = ["", "", ""]
    kinds[place] = kind
    with ExitStack() as stack:
        trio.run(main, start(stack, tmp_path, *kinds))
