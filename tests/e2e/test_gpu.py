"""A real accelerator: workers that compute and train on it. Skipped where there is none.

Two workers share the first one, so that stages, batches and recovery are tried on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import trio
from torch import Tensor, nn

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.model.stages.device import select_device
from neurogrid.training.loops import Run, join_run, open_run
from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.trainer import open_trainer
from neurogrid.training.wire import GroupSettings
from tests.e2e.support import (
    DEADLINE,
    WorkerProcess,
    reference_tokens,
    run_coordinator,
    start_worker,
)
from tests.e2e.training.run_processes import RUN_FILE, rounds_of, used_samples
from tests.e2e.training.run_processes import open_run as run_in
from tests.e2e.training.trainer_models import (
    batches_of,
    plain_loop,
    settings_of,
    text_config,
    vector_of,
    write_slice,
)
from tests.families import FAMILIES, save_checkpoint
from tests.ports import free_port

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="there is no accelerator here"
)

PROMPT = list(range(40, 100))
NUM_TOKENS = 12
FAMILY = {family.name: family for family in FAMILIES}


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WorkerProcess]]:
    directory = tmp_path_factory.mktemp("workers")
    with ExitStack() as stack:
        yield [stack.enter_context(start_worker(directory, "--gpu", "0")) for _ in range(2)]


@pytest.mark.parametrize("family", sorted(FAMILY))
def test_workers_write_what_generate_writes(
    on_gpu: list[WorkerProcess], tmp_path: Path, family: str
) -> None:
    """One after another and four at once."""
    model = save_checkpoint(FAMILY[family], tmp_path)
    prompts = [[*range(5 + i, 15 + 3 * i)] for i in range(4)]
    expected = [reference_tokens(model, prompt, NUM_TOKENS) for prompt in prompts]
    answers: dict[int, list[int]] = {}

    async def note(coordinator: Coordinator, number: int) -> None:
        written = coordinator.generate(prompts[number], max_tokens=NUM_TOKENS)
        answers[number] = [token async for token in written]

    async def main() -> None:
        settings = CoordinatorSettings(
            model=tmp_path,
            peers=tuple(worker.address for worker in on_gpu),
            stages=2,
            max_seq_len=256,
        )
        with trio.fail_after(DEADLINE):
            async with open_coordinator(settings) as coordinator:
                assert {worker.device_kind for worker in coordinator.workers} == {
                    select_device(None).type
                }
                async with trio.open_nursery() as nursery:
                    for number in range(len(prompts)):
                        nursery.start_soon(note, coordinator, number)
                assert [answers[number] for number in range(len(prompts))] == expected
                await note(coordinator, 0)
                assert answers[0] == expected[0]

    trio.run(main)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_codes_give_the_tokens_of_the_cpu(
    on_gpu: list[WorkerProcess], tmp_path: Path, method: str
) -> None:
    save_checkpoint(FAMILY["llama-untied-sharded"], tmp_path)
    peers = tuple(worker.address for worker in on_gpu)
    alone = CoordinatorSettings(
        model=tmp_path, max_seq_len=256, local_layers=6, quantize=method, dtype="float32"
    )
    there = CoordinatorSettings(
        model=tmp_path, max_seq_len=256, peers=peers, stages=2, quantize=method, dtype="float32"
    )
    assert (
        run_coordinator(there, [PROMPT], NUM_TOKENS).tokens
        == run_coordinator(alone, [PROMPT], NUM_TOKENS).tokens
    )


def test_a_cpu_goes_on_where_a_gpu_was(tmp_path: Path) -> None:
    model = save_checkpoint(FAMILY["llama-tied"], tmp_path)
    expected = reference_tokens(model, PROMPT, NUM_TOKENS)

    async def main() -> None:
        settings = CoordinatorSettings(
            model=tmp_path,
            peers=tuple(worker.address for worker in three),
            stages=2,
            max_seq_len=256,
        )
        with trio.fail_after(DEADLINE):
            async with open_coordinator(settings) as coordinator:
                while len(coordinator.fleet.holdings) < 3:
                    await trio.sleep(0.02)
                on_gpu = {three[0].peer_id, three[1].peer_id}
                lost = next(s.peer_id for s in coordinator.stages if s.peer_id in on_gpu)
                tokens = []
                async for token in coordinator.generate(PROMPT, max_tokens=NUM_TOKENS):
                    tokens.append(token)
                    if len(tokens) == NUM_TOKENS // 2:
                        next(each for each in three if each.peer_id == lost).kill()
                    await trio.sleep(0.05)
                assert tokens == expected
                assert lost not in {stage.peer_id for stage in coordinator.stages}

    with ExitStack() as stack:
        devices = (("--gpu", "0"), ("--gpu", "0"), ("--device", "cpu"))
        three = [stack.enter_context(start_worker(tmp_path, *each)) for each in devices]
        trio.run(main)


# Training


async def test_a_trainer_has_the_losses_of_a_plain_loop(tmp_path: Path) -> None:
    """Up to the order of sums: the loop is the CPU's."""
    config, device = text_config(), str(select_device(None))
    batches = batches_of(write_slice(tmp_path / "slice"), 6)
    model, losses = plain_loop(config, batches)
    told: list[float] = []
    with trio.fail_after(DEADLINE):
        async with open_trainer(settings_of(config, device=device)) as trainer:
            await trainer.train(
                batches, step=0, seed=0, on_batch=lambda each: told.append(each.loss)
            )
            assert told == pytest.approx(losses, rel=1e-4)
            assert torch.allclose(trainer.weights, vector_of(model), atol=2e-3)
            await trainer.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").exists()


