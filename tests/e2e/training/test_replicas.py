"""Runs of several replicas of both kinds: equal to a simulation in one process, whoever is killed meanwhile."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from neurogrid.training.data.dealing import SampleRange
from neurogrid.training.data.slices import read_manifest, slice_path
from neurogrid.training.optimizers import OuterOptimizer
from neurogrid.training.optimizers.gradients import token_weighted_loss
from neurogrid.training.runs.changes import Changes, run_at
from neurogrid.training.runs.entries import ChangedEntry, ResumedEntry, RoundEntry, RunEntry
from neurogrid.training.runs.estimate import BASE_BYTES
from neurogrid.training.runs.inner_optimizer import make_optimizer, rates_of
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.runs.state import RunState
from neurogrid.training.runs.trainers import cut_batches
from neurogrid.training.trainer import FileRange
from neurogrid.training.trainer.batches import BatchReader
from neurogrid.training.trainer.models import make_model
from tests.e2e.training.run_processes import (
    RUN_FILE,
    RunProcesses,
    check_used,
    entries_of,
    open_run,
    rounds_of,
)
from tests.e2e.training.test_chains import weights_of
from tests.ports import free_port

ODD = (sys.executable, "-m", "tests.e2e.training.odd_replica")
Ranges = tuple[SampleRange, ...]

EVERY, NUM_ROUNDS = 4, 6
REPLICAS = (
    RUN_FILE.replace("lr = 3e-3", 'lr = 0.1\noptimizer = "sgd"')
    + f"""
