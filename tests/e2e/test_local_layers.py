"""The coordinator computes layers itself: the tokens are those of the whole model, and workers come and go as ever."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.errors import CapacityError, ConfigurationError
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.wire import MessageType
from tests.e2e.commands import expect, run_preloaded
from tests.e2e.support import (
    DEADLINE,
    WorkerProcess,
    generate,
    reference_tokens,
    start_worker,
)
from tests.families import FAMILIES, save_checkpoint

PROMPT = [5, 17, 200, 33]
MAX_TOKENS = 24
MIDDLE = 8
# Room for two of the embedded model's eight layers with one session.
TIGHT = "3MiB"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A Llama of six layers, and the tokens that it writes."""
    path = tmp_path_factory.mktemp("llama")
    model = save_checkpoint(FAMILIES[0], path)
    return path, reference_tokens(model, PROMPT, MAX_TOKENS)


def settings(path: Path, *workers: WorkerProcess, **more: Any) -> CoordinatorSettings:
    addresses = tuple(worker.address for worker in workers)
    return CoordinatorSettings(model=path, peers=addresses, max_seq_len=256, **more)


def bounds(coordinator: Coordinator) -> list[tuple[bool, int, int]]:
    """For each stage whether it is here, and its layers."""
    own = coordinator.host.peer_id
    return [(stage.peer_id == own, stage.start, stage.stop) for stage in coordinator.stages]


async def run(chosen: CoordinatorSettings, expected: list[int], stages: list[Any]) -> None:
    with trio.fail_after(DEADLINE):
        async with open_coordinator(chosen) as coordinator:
            assert bounds(coordinator) == stages
            assert (await generate(coordinator, [PROMPT], MAX_TOKENS)).tokens == [expected]


def test_alone_and_in_front_of_a_worker(
    workers: list[WorkerProcess], llama: tuple[Path, list[int]]
) -> None:
    path, expected = llama

    async def main() -> None:
        alone = settings(path, min_peers=0)
        await run(alone, expected, [(True, 0, 6)])
        await run(settings(path, local_layers=6), expected, [(True, 0, 6)])
        before = settings(path, workers[0], local_layers=2)
        await run(before, expected, [(True, 0, 2), (False, 2, 6)])
        chain = settings(path, *workers[:2], local_layers=2, stages=3)
        await run(chain, expected, [(True, 0, 2), (False, 2, 4), (False, 4, 6)])
        # Workers that have room for all leave nothing to do here.
        await run(settings(path, workers[0]), expected, [(False, 0, 6)])

    trio.run(main)


def test_who_has_all_layers_here_gives_others_their_turns(llama: tuple[Path, list[int]]) -> None:
    path, expected = llama

    async def main() -> None:
        num_turns = 0

        async def take_turns() -> None:
            nonlocal num_turns
            while True:
                await trio.lowlevel.checkpoint()
                num_turns += 1

        with trio.fail_after(DEADLINE):
            async with open_coordinator(settings(path, min_peers=0)) as coordinator:
                num_turns_at = []
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(take_turns)
                    tokens = []
                    async for token in coordinator.generate(PROMPT, max_tokens=MAX_TOKENS):
                        tokens.append(token)
                        num_turns_at.append(num_turns)
                    nursery.cancel_scope.cancel()
        assert tokens == expected
        # Its steps are brief by now, and torch's thread is not asked. One for each, in an order that trio draws.
        assert num_turns_at[-1] - num_turns_at[MIDDLE] >= MAX_TOKENS - MIDDLE - 3

    trio.run(main)


def test_sessions_at_once_share_the_stage_here(
    workers: list[WorkerProcess], llama: tuple[Path, list[int]]
) -> None:
    path, expected = llama

    async def main() -> None:
        chosen = settings(path, workers[0], local_layers=3, max_sessions=4)
        results: list[list[int]] = []
        with trio.fail_after(DEADLINE):
            async with open_coordinator(chosen) as coordinator:

                async def write() -> None:
                    results.append(
                        [t async for t in coordinator.generate(PROMPT, max_tokens=MAX_TOKENS)]
                    )

                async with trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(write)
                weights = coordinator.counters.total(Direction.SENT, msg_type=MessageType.WEIGHTS)
                whole = sum(
                    coordinator.model.checkpoint.layer_blob(layer).num_bytes for layer in range(6)
                )
                # Half of the model went out, none of it to this machine.
                assert weights.num_bytes < 0.7 * whole
        assert results == [expected] * 4

    trio.run(main)


def test_it_helps_where_the_workers_cannot_hold_the_model(tmp_path: Path) -> None:
    with start_worker(tmp_path, "--memory-limit", TIGHT) as tight:

        async def main() -> None:
            with trio.fail_after(DEADLINE):
                with pytest.raises(CapacityError):
                    async with open_coordinator(
                        CoordinatorSettings(
                            peers=(tight.address,), max_seq_len=256, local_layers="none"
                        )
                    ):
                        pass

        trio.run(main)
        helped = run_preloaded(
            *("coordinator", "--plan-only", "--peer", tight.address, "--max-seq-len", "256")
        )
        assert helped.status == 0, helped.stderr
        assert "this machine computes, too: without it, the layers do not fit" in helped.stdout
        written = run_preloaded(
            *("coordinator", "--peer", tight.address, "--max-seq-len", "256"),
            *("--prompt", "A class", "--max-tokens", "8", "--stages", "2", "--local-layers", "6"),
        )
        assert written.status == 0, written.stderr
        here = run_preloaded(
            *("coordinator", "--min-peers", "0", "--max-seq-len", "256"),
            *("--prompt", "A class", "--max-tokens", "8"),
        )
        assert written.stdout == here.stdout
    expect(
        run_preloaded("coordinator", "--local-layers", "9", "--prompt", "x"),
        status=2,
        says="--local-layers 9: ",
    )


def test_the_stage_here_stays_when_a_worker_dies(
    tmp_path: Path, llama: tuple[Path, list[int]]
) -> None:
    path, expected = llama
    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path)) for _ in range(2)]

        async def main() -> None:
            chosen = settings(path, *workers, local_layers=2, with_replicas=False)
            async with open_coordinator(chosen) as coordinator:
                _, remote = coordinator.stages
                tokens: list[int] = []
                async for token in coordinator.generate(PROMPT, max_tokens=MAX_TOKENS):
                    tokens.append(token)
                    if len(tokens) == MIDDLE:
                        next(w for w in workers if w.peer_id == remote.peer_id).kill()
                assert tokens == expected
                (spare,) = (w for w in workers if w.peer_id != remote.peer_id)
                assert [stage.peer_id for stage in coordinator.stages] == [
                    coordinator.host.peer_id,
                    spare.peer_id,
                ]

        trio.run(main)


def test_what_cannot_be_right_is_refused(llama: tuple[Path, list[int]]) -> None:
    path, _ = llama

    async def main() -> None:
        for wrong, says in (
            ({"local_layers": 7}, "has 6 layers"),
            ({"local_layers": "none", "min_peers": 0}, "there is no worker to run on"),
            ({"local_layers": 2}, "there is no worker to plan for"),
        ):
            with pytest.raises(ConfigurationError, match=says):
                async with open_coordinator(settings(path, **wrong)):  # type: ignore[arg-type]
                    pass

    trio.run(main)
