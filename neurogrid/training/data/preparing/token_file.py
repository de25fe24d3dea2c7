"""The ids of all documents on disk, and which of them are held out. Memory holds the lengths of documents only."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from neurogrid.training.data.preparing.holding_out import chosen_documents, num_held_out
from neurogrid.training.data.preparing.samples import Arrays
from neurogrid.training.data.preparing.shuffling import Numbers

__all__ = ["Rows", "TokenFile"]

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]

# Ids that are read and written at once.
_COPIED: Final = 1 << 20


class TokenFile:
    """Two streams of token ids in files: what is trained on, and what is held out.

    Args:
        directory: of its own; the files in it are its.
        pieces: ids, int32, and whether a document ends with them.
        held_out: the share of tokens that is held out, 0 to below 1.
        length: tokens of a sample.
        seed: which documents are held out comes of it.

    Attributes:
        training, held_out: ids, int32 [samples, length], mapped. No sample has a token of both.

    Raises:
        ConfigurationError: there are not enough tokens.
    """

    def __init__(
        self,
        directory: Path,
        pieces: Iterable[tuple[Ids, bool]],
        *,
        held_out: float,
        length: int,
        seed: int,
    ) -> None:
        path = directory / "documents"
        lengths = _write(path, pieces)
        total = int(lengths.sum())
        wanted = num_held_out(total // length, held_out, f"{total:,} tokens", length)
        ids = np.memmap(path, np.int32, mode="r")
        chosen = chosen_documents(lengths, wanted * length, seed)
        if chosen.any():
            training = _copy(ids, lengths, ~chosen, directory / "training")
            held = _copy(ids, lengths, chosen, directory / "held_out")
        else:  # one document, or few and long ones: the end of the last
            training = ids[: total - wanted * length]
            held = ids[total - wanted * length :]
        self.training = _samples(training, length)
        self.held_out = _samples(held, length)


class Rows:
    """Samples in an array of ids, int32 [samples, T]."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def load(self, numbers: Numbers) -> Arrays:
        """See `Samples.load`."""
        return {"input_ids": np.ascontiguousarray(self._ids[numbers])}


def _write(path: Path, pieces: Iterable[tuple[Ids, bool]]) -> np.ndarray[Any, Any]:
    """Write all ids; the lengths of documents, int64."""
    lengths = array("q")
    num_tokens = 0
    with path.open("wb") as file:
        for ids, is_last in pieces:
            ids.tofile(file)
            num_tokens += len(ids)
            if is_last:
                lengths.append(num_tokens)
                num_tokens = 0
    if num_tokens:
        lengths.append(num_tokens)
    return np.frombuffer(lengths, np.int64) if lengths else np.zeros(0, np.int64)


def _copy(ids: Ids, lengths: np.ndarray[Any, Any], which: np.ndarray[Any, Any], path: Path) -> Ids:
    start = 0
    with path.open("wb") as file:
        for number, length in enumerate(lengths.tolist()):
            if which[number]:
                for at in range(start, start + length, _COPIED):
                    ids[at : min(at + _COPIED, start + length)].tofile(file)
            start += length
    return np.memmap(path, np.int32, mode="r")


def _samples(ids: Ids, length: int) -> Ids:
    num_samples = len(ids) // length
    return ids[: num_samples * length].reshape(num_samples, length)