[stop]
rounds = {NUM_ROUNDS}
[layout]
stages = 2
replicas = 2
activations = "float32"
state_every = {EVERY}
[outer]
method = "diloco"
every = {EVERY}
codec = "f32"
grace = 5
[members]
min = 2
[eval]
every = 3
samples = 32
"""
)
# It ends once `end_after` says so: the rate is the same in each step, however many there will be.
LONGER = (
    REPLICAS.replace(f"rounds = {NUM_ROUNDS}", "rounds = 4000")
    .replace("min = 2", "min = 1")
    .replace('"sgd"', '"sgd"\nschedule = "constant"\nwarmup = 0')
)
# Of the 920 kB that the model takes with what it learns by, room for a part.
PART, THIRD = str(BASE_BYTES // 2 + 700_000), str(BASE_BYTES // 2 + 480_000)


def simulated(run: Path) -> tuple[dict[str, Tensor], list[float]]:
    """DiLoCo in one process, by the journal: weights, and the mean loss of each round."""
    run_file = parse_run_file((run / "run.toml").read_text())
    manifest = read_manifest(run / "data")
    config = (run.parent / "model.json").read_text()
    model = make_model("causal-lm", config, seed=run_file.seed, checkpoint=None).train()
    parameters = list(model.parameters())
    reader = BatchReader("causal-lm", model.config)
    changes = Changes.of(entries_of(run))
    vector = torch.nn.utils.parameters_to_vector(parameters).detach()
    outer = OuterOptimizer(vector, lr=run_file.outer.lr, momentum=run_file.outer.momentum)
    losses = []
    works = works_of(run)
    for entry, shares in zip(rounds_of(run), works, strict=True):
        differences, weights, total, labels = [], [], 0.0, 0
        changed = run_at(run_file, changes, entry.round)
        assert changed.stop.rounds is not None
        rate_of = rates_of(changed.inner, changed.stop.rounds * EVERY)
        for ranges in shares:
            torch.nn.utils.vector_to_parameters(outer.theta0.clone(), parameters)
            optimizer = make_optimizer(run_file.inner, parameters)
            files = [
                FileRange(slice_path(run / "data", manifest.slices[r.slice]), r.start, r.stop)
                for r in ranges
            ]
            batches = cut_batches(files, run_file.num_batch_samples)
            for number, part in enumerate(batches):
                batch = reader.read(part)
                logits = model(input_ids=batch.inputs, use_cache=False).logits
                loss = token_weighted_loss(
                    logits.reshape(-1, logits.shape[-1]), batch.labels.reshape(-1), batch.num_labels
                )
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, run_file.inner.clip)
                for group in optimizer.param_groups:
                    group["lr"] = rate_of((entry.round - 1) * EVERY + number)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item() * batch.num_labels
                labels += batch.num_labels
            theta = torch.nn.utils.parameters_to_vector(parameters).detach()
            differences.append(outer.difference(theta))
            weights.append(sum(each.num_samples for each in ranges))
        mean = sum(
            (w / sum(weights) * each for w, each in zip(weights, differences, strict=True)),
            start=torch.zeros_like(vector),
        )
        outer.step(mean)
        losses.append(total / labels)
    torch.nn.utils.vector_to_parameters(outer.theta0.clone(), parameters)
    return {name: each.detach() for name, each in model.named_parameters()}, losses


def works_of(run: Path) -> list[list[Ranges]]:
    """The samples of each contributor to each round, by the journal."""
    entries = entries_of(run)
    first = entries[0]
    assert isinstance(first, RunEntry)
    resumed = {each.round for each in entries if isinstance(each, ResumedEntry)}
    state = RunState(first.slices, seed=first.seed, resumable=resumed)
    found: dict[int, list[Ranges]] = {}
    for entry in entries:
        if isinstance(entry, RoundEntry):
            found[entry.round] = [
                tuple(r for work in state.seats[seat].works[:num] for r in work.ranges)
                for seat, num in entry.contributions
            ]
        elif isinstance(entry, ResumedEntry):
            found = {number: each for number, each in found.items() if number <= entry.round}
        state.apply(entry)
    return [found[number] for number in sorted(found)]


def check_equal(run: RunProcesses) -> None:
    """The run is the simulation of its journal, and each sample was used once."""
    weights, losses = simulated(run.run)
    figures = {line["round"]: line for line in run.figures()}
    assert sorted(figures) == list(range(1, len(losses) + 1))
    assert [figures[number]["loss"] for number in sorted(figures)] == pytest.approx(
        losses, abs=2e-5
    )
    for name, got in weights_of(run.run).items():
        assert torch.allclose(got, weights[name], atol=1e-6), name
    check_used(run.run)


def join_both_kinds(run: RunProcesses) -> None:
    """A machine that has room for the model, and two that have it for a part."""
    run.join("whole")
    for name in ("one", "two"):
        run.join(name, "--memory-limit", PART)


def num_contributors(run: RunProcesses) -> list[int]:
    return [len(entry.contributions) for entry in rounds_of(run.run)]


def test_a_machine_beside_a_chain_of_two_is_the_simulation(tmp_path: Path) -> None:
    with open_run(tmp_path, free_port(), REPLICAS) as run:
        run.lead()
        join_both_kinds(run)
        run.end()
        check_equal(run)
        assert num_contributors(run) == [2] * NUM_ROUNDS
        last = run.figures()[-1]
        assert (last["replicas"], last["members"], last["stages"]) == (2, 3, 2)
        assert "eval_loss" in last
        assert "whole has layers 0 to 3" in run.log


def begin(run: RunProcesses) -> None:
    """Have both kinds take part from the first round on, or nearly."""
    run.lead()
    join_both_kinds(run)
    run.wait(lambda: num_contributors(run)[-1:] == [2], "there were never two replicas")


def wait_for(run: RunProcesses, num: int) -> None:
    """Wait for a round of so many replicas, after those that there are."""
    before = len(num_contributors(run))
    run.wait(lambda: num in num_contributors(run)[before:], f"no round had {num} replicas")


def is_lost(run: RunProcesses, name: str) -> bool:
    """Whether a replica was done without since a machine of it is gone: it was missed, or was to be told something."""
    return bool(
        re.search(rf"{name} (is lost|cannot be reached: [^\n]*)\. The others go on", run.log)
    )


def end_after(run: RunProcesses, rounds: int) -> None:
    """Have the run end so many rounds from now, and wait for its end."""
    run.change(f"stop.rounds={run.rounds() + rounds}")
    run.end()


def test_a_round_goes_on_without_a_chain_that_lost_a_stage(tmp_path: Path) -> None:
    with open_run(tmp_path, free_port(), LONGER) as run:
        begin(run)
        run.kill("two")
        wait_for(run, 1)
        run.join("two", "--memory-limit", PART)
        wait_for(run, 2)
        end_after(run, 3)
        check_equal(run)
        assert is_lost(run, "two")


def test_a_chain_goes_on_without_the_machine_that_has_it_all(tmp_path: Path) -> None:
    with open_run(tmp_path, free_port(), LONGER) as run:
        begin(run)
        run.kill("whole")
        wait_for(run, 1)
        run.join("whole")
        wait_for(run, 2)
        end_after(run, 3)
        check_equal(run)
        assert is_lost(run, "whole")


def test_a_machine_that_hangs_in_a_round_is_done_without(tmp_path: Path) -> None:
    with open_run(tmp_path, free_port(), LONGER) as run:
        begin(run)
        hung = run.workers["one"]
        hung.send_signal(signal.SIGSTOP)
        try:
            wait_for(run, 1)
            end_after(run, 3)
        finally:
            hung.send_signal(signal.SIGCONT)
        assert num_contributors(run)[-1] == 1
        check_equal(run)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("dies", ""),
        ("lies", "has come to another average than the others"),
        ("silent", ""),
    ],
)
def test_a_replica_that_is_odd_in_an_attempt_changes_nothing(
    tmp_path: Path, kind: str, told: str
) -> None:
    """Nothing is applied before all have the same: the others average again, with it or without."""
    text = LONGER.replace("grace = 5", "grace = 5\nattempt_timeout = 10")
    with open_run(tmp_path, free_port(), text) as run:
        run.lead()
        for name in ("one", "two"):
            run.join(name, "--memory-limit", PART)
        run.join("odd", program=(*ODD, kind))
        run.wait(lambda: 2 in num_contributors(run), "the odd one was never in a round")
        if kind == "dies":
            run.wait(lambda: is_lost(run, "odd"), "it did not die")
        run.wait(lambda: told in run.log, f"nobody said: {told}")
        for _ in range(2):
            wait_for(run, 1 if kind == "dies" else 2)
        end_after(run, 3)
        assert num_contributors(run)[-1] == (1 if kind == "dies" else 2)
        check_equal(run)


def test_the_leader_is_killed_and_comes_back(tmp_path: Path) -> None:
    with open_run(
        tmp_path, free_port(), LONGER.replace(f"= {EVERY}\n[outer]", "= 12\n[outer]")
    ) as run:
        begin(run)
        run.wait_round(5)
        run.kill()
        run.change("inner.lr=0.05")
        run.lead("--resume")
        wait_for(run, 2)
        run.change("inner.lr=0.02")
        wait_for(run, 2)
        end_after(run, 3)
        changed = [each for each in entries_of(run.run) if isinstance(each, ChangedEntry)]
        assert {word for each in changed for word, _ in each.changes} == {"inner.lr", "stop.rounds"}
        check_equal(run)
        # It has ended, and says so.
        run.lead("--resume")
        assert run.end().name == f"step-{run.rounds() * EVERY}"


def test_all_are_lost_and_come_back(tmp_path: Path) -> None:
    """Rounds after the state that is kept are made again."""
    text = LONGER.replace(f"state_every = {EVERY}", "state_every = 1000")
    with open_run(tmp_path, free_port(), text) as run:
        begin(run)
        for name in ("whole", "two"):
            run.kill(name)
        run.wait(lambda: "the replicas go on from the state" in run.log, "nobody began anew")
        run.join("whole")
        run.join("two", "--memory-limit", PART)
        run.wait(lambda: num_contributors(run)[-1:] == [2], "they did not come back")
        end_after(run, 3)
        check_equal(run)


def test_three_stages_beside_a_machine_send_halves(tmp_path: Path) -> None:
    text = REPLICAS.replace("stages = 2", "stages = 3").replace('"f32"', '"f16"')
    with open_run(tmp_path, free_port(), text) as run:
        run.lead()
        run.join("whole")
        for name in ("one", "two", "three"):
            run.join(name, "--memory-limit", THIRD)
        run.end()
        weights, _ = simulated(run.run)
        for name, got in weights_of(run.run).items():
            assert torch.allclose(got, weights[name], atol=1e-3), name
        last = run.figures()[-1]
        assert (last["replicas"], last["members"], last["stages"]) == (2, 4, 3)


def test_replicas_learn_an_adapter(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    text = LONGER + '[adapter]\nr = 4\ntargets = ["q_proj", "down_proj"]\n'
    with open_run(tmp_path, free_port(), text.replace("lr = 0.1", "lr = 1.0")) as run:
        run.lead()
        run.join("whole")
        run.join("other")
        run.wait(lambda: num_contributors(run)[-1:] == [2], "there were never two replicas")
        run.kill("other")
        run.join("other")
        run.wait_round(10)
        wait_for(run, 2)
        end_after(run, 3)
        losses = [line["eval_loss"] for line in run.figures() if "eval_loss" in line]
        assert losses[-1] < losses[0]
        assert (run.run / "checkpoints" / "latest" / "adapter_model.safetensors").exists()
        check_used(run.run)
