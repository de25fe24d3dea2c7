"""Whether a model's layers may be compiled (stages/fused_layers.py): tried on a miniature.

Its weights are rounded to bfloat16, which products of ours multiply exactly; so what differs is the order of sums, and
what a family does that a plain block does not. Prompts, pieces of them and single tokens go past every length at which
the model changes its ways, and rows of several sessions together.

What stands around the compiled code, as masks and angles, is the family's: whether a token gets the same bits in all
of these is seen here, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from neurogrid.errors import ModelError
from neurogrid.model.files.model_code import MODEL_CODE_ERRORS
from neurogrid.model.kernels import library
from neurogrid.model.proof.miniature_config import LengthLimit
from neurogrid.model.proof.miniature_rows import NotEqualError, row_bounds
from neurogrid.model.proof.miniature_split import Split

__all__ = ["FusedTraits", "layers_fuse"]

# Relative to the largest logit, of float32: 1e-6 off at most in the families that are a plain block. What a family
# does besides may be little where weights are small, as a limit of scores is: off by 1e-4.
_TOLERANCE = 1e-5

_PROMPT = 5


class FusedTraits(NamedTuple):
    """The traits of layers that are compiled.

    Attributes:
        fuses: whether they give what the modules give.
        same_bits: whether a token then gets the same bits, whatever it is computed with.
    """

    fuses: bool = False
    same_bits: bool = False


def layers_fuse(
    config: PreTrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    token_ids: Sequence[int],
    limits: Sequence[LengthLimit],
    bounds: tuple[int, ...] | None,
) -> FusedTraits:
    """The traits of a model's layers when they are compiled.

    Args:
        config, tensors: of the miniature.
        token_ids: random ones, past every limit.
        limits: where the model may change its ways.
        bounds: what `row_bounds` found without compiled layers; None where rows cannot share a forward.
    """
    if library() is None:
        return FusedTraits()
    rounded = {
        name: tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    try:
        fused = Split(config, rounded, (1,), is_fused=True)
        if not any(stage.has_fused for stage in fused.stages):
            return FusedTraits()
        plain = Split(config, rounded, (1,), ends=fused.ends)
        half = len(token_ids) // 2
        last: list[torch.Tensor] = []
        for first, size in ((_PROMPT, 1), (half, 2), (len(token_ids) - 1, 1)):
            mine, its = fused.new_session(), plain.new_session()
            starts = range(first, len(token_ids), size)
            for tokens in (token_ids[:first], *(token_ids[at : at + size] for at in starts)):
                got, expected = mine.step_of_last(tokens), its.step_of_last(tokens)
                off = float((got - expected).abs().max())
                if not off <= _TOLERANCE * float(expected.abs().max()):
                    return FusedTraits()
            last.append(got)
        if bounds is not None and row_bounds(fused, token_ids, limits) != bounds:
            return FusedTraits()
        same_bits = all(torch.equal(last[0], other) for other in last[1:])
        whole = all(
            stage.has_same_bits(start, stop)
            for stage, (start, stop) in zip(fused.stages, fused.ranges, strict=True)
        )
        return FusedTraits(True, same_bits and whole)
    except (*MODEL_CODE_ERRORS, NotEqualError, ModelError):
        return FusedTraits()
