"""Trainers in processes of their own: equal to a plain loop of torch, and what becomes of them when something fails.

A process takes seconds to begin, so tests do in one what can be done in one.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from neurogrid.errors import CheckpointError, ConfigurationError
from neurogrid.training.trainer import (
    BatchDone,
    BatchError,
    FileRange,
    TrainerDiedError,
    TrainerError,
    open_trainer,
)
from tests.e2e.training.trainer_models import (
    INNER,
    batches_of,
    dropping_config,
    image_config,
    mean_loss,
    plain_loop,
    plain_model,
    settings_of,
    text_config,
    vector_of,
    write_images,
    write_labelled_slice,
    write_slice,
)

NOT_FOREVER = 120.0  # seconds


async def test_steps_are_those_of_a_plain_loop_bit_for_bit(tmp_path: Path) -> None:
    config = text_config()
    batches = batches_of(write_slice(tmp_path / "slice"), 6)
    model, losses = plain_loop(config, batches)
    told: list[BatchDone] = []
    with trio.fail_after(NOT_FOREVER):
        async with open_trainer(settings_of(config)) as trainer:
            assert torch.equal(trainer.weights, vector_of(plain_model(config)))
            trained = await trainer.train(batches, step=0, seed=0, on_batch=told.append)
            assert torch.equal(trainer.weights, vector_of(model))
            held_out = FileRange(tmp_path / "slice", 48, 64)
            evaluation = await trainer.evaluate([held_out])
            await trainer.save(tmp_path / "saved")
    assert [each.loss for each in told] == losses
    assert (trained.batches, trained.samples, trained.tokens) == (6, 48, 48 * 24)
    assert (trained.labels, trained.not_finite) == (48 * 23, "")
    ids = load_file(tmp_path / "slice")["input_ids"][48:].long()
    with torch.no_grad():
        assert evaluation.loss == pytest.approx(mean_loss(model.eval(), ids, ids).item(), rel=1e-6)
    assert (evaluation.labels, evaluation.accuracy) == (16 * 23, None)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(saved(ids).logits, model(ids).logits)


async def test_micro_batches_weigh_by_their_labels_and_tied_weights_are_there_once(
    tmp_path: Path,
) -> None:
    config = text_config(tie_word_embeddings=True)
    batches = batches_of(write_labelled_slice(tmp_path / "slice"), 6)
    model, losses = plain_loop(config, batches)
    with trio.fail_after(NOT_FOREVER):
        async with open_trainer(settings_of(config, replace(INNER, micro_batch=3))) as trainer:
            assert trainer.layout.num_elements == len(vector_of(model))
            trained = await trainer.train(batches[:1], step=0, seed=0)
            assert trained.loss == pytest.approx(losses[0], rel=1e-5)
            # Adam divides small differences by small numbers: what is near is the loss.
            trained = await trainer.train(batches[1:], step=1, seed=0)
            assert trained.micro_batch == 3
            weights = trainer.weights.clone()
            await trainer.save(tmp_path / "saved")
    relative = (weights - vector_of(model)).norm() / vector_of(model).norm()
    assert relative < 1e-5
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(vector_of(saved), weights)
    assert saved.lm_head.weight is saved.model.embed_tokens.weight


async def test_what_was_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Dropout and all; in a process that begins with other weights, and finds its micro-batches in the file."""
    settings = settings_of(dropping_config(), replace(INNER, micro_batch=0))
    batches = batches_of(write_slice(tmp_path / "slice"), 8) * 16
    with trio.fail_after(NOT_FOREVER):
        async with open_trainer(settings) as trainer:
            initial = trainer.weights.clone()
            await trainer.save_optimizer(tmp_path / "new")
            await trainer.train(batches, step=0, seed=7)
            whole = trainer.weights.clone()
            trainer.weights.copy_(initial)
            await trainer.load_optimizer(tmp_path / "new")

            first = await trainer.train(batches[:4], step=0, seed=7)
            await trainer.save_optimizer(tmp_path / "optimizer")
            await trainer.save(tmp_path / "half")
        changed = replace(settings, seed=99)
        async with open_trainer(changed, checkpoint=tmp_path / "half") as trainer:
            await trainer.load_optimizer(tmp_path / "optimizer")
            trained = await trainer.train(batches[first.batches :], step=first.batches, seed=7)
            assert torch.equal(trainer.weights, whole)
            assert trained.micro_batch == first.micro_batch == 8
            await trainer.train(batches[:2], step=0, seed=8)
            of_one_seed = trainer.weights.clone()
            trainer.weights.copy_(whole)
            await trainer.load_optimizer(tmp_path / "optimizer")
            await trainer.train(batches[:2], step=0, seed=9)
            assert not torch.equal(trainer.weights, of_one_seed)
            optimizer = load_file(tmp_path / "optimizer")
            del optimizer["state/exp_avg/transformer.wte.weight"]
            save_file(optimizer, tmp_path / "other")
            with pytest.raises(CheckpointError, match="no inner optimiser"):
                await trainer.load_optimizer(tmp_path / "other")


