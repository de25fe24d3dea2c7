"""The ids of all documents on disk, and which of them are held out. Memory holds the lengths of documents only."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from neurogrid.errors import ConfigurationError

__all__ = ["TokenFile", "read_token_ids"]

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
        num_samples = total // length
        wanted = max(1, min(round(held_out * num_samples), num_samples - 1)) if held_out else 0
        if num_samples < (2 if wanted else 1):
            raise ConfigurationError(
                f"there are {total:,} tokens: a sample to train on{' and one to hold out' if wanted else ''} "
                f"of {length} each take {(2 if wanted else 1) * length:,}; take more text, or a shorter sequence_length"
            )
        ids = np.memmap(path, np.int32, mode="r")
        chosen = _chosen(lengths, wanted * length, seed)
        if chosen.any():
            training = _copy(ids, lengths, ~chosen, directory / "training")
            held = _copy(ids, lengths, chosen, directory / "held_out")
        else:  # one document, or few and long ones: the end of the last
            training = ids[: total - wanted * length]
            held = ids[total - wanted * length :]
        self.training = _samples(training, length)
        self.held_out = _samples(held, length)


def read_token_ids(path: Path, vocab_size: int, token_bytes: int) -> Iterator[tuple[Ids, bool]]:
    """Ids from a file that has nothing else, little-endian, of 2 or 4 bytes each: one document.

    Args:
        token_bytes: 2 or 4; 0 for 2 where the vocabulary allows it, as such files are mostly written.

    Raises:
        ConfigurationError: the file is no such file; the text names the first id that is none.
    """
    size = token_bytes or (2 if vocab_size <= 1 << 16 else 4)
    num_bytes = path.stat().st_size
    if num_bytes % size or not num_bytes:
        raise ConfigurationError(f"{path} has {num_bytes:,} B, which are no ids of {size} B each")
    ids = np.memmap(path, np.dtype(f"<u{size}"), mode="r")
    head = ids[: 1 << 12]
    if size == 2 and len(head) > 1 and head[::2].any() and not head[1::2].any():
        raise ConfigurationError(
            f"{path}: every second id of 2 B is 0: its ids seem to have 4 B; say so with token_bytes=4"
        )
    for start in range(0, len(ids), _COPIED):
        part = np.asarray(ids[start : start + _COPIED])
        wrong = np.flatnonzero(part >= vocab_size)
        if len(wrong):
            raise ConfigurationError(
                f"{path}: id number {start + int(wrong[0]):,} is {int(part[wrong[0]]):,}, "
                f"and the vocabulary has {vocab_size:,}"
            )
        yield part.astype(np.int32), start + len(part) == len(ids)


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


def _chosen(lengths: np.ndarray[Any, Any], wanted: int, seed: int) -> np.ndarray[Any, Any]:
    """Which documents are held out, in the order of SHA-256 of seed and number: at least `wanted` tokens of them, and
    at most twice as many. None where that cannot be.
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
    num_tokens = 0
    for number in order:
        if num_tokens >= wanted:
            break
        if num_tokens + lengths[number] <= most:
            chosen[number] = True
            num_tokens += int(lengths[number])
    return chosen if num_tokens >= wanted else np.zeros(len(lengths), np.bool_)


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
