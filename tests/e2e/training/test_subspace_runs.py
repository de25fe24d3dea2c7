"""Runs in stages whose hidden states are in a subspace: equal to one process, of which nothing is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from neurogrid.model.proof.miniature_split import saved_tensors
from neurogrid.training.data.slices import read_manifest, slice_path
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.stages.stage_learner import StageLearner
from neurogrid.training.stages.stage_settings import StageSettings
from neurogrid.training.trainer import FileRange
from neurogrid.training.trainer.batches import BatchReader
from neurogrid.training.trainer.models import make_model
from tests.e2e.preloaded import DEADLINE
from tests.e2e.training.run_processes import open_run, rounds_of
from tests.e2e.training.test_chains import CHAIN, NUM_STEPS, figures_of, weights_of
from tests.ports import free_port

TEXT = CHAIN.replace("lr = 3e-3", 'lr = 0.3\noptimizer = "sgd"').replace(
    "stages = 2", "stages = 2\nstage_members = 2\nsubspace = 8"
)


def one_learner(run: Path) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """The same steps of an unsplit learner, by the journal: weights, losses, and norms of gradients."""
    run_file = parse_run_file((run / "run.toml").read_text())
    manifest = read_manifest(run / "data")
    config = (run.parent / "model.json").read_text()
    model = make_model("causal-lm", config, seed=run_file.seed, checkpoint=None)
    told = StageSettings(
        json.dumps(model.config.to_dict()),
        0,
        4,
        run_file.inner,
        total_steps=NUM_STEPS,
        seed=run_file.seed,
        subspace=run_file.layout.subspace,
    )
    learner = StageLearner(told, saved_tensors(model))
    reader = BatchReader("causal-lm", model.config)
    losses, norms = [], []
    for step, entry in enumerate(rounds_of(run)):
        ranges = [
            FileRange(slice_path(run / "data", manifest.slices[r.slice]), r.start, r.stop)
            for r in entry.ranges
        ]
        batch, total = reader.read(ranges), 0.0
        for number, (ids, labels) in enumerate(batch.pieces(1)):
            total += learner.forward_loss(number, ids, labels, batch.num_labels, step=step)
            learner.backward(number)
        norms.append(learner.squared_norm() ** 0.5)
        learner.apply(step, norms[-1])
        losses.append(total)
    return learner.weights(), losses, norms


def test_a_chain_in_a_subspace_is_one_learner(tmp_path: Path) -> None:
    with open_run(tmp_path, free_port(), TEXT) as run:
        run.lead()
        for name in ("one", "two", "three"):
            run.join(name)
        run.end()
        weights, losses, norms = one_learner(run.run)
        figures = figures_of(run)
        assert [line["loss"] for line in figures] == pytest.approx(losses, abs=1e-4)
        assert [line["gradient_norm"] for line in figures] == pytest.approx(norms, abs=1e-4)
        for name, got in weights_of(run.run).items():
            assert torch.allclose(got, weights[name], atol=1e-4), name
        assert "eval_loss" in figures[-1]


def test_a_model_with_weights_is_not_damaged(tmp_path: Path) -> None:
    text = TEXT.replace('config = "model.json"', 'config = "embedded"').replace(
        "vocab_size = 512\n", ""
    )
    with open_run(tmp_path, free_port(), text) as run:
        run.lead()
        assert run.leader is not None
        assert run.leader.wait(DEADLINE) != 0
        assert "[layout] subspace would damage what the weights in" in run.log
