"""A whole decoder layer in two calls: up to the keys and values of new tokens, and from there on.

Between the two a cache takes the keys and values in, and gives those of all tokens. What is between the products of a
layer takes transformers 0.5 ms for a token on one core, which is more than the products of a small layer.

A token gets the bits that it gets alone, whichever others go with it: of its own sequence, as in a prompt, or of
others.

Shape legend: R rows (sequences), T tokens of each, D hidden size, H heads of queries, V heads of keys and values,
E head size, F rotary size, N keys.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch

from neurogrid.model.kernels.coded_states import CODED_DTYPE, coded_size
from neurogrid.model.kernels.compiled import ELEMENT_TYPES, Library
from neurogrid.model.kernels.matrix import Matrix

__all__ = [
    "NUM_PLACES",
    "Activation",
    "Adapters",
    "CompiledLayer",
    "LayerParts",
    "Norm",
    "NormPart",
]


NUM_PLACES: Final = 7
"""Matrices that adapters may stand beside: of queries, keys, values, output, gate, up, down; numbered as in layer.h.
Where one matrix is all of several, it is the first of them."""

Adapters = ctypes.Array[ctypes.c_void_p] | None


class Norm(IntEnum):
    """Place of a root mean square norm in a layer, numbered as in layer.h."""

    BEFORE_ATTENTION = 0
    QUERIES = 1
    KEYS = 2
    AFTER_ATTENTION = 3
    BEFORE_MLP = 4
    AFTER_MLP = 5


class Activation(IntEnum):
    """Functions of the gate, numbered as in layer.h."""

    SILU = 0
    GELU_TANH = 1


@dataclass(frozen=True, slots=True)
class NormPart:
    """A norm: x / sqrt(mean(x^2) + eps) * weight, over as many numbers as weights."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a decoder layer.

    Attributes:
        projections: of queries, keys and values, or one matrix of all three.
        output: of attention.
        gate_up: gate and up, or one matrix of both; none where the MLP is not to be computed here.
        down: of the MLP, or none.
        norms: those that it has.
        num_heads, num_kv_heads, head_size: H, V, E.
        rotary_size: F.
        scaling: of attention scores.
        softcap: what these come to at most, by a tangent; 0 where there is no limit.
        activation: of the gate.
        dtype: of hidden states, keys and values.
    """

    projections: Sequence[Matrix]
    output: Matrix
    gate_up: Sequence[Matrix]
    down: Matrix | None
    norms: Mapping[Norm, NormPart]
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary_size: int
    scaling: float
    softcap: float
    activation: Activation
    dtype: torch.dtype


class _LayerFields(ctypes.Structure):
    """`struct layer` of layer.h."""

    _fields_ = (
        ("projections", ctypes.c_void_p * 3),
        ("output", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p * 2),
        ("down", ctypes.c_void_p),
        ("norms", ctypes.c_void_p * len(Norm)),
        ("norm_sizes", ctypes.c_int64 * len(Norm)),
        *(
            (name, ctypes.c_int64)
            for name in ("hidden", "heads", "kv_heads", "head_size", "rotary", "intermediate")
        ),
        ("eps", ctypes.c_float * len(Norm)),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("activation", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("is_coded", ctypes.c_int32),
    )


class _StatesFields(ctypes.Structure):
    """`struct states` of layer.h."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row", "head", "token")),
    )


