"""Files and directories as sources of samples: text, token ids, images, or what was prepared before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

import numpy as np

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.transfer import BytesSource
from neurogrid.p2p.wire import blob_id
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.data.preparing.documents import (
    TEXT_SUFFIXES,
    Piece,
    files_under,
    read_pieces,
    text_files,
)
from neurogrid.training.data.preparing.images import IMAGE_SUFFIXES, ImageFolder
from neurogrid.training.data.preparing.samples import Arrays, Source
from neurogrid.training.data.preparing.shuffling import Numbers, in_order
from neurogrid.training.data.preparing.token_file import Rows, TokenFile
from neurogrid.training.data.preparing.token_ids import TOKEN_SUFFIXES, divide_rows, open_ids
from neurogrid.training.data.preparing.tokenizing import (
    DEFAULT_VOCAB_SIZE,
    MAX_TRAINING_CHARS,
    TextTokenizer,
    train_tokenizer,
)
from neurogrid.training.data.slices import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    SliceError,
    open_slice,
    read_manifest,
    slice_path,
)

__all__ = ["Found", "Kind", "Opener", "Wanted", "find"]

logger = logging.getLogger(__name__)

_INT32_BYTES: Final = 4


class Kind(StrEnum):
    """Kind of the content of a source."""

    TEXT = "text"
    IDS = "token ids"
    IMAGES = "images"
    PREPARED = "prepared data"


@dataclass(frozen=True, slots=True)
class Found:
    """Source that was found at a place.

    Attributes:
        place: as it was named.
        kind: of what it has.
        files: with text or ids, in order.
    """

    place: Path
    kind: Kind
    files: tuple[Path, ...] = ()

    @property
    def has_ids(self) -> bool:
        """Whether it has token ids, whose tokenizer is not known."""
        return self.kind is Kind.IDS


def find(place: Path, *, has_ids: bool) -> Found:
    """See what a place has. Ids are taken of a directory that has no text, or where somebody says that it has ids.

    Raises:
        ConfigurationError: there is nothing, or nothing that can be prepared.
    """
    if (place / MANIFEST_NAME).is_file():
        return Found(place, Kind.PREPARED)
    files = text_files(place)
    if place.is_dir():
        ids = files_under(place, TOKEN_SUFFIXES) if has_ids or not files else []
    else:
        ids = [place] if place.suffix.lower() in TOKEN_SUFFIXES else []
    if ids:
        return Found(place, Kind.IDS, tuple(ids))
    if files:
        if not any(file.stat().st_size for file in files):
            raise ConfigurationError(f"{place} is empty: there is no text in it")
        return Found(place, Kind.TEXT, tuple(files))
    if place.is_dir() and files_under(place, IMAGE_SUFFIXES):
        return Found(place, Kind.IMAGES)
    raise ConfigurationError(
        f"{place}: neither text ({', '.join(sorted(TEXT_SUFFIXES))}), token ids (.bin) nor folders of images "
        f"({', '.join(sorted(IMAGE_SUFFIXES))})"
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """Settings by which sources are read: see `prepare`."""

    tokenizer: Path | None
    vocab_size: int | None
    token_bytes: int
    length: int
    held_out: float
    seed: int
    image_size: int


class Opener:
    """Opens the sources of one data set, whose text has one tokenizer.

    Args:
        wanted: how they are read.
        sources: all of them.
        directory: of the data set, which gets the tokenizer.
        scratch: for ids; as large as those of all sources that are text, or were prepared before.
        say: is told what is left out.

    Attributes:
        classes: names of those of images; none for text.

    Raises:
        ConfigurationError: there is no tokenizer for them, or one that is none.
    """

    def __init__(
        self,
        wanted: Wanted,
        sources: Sequence[Sequence[Found]],
        directory: Path,
        scratch: Path,
        say: Callable[[str], None],
    ) -> None:
        self._wanted, self._scratch, self._say = wanted, scratch, say
        self._numbers = count()
        self._is_mixture = len(sources) > 1
        self.classes: list[str] = []
        self._tokenizer = self._find_tokenizer(sources, directory / TOKENIZER_NAME)

    def open(self, found: Sequence[Found]) -> Source:
        """Places of one kind as one source.

        Raises:
            ConfigurationError: they are of several kinds, or cannot be read; the text names the file.
        """
        first = found[0]
        for each in found[1:]:
            if each.kind is not first.kind:
                raise ConfigurationError(
                    f"{first.place} has {first.kind}, and {each.place} {each.kind}: as parts of one data set they are "
                    "mixed, by weights"
                )
        if first.kind in (Kind.IMAGES, Kind.PREPARED) and len(found) > 1:
            raise ConfigurationError(
                f"{first.place} and {found[1].place} have {first.kind}: one of them is a data set"
            )
        if first.kind is Kind.IMAGES and self._is_mixture:
            raise ConfigurationError(f"{first.place} has images: mixtures are of text")
        if first.kind is Kind.IMAGES:
            return self._open_images(ImageFolder(first.place, side=self._wanted.image_size))
        if first.kind is Kind.PREPARED:
            return self._open_prepared(first.place)
        files = [file for each in found for file in each.files]
        return self._open_ids(files) if first.kind is Kind.IDS else self._open_text(files)

    def _find_tokenizer(
        self, sources: Sequence[Sequence[Found]], out: Path
    ) -> TextTokenizer | None:
        wanted = self._wanted
        found = list(chain.from_iterable(sources))
        texts = [each for each in found if each.kind is Kind.TEXT]
        places = [wanted.tokenizer] if wanted.tokenizer is not None else []
        if not places:
            prepared = [each.place / TOKENIZER_NAME for each in found if each.kind is Kind.PREPARED]
            places = [place for place in prepared if (place / "tokenizer.json").is_file()]
        if places:
            reader = TextTokenizer(places[0])
            reader.copy_to(out)
            return reader
        if not texts:
            return None
        # Of each source as much, whatever its length.
        pieces = (_beginning(each.files, MAX_TRAINING_CHARS // len(texts)) for each in texts)
        size = DEFAULT_VOCAB_SIZE if wanted.vocab_size is None else wanted.vocab_size
        return train_tokenizer(chain.from_iterable(pieces), size, out)

    def _about_text(self, file: Path) -> dict[str, Any]:
        reader = self._tokenizer
        size = reader.vocab_size if reader is not None else self._wanted.vocab_size
        if size is None:
            raise ConfigurationError(f"{file} has token ids: give their tokenizer, or vocab_size")
        return {
            "kind": "text",
            "sequence_length": self._wanted.length,
            "vocab_size": size,
            "tokenizer": reader.name if reader is not None else "",
        }

    def _open_text(self, files: Sequence[Path]) -> Source:
        assert self._tokenizer is not None
        wanted = self._wanted
        tokens = TokenFile(
            self._room(),
            self._tokenizer.tokenize(chain.from_iterable(map(read_pieces, files))),
            held_out=wanted.held_out,
            length=wanted.length,
            seed=wanted.seed,
        )
        bytes_ = wanted.length * _INT32_BYTES
        return Source(
            Rows(tokens.training), Rows(tokens.held_out), self._about_text(files[0]), bytes_
        )

    def _open_ids(self, files: Sequence[Path]) -> Source:
        wanted, about = self._wanted, self._about_text(files[0])
        opened = [open_ids(file, about["vocab_size"], wanted.token_bytes) for file in files]
        training, held = divide_rows(opened, wanted.length, wanted.held_out, wanted.seed, self._say)
        return Source(training, held, about, wanted.length * _INT32_BYTES)

    def _open_prepared(self, place: Path) -> Source:
        manifest = read_manifest(place)
        if manifest.kind != "text":
            raise ConfigurationError(f"{place} has {manifest.kind}: mixtures are of text")
        reader = self._tokenizer
        if manifest.tokenizer and reader is not None and manifest.tokenizer != reader.name:
            raise ConfigurationError(
                f"{place} was prepared with another tokenizer than the others are, or than the one that was named"
            )
        room = self._room()
        training = _copied(place, manifest, manifest.slices, room / "training")
        held = _copied(place, manifest, manifest.held_out, room / "held_out")
        about = {
            name: getattr(manifest, name)
            for name in ("kind", "sequence_length", "vocab_size", "tokenizer")
        }
        return Source(Rows(training), Rows(held), about, manifest.sequence_length * _INT32_BYTES)

    def _open_images(self, images: ImageFolder) -> Source:
        wanted, total = self._wanted, len(images)
        num_held = max(1, min(round(wanted.held_out * total), total - 1)) if wanted.held_out else 0
        if total - num_held < 1:
            raise ConfigurationError(f"of {total} images {num_held} are held out: none is left")
        order = in_order(wanted.seed, total, 0, total)
        self.classes = images.classes
        about = {"kind": "images", "shape": images.shape, "num_classes": len(images.classes)}
        return Source(
            _Images(images, order[: total - num_held]),
            _Images(images, order[total - num_held :]),
            about,
            int(np.prod(images.shape)),
        )

    def _room(self) -> Path:
        room = self._scratch / str(next(self._numbers))
        room.mkdir()
        return room


class _Images:
    """Images of a folder, chosen by their numbers."""

    def __init__(self, images: ImageFolder, chosen: Numbers) -> None:
        self._images, self._chosen = images, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def load(self, numbers: Numbers) -> Arrays:
        """See `Samples.load`."""
        pixels, labels = self._images.load(self._chosen[numbers].tolist())
        return {"pixel_values": pixels, "labels": labels}


def _copied(place: Path, manifest: Manifest, infos: Sequence[SliceInfo], out: Path) -> Any:
    """The ids of slices in one file, int32 [samples, T], mapped. Each slice is verified, by its id and what it has."""
    shape = sum(info.num_samples for info in infos), manifest.sequence_length
    if not shape[0]:
        return np.zeros(shape, np.int32)
    with out.open("wb") as file:
        for info in infos:
            path = slice_path(place, info)
            try:
                ids = open_slice(path, manifest, info)["input_ids"]
                is_it = blob_id([BytesSource(path.read_bytes()).digests()]) == info.blob_id
            except (OSError, SliceError) as exc:
                raise ConfigurationError(f"{place} is not whole: {exc}") from exc
            if not is_it:
                raise ConfigurationError(f"{path} is not what its name says: it was damaged")
            ids.numpy().tofile(file)
    return np.memmap(out, np.int32, mode="r", shape=shape)


def _beginning(files: Sequence[Path], num_chars: int) -> Iterator[Piece]:
    for piece in chain.from_iterable(map(read_pieces, files)):
        yield piece
        num_chars -= len(piece.text)
        if num_chars <= 0:
            return
