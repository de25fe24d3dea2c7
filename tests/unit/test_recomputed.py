"""Caches that are made anew by one prefill, wherever a generation was: its tokens, and their bits, stay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.blob import parse_blob
from neurogrid.model.kernels import library
from neurogrid.model.stages.stage import Stage

NUM_TOKENS = 24
# A generation is broken off at so many of its tokens, one after the other.
NUM_BROKEN = 20


class Pipeline:
    """The embedded model in two stages, and one sequence in it."""

    def __init__(self, model: LoadedModel, stages: Sequence[Stage]) -> None:
        self._model, self._stages = model, stages
        self._caches = [stage.new_cache() for stage in stages]
        self._length = 0

    def step(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [V] in float32 after these tokens."""
        ends, position = self._model.ends, self._length
        hidden_BTD = ends.embed(token_ids, position=position)
        for stage, states in zip(self._stages, self._caches, strict=True):
            held = sorted(stage.held_layers)
            hidden_BTD = stage.forward(
                hidden_BTD, start=held[0], stop=held[-1] + 1, position=position, cache=states
            )
        self._length += len(token_ids)
        return ends.logits(hidden_BTD, position=position)


@cache
def loaded(dtype: str, quantize: str | None) -> tuple[LoadedModel, list[Stage]]:
    model = LoadedModel.load(
        embedded_model_path(), name=None, max_seq_len=128, dtype=dtype, quantize=quantize
    )
    stages = []
    middle = model.ends.num_layers // 2
    for layers in (range(middle), range(middle, model.ends.num_layers)):
        stage = Stage(
            model.config, dtype=model.dtype, device="cpu", quantization=model.quantization
        )
        for layer_id in layers:
            blob = model.layer_blob(layer_id)
            stage.load_layer(layer_id, parse_blob(memoryview(bytearray().join(blob.chunks()))))
            stage.speed_up_layer(layer_id, fuse=model.traits.fuses)
        stages.append(stage)
    return model, stages


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_prefill_makes_the_caches_that_steps_made(dtype: str, quantize: str | None) -> None:
    assert library() is not None, "kernels.so is not there: make kernels"
    model, stages = loaded(dtype, quantize)
    assert model.traits.same_bits
    prompt = model.tokenizer.encode("A function definition")
    undisturbed = Pipeline(model, stages)
    logits, tokens = [undisturbed.step(prompt)], list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(logits[-1].argmax()))
        logits.append(undisturbed.step(tokens[-1:]))
    for broken in range(NUM_BROKEN):
        others = Pipeline(model, stages)
        # The step that failed, and the two after it.
        length = len(prompt) + broken
        others.step(tokens[:length])
        for at in range(length, min(length + 3, len(tokens))):
            got = others.step(tokens[at : at + 1])
            assert torch.equal(got, logits[at + 1 - len(prompt)])
