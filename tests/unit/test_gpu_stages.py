"""Stages on a real accelerator: the model's own logits there, and its gradients. Skipped where there is none."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from stage_families import FAMILIES, Pipeline, shared
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache

from neurogrid.model.kernels import CodesLinear, quantize
from neurogrid.model.proof.training_proof import without_dropout
from neurogrid.model.stages.device import device_memory, device_name, select_device
from neurogrid.model.stages.stage import Stage
from neurogrid.model.stages.training_stage import TrainingStage
from neurogrid.telemetry.gpu_metrics import read_gpu

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="there is no accelerator here"
)

ALL = list(FAMILIES)
SIZES = [9, 1, 1, 6, 1, 1]
LENGTH = 12


def off_by(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


@pytest.mark.parametrize("family", ALL)
def test_two_stages_give_the_logits_that_transformers_gives_there(
    family: str, record_property: pytest.RecordProperty
) -> None:
    checkpoint, device = shared(family), select_device(None)
    pipeline = Pipeline(checkpoint, (2,))
    stages = []
    for start, stop in pipeline.ranges:
        stage = Stage(checkpoint.config, dtype=checkpoint.dtype, device=device)
        for layer_id in range(start, stop):
            stage.load_layer(layer_id, checkpoint.layer(layer_id))
            stage.speed_up_layer(layer_id)
        stages.append(stage)
    pipeline.stages = stages
    pipeline.restart()
    token_ids = checkpoint.tokens(sum(SIZES))
    got = torch.stack([each.cpu() for each in pipeline.logits(token_ids, SIZES)])
    whole = copy.deepcopy(checkpoint.whole).to(device)
    cache, position, expected = DynamicCache(config=checkpoint.config), 0, []
    with torch.inference_mode():
        for size in SIZES:
            ids = torch.tensor([token_ids[position : position + size]], device=device)
            output = whole(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            expected.append(output.logits[0, -1].float().cpu())
            position += size
    off = off_by(got, torch.stack(expected))
    record_property("off_by", off)
    assert off < 1e-4


def loss_of(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    return functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


@pytest.mark.parametrize("family", ALL)
def test_stages_have_the_gradients_of_the_whole_model_there(
    family: str, record_property: pytest.RecordProperty
) -> None:
    checkpoint, device = shared(family), select_device(None)
    ids_BT = torch.tensor(checkpoint.tokens(2 * LENGTH), device=device).view(2, LENGTH)
    whole = AutoModelForCausalLM.from_config(without_dropout(checkpoint.config))
    whole.load_state_dict(checkpoint.whole.state_dict())
    whole.to(device).train()
    loss = loss_of(whole(input_ids=ids_BT, use_cache=False).logits, ids_BT)
    loss.backward()
    stages = [
        TrainingStage(whole.config, start, stop, checkpoint.tensors, device=device)
        for start, stop in pairwise((0, 2, checkpoint.num_layers))
    ]
    first, last = stages
    hidden_BTD = first.forward(0, ids_BT)
    got = last.forward_loss(0, hidden_BTD, lambda logits: loss_of(logits, ids_BT))
    first.backward(0, last.backward(0))
    assert abs(float(got) - loss.item()) <= 1e-5 * abs(loss.item())
    most = 0.0
    for name, parameter in whole.named_parameters():
        if parameter.grad is None:
            continue
        found = [
            stage.parameters[name].grad
            for stage in stages
            if name in stage.parameters and stage.parameters[name].grad is not None
        ]
        most = max(most, off_by(sum(found), parameter.grad))
    record_property("off_by", most)
    assert most < 1e-4


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_are_multiplied_there(dtype: torch.dtype, bits: int, num_rows: int) -> None:
    device = select_device(None)
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(512, 1024, generator=generator)
    given = torch.randn(1, num_rows, 1024, generator=generator).to(dtype)
    codes = quantize(weight, bits)
    linear = CodesLinear(codes.to(device), None, dtype, by_int8=False)
    expected = given.double() @ codes.dense(torch.float32).double().t()
    got = linear(given.to(device)).double().cpu()
    assert off_by(got, expected) < (1e-5 if dtype == torch.float32 else 8e-3)
    held = sum(part.nbytes for part in linear.parameters())
    assert held < 1.2 * weight.numel() * (bits + 0.5) / 8 + 1


def test_memory_is_counted() -> None:
    device = select_device(None)
    before = device_memory(device)
    kept = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    after = device_memory(device)
    assert before.total_bytes == after.total_bytes > 0
    # Others may use the device, too.
    assert after.used_bytes - before.used_bytes >= 60 << 20
    del kept
    gpu = read_gpu(device)
    assert gpu is not None
    assert device_name(device)
