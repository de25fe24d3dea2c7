"""Runs whose stages have several members: equal to one process, whoever joins in or is killed meanwhile."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from neurogrid.training.data.slices import read_manifest, slice_path
from neurogrid.training.optimizers.gradients import token_weighted_loss
from neurogrid.training.trainer import FileRange
from neurogrid.training.trainer.batches import BatchReader
from tests.e2e.otlp_collector import ReceivedSpan, open_collector
from tests.e2e.training.run_processes import RunProcesses, check_used, open_run
from tests.e2e.training.test_chains import CHAIN, NUM_STEPS, check_equal
from tests.observability import documented_spans
from tests.ports import free_port

# AdamW divides by gradients that are near zero, and gradients of several members are added up in another order.
WIDE = CHAIN.replace("lr = 3e-3", 'lr = 0.3\noptimizer = "sgd"').replace(
    "stages = 2", "stages = 2\nstage_members = 2\nmicro_batches = 8"
)
# It ends where `stop.steps` is changed to: the rate is the same in each step, however many there will be.
ENDLESS = WIDE.replace(f"steps = {NUM_STEPS}", "steps = 4000").replace(
    '"sgd"', '"sgd"\nschedule = "constant"\nwarmup = 0'
)

NODE0 = """
stages = 3
stage_members = 3
micro_batches = 8
power_sgd = 4
weights_every = 2
"""


def last_stages(run: RunProcesses) -> list[list[str]]:
    """The members of each stage, by the leader's last words."""
    line = [line for line in run.log.splitlines() if line.startswith("stages: ")][-1]
    return [
        re.split(" has layers | have layers ", stage)[0].split(" and ")
        for stage in line.removeprefix("stages: ").split(", ")
    ]


def test_stages_of_two_members_are_one_process(tmp_path: Path) -> None:
    with open_run(tmp_path, free_port(), WIDE) as run:
        run.lead()
        for name in ("one", "two", "three", "four"):
            run.join(name)
        run.end()
        check_equal(run)
        assert run.figures()[-1]["members"] == 4
        assert run.figures()[-1]["stages"] == 2
        assert [len(stage) for stage in last_stages(run)] == [2, 2]


def test_members_that_come_late_join_in_and_one_that_is_killed_is_done_without(
    tmp_path: Path,
) -> None:
    text = ENDLESS.replace("state_every = 4", "state_every = 1000")
    with open_run(tmp_path, free_port(), text) as run:
        run.lead()
        run.join("one")
        run.join("two")
        run.wait_round(2)
        run.join("three")
        run.join("four")
        run.wait(lambda: has_members(run, 4), "nobody joined in")
        run.kill("one")
        run.wait(lambda: has_members(run, 3), "nobody went on")
        run.join("one")
        run.wait(lambda: has_members(run, 4), "it did not come back")
        num_steps = end_after(run, 4)
        check_equal(run, num_steps=num_steps)
        assert "The stages are arranged anew" in run.log
        # Its stage had another member that has the state: nothing was computed again.
        assert "is computed again" not in run.log


def end_after(run: RunProcesses, steps: int) -> int:
    """Have the run end so many steps from now; how many it had in all."""
    last = run.rounds() + steps
    run.change(f"stop.steps={last}")
    run.end()
    # Of those after the last one two may have been dealt already.
    assert last <= run.rounds() <= last + 2
    return run.rounds()


def has_members(run: RunProcesses, num: int) -> bool:
    return any(line.get("members") == num for line in run.figures()[-1:])


def test_two_heads_three_bodies_and_two_tails(tmp_path: Path) -> None:
    """Node0's chain: members are killed and come late, gradients go at a low rank, weights are averaged."""
    text = ENDLESS.replace("stages = 2\nstage_members = 2\nmicro_batches = 8", NODE0)
    with open_run(tmp_path, free_port(), text) as run:
        run.lead()
        for name in ("one", "two", "three", "four", "five"):
            run.join(name)
        run.wait_round(3)
        run.join("six")
        run.join("seven")
        run.wait(lambda: has_members(run, 7), "not all have joined in")
        at = run.rounds()
        assert sorted(len(stage) for stage in last_stages(run)) == [2, 2, 3]
        for stage in range(3):
            run.wait_round(at + 3 * (stage + 1))
            run.kill(last_stages(run)[stage][0])
        run.wait(lambda: has_members(run, 4), "nobody went on")
        num_steps = end_after(run, 20)
        figures = run.figures()
        assert [line["round"] for line in figures] == list(range(1, num_steps + 1))
        assert figures[-1]["members"] == 4
        assert figures[-1]["loss"] < 0.7 * figures[0]["loss"]
        check_used(run.run)
        assert "other gradients" not in run.log
        assert "other weights" not in run.log


