"""Workers that compute on an accelerator, a simulated one: tokens, batches, prefixes, codes and recovery as ever."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.wire import MessageType
from tests.e2e.preloaded import COORDINATOR, command_after
from tests.e2e.preloaded import run as run_command
from tests.e2e.support import (
    DEADLINE,
    WorkerProcess,
    reference_tokens,
    run_coordinator,
    start_worker,
)
from tests.families import FAMILIES, save_checkpoint

# Such a worker has the devices before it looks for any.
WITH_DEVICES = "from tests.simulated_device import open_devices; open_devices()"
COMMAND = command_after(WITH_DEVICES)
COORDINATOR_ON_DEVICES = command_after(WITH_DEVICES, "coordinator")
PROMPT = list(range(40, 100))
NUM_TOKENS = 12
HIDDEN_BYTES = 64 * 4  # of a token of these families, in float32
FAMILY = {family.name: family for family in FAMILIES}


@pytest.fixture(scope="module")
def on_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WorkerProcess]]:
    """A worker on each of the two devices."""
    directory = tmp_path_factory.mktemp("workers")
    with ExitStack() as stack:
        yield [
            stack.enter_context(start_worker(directory, *device, command=COMMAND))
            for device in (("--gpu", "1"), ())
        ]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("llama")
    return path, save_checkpoint(FAMILIES[0], path)


def settings(path: Path, workers: Sequence[WorkerProcess], **more: Any) -> CoordinatorSettings:
    return CoordinatorSettings(
        model=path,
        peers=tuple(worker.address for worker in workers),
        **{"stages": 2, "max_seq_len": 256, **more},
    )


def run(chosen: CoordinatorSettings, main: Callable[[Coordinator], Awaitable[None]]) -> None:
    async def in_time() -> None:
        with trio.fail_after(DEADLINE):
            async with open_coordinator(chosen) as coordinator:
                await main(coordinator)

    trio.run(in_time)


async def write(coordinator: Coordinator, prompt: Sequence[int]) -> list[int]:
    return [token async for token in coordinator.generate(prompt, max_tokens=NUM_TOKENS)]


def num_sent(coordinator: Coordinator) -> float:
    """Tokens that went to the workers, about."""
    traffic = coordinator.counters.total(Direction.SENT, msg_type=MessageType.ACTIVATION)
    return traffic.num_bytes / HIDDEN_BYTES


@pytest.mark.parametrize("family", ["llama-tied", "mistral-sliding", "lfm2"])
def test_sessions_alone_together_and_one_after_another_write_what_generate_writes(
    on_devices: list[WorkerProcess], tmp_path: Path, family: str
) -> None:
    model = save_checkpoint(FAMILY[family], tmp_path)
    prompts = [[*range(5 + i, 15 + 3 * i)] for i in range(4)]

    async def main(coordinator: Coordinator) -> None:
        assert {worker.device_kind for worker in coordinator.workers} == {"sim"}
        assert {worker.name for worker in coordinator.workers} == {"simulated device"}
        answers: dict[int, list[int]] = {}

        async def note(number: int) -> None:
            answers[number] = await write(coordinator, prompts[number])

        async with trio.open_nursery() as nursery:
            for number in range(len(prompts)):
                nursery.start_soon(note, number)
        for number, prompt in enumerate(prompts):
            assert answers[number] == reference_tokens(model, prompt, NUM_TOKENS)
        # What a session left behind the next one begins with.
        first = await write(coordinator, PROMPT)
        before = num_sent(coordinator)
        turn = [*PROMPT, *first, 7, 8, 9]
        assert await write(coordinator, turn) == reference_tokens(model, turn, NUM_TOKENS)
        assert num_sent(coordinator) - before < len(PROMPT)

    run(settings(tmp_path, on_devices, max_seq_len=512), main)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_codes_are_held_by_devices(
    on_devices: list[WorkerProcess], tmp_path: Path, method: str
) -> None:
    save_checkpoint(FAMILY["llama-untied-sharded"], tmp_path)
    alone = run_coordinator(
        CoordinatorSettings(model=tmp_path, max_seq_len=256, local_layers=6, quantize=method),
        [PROMPT],
    )
    outcome = run_coordinator(settings(tmp_path, on_devices, quantize=method), [PROMPT])
    assert outcome.tokens == alone.tokens


def test_another_device_takes_over(
    tmp_path: Path, llama: tuple[Path, Any], on_devices: list[WorkerProcess]
) -> None:
    """One dies in the middle of an answer; a worker on the other device and one on the CPU go on."""
    path, model = llama
    expected = reference_tokens(model, PROMPT, NUM_TOKENS)

    async def main(coordinator: Coordinator) -> None:
        with trio.fail_after(DEADLINE):
            while len(coordinator.fleet.holdings) < 3:
                await trio.sleep(0.02)
        lost = coordinator.stages[0].peer_id
        tokens = []
        async for token in coordinator.generate(PROMPT, max_tokens=NUM_TOKENS):
            tokens.append(token)
            if len(tokens) == NUM_TOKENS // 2:
                next(worker for worker in three if worker.peer_id == lost).kill()
            await trio.sleep(0.05)
        assert tokens == expected
        assert lost not in {stage.peer_id for stage in coordinator.stages}

    with ExitStack() as stack:
        three = [
            stack.enter_context(start_worker(tmp_path, *args, command=COMMAND))
            for args in (("--gpu", "0"), ("--gpu", "1"), ("--device", "cpu"))
        ]
        run(settings(path, three), main)


def test_a_coordinator_computes_layers_on_its_own_device(
    on_devices: list[WorkerProcess], workers: list[WorkerProcess]
) -> None:
    """The first that it has; beside a worker on the other, whose layers come after its own."""
    written = []
    for command, worker in ((COORDINATOR_ON_DEVICES, on_devices[0]), (COORDINATOR, workers[0])):
        done = run_command(
            [*command, "--peer", worker.address, "--local-layers", "4", "--dtype", "float32"]
            + ["--prompt", "A function definition", "--max-tokens", "20"],
            check=True,
        )
        written.append(done.stdout)
        assert ("this machine: simulated device" in done.stderr) is (worker is on_devices[0])
    assert written[0] == written[1]


def test_a_worker_says_which_devices_there_are(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="there is no gpu:2 here: torch sees cpu, sim:0 and"),
        start_worker(tmp_path, "--gpu", "2", command=COMMAND),
    ):
        pass


# The benchmark

BENCHMARK = (sys.executable, str(Path(__file__).parents[2] / "benchmarks" / "gpu.py"))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU here")
def test_the_benchmark_says_that_there_is_no_gpu() -> None:
    done = run_command(BENCHMARK)
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr == "there is no GPU here that torch can use: nothing was measured\n"


@pytest.mark.long
def test_the_benchmark_runs_on_a_cpu() -> None:
    small = ["--device", "cpu", "--size", "64x2", "--no-compile", "--rounds", "1"]
    done = run_command([*BENCHMARK, *small, "--prompt-tokens", "16", "--tokens", "8"], check=True)
    for title in ("Weights to the device", "Products", "One token", "Answers", "2 workers"):
        assert title in done.stdout