class CompiledLayer:
    """A decoder layer of compiled code.

    Raises:
        ValueError: the shapes of the parts do not fit each other.
    """

    def __init__(self, found: Library, parts: LayerParts) -> None:
        self._library = found
        # Held: only pointers to them go into the fields.
        self._parts = parts
        self._weights = {
            norm: part.weight.detach().float().contiguous() for norm, part in parts.norms.items()
        }
        self.hidden_size = parts.output.num_outputs
        self._query_size = parts.num_heads * parts.head_size
        self._check()
        fields = _LayerFields(
            output=parts.output.address,
            down=None if parts.down is None else parts.down.address,
            hidden=self.hidden_size,
            heads=parts.num_heads,
            kv_heads=parts.num_kv_heads,
            head_size=parts.head_size,
            rotary=parts.rotary_size,
            intermediate=0 if parts.down is None else parts.down.num_inputs,
            scaling=parts.scaling,
            softcap=parts.softcap,
            activation=parts.activation,
            type=ELEMENT_TYPES[parts.dtype],
        )
        for i, matrix in enumerate(parts.projections):
            fields.projections[i] = matrix.address
        for i, matrix in enumerate(parts.gate_up):
            fields.gate_up[i] = matrix.address
        for norm, weight in self._weights.items():
            fields.norms[norm] = weight.data_ptr()
            fields.norm_sizes[norm] = weight.numel()
            fields.eps[norm] = parts.norms[norm].eps
        coded = _LayerFields.from_buffer_copy(fields)
        coded.is_coded = 1
        # Of caches as they are, and of coded ones.
        self._fields = fields, coded
        self._addresses = ctypes.addressof(fields), ctypes.addressof(coded)

    def _check(self) -> None:
        parts = self._parts
        hidden, queries = self.hidden_size, self._query_size
        keys = parts.num_kv_heads * parts.head_size
        projected = [(each.num_outputs, each.num_inputs) for each in parts.projections]
        fits = (
            projected
            in ([(queries, hidden), (keys, hidden), (keys, hidden)], [(queries + 2 * keys, hidden)])
            and parts.output.num_inputs == queries
            and parts.num_heads % parts.num_kv_heads == 0
            and 0 <= parts.rotary_size <= parts.head_size
            and parts.rotary_size % 2 == 0
        )
        if parts.down is not None:
            inner = parts.down.num_inputs
            widened = [(each.num_outputs, each.num_inputs) for each in parts.gate_up]
            fits = fits and parts.down.num_outputs == hidden
            fits = fits and widened in ([(inner, hidden)] * 2, [(2 * inner, hidden)])
        sizes: dict[Norm, tuple[int, ...]] = dict.fromkeys(Norm, (hidden,))
        sizes[Norm.QUERIES] = parts.head_size, queries
        sizes[Norm.KEYS] = parts.head_size, keys
        fits = fits and all(
            weight.dim() == 1 and weight.numel() in sizes[norm]
            for norm, weight in self._weights.items()
        )
        if not fits:
            raise ValueError("the parts of the layer do not fit each other")

    def project(
        self,
        hidden_RTD: torch.Tensor,
        cosines_RTF: torch.Tensor,
        sines_RTF: torch.Tensor,
        adapters: Adapters = None,
        *,
        is_coded: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of new tokens, turned by their positions.

        Args:
            hidden_RTD: on the CPU, in the layer's dtype.
            cosines_RTF, sines_RTF: in the same dtype; [1, T, F] where all rows have the same.
            adapters: [`NUM_PLACES`, R] addresses of `LowRank`, whose shapes are those of the matrices; 0 for none.
            is_coded: make codes of the keys and values.

        Returns:
            [R, T, H E] in float32, for `finish`; twice [R, V, T, E] in the layer's dtype, for a cache, or, coded, what
            `encode_states` makes of them.
        """
        parts = self._parts
        hidden_RTD, cosines_RTF, sines_RTF = (
            each.contiguous() for each in (hidden_RTD, cosines_RTF, sines_RTF)
        )
        num_rows, num_tokens = hidden_RTD.shape[0], hidden_RTD.shape[1]
        self._require(hidden_RTD, (num_rows, num_tokens, self.hidden_size))
        for angles in (cosines_RTF, sines_RTF):
            self._require(angles, (cosines_RTF.shape[0], num_tokens, parts.rotary_size))
        if cosines_RTF.shape[0] not in (1, num_rows):
            raise ValueError(f"angles of {cosines_RTF.shape[0]} rows are given for {num_rows}")
        size, dtype = self._states_form(is_coded)
        shape = num_rows, parts.num_kv_heads, num_tokens, size
        keys, values = (torch.empty(shape, dtype=dtype, device="cpu") for _ in range(2))
        queries = torch.empty(
            num_rows, num_tokens, self._query_size, dtype=torch.float32, device="cpu"
        )
        self._require_adapters(adapters, num_rows)
        self._library.project(
            self._addresses[is_coded],
            hidden_RTD,
            cosines_RTF,
            sines_RTF,
            queries,
            keys,
            values,
            adapters,
        )
        return queries, keys, values

    def _states_form(self, is_coded: bool) -> tuple[int, torch.dtype]:
        """Return the number of elements of a key or value in the cache, and their dtype."""
        size = self._parts.head_size
        return (coded_size(size), CODED_DTYPE) if is_coded else (size, self._parts.dtype)

    def finish(
        self,
        hidden_RTD: torch.Tensor,
        queries: torch.Tensor,
        keys_RVNE: torch.Tensor,
        values_RVNE: torch.Tensor,
        mask_RTN: torch.Tensor | None,
        adapters: Adapters = None,
        *,
        first_keys: Sequence[tuple[int, int]],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [R, T, D] that leave the layer; without an MLP those that enter it, and their norm.

        Args:
            hidden_RTD: as in `project`.
            queries: from there.
            keys_RVNE, values_RVNE: of all tokens that the cache has, in the layer's dtype or coded; the new ones are
                the last.
            mask_RTN: bool, the keys that each token sees, one at least; None for all up to its own.
            adapters: as in `project`.
            first_keys: of each row the position of its earliest key, and the place of that, from which on the others
                lie, and behind the last place the first. Sums go by blocks of positions: so a token gets the same bits
                from a window that has dropped tokens, or that is a ring, as from one with all of them.
        """
        self._require_adapters(adapters, hidden_RTD.shape[0])
        hidden_RTD = hidden_RTD.contiguous()
        num_rows, num_tokens, num_keys = *hidden_RTD.shape[:2], keys_RVNE.shape[2]
        self._require(hidden_RTD, (num_rows, num_tokens, self.hidden_size))
        is_coded = keys_RVNE.dtype == CODED_DTYPE
        size, dtype = self._states_form(is_coded)
        shape = num_rows, self._parts.num_kv_heads, num_keys, size
        self._require(keys_RVNE, shape, dtype)
        self._require(values_RVNE, shape, dtype)
        if queries.shape != (num_rows, num_tokens, self._query_size) or num_keys < num_tokens:
            raise ValueError(
                f"{list(queries.shape)} queries are no {num_tokens} of {num_keys} tokens"
            )
        if len(first_keys) != num_rows or not all(
            position >= 0 and 0 <= place < num_keys and (num_tokens == 1 or not place)
            for position, place in first_keys
        ):
            raise ValueError(f"{num_rows} first keys among {num_keys} are due, got {first_keys}")
        if mask_RTN is not None:
            mask_RTN = mask_RTN.contiguous()
            if (
                mask_RTN.shape != (num_rows, num_tokens, num_keys)
                or mask_RTN.dtype != torch.bool
                or not mask_RTN.any(-1).all()
            ):
                raise ValueError(f"a mask of {num_rows} rows and {num_keys} keys is due")
        result = torch.empty_like(hidden_RTD)
        normed = None if self._parts.down is not None else torch.empty_like(hidden_RTD)
        self._library.finish(
            self._addresses[is_coded],
            hidden_RTD,
            queries,
            ctypes.byref(_states(keys_RVNE)),
            ctypes.byref(_states(values_RVNE)),
            num_keys,
            (ctypes.c_int64 * (2 * num_rows))(*(n for first in first_keys for n in first)),
            mask_RTN,
            result,
            normed,
            adapters,
        )
        return result, normed

    def _require_adapters(self, adapters: Adapters, num_rows: int) -> None:
        if adapters is not None and len(adapters) != NUM_PLACES * num_rows:
            raise ValueError(f"{len(adapters)} adapters are given for {num_rows} rows")

    def _require(
        self, given: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> None:
        """Check a tensor: nothing behind this looks at it again, as kernels have its address alone."""
        dtype = dtype or self._parts.dtype
        if given.shape != shape or given.dtype != dtype or not given.is_cpu:
            raise ValueError(
                f"{list(shape)} in {dtype} on the CPU is due, got {list(given.shape)} in {given.dtype} "
                f"on {given.device}"
            )


def _states(tensor_RVNE: torch.Tensor) -> _StatesFields:
    """Return the address and strides of keys or values. Elements of a token lie together, or strides would not do."""
    row, head, token, element = tensor_RVNE.stride()
    if element != 1:
        raise ValueError("the elements of a key do not lie together")
    return _StatesFields(tensor_RVNE.data_ptr(), row, head, token)