def held_out_loss(run: RunProcesses) -> float:
    """Of the checkpoint, as transformers opens it, over 32 samples."""
    manifest = read_manifest(run.run / "data")
    model = AutoModelForCausalLM.from_pretrained(run.run / "checkpoints" / "latest")
    held_out = slice_path(run.run / "data", manifest.held_out[0])
    batch = BatchReader("causal-lm", model.config).read([FileRange(held_out, 0, 32)])
    ((ids, labels),) = batch.pieces(batch.num_samples)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return float(token_weighted_loss(logits.flatten(0, 1), labels.flatten(), batch.num_labels))


def test_hidden_states_in_a_subspace_are_learned_from(tmp_path: Path) -> None:
    """An eighth of the numbers goes from stage to stage, and the model is one like any other."""
    text = CHAIN.replace("stages = 2", "stages = 2\nstage_members = 2\nsubspace = 4")
    with open_run(tmp_path, free_port(), text) as run:
        run.lead()
        for name in ("one", "two", "three"):
            run.join(name)
        run.end()
        figures = run.figures()
        assert figures[-1]["loss"] < figures[0]["loss"] - 0.5
        assert "the subspace has the digest " in run.log
        assert figures[-1]["eval_loss"] == pytest.approx(held_out_loss(run), abs=2e-4)


def test_a_step_is_one_trace_over_leader_and_all_members(tmp_path: Path) -> None:
    text = WIDE.replace(f"steps = {NUM_STEPS}", "steps = 60")
    with open_collector() as collector, open_run(tmp_path, free_port(), text) as run:
        traced = ("--otlp-endpoint", collector.url)
        run.lead(*traced)
        for name in ("one", "two", "three"):
            run.join(name, *traced)
        run.end()
        collector.wait(lambda spans: bool(whole_steps(spans)) and names_of(spans) >= SPANS.keys())
    spans = collector.spans
    told = {
        name: {key for span in spans if span.name == name for key in span.attributes}
        for name in names_of(spans)
    }
    assert told == SPANS
    for root in whole_steps(spans):
        check_step(root, [span for span in spans if span.trace_id == root.trace_id])


SPANS = documented_spans("training", under="A step of a chain of stages")


def names_of(spans: list[ReceivedSpan]) -> set[str]:
    return {span.name for span in spans}


def whole_steps(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    """The roots of steps of three members, of which all have told."""
    members = Counter(span.trace_id for span in spans if span.name == "training.stage")
    return [span for span in spans if span.name == "training.step" and members[span.trace_id] == 3]


def check_step(root: ReceivedSpan, trace: list[ReceivedSpan]) -> None:
    """A trace has one root, in which the members lie, in which lies what they did, and nothing else."""
    assert not root.parent_id
    assert root.attributes["neurogrid.members"] == len({span.instance for span in trace}) - 1 == 3
    members = [span for span in trace if span.name == "training.stage"]
    assert {span.parent_id for span in members} == {root.span_id}
    places = [
        (span.attributes["neurogrid.stage"], span.attributes["neurogrid.layers"])
        for span in members
    ]
    assert sorted(set(places)) == [(1, "0-1"), (2, "2-3")]
    assert {span.attributes["neurogrid.step"] for span in members} == {
        root.attributes["neurogrid.step"]
    }
    by_stage: dict[object, Counter[tuple[str, object]]] = {1: Counter(), 2: Counter()}
    for member in members:
        assert root.start < member.start < root.end
        parts = [span for span in trace if span.parent_id == member.span_id]
        assert {span.instance for span in parts} == {member.instance}
        assert all(member.start <= span.start <= span.end <= member.end for span in parts)
        # Whoever computes does one thing at a time; the waiting for what is tied is a part of that.
        turns = [span for span in parts if span.attributes.get("neurogrid.message") != "tied"]
        assert all(one.end <= other.start for one, other in pairwise(turns))
        assert {"training.tied", "training.apply", "training.wait"} <= names_of(parts)
        by_stage[member.attributes["neurogrid.stage"]].update(
            (span.name, span.attributes["neurogrid.micro_batch"])
            for span in parts
            if span.name in ("training.forward", "training.backward")
        )
    every = Counter(
        {(name, n): 1 for name in ("training.forward", "training.backward") for n in range(8)}
    )
    assert by_stage == {1: every, 2: every}
    assert any(span.name == "training.average" for span in trace)
