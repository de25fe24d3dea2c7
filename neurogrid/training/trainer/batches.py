"""Batches out of slices: read, checked against the model, and cut into micro-batches.

B samples, T tokens of each, C H W of an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from neurogrid.training.optimizers.gradients import IGNORED_LABEL
from neurogrid.training.runs.trainer_settings import FileRange
from neurogrid.training.trainer.errors import BatchError

__all__ = ["Batch", "BatchReader"]

_WHOLE = (torch.int32, torch.int64)
_MAX_BYTE: Final = 255.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples, and what the model is to say about each.

    Attributes:
        inputs: int64 [B, T] ids, or float32 [B, C, H, W].
        labels: int64 [B, T], already shifted, or [B]; -100 is no label.
        num_labels: labels in it.
        source: where the samples are from, in words.
    """

    inputs: Tensor
    labels: Tensor
    num_labels: int
    source: str

    @property
    def num_samples(self) -> int:
        """Samples in it."""
        return len(self.inputs)

    @property
    def num_tokens(self) -> int:
        """Tokens that go into the model; of images their number."""
        return self.inputs.numel() if self.inputs.ndim == 2 else len(self.inputs)

    def pieces(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels of micro-batches: as few as there can be of at most so many samples, and as even."""
        num_pieces = -(-self.num_samples // most)
        yield from zip(
            self.inputs.tensor_split(num_pieces), self.labels.tensor_split(num_pieces), strict=True
        )


class BatchReader:
    """Reads batches for one model.

    Args:
        kind: of `KINDS`.
        config: transformers' own of the model.
    """

    def __init__(self, kind: str, config: Any) -> None:
        self._is_text = kind == "causal-lm"
        if self._is_text:
            self._bound = int(config.vocab_size)
            longest = getattr(config, "max_position_embeddings", None)
            self._longest = longest if isinstance(longest, int) and longest > 0 else None
        else:
            self._bound = int(config.num_labels)

    def read(self, ranges: Sequence[FileRange]) -> Batch:
        """The samples of some ranges as one batch, on the CPU.

        Raises:
            BatchError: a slice cannot be read, or is not what this model takes; says which.
        """
        if not ranges:
            raise BatchError("a batch of no samples: give it ranges of slices")
        parts = [
            self._read_text(each) if self._is_text else self._read_images(each) for each in ranges
        ]
        source = "; ".join(map(str, ranges[:4])) + ("; ..." if len(ranges) > 4 else "")
        for each, (inputs, _) in zip(ranges, parts, strict=True):
            if inputs.shape[1:] != parts[0][0].shape[1:]:
                raise BatchError(
                    f"{each}: samples of {list(inputs.shape[1:])}, and those of {ranges[0]} have "
                    f"{list(parts[0][0].shape[1:])}: a batch has one shape; prepare the data again"
                )
        inputs = torch.cat([part[0] for part in parts])
        labels = torch.cat([part[1] for part in parts])
        num_labels = int((labels != IGNORED_LABEL).sum())
        if not num_labels:
            raise BatchError(f"{source}: no label in the whole batch, so it has no loss")
        return Batch(inputs, labels, num_labels, source)

    def _read_text(self, part: FileRange) -> tuple[Tensor, Tensor]:
        tensors = _read_tensors(part, ("input_ids",), ("labels",))
        ids = tensors["input_ids"]
        labels = tensors.get("labels", ids)
        if ids.ndim != 2 or ids.dtype not in _WHOLE or labels.dtype not in _WHOLE:
            raise _not_what(part, "input_ids, int32 [samples, tokens]", ids)
        if labels.shape != ids.shape:
            raise _not_what(part, f"labels of {list(ids.shape)} as input_ids has", labels)
        if self._longest is not None and ids.shape[1] > self._longest:
            raise BatchError(
                f"{part}: {ids.shape[1]} tokens in a sample, and the model has {self._longest} positions: prepare the "
                "data with a shorter sequence_length"
            )
        self._check_bound(part, ids, "id", "tokens in its vocabulary", "with its tokenizer")
        if "labels" in tensors:
            given = torch.where(labels == IGNORED_LABEL, 0, labels)
            self._check_bound(part, given, "label", "tokens in its vocabulary", "anew")
        shifted = functional.pad(labels[:, 1:].long(), (0, 1), value=IGNORED_LABEL)
        return ids.long(), shifted

    def _read_images(self, part: FileRange) -> tuple[Tensor, Tensor]:
        tensors = _read_tensors(part, ("pixel_values", "labels"), ())
        pixels, labels = tensors["pixel_values"], tensors["labels"]
        if pixels.ndim != 4 or pixels.dtype not in (torch.uint8, torch.float32):
            raise _not_what(
                part,
                "pixel_values, float32 or uint8 [samples, channels, height, width]",
                pixels,
            )
        if labels.shape != pixels.shape[:1] or labels.dtype not in _WHOLE:
            raise _not_what(part, "labels, int64, one for each sample", labels)
        self._check_bound(part, labels, "label", "classes", "with the classes of the config")
        if pixels.dtype == torch.uint8:
            pixels = pixels.float() / _MAX_BYTE
        return pixels, labels.long()

    def _check_bound(self, part: FileRange, values: Tensor, what: str, has: str, how: str) -> None:
        least, most = map(int, values.aminmax())
        if least >= 0 and most < self._bound:
            return
        wrong = values.reshape(len(values), -1)
        is_wrong = ((wrong < 0) | (wrong >= self._bound)).any(dim=1)
        sample = int(is_wrong.nonzero()[0, 0])
        raise BatchError(
            f"{part.path}: sample {part.start + sample} has {what} {most if most >= self._bound else least}, and the "
            f"model has {self._bound} {has}: prepare the data for this model, {how}"
        )


def _read_tensors(
    part: FileRange, needed: tuple[str, ...], also: tuple[str, ...]
) -> dict[str, Tensor]:
    try:
        with safe_open(part.path, framework="pt") as opened:
            names = set(opened.keys())
            if missing := [name for name in needed if name not in names]:
                raise BatchError(
                    f"{part.path}: has no {missing[0]}; is it a slice of the right kind?"
                )
            found = {}
            for name in (*needed, *(name for name in also if name in names)):
                entry = opened.get_slice(name)
                shape = entry.get_shape()
                if not shape or part.stop > shape[0]:
                    raise BatchError(
                        f"{part}: {name} has {shape[0] if shape else 0} samples; the manifest and the slice do not "
                        "belong together: fetch the slice again"
                    )
                found[name] = entry[part.start : part.stop]
            return found
    except (OSError, SafetensorError) as exc:
        raise BatchError(f"{part.path}: cannot be read: {exc}; fetch the slice again") from exc


def _not_what(part: FileRange, wanted: str, found: Tensor) -> BatchError:
    return BatchError(
        f"{part.path}: {wanted}, is wanted, not {found.dtype} {list(found.shape)}: prepare the data again"
    )
