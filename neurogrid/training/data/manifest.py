"""Manifest of a data set: its slices by content, and what all of their samples are like. Pure.

A manifest is a blob too, and so has an id: equal data have equal bytes. Whoever gets one from a peer reads it with
`Manifest.decode`, which checks all that can be checked before any slice is there.

Source: protocol_spec/training/data.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Final

from neurogrid.errors import RemoteProtocolError

__all__ = [
    "MAX_MANIFEST_BYTES",
    "MAX_PARTS",
    "MAX_PART_NAME_CHARS",
    "MAX_SLICES",
    "MAX_SLICE_BYTES",
    "MAX_TEXT_CHARS",
    "Manifest",
    "PartInfo",
    "SliceInfo",
]

# The ids and counts of so many slices have 12 MB; at 4 MiB each they have 390 GiB.
MAX_SLICES: Final = 100_000
MAX_MANIFEST_BYTES: Final = 24 * 1024 * 1024
# A member has several of them at once in memory.
MAX_SLICE_BYTES: Final = 1024**3
MAX_SAMPLES: Final = 2**31 - 1
MAX_SEQUENCE_LENGTH: Final = 2**20
MAX_VOCAB_SIZE: Final = 2**31 - 1
MAX_IMAGE_SIDE: Final = 16_384
MAX_CLASSES: Final = 10_000_000
MAX_SEED: Final = 2**64 - 1
# Source, licence, and a tokenizer's name.
MAX_TEXT_CHARS: Final = 4096
# Sources of a mixture, and what one is called.
MAX_PARTS: Final = 64
MAX_PART_NAME_CHARS: Final = 256
# Of a safetensors file, what is in front of the tensors.
MAX_HEADER_BYTES: Final = 4096

_VERSION: Final = 1
# Of a mixture.
_MIXTURE_VERSION: Final = 2
_ID_BYTES: Final = 32
_LABEL_BYTES: Final = 8
_TOKEN_BYTES: Final = 4
_PIXEL_BYTES: Final = (1, 4)
_KINDS: Final = ("text", "images")


@dataclass(frozen=True, slots=True)
class SliceInfo:
    """A slice.

    Attributes:
        blob_id: of its file, 32 bytes.
        num_samples: at least 1.
        num_bytes: of its file.
    """

    blob_id: bytes
    num_samples: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PartInfo:
    """Part of a mixture that is from one source.

    Attributes:
        name: of the source; no two of a mixture are called the same.
        licence: under what terms it is, for people.
        num_samples: of the mixture that are from it.
        num_distinct: how many of these differ: fewer, where samples come several times.
        num_held_out: slices of `held_out` that are from it: those of each part stand together, in the order of the
            parts.
    """

    name: str
    licence: str
    num_samples: int
    num_distinct: int
    num_held_out: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a data set.

    Attributes:
        kind: "text" or "images".
        slices: those to train on, at least one.
        held_out: those to evaluate on; none of them is one to train on.
        sequence_length: tokens of a sample; 0 for images.
        vocab_size: every token id is below it; 0 for images.
        shape: channels, height and width of an image; () for text.
        num_classes: every label is below it; 0 for text.
        tokenizer: the name of the tokenizer, "sha256:" and the hash of its tokenizer.json; "" where none is known.
        source: where the data are from, for people.
        licence: under what terms, for people.
        seed: that the order of samples came of.
        parts: of a mixture, its sources; () where it is none.
    """

    kind: str
    slices: tuple[SliceInfo, ...]
    held_out: tuple[SliceInfo, ...] = ()
    sequence_length: int = 0
    vocab_size: int = 0
    shape: tuple[int, ...] = ()
    num_classes: int = 0
    tokenizer: str = ""
    source: str = ""
    licence: str = ""
    seed: int = 0
    parts: tuple[PartInfo, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_samples(self) -> int:
        """Samples to train on."""
        return sum(each.num_samples for each in self.slices)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each slice to train on."""
        return tuple(each.num_samples for each in self.slices)

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of a sample; an image is one."""
        return self.sequence_length or 1

    def encode(self) -> bytes:
        """Return the manifest's bytes: JSON with keys in order, without spaces, in UTF-8."""
        record: dict[str, object] = {
            "held_out": [_listed(each) for each in self.held_out],
            "kind": self.kind,
            "licence": self.licence,
            "num_classes": self.num_classes,
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            "shape": list(self.shape),
            "slices": [_listed(each) for each in self.slices],
            "source": self.source,
            "tokenizer": self.tokenizer,
            "version": _VERSION,
            "vocab_size": self.vocab_size,
        }
        if self.parts:
            record["parts"] = [list(astuple(each)) for each in self.parts]
            record["version"] = _MIXTURE_VERSION
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        return text.encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest of these bytes, which anybody may have written.

        Raises:
            RemoteProtocolError: they are none, or it contradicts itself.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise RemoteProtocolError(
                f"a manifest has at most {MAX_MANIFEST_BYTES:,} B, not {len(data):,}"
            )
        try:
            record = json.loads(data.decode())
            manifest = _of_record(record)
            is_canonical = manifest.encode() == data
        except (ValueError, LookupError, TypeError, RecursionError) as exc:
            raise RemoteProtocolError(f"these bytes are no manifest: {exc}") from exc
        if not is_canonical:
            raise RemoteProtocolError(
                "the manifest is not written as manifests are: keys in order, once, and no spaces"
            )
        return manifest


def _listed(info: SliceInfo) -> list[object]:
    return [info.blob_id.hex(), info.num_samples, info.num_bytes]


def _of_record(record: Any) -> Manifest:
    version = record.get("version") if isinstance(record, Mapping) else None
    if version not in (_VERSION, _MIXTURE_VERSION):
        raise ValueError(f"it is not of version {_VERSION} or {_MIXTURE_VERSION}")
    known = {*Manifest.__dataclass_fields__, "version"}
    if version == _VERSION:
        known.remove("parts")
    if record.keys() != known:
        raise ValueError(f"its fields are not {', '.join(sorted(known))}")
    fields = {name: record[name] for name in known - {"version"}}
    for name in ("slices", "held_out"):
        fields[name] = tuple(_info(each) for each in _checked(fields[name], list, name))
    fields["shape"] = tuple(_checked(fields["shape"], list, "shape"))
    if version == _MIXTURE_VERSION:
        parts = _checked(fields["parts"], list, "parts")
        fields["parts"] = tuple(PartInfo(*_checked(each, list, "a part")) for each in parts)
    return Manifest(**fields)


def _info(listed: Any) -> SliceInfo:
    blob_id, num_samples, num_bytes = _checked(listed, list, "a slice")
    return SliceInfo(bytes.fromhex(_checked(blob_id, str, "a slice's id")), num_samples, num_bytes)


def _checked(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{name} is {str(value)[:40]!r}")
    return value


def _check(manifest: Manifest) -> None:
    """Raise ValueError where a manifest contradicts itself or our bounds."""
    for name in ("kind", "tokenizer", "source", "licence"):
        text = _checked(getattr(manifest, name), str, name)
        if len(text) > MAX_TEXT_CHARS:
            raise ValueError(f"{name} has more than {MAX_TEXT_CHARS} characters")
    _within(manifest.seed, 0, MAX_SEED, "seed")
    if manifest.kind not in _KINDS:
        raise ValueError(f"kind is {manifest.kind[:40]!r}, not text or images")
    is_text = manifest.kind == "text"
    _within(
        manifest.sequence_length,
        *((2, MAX_SEQUENCE_LENGTH) if is_text else (0, 0)),
        "sequence_length",
    )
    _within(manifest.vocab_size, *((1, MAX_VOCAB_SIZE) if is_text else (0, 0)), "vocab_size")
    _within(manifest.num_classes, *((0, 0) if is_text else (1, MAX_CLASSES)), "num_classes")
    if len(manifest.shape) != (0 if is_text else 3):
        raise ValueError(f"shape has {len(manifest.shape)} numbers")
    for side in manifest.shape:
        _within(side, 1, MAX_IMAGE_SIDE, "shape")
    if not manifest.slices or len(manifest.slices) + len(manifest.held_out) > MAX_SLICES:
        raise ValueError(f"there are 1 to {MAX_SLICES} slices, not {len(manifest.slices)}")
    is_size = _sizes_of(manifest)
    for info in (*manifest.slices, *manifest.held_out):
        if len(info.blob_id) != _ID_BYTES:
            raise ValueError(f"a slice's id has {len(info.blob_id)} bytes")
        _within(info.num_samples, 1, MAX_SAMPLES, "a slice's number of samples")
        _within(info.num_bytes, 1, MAX_SLICE_BYTES, "a slice's number of bytes")
        if not is_size(info):
            raise ValueError(
                f"slice {info.blob_id.hex()[:12]} of {info.num_samples} samples cannot have {info.num_bytes} B"
            )
    if {each.blob_id for each in manifest.slices} & {each.blob_id for each in manifest.held_out}:
        raise ValueError("a slice that is held out is one to train on")
    if manifest.parts:
        _check_parts(manifest)


def _check_parts(manifest: Manifest) -> None:
    parts = manifest.parts
    if not 2 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"a mixture has 2 to {MAX_PARTS} parts, not {len(parts)}")
    for part in parts:
        name = _checked(part.name, str, "a part's name")
        if not name or len(name) > MAX_PART_NAME_CHARS:
            raise ValueError(f"a part's name has 1 to {MAX_PART_NAME_CHARS} characters")
        if len(_checked(part.licence, str, "a part's licence")) > MAX_TEXT_CHARS:
            raise ValueError(f"a part's licence has more than {MAX_TEXT_CHARS} characters")
        _within(part.num_samples, 1, manifest.num_samples, "a part's number of samples")
        _within(part.num_distinct, 1, part.num_samples, "a part's number of different samples")
        _within(part.num_held_out, 0, len(manifest.held_out), "a part's slices held out")
    if len({part.name for part in parts}) < len(parts):
        raise ValueError("two parts have one name")
    if sum(part.num_samples for part in parts) != manifest.num_samples:
        raise ValueError("the parts have not as many samples as the slices")
    if sum(part.num_held_out for part in parts) != len(manifest.held_out):
        raise ValueError("the parts have not as many slices held out as there are")


def _sizes_of(manifest: Manifest) -> Callable[[SliceInfo], bool]:
    """Whether a slice's bytes and samples go together."""
    if manifest.kind == "text":
        sizes = [_TOKEN_BYTES * manifest.sequence_length]
    else:
        pixels = math.prod(manifest.shape)
        sizes = [_LABEL_BYTES + each * pixels for each in _PIXEL_BYTES]

    def is_size(info: SliceInfo) -> bool:
        return any(
            0 < info.num_bytes - info.num_samples * size <= MAX_HEADER_BYTES for size in sizes
        )

    return is_size


def _within(value: int, least: int, most: int, name: str) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}: it is a number from {least} to {most}")