async def test_a_trainer_that_dies_leaves_its_weights_to_the_next(tmp_path: Path) -> None:
    batches = batches_of(write_slice(tmp_path / "slice"), 8)
    with trio.fail_after(NOT_FOREVER):
        async with open_trainer(settings_of(text_config())) as trainer:
            await trainer.train(batches[:2], step=0, seed=0)
            before = trainer.weights.clone()

            def kill(done: BatchDone) -> None:
                assert trainer.pid is not None
                os.kill(trainer.pid, signal.SIGKILL)

            with pytest.raises(TrainerDiedError, match="ended by signal 9") as died:
                await trainer.train(batches * 100, step=2, seed=0, on_batch=kill)
            assert not died.value.are_weights_torn
            assert torch.equal(trainer.weights, before)
            with pytest.raises(TrainerDiedError, match="restart"):
                await trainer.evaluate([batches[0][0]])
            await trainer.restart()
            assert torch.equal(trainer.weights, before)
            trained = await trainer.train(batches[2:], step=2, seed=0)
            assert trained.batches == 6
            after = trainer.weights.clone()
            # A deadline in the middle of a call costs the process, too.
            with trio.move_on_after(0.5) as scope:
                await trainer.train(batches * 1000, step=8, seed=0)
            assert scope.cancelled_caught
            assert trainer.pid is None
            assert torch.equal(trainer.weights, after)


async def test_bad_batches_are_named_and_change_nothing(tmp_path: Path) -> None:
    path = write_slice(tmp_path / "slice")
    batches = batches_of(path, 4)
    ids = load_file(path)["input_ids"]
    ids[5, 3] = 70_000
    save_file({"input_ids": ids}, tmp_path / "foreign")
    save_file({"input_ids": ids[:, :1] * 0}, tmp_path / "short")
    save_file({"input_ids": ids.repeat(1, 3) % 100}, tmp_path / "long")
    save_file({"pixel_values": ids}, tmp_path / "images")
    save_file({"input_ids": ids.float()}, tmp_path / "floats")
    (tmp_path / "damaged").write_bytes(path.read_bytes()[:100])
    wrong = {
        "foreign": "foreign: sample 5 has id 70000, and the model has 300 tokens in its vocabulary: prepare",
        "short": "no label in the whole batch",
        "long": "72 tokens in a sample, and the model has 64 positions",
        "images": "has no input_ids; is it a slice of the right kind",
        "floats": "int32 .* is wanted, not torch.float32",
        "damaged": "damaged: cannot be read: .*; fetch the slice again",
        "nowhere": "nowhere: cannot be read",
    }
    with trio.fail_after(NOT_FOREVER):
        async with open_trainer(settings_of(text_config())) as trainer:
            before = trainer.weights.clone()
            for name, words in wrong.items():
                with pytest.raises(BatchError, match=words):
                    await trainer.train(
                        [batches[0], [FileRange(tmp_path / name, 2, 8)]], step=0, seed=0
                    )
                assert torch.equal(trainer.weights, before)
            with pytest.raises(BatchError, match="has 64 samples; the manifest"):
                await trainer.evaluate([FileRange(path, 60, 65)])
            with pytest.raises(BatchError, match="a batch of no samples"):
                await trainer.train([[]], step=0, seed=0)
            with pytest.raises(TrainerError, match="cannot be written"):
                await trainer.save_optimizer(tmp_path / "nowhere" / "optimizer")
            trainer.weights.fill_(float("nan"))
            trained = await trainer.train(batches, step=0, seed=0)
            gradient = await trainer.gradient(batches[1], step=0, seed=0)
    assert trained.batches == 0
    assert f"batch 0 ({path}, samples 0 to 3; " in trained.not_finite
    assert (
        "the loss is nan, so no step was made of it; lower the learning rate" in trained.not_finite
    )
    assert f"{path}, samples 8 to 11; " in gradient.not_finite