async def test_a_trainer_finds_the_micro_batch_that_fits(tmp_path: Path) -> None:
    """Within 600 MiB of the accelerator; products in bfloat16."""
    config = text_config(hidden_size=512, intermediate_size=2048, vocab_size=8192)
    inner = InnerSection(lr=1e-3, precision="bfloat16")
    path = write_slice(tmp_path / "slice", num_samples=1024, length=60)
    batches = batches_of(path, 2, 512)
    limit = 600 << 20
    settings = settings_of(config, inner, device=str(select_device(None)), memory_limit=limit)
    with trio.fail_after(DEADLINE):
        async with open_trainer(settings) as trainer:
            trained = await trainer.train(batches, step=0, seed=0)
            assert trained.samples == 1024
            assert 0 < trained.memory_bytes <= limit
            assert 0 < trained.micro_batch < 512


def test_loops_of_ones_own_on_a_gpu() -> None:
    """Their models lie there, the optimiser too: both end with the same weights, and a CPU's loop with about those."""

    def work(run: Run, net: nn.Module, member: int, device: torch.device) -> Tensor:
        for step in range(8):
            generator = torch.Generator().manual_seed(100 * member + step)
            inputs = torch.randn(5, 6, generator=generator).to(device)
            net(inputs).square().mean().backward()
            run.step(samples=5)
        return torch.cat([each.detach().cpu().flatten() for each in net.parameters()])

    def member(number: int, device: torch.device, invitation: Future[str]) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        net.to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        if number:
            with join_run(invitation.result(DEADLINE), net, optimizer) as run:
                return work(run, net, number, device)
        settings = GroupSettings(min_members=2, grace=5.0)
        listen = ("/ip4/127.0.0.1/tcp/0",)
        with open_run(net, optimizer, settings=settings, every=4, listen=listen) as run:
            invitation.set_result(run.invitation)
            return work(run, net, number, device)

    found = []
    for device in (select_device(None), torch.device("cpu")):
        invitation: Future[str] = Future()
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(member, number, device, invitation) for number in range(2)]
            first, second = (future.result(DEADLINE) for future in futures)
        assert torch.equal(first, second)
        found.append(first)
    assert torch.allclose(*found, atol=1e-4)


def test_a_run_whose_members_train_on_a_gpu(tmp_path: Path) -> None:
    """Beside one that trains on its CPU; all have the digest of every round."""
    run_file = RUN_FILE + "[stop]\nrounds = 6\n[outer]\nevery = 8\n[members]\nmin = 3\n"
    with run_in(tmp_path, free_port(), run_file) as run:
        run.lead()
        for name, device in (("one", "--gpu"), ("two", "--gpu")):
            run.join(name, device, "0")
        run.join("three", "--device", "cpu")
        checkpoint = run.end()
    assert (checkpoint / "model.safetensors").exists()
    assert len(rounds_of(run.run)) >= 6
    assert set(used_samples(run.run).values()) == {1}
    losses = [line["loss"] for line in run.figures() if "loss" in line]
    assert losses[-1] < losses[0]
