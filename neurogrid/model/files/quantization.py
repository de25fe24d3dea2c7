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
from math import prod
from typing import Final, Protocol

import torch

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.sanitize import config_fingerprint
from neurogrid.model.files.tensor_names import numbers_hidden, path_in_layer
from neurogrid.model.files.tensors import TORCH_DTYPES, dtype_name, is_finite
from neurogrid.model.kernels import CODE_GROUP, Codes

__all__ = [
    "METHODS",
    "CodesForm",
    "Linears",
    "Quantization",
    "choose_quantization",
    "form_of",
    "gather_codes",
    "model_fingerprint",
    "record_of_stored",
]

CODES, SCALES, MINIMUMS, TABLE = ".codes", ".scales", ".minimums", ".table"

_WEIGHT: Final = ".weight"
# What families call the layer that chooses experts.
_ROUTERS: Final = frozenset({"gate", "router", "shared_expert_gate", "gate_inp"})
# Below this a matrix is not worth it: gates, routers of few experts, low ranks.
_MIN_SIZE: Final = 32
# Bounds of a record: a layer of the largest models has some dozens of matrices that differ.
_MAX_SKIPPED: Final = 1024
_MAX_PATH_LENGTH: Final = 256
_MAX_GROUP: Final = 2**20


@dataclass(frozen=True, slots=True)
class CodesForm:
    """The form that all codes of a model have.

    Attributes:
        bits: 8 or 4.
        group: inputs of an output that share a scale, a multiple of 32; 0 for all inputs.
        scale: the name in a file of what scales and minimums are: F16, BF16 or F32.
        has_minimums: whether there are minimums.
        has_table: whether each matrix has a table, of 4 bits.
    """

    bits: int
    group: int = CODE_GROUP
    scale: str = "F16"
    has_minimums: bool = False
    has_table: bool = False

    def entries(self, shape: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of what stands in the place of a matrix [O, I], by suffix."""
        num_outputs, num_inputs = shape
        codes = ("I8", (num_outputs, num_inputs))
        if self.bits == 4:
            codes = ("U8", (num_outputs, num_inputs // 2))
        scales = (self.scale, (num_outputs, num_inputs // (self.group or num_inputs)))
        entries: dict[str, tuple[str, tuple[int, ...]]] = {CODES: codes, SCALES: scales}
        if self.has_minimums:
            entries[MINIMUMS] = scales
        if self.has_table:
            entries[TABLE] = ("F32", (16,))
        return entries

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a matrix of that shape can have the form."""
        return len(shape) == 2 and shape[0] > 0 < shape[1] and shape[1] % (self.group or 32) == 0

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of what stands in the place of a matrix, but for the table."""
        return sum(
            prod(sizes) * TORCH_DTYPES[dtype].itemsize
            for suffix, (dtype, sizes) in self.entries(shape).items()
            if suffix != TABLE
        )

    def read(self, tensors: Mapping[str, torch.Tensor], name: str) -> Codes:
        """Codes of these tensors, by suffix, checked.

        Raises:
            CheckpointError: they do not have this form, or a number is not finite.
        """
        codes = tensors[CODES]
        num_inputs = codes.shape[-1] * 8 // self.bits if codes.dim() else 0
        shape = (codes.shape[0] if codes.dim() else 0, num_inputs)
        if codes.dim() != 2 or not self.takes(shape):
            raise CheckpointError(
                f"the codes of {name} are {list(codes.shape)}: no matrix of codes"
            )
        expected = self.entries(shape)
        if tensors.keys() != expected.keys():
            raise CheckpointError(f"{name} has {_listed(tensors)}, and {_listed(expected)} is due")
        for suffix, (dtype, sizes) in expected.items():
            given = tensors[suffix]
            if given.dtype != TORCH_DTYPES[dtype] or tuple(given.shape) != sizes:
                raise CheckpointError(
                    f"{name}{suffix} is {given.dtype} {list(given.shape)}, and {dtype} {list(sizes)} is due"
                )
            if given.is_floating_point() and not is_finite(given):
                raise CheckpointError(f"{name}{suffix} is not finite")
        return Codes(
            self.bits,
            codes,
            tensors[SCALES],
            num_inputs,
            tensors.get(MINIMUMS),
            tensors.get(TABLE),
        )


def form_of(codes: Codes) -> CodesForm:
    """The form that these codes have."""
    num_groups = codes.scales.shape[1]
    return CodesForm(
        codes.bits,
        codes.num_inputs // num_groups if num_groups > 1 else 0,
        dtype_name(codes.scales.dtype),
        codes.minimums is not None,
        codes.table is not None,
    )


METHODS: Final = {"int8": CodesForm(8), "int4": CodesForm(4)}
"""What `--quantize` makes; activations are rounded to 8 bits for the products with it."""
AS_STORED: Final = "codes"
"""The method of a checkpoint that has codes itself, in a form of its own."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The matrices of linear layers, in the decoder layers, are codes; all but those that are skipped.

    Attributes:
        method: a key of METHODS, or AS_STORED.
        skipped: paths in a layer, as `path_in_layer` gives them, without `.weight`; sorted.
        stored: the form of the codes AS_STORED.
    """

    method: str
    skipped: tuple[str, ...] = ()
    stored: CodesForm | None = None

    @property
    def form(self) -> CodesForm:
        """The form of the codes."""
        form = METHODS.get(self.method, self.stored)
        assert form is not None
        return form

    @property
    def is_stored(self) -> bool:
        """Whether the codes are those of the checkpoint."""
        return self.method == AS_STORED

    @property
    def by_int8(self) -> bool:
        """Whether activations are rounded to 8 bits for the products."""
        return self.method in METHODS

    def takes(self, path: str, shape: Sequence[int]) -> bool:
        """Whether a matrix is codes.

        Args:
            path: of the linear layer, as in `skipped`.
            shape: of its weight.
        """
        if path in self.skipped or not self.form.takes(shape):
            return False
        return self.method == AS_STORED or min(shape) >= _MIN_SIZE

    def takes_tensor(self, name: str, shape: Sequence[int]) -> bool:
        """The same for a tensor of a checkpoint, one of a layer."""
        path = path_in_layer(name)
        return path.endswith(_WEIGHT) and self.takes(path.removesuffix(_WEIGHT), shape)

    def record(self) -> dict[str, object]:
        """What travels."""
        form = self.form
        record: dict[str, object] = {
            "method": self.method,
            "bits": form.bits,
            "group": form.group,
            "skipped": list(self.skipped),
        }
        if self.method == AS_STORED:
            record |= {
                "scale": form.scale,
                "minimums": form.has_minimums,
                "table": form.has_table,
            }
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, object] | None) -> Quantization | None:
        """Read what came; None for a model that is not quantised.

        Raises:
            UnsupportedModelError: it is of a method, or with numbers, that are not known here.
        """
        if record is None:
            return None
        method, skipped = record.get("method"), record.get("skipped", [])
        if not isinstance(method, str) or method not in (*METHODS, AS_STORED):
            known = ", ".join((*METHODS, AS_STORED))
            raise UnsupportedModelError(
                f"the model is quantised by {str(method)[:40]!r}; known are {known}"
            )
        if (
            not isinstance(skipped, list)
            or len(skipped) > _MAX_SKIPPED
            or not all(isinstance(each, str) and len(each) <= _MAX_PATH_LENGTH for each in skipped)
        ):
            raise UnsupportedModelError("the record of what is not quantised is no list of names")
        form = _form_of(record)
        if METHODS.get(method, form) != form:
            raise UnsupportedModelError(
                f"the model is quantised as {method} with {form.bits} bits in groups of {form.group}: {method} has "
                f"{METHODS[method].bits} in groups of {METHODS[method].group}"
            )
        return cls(method, tuple(sorted(skipped)), None if method in METHODS else form)


def _form_of(record: Mapping[str, object]) -> CodesForm:
    bits, group, scale = record.get("bits"), record.get("group"), record.get("scale", "F16")
    minimums, table = record.get("minimums", False), record.get("table", False)
    if (
        type(bits) is not int
        or type(group) is not int
        or type(minimums) is not bool
        or type(table) is not bool
        or bits not in (4, 8)
        or not 0 <= group <= _MAX_GROUP
        or group % CODE_GROUP
        or scale not in ("F16", "BF16", "F32")
        or (table and bits != 4)
    ):
        raise UnsupportedModelError(
            "the record of how the model is quantised names no form of codes"
        )
    return CodesForm(bits, group, str(scale), minimums, table)


def _listed(suffixes: Iterable[str]) -> str:
    return ", ".join(sorted(suffixes))


class Linears(Protocol):
    """A model that knows its linear layers."""

    def linear_shapes(self, layer_id: int) -> Mapping[str, Sequence[int]]:
        """Shapes of the weights of a decoder layer's linear layers, by their paths in it."""

    def linear_names(self, layer_id: int, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, str]:
        """Of a layer's tensors those that are such weights as they are: the paths, by name of the tensor."""


def record_of_stored(
    form: CodesForm, layers: Mapping[int, Mapping[str, Sequence[int]]], model: Linears
) -> Quantization:
    """The record for a checkpoint that has codes.

    Args:
        layers: of each decoder layer that is there the shapes of the matrices that are codes, by name.

    Raises:
        UnsupportedModelError: one of them is no linear layer of its own in this model, or has another shape than
            codes can have here.
    """
    skipped: set[str] = set()
    taken: set[str] = set()
    for layer_id, matrices in layers.items():
        found = model.linear_names(layer_id, matrices)
        for name, shape in matrices.items():
            if name not in found or not form.takes(shape):
                raise UnsupportedModelError(
                    f"{name} is quantised, and is {list(shape)} or put together with others by this family: that "
                    "cannot be served as codes"
                )
        paths = {numbers_hidden(path) for path in found.values()}
        taken |= paths
        skipped |= {numbers_hidden(path) for path in model.linear_shapes(layer_id)} - paths
    if both := sorted(taken & skipped):
        raise UnsupportedModelError(
            f"{both[0]} is quantised in some layers and not in others: that cannot be served"
        )
    return Quantization(AS_STORED, tuple(sorted(skipped)), form)


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
    # Paths of tensors, and of the layers that they become.
    taken: set[tuple[str, str]] = set()
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
        paths_of = {name: path_in_layer(name).removesuffix(_WEIGHT) for name in shapes}
        taken |= {(paths_of[name], numbers_hidden(path)) for name, path in found.items()}
        skipped |= {path for name, path in paths_of.items() if name not in found}
        # As modules they may have other names: who counts their memory sees those.
        paths = model.linear_shapes(layer_id)
        skipped |= {numbers_hidden(path) for path in paths if path not in found.values()}
    # What one kind of layer skips all do, under either name.
    while halves := {pair for pair in taken if not skipped.isdisjoint(pair)}:
        taken -= halves
        skipped.update(*halves)
    if not taken:
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
        CheckpointError: the parts of a matrix do not belong together.
    """
    plain, found = dict(tensors), {}
    for name in tensors:
        if name.endswith(CODES):
            base = name.removesuffix(CODES)
            parts = {
                suffix: plain.pop(base + suffix)
                for suffix in (CODES, SCALES, MINIMUMS, TABLE)
                if base + suffix in plain
            }
            found[base] = quantization.form.read(parts, base)
    return plain, found
