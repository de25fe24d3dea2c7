"""Tensors of a checkpoint, and their rows, that become experts' matrices: found by loading numbers for them.

transformers puts the tensors of experts together while it loads them, by rules that differ between families. So a
layer is loaded whose matrices have one input: of each tensor, a number for each row that no other has. Where the
numbers arrive the rows go. Loaded again with two or three outputs, numbers tell whether the inputs keep their order.
Nothing of a layer's size is made, and what is not an exact rearrangement of rows is not found.

A tensor may also be a matrix as the experts multiply it, and is then called as that is: PATH.weight.

Shape legend: E experts, O outputs, I inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from neurogrid.errors import CheckpointError
from neurogrid.model.files.tensor_names import path_in_layer
from neurogrid.model.stages.experts import ExpertWeight, expert_weights, shrink_weight

__all__ = ["ExpertRows", "find_expert_rows"]

# Up to this float32 has every whole number.
_MAX_ROWS: Final = 2**24

Shapes = Mapping[str, Sequence[int]]
Load = Callable[[nn.Module, Mapping[str, torch.Tensor], frozenset[str]], None]


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The tensors that make the matrix of an expert.

    Attributes:
        names: of the tensors, in the layer.
        order: int64 [O], of the rows of all of them one after another, those of the matrix; None for all as they are.
    """

    names: tuple[str, ...]
    order: torch.Tensor | None = None


def find_expert_rows(layer: nn.Module, shapes: Shapes, load: Load) -> dict[str, ExpertRows]:
    """Find the tensors that make each matrix of experts, by its path; matrices not made of such alone are left out.

    Args:
        layer: a template; left as it is.
        shapes: of matrices of a checkpoint, by their names in the layer.
        load: puts tensors, by their names in the layer, into a copy of the layer that may lose them; of the parameters
            that are named, those that nothing goes into are as they may be. Raises CheckpointError.
    """
    weights = expert_weights(layer)
    made = {
        weight.path(expert): ExpertRows((f"{weight.path(expert)}.weight",))
        for weight in weights
        for expert in range(weight.num_experts)
        if tuple(shapes.get(f"{weight.path(expert)}.weight", ()))
        == (weight.num_outputs, weight.num_inputs)
    }
    named = {rows.names[0] for rows in made.values()}
    listed = {
        name: shape
        for name, shape in shapes.items()
        if "#" in path_in_layer(name) and name not in named and len(shape) == 2
    }
    if not weights or not listed or sum(shape[0] for shape in listed.values()) > _MAX_ROWS:
        return made
    try:
        found = dict(_by_rows(layer, weights, listed, load))
        return made | _those_in_order(layer, weights, listed, found, load)
    except CheckpointError:
        return made


def _by_rows(
    layer: nn.Module, weights: Sequence[ExpertWeight], shapes: Shapes, load: Load
) -> Iterator[tuple[str, ExpertRows]]:
    """Yield the path of each matrix and its rows, found by where their numbers went; of inputs nothing is known."""
    names = list(shapes)
    num_rows = torch.tensor([shapes[name][0] for name in names])
    firsts = 1 + num_rows.cumsum(0) - num_rows
    numbered = {
        name: torch.arange(first, first + count).float()[:, None]
        for name, first, count in zip(names, firsts.tolist(), num_rows.tolist(), strict=True)
    }
    sizes = {weight: (weight.num_outputs, 1) for weight in weights}
    for weight, loaded_EO1 in _loaded(layer, sizes, numbered, load).items():
        for expert, values_O in enumerate(loaded_EO1.flatten(1)):
            numbers_O = values_O.long()
            if torch.equal(numbers_O.float(), values_O) and int(numbers_O.min()) >= 1:
                rows = _rows_of(numbers_O, firsts, num_rows, names)
                if rows is not None:
                    yield weight.path(expert), rows


def _rows_of(
    numbers_O: torch.Tensor, firsts: torch.Tensor, num_rows: torch.Tensor, names: Sequence[str]
) -> ExpertRows | None:
    """The tensors whose rows have these numbers; None where a row of one is missing, or there twice."""
    sources_O = torch.searchsorted(firsts, numbers_O, right=True) - 1
    # In the order in which they come.
    used = sources_O.unique()
    used = used[(sources_O == used[:, None]).int().argmax(1).argsort()]
    starts = torch.zeros_like(firsts)
    starts[used] = num_rows[used].cumsum(0) - num_rows[used]
    order_O = numbers_O - firsts[sources_O] + starts[sources_O]
    plain = torch.arange(int(num_rows[used].sum()))
    if not torch.equal(order_O.sort().values, plain):
        return None
    is_plain = torch.equal(order_O, plain)
    return ExpertRows(tuple(names[source] for source in used), None if is_plain else order_O)


def _those_in_order(
    layer: nn.Module,
    weights: Sequence[ExpertWeight],
    shapes: Shapes,
    found: Mapping[str, ExpertRows],
    load: Load,
) -> dict[str, ExpertRows]:
    """Keep the matrices of `found` whose inputs are those of their tensors, in the same order."""
    sizes = {}
    for weight in weights:
        counts = {
            len(found[path].names)
            for path in map(weight.path, range(weight.num_experts))
            if path in found
        }
        if len(counts) == 1:
            sizes[weight] = (counts.pop(), weight.num_inputs)
    used = {name for rows in found.values() for name in rows.names}
    numbered = {name: torch.arange(1.0, shapes[name][1] + 1)[None] for name in used}
    checked = {}
    for weight, parameter in _loaded(layer, sizes, numbered, load).items():
        expected = torch.arange(1.0, weight.num_inputs + 1)
        for expert, matrix in enumerate(parameter):
            path = weight.path(expert)
            if path in found and bool((matrix == expected).all()):
                checked[path] = found[path]
    return checked


def _loaded(
    layer: nn.Module,
    sizes: Mapping[ExpertWeight, tuple[int, int]],
    tensors: Mapping[str, torch.Tensor],
    load: Load,
) -> dict[ExpertWeight, torch.Tensor]:
    """[E, O, I] of each weight after loading, with matrices of these sizes."""
    resized = copy.deepcopy(layer)
    for weight, size in sizes.items():
        shrink_weight(resized, weight, size)
    load(resized, tensors, frozenset(f"{weight.module}.{weight.name}" for weight in sizes))
    return {weight: weight.matrices(resized) for weight in sizes}
