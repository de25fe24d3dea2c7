"""The proof that a model can be trained in stages, on a miniature of its own config.

A miniature with random weights computes a loss and its gradients as a whole, and in stages, cut in several places;
unequal means refused, with the reason. It knows no family. What is dropped at random has no equal, so the miniature
drops nothing.

What stands outside the layers belongs to the first stage, to the last one, or to both (an embedding that is the head,
too): which, is seen by who has a gradient of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.proof.miniature import proving, small_model
from neurogrid.model.proof.miniature_split import saved_tensors
from neurogrid.model.stages.skeleton import num_decoder_layers
from neurogrid.model.stages.training_stage import TrainingStage

__all__ = [
    "TrainingTraits",
    "check_trainable",
    "gradients_of",
    "loss_of",
    "pass_through",
    "require_equal",
    "require_gradients",
    "without_dropout",
]

# Of a gradient's norm, where bits are not equal: sums in another order.
_TOLERANCE = 1e-5
_SEQUENCES = 2
_PAST_LAST_LIMIT = 4


@dataclass(frozen=True, slots=True)
class TrainingTraits:
    """Traits of a model on which training it in stages depends.

    Attributes:
        first, last: parameters outside the layers of which the first stage has a gradient, and those of the last stage,
            by their names in the whole model. Those in both are one tensor, whose gradient is the sum of the two.
        same_bits: whether loss and gradients have the whole model's bits, and not only its values up to rounding.
    """

    first: frozenset[str]
    last: frozenset[str]
    same_bits: bool


def check_trainable(config: PreTrainedConfig) -> TrainingTraits:
    """Prove on a miniature of `config` that stages give the loss and the gradients of the whole model.

    On the CPU, in float32.

    Raises:
        UnsupportedModelError: with the reason, in one line.
    """
    what = f"model type {config.model_type!r} cannot be trained in stages"
    with proving(what):
        limits, model = small_model(without_dropout(config))
        length = max((limit.small for limit in limits), default=8) + _PAST_LAST_LIMIT
        return _check(model, length)


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config with all that it calls a dropout at 0."""
    config = copy.deepcopy(config)
    for part in {
        id(part): part for part in (config, config.get_text_config(decoder=True))
    }.values():
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _check(model: Any, length: int) -> TrainingTraits:
    config = model.config
    num_layers = num_decoder_layers(config)
    vocab_size = config.get_text_config(decoder=True).vocab_size
    ids_BT = torch.randint(0, vocab_size, (_SEQUENCES, length))
    tensors = saved_tensors(model)
    model.train()
    whole = loss_of(model(input_ids=ids_BT, use_cache=False).logits, ids_BT)
    whole.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    first: set[str] = set()
    last: set[str] = set()
    same_bits = True
    for cuts, keeps_graphs in _ways(num_layers):
        stages = [
            TrainingStage(config, start, stop, tensors, keeps_graphs=keeps_graphs)
            for start, stop in pairwise((0, *cuts, num_layers))
        ]
        where = f"cut before layer {' and '.join(map(str, cuts))}" if cuts else "in one piece"
        loss = pass_through(stages, ids_BT)
        same_bits &= require_equal("the loss", loss, whole.detach(), where)
        same_bits &= require_gradients(gradients_of(stages), expected, where)
        if cuts:
            first |= _ends(stages[0])
            last |= _ends(stages[-1])
    return TrainingTraits(frozenset(first), frozenset(last), same_bits)


def pass_through(stages: Sequence[TrainingStage], ids_BT: Tensor) -> Tensor:
    """Send one micro-batch through all stages, and its gradients back; its loss."""
    given = ids_BT
    for stage in stages[:-1]:
        given = stage.forward(0, given, ids_BT)
    loss = stages[-1].forward_loss(0, given, lambda logits_BTV: loss_of(logits_BTV, ids_BT), ids_BT)
    gradient: Tensor | None = None
    for stage in reversed(stages):
        gradient = stage.backward(0, gradient)
    return loss


def loss_of(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """The mean loss of all tokens but the first of each sequence."""
    return functional.cross_entropy(
        logits_BTV[:, :-1].float().flatten(0, 1), ids_BT[:, 1:].flatten()
    )


def gradients_of(stages: Sequence[TrainingStage]) -> dict[str, Tensor]:
    """All gradients; of what two stages have, their sum."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.parameters.items():
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found


def _ends(stage: TrainingStage) -> set[str]:
    return {
        name
        for name, parameter in stage.parameters.items()
        if parameter.grad is not None and not stage.is_of_layer(name)
    }


def require_gradients(
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    where: str,
    *,
    tolerance: float = _TOLERANCE,
) -> bool:
    """Whether all bits are the same.

    Raises:
        UnsupportedModelError: one is missing, or its values are others.
    """
    if missing := expected.keys() - got.keys():
        raise UnsupportedModelError(f"no stage has a gradient of {min(missing)}, {where}")
    same_bits = True
    for name, gradient in got.items():
        if name in expected:
            what = f"the gradient of {name}"
            same_bits &= require_equal(what, gradient, expected[name], where, tolerance=tolerance)
        elif bool(gradient.any()):
            raise UnsupportedModelError(f"a stage has a gradient of {name}, and the whole none")
    return same_bits


def require_equal(
    what: str, got: Tensor, expected: Tensor, where: str, *, tolerance: float = _TOLERANCE
) -> bool:
    """Whether the bits are the same.

    Raises:
        UnsupportedModelError: the values are not.
    """
    if torch.equal(got, expected):
        return True
    off = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
    if not off <= tolerance:
        raise UnsupportedModelError(
            f"its stages do not give {what} of the whole model: off by {off:.2g}, {where}"
        )
    return False


def _ways(num_layers: int) -> list[tuple[tuple[int, ...], bool]]:
    """Cuts to prove, each with whether graphs are kept: two stages with graphs, and up to three with and without."""
    if num_layers < 2:
        return [((), True), ((), False)]
    most = (1, num_layers - 1) if num_layers > 2 else (1,)
    return [((num_layers // 2,), True), (most, True), (most, False)]
