"""Parts of a vector: tensors as one vector, the part that each member reduces, and the part that a round is about.

All of it is integers, and the same on every machine (`protocol_spec/training/forms.md`). A span is [start, stop).
"""

from __future__ import annotations

import hashlib
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
import torch

from neurogrid.errors import ConfigurationError
from neurogrid.training.averaging.shares import fair_shares

__all__ = [
    "AllOfIt",
    "Fragments",
    "Layout",
    "RandomPartitions",
    "Span",
    "Turns",
    "gather",
    "parse_turns",
    "scatter",
    "split",
]

Span: TypeAlias = tuple[int, int]

PARTITION_UNIT: Final = 1024
"""Elements that random partitions keep together."""

MAX_PARTS: Final = 65_536
"""Fragments or partitions of one vector."""


def split(num_elements: int, bandwidths: Sequence[int], block: int) -> list[Span]:
    """Divide a vector into the parts that members reduce: contiguous, in the order of the members, some of them empty.

    A member that reduces the share p sends its other elements to those that reduce them, and its mean to all n - 1
    others: of N elements N (1 + (n - 2) p) in each direction. Parts are such that all of those that reduce take the
    same time for that; a member so slow that it would take longer for its own elements alone reduces nothing. With two
    members it does not matter, and parts are in proportion.

    Args:
        num_elements: of the vector.
        bandwidths: of each member, in any unit, not negative; 0 for one that reduces nothing, as nobody can dial it.
        block: parts end at multiples of it, or at the end of the vector.

    Raises:
        ConfigurationError: no member has a bandwidth.
    """
    if num_elements < 0 or block < 1 or any(bandwidth < 0 for bandwidth in bandwidths):
        raise ValueError(f"{num_elements} elements in blocks of {block} by {list(bandwidths)[:8]}")
    shares = fair_shares(bandwidths)
    total = sum(shares)
    if not total:
        raise ConfigurationError("no member can be reached by all others: nobody reduces")
    num_blocks = -(-num_elements // block)
    spans, taken, start = [], 0, 0
    for share in shares:
        taken += share
        stop = min(num_elements, block * ((2 * num_blocks * taken + total) // (2 * total)))
        spans.append((start, stop))
        start = stop
    return spans


@dataclass(frozen=True)
class Layout:
    """Tensors in an order, as one vector of float32.

    Attributes:
        names: of each tensor, no two alike.
        shapes: of each tensor.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes) or len(set(self.names)) != len(self.names):
            raise ValueError("each tensor of a layout has a name of its own, and a shape")

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """The layout of tensors in the order of the mapping.

        Raises:
            ConfigurationError: one is not of floats.
        """
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise ConfigurationError(
                    f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and what is averaged are floats: "
                    "leave it out, or give it as floats"
                )
        return cls(tuple(tensors), tuple(tuple(tensor.shape) for tensor in tensors.values()))

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The span of each tensor in the vector."""
        spans, start = [], 0
        for shape in self.shapes:
            stop = start + math.prod(shape)
            spans.append((start, stop))
            start = stop
        return tuple(spans)

    @property
    def num_elements(self) -> int:
        """Elements of the vector."""
        return self.spans[-1][1] if self.spans else 0

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of names, shapes and order: members with another one cannot average with one another."""
        hasher = hashlib.sha256(b"neurogrid layout 1\0" + struct.pack("<I", len(self.names)))
        for name, shape in zip(self.names, self.shapes, strict=True):
            encoded = name.encode()
            hasher.update(struct.pack("<I", len(encoded)) + encoded)
            hasher.update(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        return hasher.digest()

    def flatten(self, tensors: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Write all tensors, of any float dtype and device, into a vector, float32 [num_elements].

        Raises:
            ConfigurationError: they are not those of this layout.
        """
        self._check(out)
        if Layout.of(tensors) != self:
            raise ConfigurationError(self._difference(Layout.of(tensors)))
        with torch.no_grad():
            for (start, stop), tensor in zip(self.spans, tensors.values(), strict=True):
                out[start:stop].view(tensor.shape).copy_(tensor)

    def views(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of a vector, float32 [num_elements], which share its memory."""
        self._check(vector)
        return {
            name: vector[start:stop].view(shape)
            for name, shape, (start, stop) in zip(self.names, self.shapes, self.spans, strict=True)
        }

    def _check(self, vector: torch.Tensor) -> None:
        if vector.shape != (self.num_elements,) or vector.dtype != torch.float32:
            raise ValueError(
                f"a vector of {self.num_elements} float32 is wanted, not {vector.dtype} {list(vector.shape)}"
            )

    def _difference(self, other: Layout) -> str:
        pairs = zip(self.names, self.shapes, other.names, other.shapes, strict=False)
        for index, (name, shape, their_name, their_shape) in enumerate(pairs):
            if (name, shape) != (their_name, their_shape):
                return f"tensor {index} is {their_name} {list(their_shape)}, and was {name} {list(shape)}"
        return f"there are {len(other.names)} tensors, and were {len(self.names)}"


class Turns(ABC):
    """Parts of the vector that rounds are about, in turn. Rounds count from 0; after `num_turns` the parts come again.

    Attributes:
        name: what `parse_turns` takes.
        num_turns: rounds until each element had its turn, once.
    """

    name: str
    num_turns: int

    @abstractmethod
    def spans(self, round_number: int) -> tuple[Span, ...]:
        """Spans of the part, ascending, none empty, none touching another; none at all where a turn has no elements."""

    def num_elements(self, round_number: int) -> int:
        """Elements of the part."""
        return sum(stop - start for start, stop in self.spans(round_number))


class AllOfIt(Turns):
    """The whole vector in each round."""

    name = "all"
    num_turns = 1

    def __init__(self, layout: Layout) -> None:
        self._spans = _joined([(0, layout.num_elements)])

    def spans(self, round_number: int) -> tuple[Span, ...]:
        return self._spans


class Fragments(Turns):
    """Whole tensors, dealt so that fragments are about as large as one another; round r is about fragment r.

    The largest tensor is dealt first, each to the fragment that has fewest elements: a round takes the time of the
    largest. Of equal tensors, neighbours are in different fragments, as in Streaming DiLoCo (arXiv 2501.18512).

    Raises:
        ConfigurationError: there are not as many tensors.
    """

    def __init__(self, layout: Layout, num_turns: int) -> None:
        if not 1 <= num_turns <= min(MAX_PARTS, len(layout.spans)):
            raise ConfigurationError(
                f"fragments:{num_turns}: at least 1, and at most as many as tensors, {len(layout.spans)}"
            )
        self.name = f"fragments:{num_turns}"
        self.num_turns = num_turns
        sizes = [stop - start for start, stop in layout.spans]
        dealt: list[list[Span]] = [[] for _ in range(num_turns)]
        totals = [0] * num_turns
        for tensor in sorted(range(len(sizes)), key=lambda tensor: -sizes[tensor]):
            turn = totals.index(min(totals))
            dealt[turn].append(layout.spans[tensor])
            totals[turn] += sizes[tensor]
        self._spans = [_joined(sorted(spans)) for spans in dealt]

    def spans(self, round_number: int) -> tuple[Span, ...]:
        return self._spans[round_number % self.num_turns]


class RandomPartitions(Turns):
    """Units of 1,024 elements, dealt by chance: the same for all from one seed, and each in one partition.

    Units are put in the order of 8 bytes each of SHA-256, of the seed and a counter; partition p has every one from the
    p-th on in steps of their number.

    Args:
        layout: of the vector.
        num_turns: partitions; 20 are 5 % of the elements in each round.
        seed: the same for all members, at most 64 bytes.

    Raises:
        ConfigurationError: the vector has fewer units than partitions.
    """

    def __init__(self, layout: Layout, num_turns: int = 20, *, seed: bytes) -> None:
        if len(seed) > 64:
            raise ValueError(f"a seed of {len(seed)} bytes: 64 are enough")
        num_elements = layout.num_elements
        num_units = -(-num_elements // PARTITION_UNIT)
        if not 1 <= num_turns <= min(MAX_PARTS, num_units):
            raise ConfigurationError(
                f"partitions:{num_turns}: at least 1, and at most as many as there are units of "
                f"{PARTITION_UNIT} elements, {num_units}"
            )
        self.name = f"partitions:{num_turns}"
        self.num_turns = num_turns
        order = np.argsort(_random_keys(seed, num_units), kind="stable")
        self._spans = []
        for turn in range(num_turns):
            starts = np.sort(order[turn::num_turns]) * PARTITION_UNIT
            stops = np.minimum(starts + PARTITION_UNIT, num_elements)
            self._spans.append(_joined(list(zip(starts.tolist(), stops.tolist(), strict=True))))

    def spans(self, round_number: int) -> tuple[Span, ...]:
        return self._spans[round_number % self.num_turns]


def parse_turns(name: str, layout: Layout, *, seed: bytes) -> Turns:
    """The parts called `name`: `all`, `fragments:N`, or `partitions:N`, of which `partitions` is the one with 20.

    Raises:
        ConfigurationError: there are none of that name, or `layout` has not as many parts.
    """
    kind, _, number = name.partition(":")
    is_number = number.isascii() and number.isdecimal() and len(number) <= 5
    if name == "all":
        return AllOfIt(layout)
    if kind == "fragments" and is_number:
        return Fragments(layout, int(number))
    if name == "partitions" or (kind == "partitions" and is_number):
        return RandomPartitions(layout, int(number or 20), seed=seed)
    raise ConfigurationError(
        f"no parts in turn are called {name[:40]!r}: there are all, fragments:4 and the like, and partitions:20 and "
        "the like"
    )


def gather(vector: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """The elements of spans, one after the other, [their number]; a view where there is one span."""
    if len(spans) == 1:
        ((start, stop),) = spans
        return vector[start:stop]
    if not spans:
        return vector[:0]
    return torch.cat([vector[start:stop] for start, stop in spans])


def scatter(part: torch.Tensor, vector: torch.Tensor, spans: Sequence[Span]) -> None:
    """Write what `gather` gave, or what became of it, back into the vector."""
    lengths = [stop - start for start, stop in spans]
    for (start, stop), piece in zip(spans, part.split(lengths), strict=True):
        vector[start:stop] = piece


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Ascending spans without empty ones, those that touch as one."""
    joined: list[Span] = []
    for start, stop in spans:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def _random_keys(seed: bytes, number: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """u64 [number]: four of each SHA-256, little-endian."""
    start = hashlib.sha256(b"neurogrid partitions 1\0" + seed)
    digests = bytearray()
    for counter in range(-(-number // 4)):
        hasher = start.copy()
        hasher.update(counter.to_bytes(8, "little"))
        digests += hasher.digest()
    return np.frombuffer(digests, "<u8")[:number]
