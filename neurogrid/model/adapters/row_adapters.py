"""Adapters of the rows of a pass, added to the linear layers that it goes through.

A linear layer that some adapter is for has a hook, which adds to each row what its own adapter gives. Layers that are
compiled as a whole call no linear layers: they are told where the matrices of each row lie, and add that themselves.

Not thread-safe: of one stage, one pass at a time.

Shape legend: R rows, T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from neurogrid.errors import ModelError
from neurogrid.model.adapters.layer_adapter import Adapter
from neurogrid.model.kernels import LowRank, library

__all__ = ["RowAdapters"]

_HOOKED = "_adapted_paths"


class RowAdapters:
    """The adapters of the rows of the pass that is under way in one stage."""

    def __init__(self) -> None:
        self._rows: tuple[Adapter | None, ...] = ()
        # By layer and places, as long as the same rows go on together.
        self._addresses: dict[tuple[int, object], ctypes.Array[ctypes.c_void_p] | None] = {}
        self._addressed: tuple[Adapter | None, ...] = ()

    @contextmanager
    def of(self, rows: Sequence[Adapter | None]) -> Iterator[None]:
        """Rows with these adapters, in this order, go through layers within the block."""
        self._rows = tuple(rows) if any(row is not None for row in rows) else ()
        try:
            yield
        finally:
            self._rows = ()

    def attach(self, layer_id: int, layer: nn.Module, adapter: Adapter) -> None:
        """Let the linear layers of a layer that runs ask for what an adapter adds to them.

        Raises:
            ValueError: it is for linear layers of other shapes, or for what is none.
        """
        part = adapter.layers.get(layer_id)
        if part is None:
            return
        # Nothing behind this looks at it again: what reads the matrices has their addresses.
        for path, its in part.beside.items():
            linear = layer.get_submodule(path)
            if not isinstance(linear, nn.Linear) or (
                (linear.out_features, linear.in_features) != (its.num_outputs, its.num_inputs)
            ):
                raise ValueError(f"an adapter is for {path} of another layer than {layer_id}")
        hooked: set[str] = layer.__dict__.setdefault(_HOOKED, set())
        for path in part.beside.keys() - hooked:
            hooked.add(path)
            layer.get_submodule(path).register_forward_hook(self._hook(layer_id, path))

    def addresses(
        self, layer_id: int, places: Sequence[str | None]
    ) -> ctypes.Array[ctypes.c_void_p] | None:
        """Addresses of the matrices of each row, [places, R], 0 where it has none there; None where no row has any.

        Args:
            places: the paths of the linear layers that compiled code multiplies with, in its order.
        """
        if not self._rows:
            return None
        if self._addressed != self._rows:
            self._addressed, self._addresses = self._rows, {}
        # A layer has the same places each time; of one linear layer it is that alone.
        key = (layer_id, places[0] if len(places) == 1 else None)
        if key not in self._addresses:
            parts = [each for path in places for each in self._beside(layer_id, path)]
            self._addresses[key] = (
                (ctypes.c_void_p * len(parts))(*(each.address if each else None for each in parts))
                if any(each is not None for each in parts)
                else None
            )
        return self._addresses[key]

    def _beside(self, layer_id: int, path: str | None) -> list[LowRank | None]:
        """The low-rank matrices that each row's adapter adds to one linear layer; None for a row without."""
        layers = (None if row is None else row.layers.get(layer_id) for row in self._rows)
        return [None if its is None or path is None else its.beside.get(path) for its in layers]

    def _hook(self, layer_id: int, path: str) -> Any:
        def add(
            module: nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor
        ) -> torch.Tensor | None:
            return self._added(layer_id, path, args[0], result) if self._rows else None

        return add

    def _added(
        self, layer_id: int, path: str, given: torch.Tensor, result: torch.Tensor
    ) -> torch.Tensor:
        num_rows = given.numel() // given.shape[-1]
        if given.is_cpu and num_rows == len(self._rows) == given.shape[0] == result.shape[0]:
            compiled = self._added_by_rows(layer_id, path, given, result)
            if compiled is not None:
                return compiled
        beside = self._beside(layer_id, path)
        first = beside[0]
        if all(each is first for each in beside):
            return result if first is None else first.added(given, result)
        if given.shape[0] != len(beside) or result.shape[0] != len(beside):
            raise ModelError(
                f"rows of several adapters cannot be told apart in {path}, where {list(given.shape)} goes in"
            )
        rows: dict[LowRank, list[int]] = {}
        for row, each in enumerate(beside):
            if each is not None:
                rows.setdefault(each, []).append(row)
        result = result.clone()
        for each, of in rows.items():
            result[of] = each.added(given[of], result[of])
        return result

    def _added_by_rows(
        self, layer_id: int, path: str, given: torch.Tensor, result: torch.Tensor
    ) -> torch.Tensor | None:
        """The same for one token of each row, by compiled code; None where there is none."""
        found = library()
        if found is None:
            return None
        addresses = self.addresses(layer_id, (path,))
        if addresses is None:
            return result
        sums = result.to(torch.float32, copy=True).contiguous()
        rows = given.float().contiguous().view(len(addresses), -1)
        found.adapt(addresses, rows, sums.view(len(addresses), -1))
        return sums.to(result.dtype)
