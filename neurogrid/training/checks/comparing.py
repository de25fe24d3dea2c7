"""Vectors compared: gradients by their sums, and an encoding by what it was made of.

Whoever has a momentum before a round and the same with the gradient in it knows the gradient. So processors that are
not alike are compared where it shows best: by the whole gradient, not by the few frequencies that were sent. What was
sent follows from the momentum almost exactly: only coefficients that are as large as one another may be chosen either
way, and that is judged in float64.

    n  elements of all tensors      C  chunks of a tensor      S  coefficients of a chunk      K  of these that are sent
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from neurogrid.training.checks.band import Sums
from neurogrid.training.checks.claims import Settings
from neurogrid.training.checks.plausibility import Figures
from neurogrid.training.optimizers import ChunkedDct, Coefficients

__all__ = [
    "cosines_of",
    "encoding_error",
    "figures_of",
    "gradient_between",
    "momentum_error",
    "sums_of",
]

# Of a chunk: about the least normal binary32.
_LEAST_NORM = 1e-36


def sums_of(a: Tensor, b: Tensor, settings: Settings) -> list[Sums]:
    """The sums of each tensor of two vectors, float [n]."""
    pairs = zip(a.split(settings.sizes), b.split(settings.sizes), strict=True)
    return [_sums(x.double(), y.double()) for x, y in pairs]


def figures_of(rows: Sequence[Tensor]) -> list[Figures]:
    """Each member's vector, float32 [n], beside the mean of the others'; there are at least two.

    Of coefficients the same comes out as of what they stand for: the transform is orthonormal, but for the variance,
    which is that of coefficients then.
    """
    total = torch.stack([row.double() for row in rows]).sum(0)
    found = []
    for row in rows:
        own = row.double()
        others = (total - own) / (len(rows) - 1)
        norms = float(own.norm()), float(others.norm())
        variances = float(own.var(correction=0)), float(others.var(correction=0))
        cosine = float(own @ others) / (norms[0] * norms[1]) if all(norms) else 0.0
        found.append(Figures(cosine, _ratio(*norms), _ratio(*variances)))
    return found


def cosines_of(members: Sequence[Coefficients], num_elements: int) -> list[float]:
    """The cosine of what each member sent to the sum of what the others did; 0 where one of the two is nothing."""
    total = torch.zeros(num_elements, dtype=torch.float64)
    for each in members:
        total[each.positions] += each.values.double()
    whole, found = float(total @ total), []
    for each in members:
        own = each.values.double()
        beside, norm = float(own @ total[each.positions]), float(own @ own)
        # The others' sum is the whole less its own.
        dot, others = beside - norm, max(0.0, whole - 2 * beside + norm)
        found.append(dot / math.sqrt(norm * others) if norm > 0 and others > 0 else 0.0)
    return [max(-1.0, min(1.0, each)) for each in found]


def gradient_between(before: Tensor, kept: Tensor, settings: Settings, lr: float) -> Tensor:
    """The gradient that made the one momentum, float32 [n], the other: float64 [n]."""
    return (kept.double() - settings.decay * before.double()) / lr


@torch.no_grad()
def encoding_error(kept: Tensor, coefficients: Coefficients, settings: Settings) -> float:
    """Compute the error of coefficients, against those that are to be sent of a momentum.

    Args:
        kept: float32 [n], the momentum.
        coefficients: as `Distro.check` lets them pass.

    Returns:
        A share of the norm of a chunk, the largest of all chunks: by how much a coefficient that was left out is
        greater than one that was sent, or a value is off. Infinite where a chunk of zeros sends anything.
    """
    worst = 0.0
    for coefficients_CS, places_CK, values_CK in _chunks(kept, coefficients, settings):
        norm_C1 = coefficients_CS.norm(dim=1, keepdim=True)
        chosen_CK = coefficients_CS.gather(1, places_CK)
        sizes_CS = coefficients_CS.abs()
        least_C = chosen_CK.abs().min(dim=1).values
        left_C = sizes_CS.scatter(1, places_CK, -1.0).max(dim=1).values
        errors = [(left_C - least_C).unsqueeze(1)]
        if settings.is_one_bit:
            # As a number that is no normal binary32 the encoder may have taken it for 0.
            is_least_CK = (values_CK == 0) & (norm_C1 < _LEAST_NORM)
            is_wrong_CK = ((chosen_CK < 0) != (values_CK < 0)) | (values_CK == 0)
            errors.append(chosen_CK.abs() * (is_wrong_CK & ~is_least_CK))
        else:
            errors.append((values_CK - chosen_CK).abs())
        if bool(((norm_C1 == 0) & (values_CK != 0)).any()):
            return math.inf
        for error in errors:
            share = torch.where(norm_C1 == 0, torch.zeros_like(error), error / norm_C1)
            worst = max(worst, _or_infinite(float(share.max())))
    return worst


@torch.no_grad()
def momentum_error(
    kept: Tensor, sent: Tensor, coefficients: Coefficients, settings: Settings
) -> float:
    """Compute the error of the momentum `sent`, which is to be `kept` without the coefficients that were sent.

    Args:
        kept, sent: float32 [n], the momentum with and without them.

    Returns:
        The largest difference of an element, as a share of the largest element.
    """
    parts = []
    for coefficients_CS, places_CK, _ in _chunks(kept, coefficients, settings):
        gone_CS = torch.zeros_like(coefficients_CS)
        gone_CS.scatter_(1, places_CK, coefficients_CS.gather(1, places_CK))
        parts.append(gone_CS)
    pieces = kept.double().split(settings.sizes)
    transforms = [ChunkedDct(shape, settings.max_side) for shape in settings.shapes]
    due = torch.cat(
        [
            piece - transform.decode(gone_CS).flatten()
            for piece, transform, gone_CS in zip(pieces, transforms, parts, strict=True)
        ]
    )
    largest = float(kept.abs().max())
    off = float((due - sent.double()).abs().max())
    return _or_infinite(off / largest) if largest else float(off != 0)


def _or_infinite(error: float) -> float:
    """The error itself, or infinity for NaN: what is no number is as wrong as can be."""
    return math.inf if math.isnan(error) else error


def _ratio(one: float, other: float) -> float:
    return one / other if other else (math.inf if one else 1.0)


def _chunks(
    kept: Tensor, coefficients: Coefficients, settings: Settings
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Coefficients of the momentum for each tensor, in float64, with places and values of those that were sent."""
    found, start, taken = [], 0, 0
    for shape, piece in zip(settings.shapes, kept.double().split(settings.sizes), strict=True):
        transform = ChunkedDct(shape, settings.max_side)
        k = min(settings.top_k, transform.chunk_size)
        num = transform.num_chunks * k
        first = torch.arange(transform.num_chunks) * transform.chunk_size + start
        places_CK = coefficients.positions[taken : taken + num].view(-1, k) - first.unsqueeze(1)
        values_CK = coefficients.values[taken : taken + num].view(-1, k).double()
        found.append((transform.encode(piece), places_CK, values_CK))
        start += piece.numel()
        taken += num
    return found


def _sums(a: Tensor, b: Tensor) -> Sums:
    difference = a - b
    return Sums(float(a @ a), float(b @ b), float(difference @ difference), a.numel())
