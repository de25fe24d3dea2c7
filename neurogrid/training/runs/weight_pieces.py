"""Weights in pieces: consecutive elements of the vector that all tensors make, each a file, so that a newcomer can have
each from another member.

Source: protocol_spec/training/witnessed.md, "Pieces".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from neurogrid.errors import CheckpointError

__all__ = ["check_pieces", "cut_pieces", "read_piece", "write_pieces"]

# Elements of a piece: enough that asking for it is little beside sending it, and so few that it is not held up long.
_LEAST: Final = 4096
_MOST: Final = 16 * 1024 * 1024
# Pieces that weights of middling size are cut into.
_USUAL: Final = 16
_WIDTH: Final = 4


def cut_pieces(num_elements: int) -> tuple[str, ...]:
    """The names of the pieces that weights are cut into, in order: "elements.START.STOP"."""
    size = min(max(-(-num_elements // _USUAL), _LEAST), _MOST)
    return tuple(
        f"elements.{start}.{min(start + size, num_elements)}"
        for start in range(0, num_elements, size)
    )


def write_pieces(weights: Tensor, directory: Path) -> dict[str, Path]:
    """Write weights, float32 [num_elements], as their pieces; the file of each, in order."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {}
    for name in cut_pieces(weights.numel()):
        start, stop = _span(name)
        files[name] = directory / name
        files[name].write_bytes(weights[start:stop].contiguous().numpy().tobytes())
    return files


def read_piece(name: str, path: Path, weights: Tensor) -> None:
    """Put a piece into weights, float32 [num_elements], in its place.

    Raises:
        CheckpointError: it is not of the length that it has to have.
    """
    start, stop = _span(name)
    data = path.read_bytes()
    if len(data) != (stop - start) * _WIDTH:
        raise CheckpointError(
            f"piece {name} has {len(data)} bytes, and {stop - start} elements have {(stop - start) * _WIDTH}"
        )
    weights[start:stop] = torch.frombuffer(bytearray(data), dtype=torch.float32)


def check_pieces(names: Sequence[str], num_elements: int) -> None:
    """Raises CheckpointError where names are not those of the pieces of so many elements."""
    if tuple(names) != cut_pieces(num_elements):
        raise CheckpointError(f"these are not the pieces of {num_elements} elements")


def _span(name: str) -> tuple[int, int]:
    _, start, stop = name.split(".")
    return int(start), int(stop)
