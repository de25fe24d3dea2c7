"""Samples that can be read by their numbers, wherever they come from; and a source of them, in two parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from neurogrid.training.data.preparing.shuffling import Numbers

__all__ = ["Arrays", "Samples", "Source"]

Arrays: TypeAlias = Mapping[str, Any]
"""Arrays of some samples of a slice, by name: `input_ids` int32 [n, T]; or `pixel_values` uint8 [n, C, H, W] and
`labels` int64 [n]."""


class Samples(Protocol):
    """Samples, numbered from 0."""

    def __len__(self) -> int: ...

    def load(self, numbers: Numbers) -> Arrays:
        """Load the samples of these numbers, in this order."""


@dataclass(frozen=True, slots=True)
class Source:
    """Samples that become a data set, or a part of one.

    Attributes:
        training, held_out: its samples; none of them is in both.
        about: fields of the manifest that are about each sample: kind, sizes, tokenizer.
        sample_bytes: of a sample in a slice.
    """

    training: Samples
    held_out: Samples
    about: Mapping[str, Any]
    sample_bytes: int
