"""Choice of the documents to hold out: whole ones, so that nothing of what is evaluated on was trained on."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np

from neurogrid.errors import ConfigurationError

__all__ = ["chosen_documents", "num_held_out"]


def num_held_out(num_samples: int, held_out: float, what: str, length: int) -> int:
    """Samples that are held out of so many: at least one unless none is to be, and not all.

    Args:
        held_out: their share, 0 to below 1.
        what: there is, for people.
        length: tokens of a sample.

    Raises:
        ConfigurationError: there are too few.
    """
    wanted = max(1, min(round(held_out * num_samples), num_samples - 1)) if held_out else 0
    if num_samples < (2 if wanted else 1):
        raise ConfigurationError(
            f"there are {what}: a sample to train on{' and one to hold out' if wanted else ''} "
            f"of {length} each take {(2 if wanted else 1) * length:,}; take more text, or a shorter sequence_length"
        )
    return wanted


def chosen_documents(
    lengths: np.ndarray[Any, Any], wanted: int, seed: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Choose the documents to hold out, in the order of SHA-256 of seed and number: with at least `wanted` in all, and
    at most twice as many. None of them where that cannot be.

    Args:
        lengths: of the documents, in tokens or in samples.
    """
    chosen = np.zeros(len(lengths), np.bool_)
    if not wanted:
        return chosen
    start = b"neurogrid held out 1\0" + struct.pack("<Q", seed)
    order = sorted(
        range(len(lengths)),
        key=lambda number: hashlib.sha256(start + struct.pack("<Q", number)).digest(),
    )
    # Neither all of it, nor all but a few.
    most = min(2 * wanted, int(lengths.sum()) - wanted)
    found = 0
    for number in order:
        if found >= wanted:
            break
        if found + lengths[number] <= most:
            chosen[number] = True
            found += int(lengths[number])
    return chosen if found >= wanted else np.zeros(len(lengths), np.bool_)
