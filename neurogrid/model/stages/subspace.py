"""A subspace that hidden states are kept in, so that few numbers of each go from stage to stage.

U is a frozen orthonormal basis of K dimensions, T a frozen table of tokens. Where whatever writes into the hidden state
writes into the span of U, and the embedding is T plus something of that span, a hidden state is T[token] + U c, and
c = U^T (h - T[token]) is all that has to travel. (Ramasinghe and others, "Protocol Models: Scaling Decentralized
Training with Communication-Efficient Model Parallelism", 2025.)

What is kept in the span are weights, by projecting them before the first step and after each, and with them their
gradients: what a gradient has beside the span is what no step may follow, and what no stage is told that is cut off.
So loss and gradients are those of the unsplit model with such weights, wherever it is cut.

The last layers of the model write what they like: no hidden state behind them is sent, since no cut lies there.

U and T are made of whole numbers by the seed, the same on every machine, and so is `Subspace.digest` of them. U is
their orthonormal basis by the libraries that are there: on machines that are alike it has the same bits, on others it
may differ in last ones.

Shape legend: B sequences, T tokens, D hidden size, K dimensions of the subspace, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from neurogrid.model.files.tensor_names import layer_of, numbers_hidden

__all__ = [
    "NUM_FREE_LAYERS",
    "Subspace",
    "SubspaceTraits",
    "Writer",
    "project_gradients",
    "project_weights",
]

NUM_FREE_LAYERS: Final = 2
"""Last layers of a model that may write anything: they are of one stage, the last."""

_MAX_ELEMENTS: Final = 1 << 22
"""Elements of the table at once: 32 MiB of whole numbers."""

# SplitMix64's (Steele and others, 2014), as signed numbers.
_STEP: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True, slots=True)
class Writer:
    """Parameters that write into the hidden state.

    Attributes:
        pattern: their name in the whole model, with # for each number (`numbers_hidden`).
        dim: which of their dimensions is the hidden state's.
    """

    pattern: str
    dim: int


@dataclass(frozen=True, slots=True)
class SubspaceTraits:
    """Parameters of a model that are to be kept in a subspace.

    Attributes:
        embedding: the name of the table of tokens' embeddings, [V, D].
        writers: all other parameters that write into the hidden state.
    """

    embedding: str
    writers: tuple[Writer, ...]


class Subspace:
    """U and T of one run.

    Args:
        num_dims: K, below the hidden size.
        hidden_size: D.
        seed: of the run.
        scale: the standard deviation of the table's elements; that of the model's embedding when it begins.
        device: where tensors are.

    Attributes:
        num_dims: K.
        basis_DK: U, float32.

    Raises:
        ValueError: there are not so many dimensions.
    """

    def __init__(
        self,
        num_dims: int,
        hidden_size: int,
        *,
        seed: int,
        scale: float,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 < num_dims < hidden_size:
            raise ValueError(
                f"a subspace of {num_dims} dimensions: from 1 to {hidden_size - 1} are wanted, below the hidden size"
            )
        self.num_dims, self.hidden_size = num_dims, hidden_size
        self._device = torch.device(device)
        self._unit = scale * math.sqrt(3) / (1 << 24)
        digest = hashlib.sha256(f"neurogrid subspace 1 {seed}".encode()).digest()
        self._table_seed = int.from_bytes(digest[:8], "little", signed=True)
        self._basis_seed = int.from_bytes(digest[8:16], "little", signed=True)
        # On the CPU, whatever computes: all stages are to have the same one.
        basis, upper = torch.linalg.qr(self._numbers().double())
        # Libraries differ in signs: here the diagonal of R is not negative.
        basis.mul_(torch.where(upper.diagonal() < 0, -1.0, 1.0))
        self.basis_DK = basis.float().to(self._device)
        self._columns_D = torch.arange(hidden_size, device=self._device)

    def digest(self, vocab_size: int) -> bytes:
        """SHA-256 of the numbers that U, and T of so many tokens, are made of (protocol_spec/training/stages.md)."""
        hasher = hashlib.sha256(struct.pack("<3Q", self.num_dims, self.hidden_size, vocab_size))
        hasher.update(_as_int32(self._numbers()))
        for ids in torch.arange(vocab_size, device=self._device).split(self._num_rows):
            hasher.update(_as_int32(self._numbers_of(ids)))
        return hasher.digest()

    def rows(self, ids: Tensor) -> Tensor:
        """T of tokens: float32 [..., D].

        Nothing is kept: the table of a large model would be a fifth of what its stage takes.

        Args:
            ids: int64, of any shape; not negative.
        """
        flat = ids.to(self._device).flatten()
        rows = torch.empty(len(flat), self.hidden_size, device=self._device)
        for some, part in zip(flat.split(self._num_rows), rows.split(self._num_rows), strict=True):
            part.copy_(self._numbers_of(some))
        return rows.mul_(self._unit).view(*ids.shape, self.hidden_size)

    def compress(self, hidden_BTD: Tensor, ids_BT: Tensor) -> Tensor:
        """Compute the coefficients of hidden states, which are to travel: float32 [B, T, K]. Gradients go through."""
        with torch.autocast(self._device.type, enabled=False):
            sent_BTK: Tensor = (hidden_BTD.float() - self.rows(ids_BT)) @ self.basis_DK
            return sent_BTK

    def expand(self, sent_BTK: Tensor, ids_BT: Tensor) -> Tensor:
        """The hidden state that `compress` was given: float32 [B, T, D]. Gradients go through it."""
        with torch.autocast(self._device.type, enabled=False):
            hidden_BTD: Tensor = sent_BTK.float() @ self.basis_DK.T + self.rows(ids_BT)
            return hidden_BTD

    @torch.no_grad()
    def outside(self, hidden_BTD: Tensor, ids_BT: Tensor) -> float:
        """Distance of hidden states from what `expand` makes of them again, as a part of their own norm."""
        again_BTD = self.expand(self.compress(hidden_BTD, ids_BT), ids_BT)
        return float((again_BTD - hidden_BTD).norm() / hidden_BTD.norm().clamp_min(1e-30))

    @torch.no_grad()
    def project(self, tensor: Tensor, dim: int) -> None:
        """Leave of a tensor what it has in the span, in place.

        Args:
            tensor: float32.
            dim: which of its dimensions, from 0, is the hidden state's.
        """
        basis_DK = self.basis_DK
        if dim < tensor.ndim - 1:
            columns = tensor.flatten(dim + 1)
            tensor.copy_((basis_DK @ (basis_DK.T @ columns)).view(tensor.shape))
            return
        rows = tensor if tensor.ndim > 1 else tensor[None]
        for part in rows.split(max(1, _MAX_ELEMENTS // rows[0].numel())):
            part.copy_((part @ basis_DK) @ basis_DK.T)

    @torch.no_grad()
    def project_embedding(self, embedding_VD: Tensor) -> None:
        """Leave of an embedding the table, and what it has beside it in the span; in place."""
        for ids, part in zip(
            torch.arange(len(embedding_VD), device=self._device).split(self._num_rows),
            embedding_VD.split(self._num_rows),
            strict=True,
        ):
            rows = self.rows(ids)
            part.copy_(((part - rows) @ self.basis_DK) @ self.basis_DK.T + rows)

    @property
    def _num_rows(self) -> int:
        return max(1, _MAX_ELEMENTS // self.hidden_size)

    def _numbers(self) -> Tensor:
        """Integers whose columns U is the orthonormal basis of: int64 [D, K], on the CPU."""
        places = torch.arange(self.hidden_size * self.num_dims)
        return _drawn(places, self._basis_seed).view(self.hidden_size, self.num_dims)

    def _numbers_of(self, ids: Tensor) -> Tensor:
        """Integers that rows of T are made of: int64 [number of ids, D]."""
        places = ids[:, None] * self.hidden_size + self._columns_D
        return _drawn(places, self._table_seed)


def project_weights(
    subspace: Subspace,
    traits: SubspaceTraits,
    parameters: Mapping[str, Tensor],
    num_layers: int,
    *,
    num_free: int = NUM_FREE_LAYERS,
) -> None:
    """Keep weights in the subspace, in place; once more changes nothing but last bits.

    Args:
        parameters: of the whole model or of a part, by their names in the whole; float32.
        num_layers: of the whole model, the last `num_free` of which are left as they are.
    """
    for name, dim in _confined(traits, parameters, num_layers - num_free, num_layers):
        if name == traits.embedding:
            subspace.project_embedding(parameters[name].data)
        else:
            subspace.project(parameters[name].data, dim)


def project_gradients(
    subspace: Subspace,
    traits: SubspaceTraits,
    parameters: Mapping[str, Tensor],
    num_layers: int,
) -> None:
    """Leave of the gradients of such weights what a step may follow; arguments as of `project_weights`."""
    for name, dim in _confined(traits, parameters, num_layers - NUM_FREE_LAYERS, num_layers):
        gradient = parameters[name].grad
        if gradient is not None:
            subspace.project(gradient, dim)


def _confined(
    traits: SubspaceTraits, parameters: Mapping[str, Tensor], stop: int, num_layers: int
) -> list[tuple[str, int]]:
    """Parameters that are kept in the subspace, of layers before `stop` and outside of them: (name, dimension)."""
    dims: dict[str, list[int]] = {}
    for writer in traits.writers:
        dims.setdefault(writer.pattern, []).append(writer.dim)
    found = [(name, 1) for name in parameters if name == traits.embedding]
    for name in parameters:
        layer_id = layer_of(name, num_layers)
        if layer_id is None or layer_id < stop:
            found += [(name, dim) for dim in dims.get(numbers_hidden(name), ())]
    return found


def _drawn(places: Tensor, seed: int) -> Tensor:
    """Odd numbers below 2^24 and above -2^24, which float32 has, of SplitMix64's sequence; int64 in and out.

    Whole numbers, since torch's normal ones have other last bits on other processors.
    """
    mixed = places * _STEP + seed
    mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
    return (_shifted(mixed ^ _shifted(mixed, 31), 40) << 1) + (1 - (1 << 24))


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Numbers of 64 bits without a sign, shifted to the right."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _as_int32(numbers: Tensor) -> bytes:
    data: bytes = numbers.to("cpu", torch.int32).numpy().astype("<i4").tobytes()
    return data
