"""What of a model is quantised and how: the record that travels beside its config, and the names of what it makes.

In the place of a matrix NAME a blob has NAME.codes and NAME.scales, in the row-major form of `kernels.Codes`: int8
[O, I], or uint8 [O, I / 2] with two codes of 4 bits each; and float16 [O, I / 32]. They are made of that matrix alone,
so whoever has the checkpoint and the record makes the same bytes.

Source: protocol_spec/messages.md, "Quantization".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Protocol

import torch

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.sanitize import config_fingerprint
from neurogrid.model.files.tensor_names import numbers_hidden, path_in_layer
from neurogrid.model.kernels import CODE_GROUP, Codes

__all__ = [
    "CODES",
    "METHODS",
    "SCALES",
    "Linears",
    "Quantization",
    "choose_quantization",
    "gather_codes",
    "model_fingerprint",
]

METHODS: Final = {"int8": 8, "int4": 4}
"""Bits of each method."""
CODES, SCALES = ".codes", ".scales"

_WEIGHT: Final = ".weight"
# What families call the layer that chooses experts.
_ROUTERS: Final = frozenset({"gate", "router", "shared_expert_gate", "gate_inp"})
# Below this a matrix is not worth it: gates, routers of few experts, low ranks.
_MIN_SIZE: Final = 32
# Bounds of a record: a layer of the largest models has some dozens of matrices that differ.
_MAX_SKIPPED: Final = 1024
_MAX_PATH_LENGTH: Final = 256


@dataclass(frozen=True, slots=True)
class Quantization:
    """The matrices of linear layers, in the decoder layers, are codes; all but those that are skipped.

    Attributes:
        method: a key of METHODS.
        skipped: paths in a layer, as `path_in_layer` gives them, without `.weight`; sorted.
    """

    method: str
    skipped: tuple[str, ...] = ()

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return METHODS[self.method]

    def takes(self, path: str, shape: Iterable[int]) -> bool:
        """Whether a matrix is quantised.

        Args:
            path: of the linear layer, as in `skipped`.
            shape: of its weight.
        """
        sizes = tuple(shape)
        return (
            len(sizes) == 2
            and min(sizes) >= _MIN_SIZE
            and sizes[1] % CODE_GROUP == 0
            and path not in self.skipped
        )

    def takes_tensor(self, name: str, shape: Iterable[int]) -> bool:
        """The same for a tensor of a checkpoint, one of a layer."""
        path = path_in_layer(name)
        return path.endswith(_WEIGHT) and self.takes(path.removesuffix(_WEIGHT), shape)

    def num_bytes(self, shape: Iterable[int]) -> int:
        """Bytes of the codes and scales of a matrix [O, I]."""
        num_outputs, num_inputs = shape
        return num_outputs * (num_inputs * self.bits // 8 + num_inputs // CODE_GROUP * 2)

    def record(self) -> dict[str, object]:
        """What travels."""
        return {
            "method": self.method,
            "bits": self.bits,
            "group": CODE_GROUP,
            "skipped": list(self.skipped),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, object] | None) -> Quantization | None:
        """Read what came; None for a model that is not quantised.

        Raises:
            UnsupportedModelError: it is of a method, or with numbers, that are not known here.
        """
        if record is None:
            return None
        method, skipped = record.get("method"), record.get("skipped", [])
        if not isinstance(method, str) or method not in METHODS:
            raise UnsupportedModelError(
                f"the model is quantised by {str(method)[:40]!r}; known are {', '.join(METHODS)}"
            )
        if (record.get("bits"), record.get("group")) != (METHODS[method], CODE_GROUP):
            raise UnsupportedModelError(
                f"the model is quantised with {str(record.get('bits'))[:20]} bits in groups of "
                f"{str(record.get('group'))[:20]}; {method} has {METHODS[method]} in groups of {CODE_GROUP}"
            )
        if (
            not isinstance(skipped, list)
            or len(skipped) > _MAX_SKIPPED
            or not all(isinstance(each, str) and len(each) <= _MAX_PATH_LENGTH for each in skipped)
        ):
            raise UnsupportedModelError("the record of what is not quantised is no list of names")
        return cls(method, tuple(sorted(skipped)))


class Linears(Protocol):
    """A model that knows its linear layers."""

    def linear_shapes(self, layer_id: int) -> Mapping[str, Sequence[int]]:
        """Shapes of the weights of a decoder layer's linear layers, by their paths in it."""

    def linear_names(self, layer_id: int, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, str]:
        """Of a layer's tensors those that are such weights as they are: the paths, by name of the tensor."""


