"""Processes of stages whose hidden states are in a subspace: token ids go to each, and few numbers come of it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers as tf
import trio
from safetensors.torch import save_file

from neurogrid.model.proof.miniature_split import saved_tensors
from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.stages.stage_learner import StageLearner
from neurogrid.training.stages.stage_process import PlainTensor, open_stage_process
from neurogrid.training.stages.stage_settings import StageSettings
from neurogrid.training.trainer.errors import TrainerError


def plain(ids: torch.Tensor) -> PlainTensor:
    return PlainTensor("I32", tuple(ids.shape), ids.to(torch.int32).numpy().tobytes())


def test_two_processes_do_what_one_learner_does(tmp_path: Path) -> None:
    config = tf.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tensors = saved_tensors(tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    save_file(tensors, tmp_path / "weights.safetensors")
    text = json.dumps(config.to_dict())
    inner = InnerSection(optimizer="sgd", lr=0.1, clip=1.0)
    told = [
        StageSettings(text, start, stop, inner, subspace=8) for start, stop in pairwise((0, 2, 4))
    ]
    ids_BT = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    given_BT, labels_BT = ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()
    tokens, labels = plain(given_BT), plain(labels_BT)

    async def main() -> tuple[float, float, list[int], float]:
        async with open_stage_process(threads=1) as one, open_stage_process(threads=1) as two:
            for process, settings in zip((one, two), told, strict=True):
                await process.open(
                    settings,
                    step=0,
                    weights=[tmp_path / "weights.safetensors"],
                    pieces={},
                    activations="F32",
                )
            sent = await one.forward(0, 0, tokens, tokens)
            with pytest.raises(TrainerError, match="says nothing without its token ids"):
                await two.forward_loss(0, 0, sent, labels, 16)
            loss = await two.forward_loss(0, 0, sent, labels, 16, tokens)
            back = await two.backward(0, None)
            assert back is not None
            assert await one.backward(0, back) is None
            norm = (await one.squared_norm() + await two.squared_norm()) ** 0.5
            for process in (one, two):
                await process.apply(0, norm, is_applied=True)
            hidden = await one.evaluate(tokens, None)
            assert isinstance(hidden, PlainTensor)
            after = await two.evaluate(hidden, labels, tokens)
            assert isinstance(after, float)
            return loss, norm, [len(memoryview(each.data)) for each in (sent, back)], after

    loss, norm, sizes, after = trio.run(main)
    assert sizes == [2 * 8 * 8 * 4] * 2
    whole = StageLearner(StageSettings(text, 0, 4, inner, subspace=8), tensors)
    assert whole.forward_loss(0, given_BT, labels_BT, 16, step=0) == pytest.approx(loss, abs=1e-5)
    whole.backward(0)
    assert whole.squared_norm() ** 0.5 == pytest.approx(norm, rel=1e-5)
    whole.apply(0, norm)
    assert whole.evaluate(given_BT, labels_BT) == pytest.approx(after, rel=1e-5)
