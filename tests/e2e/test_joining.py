"""Who joins is used for new sessions, and those that run go on where they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.assembly.worker import Worker, WorkerSettings, open_worker
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.wire import MessageType
from tests.e2e.support import DEADLINE, reference_tokens
from tests.families import FAMILIES, save_checkpoint

PROMPT = [5, 17, 200, 33]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    path = tmp_path_factory.mktemp("llama")
    model = save_checkpoint(FAMILIES[0], path)
    return path, reference_tokens(model, PROMPT, MAX_TOKENS)


def test_a_worker_that_joins_gets_a_stage_and_no_session_is_disturbed(
    llama: tuple[Path, list[int]],
) -> None:
    """Two stages were asked for, and one worker of two is left: it holds all, until somebody comes."""
    path, expected = llama

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with trio.open_nursery() as nursery:
                gone = trio.Event()
                one: Worker = await nursery.start(run_worker, gone)
                two: Worker = await nursery.start(run_worker, trio.Event())
                chosen = CoordinatorSettings(
                    model=path,
                    peers=(one.addresses[0], two.addresses[0]),
                    stages=2,
                    max_seq_len=256,
                    max_sessions=2,
                )
                async with open_coordinator(chosen) as coordinator:
                    gone.set()
                    while len(coordinator.stages) == 2:
                        await trio.sleep(0.02)
                    tokens: list[int] = []
                    async for token in coordinator.generate(PROMPT, max_tokens=MAX_TOKENS):
                        tokens.append(token)
                        if len(tokens) == 4:
                            before = num_opened(coordinator)
                            own = coordinator.host.addresses[0]
                            late: Worker = await nursery.start(run_worker, trio.Event(), own)
                            while len(coordinator.stages) == 1:
                                await trio.sleep(0.02)
                    assert tokens == expected
                    assert num_opened(coordinator) == before
                    peers = {stage.peer_id for stage in coordinator.stages}
                    assert peers == {two.peer_id, late.peer_id}
                    again = [t async for t in coordinator.generate(PROMPT, max_tokens=MAX_TOKENS)]
                    assert again == expected
                    assert num_opened(coordinator) == before + 2
                nursery.cancel_scope.cancel()

    trio.run(main)


async def run_worker(
    until: trio.Event, *bootstrap: str, task_status: trio.TaskStatus[Worker]
) -> None:
    async with open_worker(WorkerSettings(device="cpu", bootstrap=bootstrap)) as worker:
        task_status.started(worker)
        await until.wait()


def num_opened(coordinator: Coordinator) -> int:
    """Sessions that were opened on a worker, each on each."""
    opened = coordinator.counters.total(Direction.SENT, msg_type=MessageType.SESSION_OPEN)
    return opened.num_messages
