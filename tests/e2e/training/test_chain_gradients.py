"""Gradients of a chain of real processes, one by one, against those of one process.

Momentum of SGD after its first step is the gradient, to the bit, and the state that the leader keeps has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from neurogrid.training.data.slices import read_manifest, slice_path
from neurogrid.training.optimizers.gradients import token_weighted_loss
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.trainer import FileRange
from neurogrid.training.trainer.batches import BatchReader
from neurogrid.training.trainer.models import make_model
from tests.e2e.training.run_processes import CONFIG, RUN_FILE, open_run, rounds_of
from tests.ports import free_port

LLAMA = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
ONE_STEP = (
    RUN_FILE.replace(
        "lr = 3e-3", 'lr = 1e-2\noptimizer = "sgd"\nmomentum = 0.9\nweight_decay = 0.0\nclip = 0.0'
    )
    + """
[stop]
steps = 1
[layout]
stages = 3
micro_batches = 4
activations = "float32"
"""
)
PREFIX = "momentum_buffer/"


def kept_gradients(run: Path) -> dict[str, Tensor]:
    """The gradients of the one step, of all stages."""
    found: dict[str, Tensor] = {}
    for path in (run / "stages" / "step-1").glob("*.safetensors"):
        tensors = load_file(path)
        found |= {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}
    return found


def one_process(run: Path, config: str) -> tuple[float, Mapping[str, Tensor]]:
    """Loss and gradients of the same batch in plain torch."""
    run_file = parse_run_file((run / "run.toml").read_text())
    manifest = read_manifest(run / "data")
    model = make_model("causal-lm", config, seed=run_file.seed, checkpoint=None).train()
    (entry,) = rounds_of(run)
    batch = BatchReader("causal-lm", model.config).read(
        [
            FileRange(slice_path(run / "data", manifest.slices[r.slice]), r.start, r.stop)
            for r in entry.ranges
        ]
    )
    total = 0.0
    for ids, labels in batch.pieces(-(-batch.num_samples // run_file.layout.micro_batches)):
        logits = model(input_ids=ids, use_cache=False).logits
        share = token_weighted_loss(logits.flatten(0, 1), labels.flatten(), batch.num_labels)
        share.backward()
        total += share.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("is_tied", [False, True])
def test_three_processes_have_the_gradients_of_one(tmp_path: Path, is_tied: bool) -> None:
    config = json.dumps({**CONFIG, **LLAMA, "tie_word_embeddings": is_tied})
    with open_run(tmp_path, free_port(), ONE_STEP) as run:
        (tmp_path / "model.json").write_text(config)
        run.lead()
        for name in ("one", "two", "three"):
            run.join(name)
        run.end()
        (figures,) = run.figures()
        found = kept_gradients(run.run)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have
    try:
        loss, expected = one_process(tmp_path / "run", config)
    finally:
        torch.set_num_threads(threads)
    assert figures["loss"] == pytest.approx(loss, abs=1e-6)
    assert found.keys() == expected.keys()
    apart = [name for name, each in found.items() if not torch.equal(each, expected[name])]
    # Of what is tied each end adds its own micro-batches up, and one process all in turn.
    tied = {"model.embed_tokens.weight"} if is_tied else set()
    assert set(apart) <= tied
    for name in apart:
        assert torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-7)
