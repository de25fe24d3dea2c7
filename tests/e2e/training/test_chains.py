"""Runs whose model lies in a chain of stages: equal to one process, whoever is killed meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from neurogrid.training.checkpoints import export
from neurogrid.training.data.slices import read_manifest, slice_path
from neurogrid.training.optimizers.gradients import token_weighted_loss
from neurogrid.training.runs.inner_optimizer import make_optimizer, rates_of
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.trainer import FileRange
from neurogrid.training.trainer.batches import BatchReader
from neurogrid.training.trainer.models import make_model
from tests.e2e.preloaded import DEADLINE
from tests.e2e.training.run_processes import (
    RUN_FILE,
    STAGE_PROGRAM,
    RunProcesses,
    check_used,
    open_run,
    program_below,
    rounds_of,
    used_samples,
)
from tests.ports import free_port

ODD = (sys.executable, "-m", "tests.e2e.training.odd_stage")
SLOW = (sys.executable, "-m", "tests.e2e.training.slow_stage")
NUM_STEPS = 16
CHAIN = (
    RUN_FILE
    + f"""
[stop]
steps = {NUM_STEPS}
[layout]
stages = 2
activations = "float32"
state_every = 4
[outer]
grace = 5
[eval]
every = 8
samples = 32
"""
)


def weights_of(run: Path) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / "latest" / "model.safetensors")


def one_process(run: Path) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The same steps in plain torch, by the journal: weights, losses, and norms of gradients."""
    run_file = parse_run_file((run / "run.toml").read_text())
    manifest = read_manifest(run / "data")
    config = (run.parent / "model.json").read_text()
    model = make_model("causal-lm", config, seed=run_file.seed, checkpoint=None).train()
    parameters = list(model.parameters())
    optimizer = make_optimizer(run_file.inner, parameters)
    assert run_file.stop.steps is not None
    rate_of = rates_of(run_file.inner, run_file.stop.steps)
    reader = BatchReader("causal-lm", model.config)
    num_pieces = run_file.layout.num_micro_batches(run_file.num_batch_samples)
    losses, norms = [], []
    for entry in rounds_of(run):
        batch = reader.read(
            [
                FileRange(slice_path(run / "data", manifest.slices[r.slice]), r.start, r.stop)
                for r in entry.ranges
            ]
        )
        total = 0.0
        for ids, labels in batch.pieces(-(-batch.num_samples // num_pieces)):
            logits = model(input_ids=ids, use_cache=False).logits
            share = token_weighted_loss(
                logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), batch.num_labels
            )
            share.backward()
            total += share.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, run_file.inner.clip)))
        for group in optimizer.param_groups:
            group["lr"] = rate_of(entry.round - 1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {name: each.detach() for name, each in model.named_parameters()}, losses, norms


def figures_of(run: RunProcesses, *, num_steps: int = NUM_STEPS) -> list[dict[str, float]]:
    """The last line of each step: what was computed again was written once."""
    figures = run.figures()
    assert [line["round"] for line in figures] == list(range(1, num_steps + 1))
    return figures


def check_equal(run: RunProcesses, *, num_steps: int = NUM_STEPS) -> None:
    """The run is what one process computes from its journal."""
    weights, losses, norms = one_process(run.run)
    figures = figures_of(run, num_steps=num_steps)
    assert [line["loss"] for line in figures] == pytest.approx(losses, abs=2e-5)
    assert [line["gradient_norm"] for line in figures] == pytest.approx(norms, abs=2e-5)
    for name, got in weights_of(run.run).items():
        assert torch.allclose(got, weights[name], atol=1e-6), name
    check_used(run.run)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of the run that others are to end with, whatever happens to them; equal to one process."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with open_run(directory, free_port(), CHAIN) as run:
        run.lead()
        run.join("one")
        run.join("two")
        run.end()
        check_equal(run)
        assert "eval_loss" in run.figures()[-1]
        return weights_of(run.run)


def assert_same_bits(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


def test_three_stages_are_one_process(tmp_path: Path) -> None:
    """Activations of 32 bits, forward passes computed again."""
    text = CHAIN.replace("stages = 2", "stages = 3\nrecompute = true")
    with open_run(tmp_path, free_port(), text) as run:
        run.lead()
        for name in ("one", "two", "three"):
            run.join(name)
        run.end()
        check_equal(run)


# At step 7 of 16 once nobody was lost: that the run was over by then fits, and was not seen. It is told now.
@pytest.mark.parametrize("at", [2, 4])
def test_a_spare_takes_the_place_of_a_worker_that_is_killed(
    tmp_path: Path, undisturbed: dict[str, Tensor], at: int
) -> None:
    with open_run(tmp_path, free_port(), CHAIN) as run:
        run.lead()
        for name in ("one", "two", "three"):
            run.join(name)
        run.wait_round(at)
        run.kill(working(run))
        assert run.rounds() < NUM_STEPS, "the run was over before anybody was killed"
        run.end()
        assert "is lost. The stages are arranged anew" in run.log
        assert set(used_samples(run.run).values()) == {1}
        figures_of(run)
        assert_same_bits(weights_of(run.run), undisturbed)


def working(run: RunProcesses) -> str:
    """The name of a worker that is a stage, by the leader's words."""
    line = next(line for line in reversed(run.log.splitlines()) if line.startswith("stages: "))
    return line.removeprefix("stages: ").split(" has layers")[0]


def test_a_worker_that_hangs_is_waited_for_no_longer_than_the_grace(
    tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    with open_run(tmp_path, free_port(), CHAIN) as run:
        run.lead()
        for name in ("one", "two", "three"):
            run.join(name)
        run.wait_round(5)
        hung = run.workers[working(run)]
        hung.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        try:
            run.end()
        finally:
            hung.send_signal(signal.SIGCONT)
        assert time.monotonic() - began < DEADLINE / 2
        # Its lease ends before the grace is over where it was about to be renewed.
        by_silence, by_lease = "says nothing any more", "takes part no more"
        assert f"{by_silence}. The stages" in run.log or f"{by_lease}. The stages" in run.log
        assert_same_bits(weights_of(run.run), undisturbed)


def test_the_process_of_a_stage_is_killed(tmp_path: Path, undisturbed: dict[str, Tensor]) -> None:
    """The worker lives: it is a stage again."""
    with open_run(tmp_path, free_port(), CHAIN) as run:
        run.lead()
        run.join("one")
        run.join("two")
        run.wait_round(6)
        os.kill(program_below(run.workers["two"].pid, STAGE_PROGRAM), signal.SIGKILL)
        run.end()
        assert "the stage's process was ended by signal 9" in run.log
        assert_same_bits(weights_of(run.run), undisturbed)


def test_the_leader_is_killed_and_comes_back(
    tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    with open_run(tmp_path, free_port(), CHAIN) as run:
        run.lead()
        run.join("one")
        run.join("two")
        run.wait_round(10)
        run.kill()
        run.lead("--resume")
        run.end()
        assert_same_bits(weights_of(run.run), undisturbed)
        assert set(used_samples(run.run).values()) == {1}


def test_a_last_checkpoint_that_is_missing_is_written_by_a_leader_that_comes_back(
    tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    """It died after it had kept the last state. Nobody needs to join for that."""
    with open_run(tmp_path, free_port(), CHAIN) as run:
        run.lead()
        run.join("one")
        run.join("two")
        last = run.end()
        shutil.rmtree(last)
        (last.parent / "latest").unlink()
        (last.parent / "latest").symlink_to("step-10")
        run.lead("--resume")
        assert run.end() == last
        assert_same_bits(weights_of(run.run), undisturbed)


def test_fewer_stages_go_on_where_nobody_takes_the_place(
    tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    with open_run(tmp_path, free_port(), CHAIN) as run:
        run.lead("--wait", "20")
        run.join("one")
        run.join("two")
        run.wait_round(6)
        run.kill("one")
        run.end()
        for name, got in weights_of(run.run).items():
            assert torch.allclose(got, undisturbed[name], atol=1e-6)
        assert run.figures()[-1]["stages"] == 1


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("shape", "due, got"),
        ("twice", "has come twice"),
        ("number", "micro-batches"),
        ("neighbour", "comes of none that may send it"),
    ],
)
def test_a_stage_that_sends_what_is_not_due_changes_nothing(
    tmp_path: Path, undisturbed: dict[str, Tensor], kind: str, told: str
) -> None:
    """Whoever was sent it says so, and the step is made again."""
    with open_run(tmp_path, free_port(), CHAIN) as run:
        run.lead()
        run.join("one")
        run.join("odd", program=(*ODD, kind))
        run.end()
        assert told in run.log
        assert_same_bits(weights_of(run.run), undisturbed)
        figures_of(run)


def test_a_step_of_numbers_that_are_not_finite_is_not_made(tmp_path: Path) -> None:
    with open_run(tmp_path, free_port(), CHAIN) as run:
        run.lead()
        run.join("one")
        run.join("odd", program=(*ODD, "nan"))
        run.end()
        (line,) = [line for line in run.log.splitlines() if "so no step was made of it" in line]
        assert "is not finite" in line
        assert all(each.isfinite().all() for each in weights_of(run.run).values())
        figures_of(run)


def test_a_batch_that_does_not_fit_goes_in_more_micro_batches(tmp_path: Path) -> None:
    text = CHAIN.replace("batch_tokens = 256", "batch_tokens = 32768")
    text = text.replace("stages = 2", "stages = 2\nmicro_batches = 1").replace(
        "steps = 16", "steps = 3"
    )
    with open_run(tmp_path, free_port(), text) as run:
        run.lead()
        for name in ("one", "two"):
            run.join(name, "--memory-limit", "700MiB")
        run.end()
        assert "a batch goes in 2 micro-batches from here on" in run.log
        assert "there is no memory left to" in run.log


def test_a_stage_that_becomes_slow_gives_its_place_to_a_spare(tmp_path: Path) -> None:
    text = CHAIN.replace(f"steps = {NUM_STEPS}", "steps = 60")
    with open_run(tmp_path, free_port(), text) as run:
        run.lead()
        run.join("one")
        run.join("slow", program=SLOW)
        run.wait_round(3)
        run.join("two")
        run.end()
        assert "slow has become slow: it takes" in run.log
        last = [line for line in run.log.splitlines() if line.startswith("stages: ")][-1]
        assert "slow has layers" not in last
        assert set(used_samples(run.run).values()) == {1}


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_an_adapter_is_trained(tmp_path: Path, quantize: str) -> None:
    """Base weights stay, also as codes; PEFT opens what comes of it, and the model speaks better with it."""
    peft = pytest.importorskip("peft")
    text = (
        f'{CHAIN}[adapter]\nr = 4\nquantize = "{quantize}"\n'
        'targets = ["q_proj", "v_proj", "down_proj"]\n'
    )
    with open_run(tmp_path, free_port(), text) as run:
        run.lead()
        run.join("one")
        run.join("two")
        run.wait_round(5)
        run.kill("two")
        run.join("two")
        run.end()
        figures = figures_of(run)
        assert (run.run / "checkpoints" / "latest" / "adapter_model.safetensors").exists()
        run_file = parse_run_file((run.run / "run.toml").read_text())
        config = (tmp_path / "model.json").read_text()
        base = make_model("causal-lm", config, seed=run_file.seed, checkpoint=None).eval()
        manifest = read_manifest(run.run / "data")
        reader = BatchReader("causal-lm", base.config)
        held_out = slice_path(run.run / "data", manifest.held_out[0])
        batch = reader.read([FileRange(held_out, 0, min(32, manifest.held_out[0].num_samples))])
        export(run.run, tmp_path / "merged")
        # Codes and the weights that they stand for speak nearly alike.
        off = 1e-5 if quantize == "none" else 1e-2
        for model in (
            peft.PeftModel.from_pretrained(base, run.run / "checkpoints" / "latest"),
            AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(),
        ):
            with torch.no_grad():
                logits = model(input_ids=batch.inputs, use_cache=False).logits
                loss = token_weighted_loss(
                    logits.reshape(-1, logits.shape[-1]), batch.labels.reshape(-1), batch.num_labels
                )
            assert loss.item() == pytest.approx(figures[-1]["eval_loss"], abs=off)
        assert figures[-1]["eval_loss"] < figures[7]["eval_loss"]
        # It has ended, and says so.
        run.lead("--resume")
        assert run.end().name == f"step-{NUM_STEPS}"
        told = json.loads((run.run / "checkpoints" / "latest" / "adapter_config.json").read_text())
        assert (told["r"], told["peft_type"]) == (4, "LORA")
