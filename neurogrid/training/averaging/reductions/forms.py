"""What the codecs and the aggregators of a plan have to offer here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from neurogrid.p2p.wire import Data

__all__ = ["Accumulator", "Aggregator", "Codec"]


class Codec(Protocol):
    """A form of float32 elements as bytes. `encode` may give a view of the tensor."""

    @property
    def block(self) -> int:
        """Elements that are encoded together."""

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of so many encoded elements."""

    def encode(self, values: Tensor) -> Data:
        """Encode float32 [n]."""

    def decode(self, data: Data, num_elements: int) -> Tensor:
        """Decode to float32 [n]; a view of `data` where it can be."""


class Accumulator(Protocol):
    """An aggregate that takes one row after the other."""

    def add(self, row: Tensor, weight: float) -> None:
        """Add float32 [n]; the row is not kept."""

    def finish(self) -> Tensor:
        """The aggregate, float32 [n]."""


class Aggregator(Protocol):
    """A way to make rows one."""

    def aggregate(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """The aggregate of float32 [n] rows, float32 [n]."""