async def test_gradients_of_members_are_that_of_one(tmp_path: Path) -> None:
    """Two members with a half each, weighted by labels."""
    path = write_labelled_slice(tmp_path / "slice")
    (batch,) = batches_of(path, 1)
    with trio.fail_after(NOT_FOREVER):
        async with open_trainer(settings_of(text_config())) as trainer:
            before = trainer.weights.clone()
            await trainer.gradient(batch, step=0, seed=0)
            whole = trainer.gradients.clone()
            total, labels = torch.zeros_like(whole), 0
            for part in batch:
                half = await trainer.gradient([part], step=0, seed=0)
                assert half.not_finite == ""
                total += half.labels * trainer.gradients
                labels += half.labels
            assert torch.allclose(total / labels, whole, rtol=1e-4, atol=1e-7)
            assert torch.equal(trainer.weights, before)


async def test_images_are_learned_and_statistics_gathered(tmp_path: Path) -> None:
    path = write_images(tmp_path / "slice")
    held_out = [FileRange(path, 64, 96)]
    with trio.fail_after(NOT_FOREVER):
        async with open_trainer(settings_of(image_config(), replace(INNER, lr=5e-3))) as trainer:
            await trainer.save_optimizer(tmp_path / "new")
            first = await trainer.evaluate(held_out)
            batches = batches_of(path, 4, 16) * 6
            await trainer.train(batches, step=0, seed=0)
            # As a leader that trained nothing itself has it: weights, and no statistics.
            weights = trainer.weights.clone()
            await trainer.load_optimizer(tmp_path / "new")
            without = await trainer.evaluate(held_out)
            await trainer.gather_statistics([FileRange(path, 0, 64)])
            last = await trainer.evaluate(held_out)
            assert torch.equal(trainer.weights, weights)
            await trainer.save(tmp_path / "saved")
    assert last.loss < min(first.loss, without.loss)
    assert last.accuracy is not None
    assert last.accuracy > 0.9
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "saved").eval()
    data = load_file(path)
    with torch.no_grad():
        logits = model(pixel_values=data["pixel_values"][64:].float() / 255).logits
    loss = torch.nn.functional.cross_entropy(logits, data["labels"][64:])
    assert loss.item() == pytest.approx(last.loss, rel=1e-5)


async def test_the_largest_micro_batch_that_fits_is_found(tmp_path: Path) -> None:
    """Logits of 4 MB a sample, and their like in the backward pass: 48 samples are too many for the limit.

    What a process begins with is what it was forked with, by itself or after other tests: the limit is above what one
    sample takes.
    """
    path = write_slice(tmp_path / "slice", length=64)
    batches = batches_of(path, 1, 48) * 2
    config = text_config(vocab_size=16_384)
    inner = replace(INNER, micro_batch=0, precision="bfloat16")
    with trio.fail_after(NOT_FOREVER):
        async with open_trainer(settings_of(config, replace(inner, micro_batch=1))) as trainer:
            one = await trainer.train(batches[:1], step=2, seed=0, on_batch=lambda done: None)
    settings = settings_of(
        config, inner, memory_limit=int((one.memory_bytes + 200 * 1024**2) / 0.9)
    )
    # What the owner of a trainer had is not what the trainer took.
    bytearray(b"1") * (settings.memory_limit + 1)
    with trio.fail_after(NOT_FOREVER):
        async with open_trainer(settings) as trainer:
            told: list[BatchDone] = []
            trained = await trainer.train(batches, step=2, seed=0, on_batch=told.append)
            assert trainer.weights.isfinite().all()
        assert 2 <= trained.micro_batch < 48
        assert trained.memory_bytes < settings.memory_limit
        assert told[-1].loss < told[0].loss


async def test_a_model_that_does_not_fit_is_refused_in_bytes() -> None:
    config = text_config(vocab_size=65_536)
    num_parameters = len(vector_of(plain_model(config)))
    with trio.fail_after(NOT_FOREVER), pytest.raises(ConfigurationError) as told:
        async with open_trainer(settings_of(config, memory_limit=32 * 1024**2)):
            pytest.fail("it was opened")
    assert str(told.value).startswith(
        "the model does not fit into 33,554,432 bytes of memory: weights, gradients and optimiser of its "
        f"{num_parameters:,} parameters take {16 * num_parameters:,} bytes"
    )


async def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with trio.fail_after(NOT_FOREVER):
        plain_model(text_config(num_hidden_layers=1)).save_pretrained(tmp_path / "smaller")
        with pytest.raises(CheckpointError):
            async with open_trainer(settings_of(text_config()), checkpoint=tmp_path / "smaller"):
                pytest.fail("it was opened")