def choose_quantization(
    method: str, layers: Iterable[Mapping[str, Sequence[int]]], model: Linears
) -> Quantization:
    """The record for a checkpoint: everything that is a linear layer's weight as it stands there.

    What a family puts together from several tensors, or keeps in another kind of module, is skipped; so is what
    chooses among experts, whose little errors are large ones.

    Args:
        layers: of each decoder layer in order the shapes of its tensors, by name.

    Raises:
        UnsupportedModelError: nothing is left.
    """
    everything = Quantization(method)
    skipped: set[str] = set()
    seen: set[frozenset[str]] = set()
    is_any_taken = False
    for layer_id, tensors in enumerate(layers):
        shapes = {
            name: shape for name, shape in tensors.items() if everything.takes_tensor(name, shape)
        }
        kind = frozenset(map(path_in_layer, shapes))
        if kind in seen:
            continue
        seen.add(kind)
        single = {name: shape for name, shape in shapes.items() if not _is_one_of_many(name)}
        found = {
            name: path
            for name, path in model.linear_names(layer_id, single).items()
            if path.rpartition(".")[2] not in _ROUTERS
        }
        is_any_taken = is_any_taken or bool(found)
        skipped |= {
            path_in_layer(name).removesuffix(_WEIGHT) for name in shapes if name not in found
        }
        # As modules they may have other names: who counts their memory sees those.
        paths = model.linear_shapes(layer_id)
        skipped |= {numbers_hidden(path) for path in paths if path not in found.values()}
    if not is_any_taken:
        raise UnsupportedModelError(
            "none of the matrices in its layers can be quantised here; leave out --quantize"
        )
    return Quantization(method, tuple(sorted(skipped)))


def _is_one_of_many(name: str) -> bool:
    """Whether a tensor is one of several in a list, as experts are, which families put together."""
    return "#" in path_in_layer(name)


def model_fingerprint(config: Mapping[str, object], quantization: Quantization | None) -> bytes:
    """32 bytes that are equal for two models exactly when config and record are: the config's own without a record.

    Raises UnsupportedModelError as `sanitize_checkpoint_config` does.
    """
    fingerprint = config_fingerprint(config)
    if quantization is None:
        return fingerprint
    record = json.dumps(quantization.record(), sort_keys=True, separators=(",", ":"))
    return sha256(fingerprint + record.encode("ascii")).digest()


def gather_codes(
    tensors: Mapping[str, torch.Tensor], quantization: Quantization
) -> tuple[dict[str, torch.Tensor], dict[str, Codes]]:
    """The tensors of a blob that are not quantised, and the codes of those that are, by name of the matrix.

    Raises:
        CheckpointError: codes without scales, or of shapes and dtypes that do not belong together.
    """
    plain, found = dict(tensors), {}
    for name in tensors:
        if name.endswith(CODES) and (base := name.removesuffix(CODES)) + SCALES in tensors:
            codes, scales = plain.pop(name), plain.pop(base + SCALES)
            found[base] = _checked(base, codes, scales, quantization)
    return plain, found


def _checked(
    name: str, codes: torch.Tensor, scales: torch.Tensor, quantization: Quantization
) -> Codes:
    bits = quantization.bits
    dtype = torch.int8 if bits == 8 else torch.uint8
    if codes.dtype != dtype or codes.dim() != 2 or scales.dtype != torch.float16:
        raise CheckpointError(f"the codes of {name} are no matrix of {quantization.method}")
    num_inputs = codes.shape[1] * 8 // bits
    if num_inputs % CODE_GROUP or scales.shape != (codes.shape[0], num_inputs // CODE_GROUP):
        raise CheckpointError(
            f"the codes of {name} are {list(codes.shape)} and its scales {list(scales.shape)}: they do not belong "
            "together"
        )
    if not torch.isfinite(scales).all():
        raise CheckpointError(f"a scale of {name} is not finite")
    return Codes(bits, codes, scales, num_inputs)
