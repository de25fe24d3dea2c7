"""The proof that experts whose matrices are codes compute what transformers' own do with the same weights.

On the miniature, whose experts are made codes and multiplied as such in a copy of it; in the model itself the weights
are made those of the codes. It knows no family, and is for those configs whose record has experts as codes.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import copy
from itertools import groupby
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedConfig

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.files.model_code import one_line, quiet_transformers
from neurogrid.model.files.quantization import Quantization
from neurogrid.model.files.tensor_names import numbers_hidden
from neurogrid.model.kernels import quantize
from neurogrid.model.proof.miniature import SEED, small_model
from neurogrid.model.stages.experts import expert_weights, hold_experts
from neurogrid.model.stages.skeleton import find_layers, num_decoder_layers

__all__ = ["check_experts"]

# Relative to the largest logit: another order of summation.
_TOLERANCE: Final = 1e-4
_PROMPT: Final = 7


def check_experts(config: PreTrainedConfig, quantization: Quantization) -> None:
    """Prove it, on the CPU and in float32, where `quantization` has experts as codes.

    Raises:
        UnsupportedModelError: with the reason, in one line.
    """
    what = f"model type {config.model_type!r} cannot have its experts as codes"
    with quiet_transformers(), torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(SEED)
        _, model = small_model(config)
        twin = copy.deepcopy(model)
        mixtures = [
            (mine, its)
            for mine, its in zip(_layers(twin), _layers(model), strict=True)
            if any(_is_named(each.path(0), quantization) for each in expert_weights(its))
        ]
        if not mixtures:
            return
        for mine, its in mixtures:
            _make_codes(mine, its)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        try:
            tokens = torch.randint(0, vocab_size, (1, _PROMPT))
            for count in (1, _PROMPT):
                got, expected = (each(input_ids=tokens[:, :count]).logits for each in (twin, model))
                off = float((got - expected).abs().max() / expected.abs().max())
                if not off <= _TOLERANCE:
                    raise UnsupportedModelError(
                        f"{what}: they are off by {off:.2g} of the largest logit"
                    )
        except UnsupportedModelError:
            raise
        except Exception as exc:  # whatever a model's code may raise is a refusal here
            raise UnsupportedModelError(
                f"{what}: its miniature failed with {type(exc).__name__}: {one_line(exc)}"
            ) from exc


def _layers(model: Any) -> nn.ModuleList:
    layers: nn.ModuleList = model.get_submodule(
        find_layers(model, num_decoder_layers(model.config))
    )
    return layers


def _is_named(path: str, quantization: Quantization) -> bool:
    """Whether what has that path is codes in some layer, if its shape allows."""
    hidden = numbers_hidden(path)
    if quantization.is_stored:
        return any(hidden == each for each, _ in quantization.matrices)
    return hidden not in quantization.skipped


def _make_codes(mine: nn.Module, its: nn.Module) -> None:
    """Make the experts of one layer codes, and the weights of another like it what those are."""
    for path, weights in groupby(expert_weights(mine), key=lambda weight: weight.module):
        codes = {}
        for weight in weights:
            codes[weight.name] = [quantize(each.contiguous(), 8) for each in weight.matrices(mine)]
            for matrix, each in zip(weight.matrices(its), codes[weight.name], strict=True):
                matrix.copy_(each.dense(torch.float32))
        hold_experts(mine.get_submodule(path), codes, torch.float32, by_int8=False)
