"""Runs that are changed while they go on: equal to one process that goes by the journal, also when the leader died."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import trio
from torch import Tensor

from neurogrid.cli.commands.training.change import change as change_run
from neurogrid.cli.terminal.screen import Screen
from neurogrid.training.data.slices import read_manifest, slice_path
from neurogrid.training.optimizers.gradients import token_weighted_loss
from neurogrid.training.runs.changes import Changes, run_at
from neurogrid.training.runs.entries import ChangedEntry
from neurogrid.training.runs.inner_optimizer import make_optimizer, rates_of
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.trainer import FileRange
from neurogrid.training.trainer.batches import BatchReader
from neurogrid.training.trainer.models import make_model
from tests.e2e import preloaded
from tests.e2e.preloaded import TRAIN
from tests.e2e.training.run_processes import (
    RUN_FILE,
    RunProcesses,
    entries_of,
    open_run,
    rounds_of,
    used_samples,
)
from tests.e2e.training.test_chains import assert_same_bits, weights_of
from tests.ports import free_port

# Far more steps than are made while somebody changes it.
CHAIN = (
    RUN_FILE.replace("lr = 3e-3", 'lr = 0.3\noptimizer = "sgd"')
    + """
[stop]
steps = 4000
[layout]
stages = 2
activations = "float32"
state_every = 1000
[outer]
grace = 5
[eval]
every = 0
[checkpoints]
every = 1000
"""
)


def change(run: RunProcesses, *words: str) -> str:
    """What `neurogrid train change` prints."""
    done = preloaded.run([*TRAIN, "change", "run", *words], cwd=run.directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


def changed_entries(run: RunProcesses) -> list[ChangedEntry]:
    return [each for each in entries_of(run.run) if isinstance(each, ChangedEntry)]


def one_process(run: Path) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The same steps in plain torch, by the journal: weights, losses, and learning rates."""
    run_file = parse_run_file((run / "run.toml").read_text())
    changes = Changes.of(entries_of(run))
    manifest = read_manifest(run / "data")
    config = (run.parent / "model.json").read_text()
    model = make_model("causal-lm", config, seed=run_file.seed, checkpoint=None).train()
    parameters = list(model.parameters())
    optimizer = make_optimizer(run_file.inner, parameters)
    reader = BatchReader("causal-lm", model.config)
    losses, rates = [], []
    for entry in rounds_of(run):
        now = run_at(run_file, changes, entry.round)
        assert now.stop.steps is not None
        batch = reader.read(
            [
                FileRange(slice_path(run / "data", manifest.slices[r.slice]), r.start, r.stop)
                for r in entry.ranges
            ]
        )
        num_pieces = now.layout.num_micro_batches(batch.num_samples)
        total = 0.0
        for ids, labels in batch.pieces(-(-batch.num_samples // num_pieces)):
            logits = model(input_ids=ids, use_cache=False).logits
            share = token_weighted_loss(logits.flatten(0, 1), labels.flatten(), batch.num_labels)
            share.backward()
            total += share.item()
        torch.nn.utils.clip_grad_norm_(parameters, now.inner.clip)
        rates.append(rates_of(now.inner, now.stop.steps)(entry.round - 1))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {name: each.detach() for name, each in model.named_parameters()}, losses, rates


def test_a_run_that_is_changed_is_what_its_journal_says(tmp_path: Path) -> None:
    """The leader is killed after the change, and all steps are made again: the change, too, at its step."""
    with open_run(tmp_path, free_port(), CHAIN) as run:
        run.lead()
        run.join("one")
        run.join("two")
        run.wait_round(5)
        # In this process: a command of its own takes as long as many steps.
        stop = run.rounds() + 40
        words = [f"stop.steps={stop}", "inner.lr=0.1", "inner.clip=0.5", "inner.batch_tokens=512"]
        trio.run(change_run, Namespace(directory=run.run, words=words), Screen())
        run.wait(lambda: bool(changed_entries(run)), "nothing was changed")
        (first,) = changed_entries(run)
        run.wait_round(first.round + 3)
        run.kill()
        num_lines = len(run.figures())
        run.lead("--resume")
        last = run.end()
        assert changed_entries(run) == [first, first]
        assert f"from step {first.round} on: inner.batch_tokens = 512, inner.clip = 0.5" in run.log
        assert last.name == f"step-{stop}"
        figures = run.figures()
        before, again = figures[:num_lines], figures[num_lines:]
        assert [line["round"] for line in again] == list(range(1, stop + 1))
        for one, other in zip(before, again, strict=False):
            assert [one[key] for key in ("round", "loss", "gradient_norm", "lr")] == [
                other[key] for key in ("round", "loss", "gradient_norm", "lr")
            ]
        weights, losses, rates = one_process(run.run)
        assert [line["lr"] for line in again] == rates
        assert [line["loss"] for line in again] == pytest.approx(losses, abs=5e-5)
        for name, got in weights_of(run.run).items():
            assert torch.allclose(got, weights[name], atol=1e-5), name
        assert set(used_samples(run.run).values()) == {1}
        # What was dealt before was trained as it was dealt.
        sizes = [sum(each.num_samples for each in entry.ranges) for entry in rounds_of(run.run)]
        assert sizes == [8] * (first.round + 1) + [16] * (stop - first.round - 1)


def test_a_changed_run_whose_leader_is_killed_has_the_bits_of_one_that_was_not(
    tmp_path: Path,
) -> None:
    """What is wanted while nobody leads the run holds from the first step after it is resumed."""
    text = CHAIN.replace("state_every = 1000", "state_every = 4")
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    port = free_port()  # where the workers of either look for their leader
    with open_run(first, port, text) as run:
        run.lead()
        run.join("one")
        run.join("two")
        run.wait_round(5)
        run.kill()
        run.kill("one")
        run.kill("two")
        kept = int(next((run.run / "stages").glob("step-*[0-9]")).name.removeprefix("step-"))
        told = change(run, f"stop.steps={kept + 20}", "inner.lr=0.1", "layout.micro_batches=4")
        assert told.splitlines()[:4] == ["[inner]", "lr = 0.1", "[layout]", "micro_batches = 4"]
        shutil.copytree(first, second)
        run.lead("--resume")
        run.join("one")
        run.join("two")
        undisturbed = weights_of_end(run, kept)
    with open_run(second, port, text) as run:
        run.lead("--resume")
        run.join("one")
        run.join("two")
        run.wait(lambda: bool(changed_entries(run)), "nothing was changed")
        run.wait_round(kept + 7)
        run.kill()
        run.lead("--resume")
        assert_same_bits(weights_of_end(run, kept), undisturbed)


def weights_of_end(run: RunProcesses, kept: int) -> dict[str, Tensor]:
    last = run.end()
    assert last.name == f"step-{kept + 20}"
    assert {each.round for each in changed_entries(run)} == {kept + 1}
    return weights_of(run.run)


def test_a_run_of_whole_models_ends_sooner(tmp_path: Path) -> None:
    text = RUN_FILE + "[stop]\nrounds = 4000\n[outer]\nevery = 4\n[eval]\nevery = 0\n"
    with open_run(tmp_path, free_port(), text) as run:
        run.lead()
        run.join("one")
        run.wait_round(3)
        change(run, "stop.rounds=4", "eval.every=1")
        run.end()
        (entry,) = changed_entries(run)
        assert f"from round {entry.round} on: eval.every = 1, stop.rounds = 4" in run.log
        assert "eval_loss" in run.figures()[-1]
        assert len(rounds_of(run.run)) < 400
        assert set(used_samples(run.run).values()) == {1}
