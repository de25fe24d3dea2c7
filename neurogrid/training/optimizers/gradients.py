"""Gradients that weigh right: a loss over label tokens, and clipping by the norm over all stages.

Both are the same whether a batch is computed at once, in micro-batches of uneven length, or by several stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["clipping_factor", "square_of_norm", "token_weighted_loss"]

# The label of what is no label token, as in transformers.
IGNORED_LABEL = -100
# Beside the norm, as in torch's clip_grad_norm_.
CLIPPING_EPSILON = 1e-6
# Elements; in float64 they take 1 MiB.
_CACHED: Final = 128 * 1024
# Apple's GPUs have no float64.
_SUMMED_ON_CPU: Final = ("cpu", "mps")


def token_weighted_loss(logits_NV: Tensor, labels_N: Tensor, num_label_tokens: int) -> Tensor:
    """A micro-batch's share of the loss of its batch: the sum over its label tokens, by the number of the batch's.

    The shares of all micro-batches sum up to the mean over the label tokens of the batch, and so do their gradients.

    Args:
        logits_NV: [tokens, vocabulary]; the loss is computed in float32.
        labels_N: int64 [tokens], already shifted; -100 is no label token.
        num_label_tokens: of the whole batch, over all micro-batches and members that share it.

    Raises:
        ValueError: there is no label token in the batch.
    """
    if num_label_tokens < 1:
        raise ValueError("a batch without label tokens has no loss")
    total = functional.cross_entropy(
        logits_NV.float(), labels_N, ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total / num_label_tokens


def square_of_norm(gradients: Iterable[Tensor]) -> float:
    """The sum of the squares of all elements, summed up in float64: of a stage, to be added to the others'."""
    return math.fsum(square for gradient in gradients for square in _squares(gradient.detach()))


def _squares(gradient: Tensor) -> Iterator[float]:
    """Sums of the squares of all elements of parts."""
    if gradient.device.type not in _SUMMED_ON_CPU:
        yield float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        return
    # A CPU has no sum in float64 of float32 without a copy: of a part it stays in the cache.
    for part in gradient.cpu().flatten().split(_CACHED):
        wide = part.double()
        yield float(wide.dot(wide))


def clipping_factor(squares_of_norms: Sequence[float], max_norm: float) -> float:
    """Factor of all gradients, at most 1, with which their common norm is at most `max_norm`.

    Args:
        squares_of_norms: one for each stage.
        max_norm: above 0.

    Raises:
        ValueError: max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"the greatest norm must be above 0, not {max_norm}")
    norm = math.sqrt(sum(squares_of_norms))
    return min(1.0, max_norm / (norm + CLIPPING_EPSILON))
