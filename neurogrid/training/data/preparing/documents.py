"""The text of files, piece by piece: a document may be longer than memory.

A text file is a document; so is each line of a .jsonl and each row of a .parquet, by its `text`. Files of a folder come
in the order of their names. A piece ends at the end of a line.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from neurogrid.errors import ConfigurationError

__all__ = ["TEXT_SUFFIXES", "Piece", "files_under", "read_pieces", "text_files"]

_PLAIN: Final = frozenset({".txt", ".py", ".rst", ".md"})
TEXT_SUFFIXES: Final = _PLAIN | {".jsonl", ".parquet"}

# A piece of a text file, about.
PIECE_BYTES: Final = 256 * 1024
# A line of .jsonl is one document, and in memory.
MAX_LINE_BYTES: Final = 64 * 1024 * 1024
# Rows of a .parquet file that are in memory at once.
ROWS: Final = 256


class Piece(NamedTuple):
    """Piece of text, and whether its document ends with it."""

    text: str
    is_last: bool


def text_files(source: Path) -> list[Path]:
    """The files with text that `source` is or has, in order; none where it has no such files.

    Raises:
        ConfigurationError: there is no such file or folder.
    """
    if source.is_dir():
        return files_under(source, TEXT_SUFFIXES)
    if not source.exists():
        raise ConfigurationError(f"{source}: there is no such file or folder")
    return [source] if source.suffix.lower() in TEXT_SUFFIXES else []


def files_under(folder: Path, suffixes: frozenset[str]) -> list[Path]:
    """Files with these suffixes, in the order of their paths; without hidden ones, and without following links to
    folders."""
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(where, name) for name in names if not name.startswith(".")]
        found += [path for path in paths if path.suffix.lower() in suffixes and path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def read_pieces(path: Path) -> Iterator[Piece]:
    """The text of one file.

    Raises:
        ConfigurationError: it cannot be read, or is not what its name says; the text names the line.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        with path.open("rb") as file:
            yield from _jsonl(path, file) if suffix == ".jsonl" else _plain(path, file)
    except OSError as exc:
        raise ConfigurationError(f"{path}: {exc.strerror or exc}") from exc


def _plain(path: Path, file: BinaryIO) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    pieces: list[str] = []
    num_bytes, line = 0, 1
    is_start = True
    while data := file.readline(PIECE_BYTES):
        if num_bytes + len(data) > PIECE_BYTES:
            yield Piece("".join(pieces), False)
            pieces, num_bytes = [], 0
        try:
            text = decoder.decode(data)
        except UnicodeDecodeError as exc:
            raise _not_utf8(path, line) from exc
        pieces.append(text.removeprefix("\N{BYTE ORDER MARK}") if is_start else text)
        num_bytes += len(data)
        line += data.endswith(b"\n")
        is_start = False
    try:
        pieces.append(decoder.decode(b"", final=True))
    except UnicodeDecodeError as exc:
        raise _not_utf8(path, line) from exc
    yield Piece("".join(pieces), True)


def _jsonl(path: Path, file: BinaryIO) -> Iterator[Piece]:
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES:
            raise ConfigurationError(f"{path}:{number}: a line has at most {MAX_LINE_BYTES:,} B")
        if not data.strip():
            continue
        try:
            record = json.loads(data.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as exc:
            raise _not_utf8(path, number) from exc
        except (ValueError, RecursionError) as exc:
            raise ConfigurationError(f"{path}:{number}: this is no JSON: {exc}") from exc
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ConfigurationError(
                f'{path}:{number}: each line is an object with a string called "text"'
            )
        yield Piece(_checked(text, f"{path}:{number}"), True)


def _parquet(path: Path) -> Iterator[Piece]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as exc:
        raise ConfigurationError(f"{path}: reading it takes pyarrow: pip install pyarrow") from exc
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names[:10])
                raise ConfigurationError(f'{path}: a column called "text" is wanted, not {names}')
            for batch in file.iter_batches(ROWS, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    if not isinstance(text, str):
                        raise ConfigurationError(
                            f'{path}: row {number}: "text" is {type(text).__name__} and not a string'
                        )
                    yield Piece(text, True)
    except (ArrowException, OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"{path}: after row {number}: {exc}") from exc


def _checked(text: str, where: str) -> str:
    """JSON can write half of a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ConfigurationError(f"{where}: half of a surrogate pair is no text") from exc
    return text


def _not_utf8(path: Path, line: int) -> ConfigurationError:
    return ConfigurationError(f"{path}:{line}: this is not UTF-8")
