"""Held-out samples to evaluate on, and the figures that come of them: over all, and of each part of a mixture. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from neurogrid.training.data.manifest import Manifest, SliceInfo

__all__ = ["HeldOut", "eval_figures", "held_out_samples"]

# What every tracker takes in the name of a figure.
_OTHER: Final = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out samples of one kind.

    Attributes:
        figure: what the loss on them is called besides `eval_loss`; empty where there are no others.
        samples: slices, and how many samples of each, from its first on.
    """

    figure: str
    samples: tuple[tuple[SliceInfo, int], ...]


def held_out_samples(manifest: Manifest, limit: int) -> tuple[HeldOut, ...]:
    """The first held-out samples, at most `limit`; of a mixture each part's share of them, at least one of each."""
    if not manifest.parts:
        return (HeldOut("", _first(manifest.held_out, limit)),)
    found, names, start = [], set[str](), 0
    for number, part in enumerate(manifest.parts, 1):
        infos = manifest.held_out[start : start + part.num_held_out]
        start += part.num_held_out
        if not infos:
            continue
        name = _OTHER.sub("-", part.name)
        while name in names:
            name = f"{name}-{number}"
        names.add(name)
        share = max(1, round(limit * part.num_samples / manifest.num_samples))
        found.append(HeldOut(f"eval_loss/{name}", _first(infos, share)))
    return tuple(found)


def eval_figures(found: Sequence[tuple[HeldOut, float, int]]) -> Mapping[str, float]:
    """The loss over all labels, and that of each part.

    Args:
        found: held-out samples, the mean loss over their labels, and how many labels that are.
    """
    labels = sum(num for _, _, num in found)
    figures = {"eval_loss": round(sum(loss * num for _, loss, num in found) / labels, 6)}
    for held_out, loss, _ in found:
        if held_out.figure:
            figures[held_out.figure] = round(loss, 6)
    return figures


def _first(infos: Sequence[SliceInfo], limit: int) -> tuple[tuple[SliceInfo, int], ...]:
    taken = []
    for info in infos:
        if limit <= 0:
            break
        taken.append((info, min(limit, info.num_samples)))
        limit -= info.num_samples
    return tuple(taken)
