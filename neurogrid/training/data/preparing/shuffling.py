"""The order of samples by a seed: the same for everybody, and in no memory however many there are.

Source: protocol_spec/training/data.md, "Order".
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

__all__ = ["Numbers", "in_order", "samples_at"]

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1
_ROUNDS: Final = 8
# Of half a number. Fewer leave few orders to choose among.
_FEWEST_BITS: Final = 4


def in_order(seed: int, num_samples: int, start: int, stop: int) -> Numbers:
    """Return the numbers of the samples at the places from `start` to before `stop`, int64: see `samples_at`."""
    return samples_at(seed, num_samples, np.arange(start, stop))


def samples_at(seed: int, num_samples: int, places: Numbers) -> Numbers:
    """Return the numbers of the samples that stand at some places, int64; no two places have the same.

    A network of Feistel's permutes the numbers of an even number of bits, and goes on until one is a sample's.

    Args:
        seed: 0 to 2^64 - 1.
        num_samples: of all places, at most 2^62.
        places: each from 0 to before `num_samples`.
    """
    half = max(_FEWEST_BITS, -(-max(num_samples - 1, 0).bit_length() // 2))
    keys = [_mixed_number(seed + (turn + 1) * _GOLDEN) for turn in range(_ROUNDS)]
    found = places.astype(np.uint64)
    left = np.arange(len(found))
    while len(left):
        found[left] = _permuted(found[left], half, keys)
        left = left[found[left] >= num_samples]
    return found.astype(np.int64)


def _permuted(numbers: Any, half: int, keys: list[int]) -> Any:
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    high, low = numbers >> shift, numbers & mask
    for key in keys:
        high, low = low, high ^ (_mixed(low + np.uint64(key)) & mask)
    return high << shift | low


def _mixed(numbers: Any) -> Any:
    """The finaliser of splitmix64, of uint64 modulo 2^64."""
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)


def _mixed_number(number: int) -> int:
    return int(_mixed(np.array([number & _MASK], np.uint64))[0])
