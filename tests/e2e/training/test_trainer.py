"""Trainers in processes of their own: equal to a plain loop of torch, and what becomes of them when something fails."""

from __future__ import annotations

from pathlib import Path

import torch
import trio
from transformers import AutoModelForCausalLM

from neurogrid.training.trainer import open_trainer
from tests.e2e.training.trainer_models import (
    batches_of,
    plain_loop,
    plain_model,
    settings_of,
    text_config,
    vector_of,
    write_slice,
)

NOT_FOREVER = 120.0  # seconds


async def test_steps_are_those_of_a_plain_loop_bit_for_bit(tmp_path: Path) -> None:
    config = text_config()
    batches = batches_of(write_slice(tmp_path / "slice"), 6)
    model, losses = plain_loop(config, batches)
    told = []
    with trio.fail_after(NOT_FOREVER):
        async with open_trainer(settings_of(config)) as trainer:
            assert torch.equal(trainer.weights, vector_of(plain_model(config)))
            trained = await trainer.train(batches, step=0, seed=0, on_batch=told.append)
            assert torch.equal(trainer.weights, vector_of(model))
            await trainer.save(tmp_path / "saved")
    assert [each.loss for each in told] == losses
    assert (trained.batches, trained.samples, trained.tokens) == (6, 48, 48 * 24)
    assert trained.labels == 48 * 23
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(vector_of(saved), vector_of(model))
