"""From a source to a data directory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.manifest import (
    MAX_SEED,
    MAX_SEQUENCE_LENGTH,
    MAX_TEXT_CHARS,
    MAX_VOCAB_SIZE,
    Manifest,
    SliceInfo,
)
from neurogrid.training.data.preparing.documents import (
    TEXT_SUFFIXES,
    Piece,
    files_under,
    read_pieces,
    text_files,
)
from neurogrid.training.data.preparing.images import IMAGE_SUFFIXES, ImageFolder
from neurogrid.training.data.preparing.token_file import TokenFile, read_token_ids
from neurogrid.training.data.preparing.tokenizing import (
    DEFAULT_VOCAB_SIZE,
    TextTokenizer,
    train_tokenizer,
)
from neurogrid.training.data.preparing.writing import (
    default_slice_samples,
    open_directory,
    write_slices,
)
from neurogrid.training.data.slices import MANIFEST_NAME, TOKENIZER_NAME

__all__ = ["prepare"]

_CLASSES: Final = "classes.json"
_INT32_BYTES: Final = 4


def prepare(
    source: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    sequence_length: int = 256,
    slice_samples: int | None = None,
    held_out: float = 0.02,
    seed: int = 0,
    licence: str = "",
    token_bytes: int = 0,
    image_size: int = 0,
) -> Manifest:
    """Make the data directory `out`, whole or not at all. Equal input, seed and versions give equal blobs.

    Samples of text are `sequence_length` tokens of the documents one after the other, without overlap; what is left at
    the end is dropped. Whole documents are held out, or the end of the text where there are too few.

    Args:
        source: a text file (.txt, .py, .rst, .md, .jsonl, .parquet), a folder with such files, a file of token ids
            (.bin), or a folder with a folder of images for each class.
        out: a directory that is new or empty.
        tokenizer: a directory with a tokenizer.json; None to train one on the text.
        vocab_size: of a tokenizer that is trained, at most (4,096); of token ids, which they have to be below.
        sequence_length: tokens of a sample.
        slice_samples: samples of a slice; None for a mebibyte, and for fewer where there is little.
        held_out: the share of the data that is not trained on, 0 to below 1; at least one sample unless it is 0.
        seed: of the order of samples, and of what is held out.
        licence: under what terms, for people.
        token_bytes: of an id in a .bin file, 2 or 4; 0 for 2 where the vocabulary allows it.
        image_size: height and width that images are resized to; 0 to leave them.

    Raises:
        ConfigurationError: the source or an argument is wrong, or the directory cannot be written; the text names the
            file, and the line where there is one.
    """
    if not 2 <= sequence_length <= MAX_SEQUENCE_LENGTH:
        raise _wrong("sequence_length", f"2 to {MAX_SEQUENCE_LENGTH}", sequence_length)
    if slice_samples is not None and slice_samples < 1:
        raise _wrong("slice_samples", "at least 1", slice_samples)
    if not 0 <= held_out < 1:
        raise _wrong("held_out", "a share from 0 to below 1", held_out)
    if not 0 <= seed <= MAX_SEED:
        raise _wrong("seed", "a number from 0 to 2^64 - 1", seed)
    if len(licence) > MAX_TEXT_CHARS:
        raise _wrong("licence", f"at most {MAX_TEXT_CHARS} characters long", licence[:20])
    if vocab_size is not None and not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise _wrong("vocab_size", f"1 to {MAX_VOCAB_SIZE}", vocab_size)
    if token_bytes not in (0, 2, 4):
        raise _wrong("token_bytes", "2 or 4, or 0 for either", token_bytes)
    if image_size < 0:
        raise _wrong("image_size", "at least 1, or 0 for that of the images", image_size)
    about: dict[str, Any] = {
        "source": source.resolve().name[:MAX_TEXT_CHARS],
        "licence": licence,
        "seed": seed,
    }
    files = text_files(source)
    if files and not any(file.stat().st_size for file in files):
        raise ConfigurationError(f"{source} is empty: there is no text in it")
    is_ids = source.suffix.lower() == ".bin" and source.is_file()
    with open_directory(out) as directory:
        if files or is_ids:
            with tempfile.TemporaryDirectory(prefix=".ids-", dir=directory) as ids:
                made = _prepare_text(
                    source,
                    files,
                    directory,
                    Path(ids),
                    tokenizer=tokenizer,
                    vocab_size=vocab_size,
                    token_bytes=token_bytes,
                    length=sequence_length,
                    slice_samples=slice_samples,
                    held_out=held_out,
                    seed=seed,
                )
        elif source.is_dir() and files_under(source, IMAGE_SUFFIXES):
            made = _prepare_images(
                ImageFolder(source, side=image_size), directory, slice_samples, held_out, seed
            )
        else:
            raise ConfigurationError(
                f"{source}: neither text ({', '.join(sorted(TEXT_SUFFIXES))}), token ids (.bin) nor folders of images "
                f"({', '.join(sorted(IMAGE_SUFFIXES))})"
            )
        try:
            manifest = Manifest(**made, **about)
        except ValueError as exc:
            raise ConfigurationError(f"{source}: {exc}") from exc
        (directory / MANIFEST_NAME).write_bytes(manifest.encode())
    return manifest


def _prepare_text(
    source: Path,
    files: list[Path],
    directory: Path,
    ids_directory: Path,
    *,
    tokenizer: Path | None,
    vocab_size: int | None,
    token_bytes: int,
    length: int,
    slice_samples: int | None,
    held_out: float,
    seed: int,
) -> dict[str, Any]:
    reader: TextTokenizer | None = None
    if tokenizer is not None:
        reader = TextTokenizer(tokenizer)
        reader.copy_to(directory / TOKENIZER_NAME)
    elif files:
        reader = train_tokenizer(
            _pieces(files),
            DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size,
            directory / TOKENIZER_NAME,
        )
    size = reader.vocab_size if reader is not None else vocab_size
    if size is None:
        raise ConfigurationError(f"{source} has token ids: give their tokenizer, or vocab_size")
    if files:
        assert reader is not None
        ids = reader.tokenize(_pieces(files))
    else:
        ids = read_token_ids(source, size, token_bytes)
    tokens = TokenFile(ids_directory, ids, held_out=held_out, length=length, seed=seed)
    samples = slice_samples or default_slice_samples(len(tokens.training), length * _INT32_BYTES)

    def written(stream: Any) -> tuple[SliceInfo, ...]:
        def load(numbers: list[int]) -> dict[str, Any]:
            return {"input_ids": np.ascontiguousarray(stream[numbers])}

        return write_slices(directory, len(stream), samples, seed=seed, load=load)

    return {
        "kind": "text",
        "slices": written(tokens.training),
        "held_out": written(tokens.held_out),
        "sequence_length": length,
        "vocab_size": size,
        "tokenizer": reader.name if reader is not None else "",
    }


def _prepare_images(
    images: ImageFolder,
    directory: Path,
    slice_samples: int | None,
    held_out: float,
    seed: int,
) -> dict[str, Any]:
    num_held = max(1, min(round(held_out * len(images)), len(images) - 1)) if held_out else 0
    num_training = len(images) - num_held
    if num_training < 1:
        raise ConfigurationError(f"of {len(images)} images {num_held} are held out: none is left")
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(images))
    sample_bytes = int(np.prod(images.shape))
    samples = slice_samples or default_slice_samples(num_training, sample_bytes)

    def written(chosen: Any) -> tuple[SliceInfo, ...]:
        def load(numbers: list[int]) -> dict[str, Any]:
            pixels, labels = images.load(chosen[numbers].tolist())
            return {"pixel_values": pixels, "labels": labels}

        return write_slices(directory, len(chosen), samples, seed=seed, load=load)

    (directory / _CLASSES).write_text(json.dumps(images.classes, ensure_ascii=False) + "\n")
    return {
        "kind": "images",
        "slices": written(order[:num_training]),
        "held_out": written(order[num_training:]),
        "shape": images.shape,
        "num_classes": len(images.classes),
    }


def _pieces(files: list[Path]) -> Iterator[Piece]:
    for path in files:
        yield from read_pieces(path)


def _wrong(name: str, allowed: str, value: object) -> ConfigurationError:
    return ConfigurationError(f"{name} is {allowed}, not {value}")
