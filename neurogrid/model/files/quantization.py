"""Quantisation of a model: the record that travels beside its config, and the names of the tensors that it makes.

In the place of a matrix NAME a blob has NAME.codes and NAME.scales, in the row-major form of `kernels.Codes`: int8
[O, I], or uint8 [O, I / 2] with two codes of 4 bits each; and float16 [O, I / 32]. They are made of that matrix alone,
so whoever has the checkpoint and the record makes the same bytes.

Source: protocol_spec/messages.md, "Quantization".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from math import prod
from typing import Final, Protocol, TypeAlias

import torch

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.safetensors_header import FILE_DTYPES, FLOAT8
from neurogrid.model.files.sanitize import config_fingerprint
from neurogrid.model.files.tensor_names import numbers_hidden, path_in_layer
from neurogrid.model.files.tensors import is_finite
from neurogrid.model.kernels import CODE_GROUP, E4M3, HALF_GROUP, Codes
from neurogrid.p2p.wire.limits import MAX_LAYERS

__all__ = [
    "METHODS",
    "CodesForm",
    "Linears",
    "Quantization",
    "choose_quantization",
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
_MAX_PATHS: Final = 1024
_MAX_PATH_LENGTH: Final = 256
# Files that mix forms have five; a matrix that changes its form every other layer has as many runs as layers.
_MAX_FORMS: Final = 16
_MAX_RUNS: Final = 1024
_DENSE: Final = -1
_MAX_GROUP: Final = 2**20


@dataclass(frozen=True, slots=True)
class CodesForm:
    """The form of codes.

    Attributes:
        bits: 8 or 4.
        group: inputs of an output that share a scale, a multiple of 32; 0 for all inputs; 16 of 8 bits without
            minimums.
        scale: the name in a file of what scales and minimums are: F16, BF16 or F32.
        has_minimums: whether there are minimums.
        has_table: whether each matrix has a table, of 4 bits.
        is_float: whether the codes are floats, of 8 bits without minimums.
    """

    bits: int
    group: int = CODE_GROUP
    scale: str = "F16"
    has_minimums: bool = False
    has_table: bool = False
    is_float: bool = False

    def entries(self, shape: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of what stands in the place of a matrix [O, I], by suffix."""
        num_outputs, num_inputs = shape
        codes = (FLOAT8 if self.is_float else "I8", (num_outputs, num_inputs))
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
        unit = max(self.group, CODE_GROUP)
        return len(shape) == 2 and shape[0] > 0 < shape[1] and shape[1] % unit == 0

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of what stands in the place of a matrix, but for the table."""
        return sum(
            prod(sizes) * FILE_DTYPES[dtype].itemsize
            for suffix, (dtype, sizes) in self.entries(shape).items()
            if suffix != TABLE
        )

    def fault(self, tensors: Mapping[str, torch.Tensor], name: str) -> str | None:
        """Fault of these tensors, by suffix, as those of a matrix `name` of this form; None if there is none."""
        codes = tensors[CODES]
        if codes.dim() != 2 or not self.takes(self._shape(codes)):
            return f"the codes of {name} are {list(codes.shape)}: no matrix of codes"
        expected = self.entries(self._shape(codes))
        if tensors.keys() != expected.keys():
            return f"{name} has {_listed(tensors)}, and {_listed(expected)} is due"
        for suffix, (dtype, sizes) in expected.items():
            given = tensors[suffix]
            if given.dtype != FILE_DTYPES[dtype] or tuple(given.shape) != sizes:
                return f"{name}{suffix} is {given.dtype} {list(given.shape)}, and {dtype} {list(sizes)} is due"
        return None

    def read(self, tensors: Mapping[str, torch.Tensor], name: str) -> Codes:
        """Codes of these tensors, by suffix, checked.

        Raises:
            CheckpointError: they do not have this form, or a number is not finite.
        """
        if fault := self.fault(tensors, name):
            raise CheckpointError(fault)
        for suffix, given in tensors.items():
            if given.is_floating_point() and not _is_finite(given):
                raise CheckpointError(f"{name}{suffix} is not finite")
        codes = tensors[CODES]
        return Codes(
            self.bits,
            codes,
            tensors[SCALES],
            self._shape(codes)[1],
            tensors.get(MINIMUMS),
            tensors.get(TABLE),
        )

    def has(self, codes: Codes) -> bool:
        """Whether these codes have this form; where a group is all inputs, by either name."""
        shape = (codes.num_outputs, codes.num_inputs)
        return self.takes(shape) and self.fault(parts_of(codes), "") is None

    def record(self) -> dict[str, object]:
        """The form as it travels in a record."""
        return {
            "bits": self.bits,
            "group": self.group,
            "scale": self.scale,
            "minimums": self.has_minimums,
            "table": self.has_table,
        } | ({"float": True} if self.is_float else {})

    @classmethod
    def from_record(cls, record: object) -> CodesForm:
        """Read what came.

        Raises:
            UnsupportedModelError: codes have no such form.
        """
        if not isinstance(record, dict):
            raise UnsupportedModelError("the record of how the model is quantised lacks a form")
        bits, group, scale = record.get("bits"), record.get("group"), record.get("scale", "F16")
        minimums, table = record.get("minimums", False), record.get("table", False)
        is_float = record.get("float", False)
        if (
            type(bits) is not int
            or type(group) is not int
            or type(minimums) is not bool
            or type(table) is not bool
            or type(is_float) is not bool
            or bits not in (4, 8)
            or not 0 <= group <= _MAX_GROUP
            or (group % CODE_GROUP and (group != HALF_GROUP or bits != 8 or minimums or is_float))
            or scale not in ("F16", "BF16", "F32")
            or (table and bits != 4)
            or (is_float and (bits != 8 or minimums))
        ):
            raise UnsupportedModelError(
                "the record of how the model is quantised names no form of codes"
            )
        return cls(bits, group, str(scale), minimums, table, is_float)

    def _shape(self, codes: torch.Tensor) -> tuple[int, int]:
        return codes.shape[0], codes.shape[1] * 8 // self.bits


def parts_of(codes: Codes) -> dict[str, torch.Tensor]:
    """Tensors that stand in the place of a matrix, by suffix."""
    parts = {
        CODES: codes.codes,
        SCALES: codes.scales,
        MINIMUMS: codes.minimums,
        TABLE: codes.table,
    }
    return {suffix: part for suffix, part in parts.items() if part is not None}


METHODS: Final = {"int8": CodesForm(8), "int4": CodesForm(4)}
"""Forms of codes that `--quantize` makes; activations are rounded to 8 bits for the products with them."""
AS_STORED: Final = "codes"
"""The method of a checkpoint that has codes itself, in a form of its own."""


Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Forms of a matrix over the layers, from the first on: a form's number, or -1 for none, and for how many layers."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Matrices of linear layers, in the decoder layers, are codes.

    Attributes:
        method: a key of METHODS, or AS_STORED.
        skipped: of METHODS, what stays as it is: paths in a layer, as `path_in_layer` gives them, without `.weight`;
            sorted.
        forms: of the codes.
        matrices: AS_STORED, what is codes: paths likewise, sorted, each with its runs. Layers behind the last run
            have none.
    """

    method: str
    skipped: tuple[str, ...] = ()
    forms: tuple[CodesForm, ...] = ()
    matrices: tuple[tuple[str, Runs], ...] = ()
    _runs: Mapping[str, Runs] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_runs", dict(self.matrices))
        if self.method in METHODS:
            object.__setattr__(self, "forms", (METHODS[self.method],))

    @property
    def is_stored(self) -> bool:
        """Whether the codes are those of the checkpoint."""
        return self.method == AS_STORED

    @property
    def by_int8(self) -> bool:
        """Whether activations are rounded to 8 bits for the products."""
        return self.method in METHODS

    def form(self, layer_id: int, path: str, shape: Sequence[int]) -> CodesForm | None:
        """The form of a matrix; None for one that is no codes.

        Args:
            path: of the linear layer, as in `skipped`.
            shape: of its weight.
        """
        if not self.is_stored:
            return self.forms[0] if self._makes(path, shape) else None
        for number, num_layers in self._runs.get(path, ()):
            layer_id -= num_layers
            if layer_id < 0:
                form = None if number == _DENSE else self.forms[number]
                return form if form is not None and form.takes(shape) else None
        return None

    def makes_of(self, name: str, shape: Sequence[int]) -> bool:
        """Whether `quantize` makes codes of a tensor of a checkpoint, one of a layer."""
        path = path_in_layer(name)
        return path.endswith(_WEIGHT) and self._makes(path.removesuffix(_WEIGHT), shape)

    def _makes(self, path: str, shape: Sequence[int]) -> bool:
        return path not in self.skipped and self.forms[0].takes(shape) and min(shape) >= _MIN_SIZE

    def record(self) -> dict[str, object]:
        """The record as it travels."""
        if self.is_stored:
            return {
                "method": self.method,
                "forms": [form.record() for form in self.forms],
                "matrices": {path: [list(run) for run in runs] for path, runs in self.matrices},
            }
        form = self.forms[0]
        return {
            "method": self.method,
            "bits": form.bits,
            "group": form.group,
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
        method = record.get("method")
        if method == AS_STORED:
            forms = _forms_of(record.get("forms"))
            matrices = _matrices_of(record.get("matrices"), len(forms))
            return cls(method, forms=forms, matrices=matrices)
        if not isinstance(method, str) or method not in METHODS:
            known = ", ".join((*METHODS, AS_STORED))
            raise UnsupportedModelError(
                f"the model is quantised by {str(method)[:40]!r}; known are {known}"
            )
        skipped = record.get("skipped", [])
        if (
            not isinstance(skipped, list)
            or len(skipped) > _MAX_PATHS
            or not all(map(_is_path, skipped))
        ):
            raise UnsupportedModelError("the record of what is not quantised is no list of names")
        form = CodesForm.from_record(record)
        if METHODS[method] != form:
            raise UnsupportedModelError(
                f"the model is quantised as {method} with {form.bits} bits in groups of {form.group}: {method} has "
                f"{METHODS[method].bits} in groups of {METHODS[method].group}"
            )
        return cls(method, tuple(sorted(skipped)))


def _is_path(given: object) -> bool:
    return isinstance(given, str) and len(given) <= _MAX_PATH_LENGTH


def _forms_of(given: object) -> tuple[CodesForm, ...]:
    if not isinstance(given, list) or not 0 < len(given) <= _MAX_FORMS:
        raise UnsupportedModelError(
            f"the record of how the model is quantised has no list of 1 to {_MAX_FORMS} forms"
        )
    return tuple(map(CodesForm.from_record, given))


def _matrices_of(given: object, num_forms: int) -> tuple[tuple[str, Runs], ...]:
    if (
        not isinstance(given, dict)
        or not 0 < len(given) <= _MAX_PATHS
        or not all(map(_is_path, given))
    ):
        raise UnsupportedModelError("the record of what is quantised names no matrices")
    return tuple((path, _runs_of(runs, num_forms)) for path, runs in sorted(given.items()))


def _runs_of(given: object, num_forms: int) -> Runs:
    runs = given if isinstance(given, list) and 0 < len(given) <= _MAX_RUNS else []
    read = tuple(
        (run[0], run[1])
        for run in runs
        if isinstance(run, list)
        and len(run) == 2
        and all(type(number) is int for number in run)
        and _DENSE <= run[0] < num_forms
        and 0 < run[1] <= MAX_LAYERS
    )
    if not read or len(read) < len(runs) or sum(count for _, count in read) > MAX_LAYERS:
        raise UnsupportedModelError(
            "the record of what is quantised has a matrix without a form for its layers"
        )
    return read


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; floats of 8 bits have no infinity."""
    if tensor.dtype == E4M3:
        return not (tensor.view(torch.uint8) & 0x7F == 0x7F).any()
    return is_finite(tensor)


def _listed(suffixes: Iterable[str]) -> str:
    return ", ".join(sorted(suffixes))


class Linears(Protocol):
    """A model that knows its linear layers."""

    def linear_shapes(self, layer_id: int) -> Mapping[str, Sequence[int]]:
        """Shapes of the weights of a decoder layer's linear layers, and of its experts, by their paths in it."""

    def linear_names(self, layer_id: int, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, str]:
        """Paths of weights of linear layers and experts, by name of each tensor that is one, or rows of one."""


def record_of_stored(
    layers: Mapping[int, Mapping[str, tuple[Sequence[int], CodesForm]]],
    model: Linears,
    num_layers: int,
) -> Quantization:
    """The record for a checkpoint that has codes.

    Args:
        layers: of each decoder layer that is there the shapes and forms of the matrices that are codes, by name. Of
            one that is not, the one before is taken, or the first.
        num_layers: of the model.

    Raises:
        CheckpointError: one of them has another shape than its linear layer.
        UnsupportedModelError: one of them is no linear layer of its own in this model, or has another shape than
            codes can have here; or there are more forms than a record has.
    """
    known = {
        layer_id: _forms_by_path(layer_id, matrices, model)
        for layer_id, matrices in sorted(layers.items())
    }
    told: list[Mapping[str, CodesForm]] = []
    for layer_id in range(num_layers):
        before = told[-1] if told else next(iter(known.values()))
        told.append(known.get(layer_id, before))
    forms: dict[CodesForm, int] = {}
    matrices: list[tuple[str, Runs]] = []
    for path in sorted({path for by_path in told for path in by_path}):
        numbers = [
            _DENSE if (form := by_path.get(path)) is None else forms.setdefault(form, len(forms))
            for by_path in told
        ]
        runs = [(number, len(list(same))) for number, same in groupby(numbers)]
        matrices.append((path, tuple(runs[:-1] if runs[-1][0] == _DENSE else runs)))
    found = Quantization(AS_STORED, forms=tuple(forms), matrices=tuple(matrices))
    # As whoever gets it will.
    Quantization.from_record(found.record())
    return found


def _forms_by_path(
    layer_id: int, matrices: Mapping[str, tuple[Sequence[int], CodesForm]], model: Linears
) -> dict[str, CodesForm]:
    """The forms in a layer, by path."""
    shapes = {numbers_hidden(path): shape for path, shape in model.linear_shapes(layer_id).items()}
    for name, (shape, _) in matrices.items():
        due = shapes.get(path_in_layer(name).removesuffix(_WEIGHT), shape)
        if tuple(shape) != tuple(due):
            raise CheckpointError(f"{name} is {list(shape)}, and by the config {list(due)} is due")
    found = model.linear_names(layer_id, {name: shape for name, (shape, _) in matrices.items()})
    for name, (shape, form) in matrices.items():
        if name not in found or not form.takes(shape):
            raise UnsupportedModelError(
                f"{name} is quantised, and is {list(shape)} or put together with others by this family: that "
                "cannot be served as codes"
            )
    forms: dict[str, CodesForm] = {}
    for name, (_, form) in matrices.items():
        if forms.setdefault(found[name], form) != form:
            raise UnsupportedModelError(
                f"{name} is quantised otherwise than what it is put together with: that cannot be served"
            )
    by_path: dict[str, CodesForm | None] = {}
    for path in model.linear_shapes(layer_id):
        here = forms.get(path)
        if by_path.setdefault(numbers_hidden(path), here) != here:
            raise UnsupportedModelError(
                f"{path} of layer {layer_id} is quantised otherwise than others of its kind: that cannot be served"
            )
    return {path: each for path, each in by_path.items() if each is not None}


def choose_quantization(
    method: str, layers: Iterable[Mapping[str, Sequence[int]]], model: Linears
) -> Quantization:
    """The record for a checkpoint: everything that is a linear layer's weight as it stands there.

    What a family keeps in another kind of module than linear layers and experts, or makes otherwise than by putting
    rows together, is skipped; so is what chooses among experts, whose little errors are large ones.

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
            name: shape for name, shape in tensors.items() if everything.makes_of(name, shape)
        }
        kind = frozenset(map(path_in_layer, shapes))
        if kind in seen:
            continue
        seen.add(kind)
        found = {
            name: path
            for name, path in model.linear_names(layer_id, shapes).items()
            if path.rpartition(".")[2] not in _ROUTERS
        }
        paths_of = {name: path_in_layer(name).removesuffix(_WEIGHT) for name in shapes}
        taken |= {(paths_of[name], numbers_hidden(path)) for name, path in found.items()}
        skipped |= {path for name, path in paths_of.items() if name not in found}
        # As modules they may have other names: who counts their memory sees those.
        others = model.linear_shapes(layer_id).keys() - set(found.values())
        skipped |= set(map(numbers_hidden, others))
    # What one kind of layer skips all do, under either name.
    while halves := {pair for pair in taken if not skipped.isdisjoint(pair)}:
        taken -= halves
        skipped.update(*halves)
    if not taken:
        raise UnsupportedModelError(
            "none of the matrices in its layers can be quantised here; leave out --quantize"
        )
    return Quantization(method, tuple(sorted(skipped)))


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
            fitting = (form for form in quantization.forms if form.fault(parts, base) is None)
            found[base] = next(fitting, quantization.forms[0]).read(parts, base)
    return plain, found
