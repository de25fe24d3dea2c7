"""Token ids in binary files, as other programs write them for training: little-endian, of 2 or 4 bytes each.

A file has ids and nothing else, or 1,024 bytes in front of them that say how many there are, as llm.c writes it. Files
are read piece by piece, and a row at a time: none is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.preparing.holding_out import chosen_documents, num_held_out
from neurogrid.training.data.preparing.samples import Arrays
from neurogrid.training.data.preparing.shuffling import Numbers

__all__ = ["TOKEN_SUFFIXES", "IdFile", "IdRows", "divide_rows", "open_ids"]

TOKEN_SUFFIXES: Final = frozenset({".bin"})

# Of a header: 256 integers of 4 bytes, of which the first three are a mark, a version, and the number of ids.
HEADER_BYTES: Final = 1024
# By the mark: the version, and the bytes of an id.
_HEADERS: Final = {20240520: (1, 2), 20240801: (7, 4)}
# Ids that are read at once.
_READ: Final = 1 << 20
# Ids that are looked at to find out how many bytes they have.
_LOOKED_AT: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class IdFile:
    """A file of token ids, all of which were looked at.

    Attributes:
        path: of the file.
        num_tokens: that it has.
        token_bytes: of each, 2 or 4.
        offset: bytes in front of them.
    """

    path: Path
    num_tokens: int
    token_bytes: int
    offset: int = 0

    def rows(self, length: int) -> Any:
        """Ids [rows, length], mapped; those after the last whole row are left out."""
        num_rows = self.num_tokens // length
        return np.memmap(
            self.path,
            np.dtype(f"<u{self.token_bytes}"),
            mode="r",
            offset=self.offset,
            shape=(num_rows, length),
        )


def open_ids(path: Path, vocab_size: int, token_bytes: int = 0) -> IdFile:
    """Look through a file of token ids.

    Args:
        vocab_size: every id has to be below it.
        token_bytes: of an id, 2 or 4; 0 for what a header says, and without one for 2 where the vocabulary allows it,
            as such files are mostly written.

    Raises:
        ConfigurationError: it is no such file; the text names the first id that is none.
    """
    try:
        found = _measure(path, vocab_size, token_bytes)
        _look_through(found, vocab_size)
    except OSError as exc:
        raise ConfigurationError(f"{path}: {exc.strerror or exc}") from exc
    return found


class IdRows:
    """Samples of files of ids, each `length` ids that stand one after the other in one file.

    Args:
        parts: files, and of each the numbers of its rows from one to before another.
        length: tokens of a sample.
    """

    def __init__(self, parts: Sequence[tuple[IdFile, int, int]], length: int) -> None:
        self._rows = [file.rows(length)[start:stop] for file, start, stop in parts if start < stop]
        self._length = length
        self._starts = np.cumsum([0, *(len(each) for each in self._rows)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def load(self, numbers: Numbers) -> Arrays:
        """See `Samples.load`."""
        ids = np.empty((len(numbers), self._length), np.int32)
        files = np.searchsorted(self._starts, numbers, side="right") - 1
        for file in np.unique(files).tolist():
            here = files == file
            ids[here] = self._rows[file][numbers[here] - self._starts[file]]
        return {"input_ids": ids}


def divide_rows(
    files: Sequence[IdFile],
    length: int,
    held_out: float,
    seed: int,
    say: Callable[[str], None],
) -> tuple[IdRows, IdRows]:
    """Divide rows into those to train on and those held out: whole files, or the last rows where no files will do.

    Args:
        length: tokens of a sample.
        held_out: the share of samples that is held out, 0 to below 1.
        seed: which files are held out comes of it.
        say: is told which ids are in no sample.

    Raises:
        ConfigurationError: there are not enough ids.
    """
    sizes = np.array([file.num_tokens // length for file in files], np.int64)
    total = int(sizes.sum())
    num_tokens = sum(file.num_tokens for file in files)
    num_held = num_held_out(total, held_out, f"{num_tokens:,} tokens", length)
    _say_left_out(files, length, say)
    chosen = chosen_documents(sizes, num_held, seed)
    training: list[tuple[IdFile, int, int]] = []
    held: list[tuple[IdFile, int, int]] = []
    if chosen.any() or not num_held:
        for file, size, is_held in zip(files, sizes.tolist(), chosen.tolist(), strict=True):
            (held if is_held else training).append((file, 0, size))
        return IdRows(training, length), IdRows(held, length)
    start, border = 0, total - num_held
    for file, size in zip(files, sizes.tolist(), strict=True):
        cut = min(max(border - start, 0), size)
        training.append((file, 0, cut))
        held.append((file, cut, size))
        start += size
    return IdRows(training, length), IdRows(held, length)


def _measure(path: Path, vocab_size: int, token_bytes: int) -> IdFile:
    """Find out the number and the size of a file's ids, by its length and its beginning."""
    num_bytes = path.stat().st_size
    header = np.fromfile(path, "<i4", HEADER_BYTES // 4)
    mark, version, count = (int(each) for each in header[:3]) if len(header) == 256 else (0, 0, 0)
    if mark in _HEADERS:
        known, size = _HEADERS[mark]
        if version != known:
            raise ConfigurationError(
                f"{path}: its header is of version {version} of mark {mark}: {known} is known"
            )
        if token_bytes not in (0, size):
            raise ConfigurationError(
                f"{path}: by its header its ids have {size} B: leave out token_bytes"
            )
        behind = num_bytes - HEADER_BYTES
        if count < 1 or behind != count * size:
            raise ConfigurationError(
                f"{path}: its header tells of {count:,} ids of {size} B, and there are {behind:,} B behind it: was all "
                "of it copied?"
            )
        return IdFile(path, count, size, HEADER_BYTES)
    size = token_bytes or (2 if vocab_size <= 1 << 16 else 4)
    if num_bytes % size or not num_bytes:
        raise ConfigurationError(f"{path} has {num_bytes:,} B, which are no ids of {size} B each")
    head = np.fromfile(path, np.dtype(f"<u{size}"), _LOOKED_AT)
    if size == 2 and len(head) > 1 and head[::2].any() and not head[1::2].any():
        raise ConfigurationError(
            f"{path}: every second id of 2 B is 0: its ids seem to have 4 B; say so with token_bytes=4"
        )
    return IdFile(path, num_bytes // size, size)


def _look_through(file: IdFile, vocab_size: int) -> None:
    dtype = np.dtype(f"<u{file.token_bytes}")
    with file.path.open("rb") as stream:
        stream.seek(file.offset)
        start = 0
        while len(ids := np.fromfile(stream, dtype, _READ)):
            if int(ids.max()) >= vocab_size:
                first = int(np.flatnonzero(ids >= vocab_size)[0])
                raise ConfigurationError(
                    f"{file.path}: id number {start + first:,} is {int(ids[first]):,}, "
                    f"and the vocabulary has {vocab_size:,}{_doubt(file)}"
                )
            start += len(ids)
    if start != file.num_tokens:
        raise ConfigurationError(f"{file.path} has changed while it was read")


def _doubt(file: IdFile) -> str:
    if file.offset:
        return ""
    other = 6 - file.token_bytes
    return f"; were they ids of {other} B, token_bytes={other} would say so"


def _say_left_out(files: Sequence[IdFile], length: int, say: Callable[[str], None]) -> None:
    left = [(file, file.num_tokens % length) for file in files if file.num_tokens % length]
    if not left:
        return
    where = left[0][0].path.name if len(left) == 1 else f"{len(left)} files"
    say(
        f"{sum(num for _, num in left):,} ids at the end of {where} are left out: a sample has {length}"
    )
