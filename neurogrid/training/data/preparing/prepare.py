"""Preparing of sources as a data directory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.manifest import (
    MAX_PART_NAME_CHARS,
    MAX_SEED,
    MAX_SEQUENCE_LENGTH,
    MAX_TEXT_CHARS,
    MAX_VOCAB_SIZE,
    Manifest,
    PartInfo,
)
from neurogrid.training.data.preparing.mixing import (
    Mixture,
    check_weights,
    common_fields,
    mixed_sizes,
)
from neurogrid.training.data.preparing.opening import Found, Kind, Opener, Wanted, find
from neurogrid.training.data.preparing.samples import Samples, Source
from neurogrid.training.data.preparing.writing import (
    default_slice_samples,
    open_directory,
    write_slices,
)
from neurogrid.training.data.slices import MANIFEST_NAME, read_manifest

__all__ = ["prepare"]

_CLASSES: Final = "classes.json"


def _say_nothing(text: str) -> None:
    """Ignore what is left out, and what is mixed."""


def prepare(
    source: Path | Sequence[Path],
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
    weights: Sequence[float] = (),
    repeat: int = 1,
    say: Callable[[str], None] = _say_nothing,
) -> Manifest:
    """Make the data directory `out`, whole or not at all. Equal input and seed give equal blobs.

    Samples of text are `sequence_length` tokens of the documents one after the other, without overlap; what is left at
    the end is dropped. Whole documents are held out, or the end of the text where there are too few. In files of token
    ids each sample is of one file, and whole files are held out, or the end of the last. Samples are shuffled, all of
    them, by the seed.

    Args:
        source: a text file (.txt, .py, .rst, .md, .jsonl, .parquet), a file of token ids (.bin), a folder with files of
            either, or a folder with a folder of images for each class; or several such files or folders of one kind.
        out: a directory that is new or empty.
        tokenizer: a directory with a tokenizer.json; None to train one on the text.
        vocab_size: of a tokenizer that is trained, at most (4,096); of token ids, which they have to be below.
        sequence_length: tokens of a sample.
        slice_samples: samples of a slice; None for a mebibyte, and for fewer where there is little.
        held_out: the share of the data that is not trained on, 0 to below 1; at least one sample unless it is 0.
        seed: of the order of samples, and of what is held out.
        licence: under what terms, for people.
        token_bytes: of an id in a .bin file, 2 or 4; 0 for what a header says, else 2 where the vocabulary allows it.
        image_size: height and width that images are resized to; 0 to leave them.
        weights: of each source, where they are a mixture: an epoch has of each as many samples as its weight says.
            Sources may be data directories then, too, which keep what they hold out.
        repeat: times that a sample of a mixture comes in an epoch, at most: the epoch ends where a source has come so
            often, or where all have come once.
        say: is told what is left out, and what is mixed.

    Raises:
        ConfigurationError: the source or an argument is wrong, or the directory cannot be written; the text names the
            file, and the line where there is one.
    """
    places = [source] if isinstance(source, Path) else list(source)
    if not places:
        raise ConfigurationError("there is no source")
    if weights:
        check_weights(weights, repeat)
        if len(weights) != len(places):
            raise ConfigurationError(f"there are {len(places)} sources and {len(weights)} weights")
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
    if repeat != 1 and not weights:
        raise _wrong("repeat", "of a mixture, which has weights: 1 without", repeat)
    found = [find(place, has_ids=token_bytes > 0) for place in places]
    for each in found if not weights else ():
        if each.kind is Kind.PREPARED:
            raise ConfigurationError(
                f"{each.place} is prepared already: it can be mixed, by weights"
            )
    sources = [[each] for each in found] if weights else [found]
    wanted = Wanted(tokenizer, vocab_size, token_bytes, sequence_length, held_out, seed, image_size)
    fields: dict[str, Any] = {
        "source": ", ".join(place.resolve().name for place in places)[:MAX_TEXT_CHARS],
        "licence": licence,
        "seed": seed,
    }
    with open_directory(out) as directory:
        with tempfile.TemporaryDirectory(prefix=".ids-", dir=directory) as scratch:
            opener = Opener(wanted, sources, directory, Path(scratch), say)
            opened = [opener.open(each) for each in sources]
            if weights:
                named = _named(found)
                fields |= common_fields(opened, named)
                training, sizes = _mixed(opened, weights, repeat, seed)
                _say_mixed(named, opened, sizes, say)
            else:
                fields |= opened[0].about
                training, sizes = opened[0].training, ()
            samples = slice_samples or default_slice_samples(len(training), opened[0].sample_bytes)
            fields["slices"] = write_slices(directory, training, samples, seed=seed)
            held = [write_slices(directory, each.held_out, samples, seed=seed) for each in opened]
            fields["held_out"] = tuple(info for infos in held for info in infos)
        if opener.classes:
            names = json.dumps(opener.classes, ensure_ascii=False)
            (directory / _CLASSES).write_text(names + "\n")
        if weights:
            fields["parts"] = tuple(
                PartInfo(
                    name, _licence(each, licence), size, min(size, len(part.training)), len(infos)
                )
                for name, each, part, size, infos in zip(
                    named, found, opened, sizes, held, strict=True
                )
            )
        try:
            manifest = Manifest(**fields)
        except ValueError as exc:
            raise ConfigurationError(f"{', '.join(map(str, places))}: {exc}") from exc
        (directory / MANIFEST_NAME).write_bytes(manifest.encode())
    return manifest


def _mixed(
    opened: Sequence[Source], weights: Sequence[float], repeat: int, seed: int
) -> tuple[Samples, tuple[int, ...]]:
    sizes = mixed_sizes([len(each.training) for each in opened], weights, repeat)
    parts = [(each.training, size) for each, size in zip(opened, sizes, strict=True)]
    return Mixture(parts, seed), sizes


def _named(found: Sequence[Found]) -> list[str]:
    """Name the sources of a mixture: by the last parts of their paths where these differ, else by the paths."""
    short = [each.place.resolve().name[:MAX_PART_NAME_CHARS] for each in found]
    if len(set(short)) == len(short):
        return short
    whole = [str(each.place)[-MAX_PART_NAME_CHARS:] for each in found]
    if len(set(whole)) < len(whole):
        twice = next(name for name in whole if whole.count(name) > 1)
        raise ConfigurationError(f"{twice} is in the mixture twice: give it the sum of its weights")
    return whole


def _licence(found: Found, licence: str) -> str:
    own = read_manifest(found.place).licence if found.kind is Kind.PREPARED else ""
    return own or licence


def _say_mixed(
    names: Sequence[str], opened: Sequence[Source], sizes: Sequence[int], say: Callable[[str], None]
) -> None:
    for name, source, size in zip(names, opened, sizes, strict=True):
        total = len(source.training)
        if size < total:
            how = f"of {total:,}: the others are left out"
        elif size == total:
            how = "all that there are"
        else:
            how = f"which are {total:,}, each {size / total:.3g} times"
        say(f"{name}: {size:,} samples of {sum(sizes):,}, {how}")


def _wrong(name: str, allowed: str, value: object) -> ConfigurationError:
    return ConfigurationError(f"{name} is {allowed}, not {value}")
