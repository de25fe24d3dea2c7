"""Flat vectors and spans of them: what optimisers here compute on.

All tensors of a model one after the other make one float32 vector. A part of it is spans, [start, stop) of elements,
ascending: a fragment, or a random partition. A step over a part leaves the rest alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from neurogrid.errors import NotFiniteError

__all__ = ["Spans", "check_finite", "check_spans", "check_vector", "load_vectors", "pieces"]

Spans: TypeAlias = Sequence[tuple[int, int]]

# Elements that are worked on at once: 1 MiB of float32, so that intermediate results stay in a core's cache.
MAX_PIECE = 1 << 18


def pieces(spans: Spans) -> Iterator[tuple[slice, slice]]:
    """Yield the pieces of a part: the slice of each in the vector, and that among the part's own elements."""
    at = 0
    for first, end in spans:
        for start in range(first, end, MAX_PIECE):
            stop = min(start + MAX_PIECE, end)
            yield slice(start, stop), slice(at, at + stop - start)
            at += stop - start


def check_spans(spans: Spans, num_elements: int) -> int:
    """The number of elements of a part of a vector of `num_elements`.

    Raises:
        ValueError: the spans do not ascend, overlap, or reach beyond the vector.
    """
    edges = [0, *chain.from_iterable(spans), num_elements]
    if any(before > after for before, after in pairwise(edges)):
        raise ValueError(
            f"spans of a part must ascend from 0 to {num_elements} and not overlap, and are not: "
            f"{list(spans[:8])}"
        )
    return sum(stop - start for start, stop in spans)


def check_vector(name: str, vector: Tensor, num_elements: int) -> None:
    """Refuses what is not a flat float32 vector of so many elements.

    Raises:
        ValueError: it is not; `name` is in its text.
    """
    if vector.dtype != torch.float32 or tuple(vector.shape) != (num_elements,):
        raise ValueError(
            f"{name} must be float32 [{num_elements}], not {vector.dtype} {list(vector.shape)}"
        )


def check_finite(name: str, vector: Tensor) -> None:
    """Refuses infinities and NaN.

    Raises:
        NotFiniteError: there is one; `name` is in its text.
    """
    # In pieces: no mask as long as the vector is made.
    for number, piece in enumerate(vector.split(MAX_PIECE)):
        is_finite = torch.isfinite(piece)
        if not bool(is_finite.all()):
            index = number * MAX_PIECE + int((~is_finite).nonzero()[0])
            raise NotFiniteError(
                f"{name} has {float(vector[index])} at element {index}: nothing of it is applied",
                index=index,
            )


def load_vectors(own: Sequence[Tensor], vectors: Sequence[Tensor]) -> None:
    """Copies `vectors` over `own` buffers, after all of them have been checked.

    Raises:
        ValueError: their number, a shape or a dtype is wrong. Nothing was copied.
        NotFiniteError: an element is infinite or no number. Nothing was copied.
    """
    if len(vectors) != len(own):
        raise ValueError(f"a state has {len(own)} vectors, not {len(vectors)}")
    for number, (mine, vector) in enumerate(zip(own, vectors, strict=True)):
        check_vector(f"vector {number} of a state", vector, mine.numel())
        check_finite(f"vector {number} of a state", vector)
    for mine, vector in zip(own, vectors, strict=True):
        mine.copy_(vector)
