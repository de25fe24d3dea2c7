"""A layer of a model, loaded: tensors where transformers puts them, codes in the place of matrices.

No code here knows a family: which linear layer a tensor becomes is told by its memory, and which rows of experts by
`find_expert_rows`. Experts that come as codes are never put together as anything else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import nn
from transformers import PreTrainedModel

from neurogrid.errors import CheckpointError
from neurogrid.model.files.quantization import CodesForm
from neurogrid.model.files.tensor_names import name_in_layer, numbers_hidden, path_in_layer
from neurogrid.model.kernels import Codes, CodesLinear, join_rows
from neurogrid.model.stages.expert_rows import ExpertRows, find_expert_rows
from neurogrid.model.stages.experts import (
    ExpertWeight,
    expert_weights,
    hold_experts,
    linear_weights,
    shrink_weight,
)
from neurogrid.model.stages.weight_loading import load_tensors, place_module

__all__ = ["LayerLoader", "module_list"]

_WEIGHT = ".weight"
# Kinds of layers of which it is kept what makes their experts: a model has one or two.
_MAX_KINDS = 8


class LayerLoader:
    """Loads the layers of one model.

    Args:
        blank: the model with nothing loaded and placeholders for layers; left as it is.
        layers_name: of the list of its layers.
        templates: the layers, on the meta device; left as they are.
        dtype, device: as of `Skeleton`.
    """

    def __init__(
        self,
        blank: PreTrainedModel,
        layers_name: str,
        templates: Sequence[nn.Module],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._blank = blank
        self._layers_name = layers_name
        self._templates = templates
        self._dtype = dtype
        self._device = device
        self._rows_of_experts: dict[object, dict[str, ExpertRows]] = {}

    def load(
        self,
        layer_id: int,
        tensors: Mapping[str, torch.Tensor],
        codes: Mapping[str, Codes],
        *,
        coded: Mapping[str, CodesForm],
        by_int8: bool,
    ) -> nn.Module:
        """A layer with these weights, on the device.

        Args:
            tensors, codes: those of the layer, by name; codes in the place of matrices.
            coded: the forms that `codes` must have, by the paths of `linear_shapes`, all of them and no others: their
                memory was counted so.
            by_int8: activations are rounded to 8 bits for the products with codes.

        Raises:
            CheckpointError: a tensor is missing, unknown, or of a wrong shape; or other matrices are codes, or in other
                forms.
        """
        shapes = {name: (each.num_outputs, each.num_inputs) for name, each in codes.items()}
        experts = self._expert_rows(layer_id, shapes)
        of_experts = {name for rows in experts.values() for name in rows.names}
        stand_ins = {
            name: self._stand_in(shape) for name, shape in shapes.items() if name not in of_experts
        }
        # Before anything is put together that is to be codes.
        weights = expert_weights(self._templates[layer_id])
        if lacking := sorted(coded.keys() & _paths(weights) - experts.keys()):
            raise CheckpointError(_not_coded(layer_id, lacking))
        coded_weights = [weight for weight in weights if _paths([weight]) <= experts.keys()]
        layer = self._load(layer_id, {**tensors, **stand_ins}, without=coded_weights)
        found = find_linears(layer, stand_ins)
        paths = {name: path for path, rows in experts.items() for name in rows.names} | found
        for name in codes:
            if name not in paths or paths[name] not in coded:
                raise CheckpointError(
                    f"{name} is quantised, and no linear layer that is to be so in this model"
                )
            if not coded[paths[name]].has(codes[name]):
                raise CheckpointError(f"{name} is quantised in another form than it is to be")
        if lacking := sorted(coded.keys() - _paths(coded_weights) - set(found.values())):
            raise CheckpointError(_not_coded(layer_id, lacking))
        for name, path in found.items():
            layer.set_submodule(path, self._codes_linear(layer, path, codes[name], by_int8=by_int8))
        self._hold_experts(layer, coded_weights, experts, codes, by_int8=by_int8)
        place_module(layer, self._device)
        return layer

    def _hold_experts(
        self,
        layer: nn.Module,
        weights: Sequence[ExpertWeight],
        experts: Mapping[str, ExpertRows],
        codes: Mapping[str, Codes],
        *,
        by_int8: bool,
    ) -> None:
        """Give the experts of a layer their codes; raises CheckpointError if some of them make no matrix."""
        for path, of_module in groupby(weights, key=lambda weight: weight.module):
            module = layer.get_submodule(path)
            # Their biases are to be where the products are.
            place_module(module, self._device)
            matrices = {weight.name: self._matrices(weight, experts, codes) for weight in of_module}
            hold_experts(module, matrices, self._dtype, by_int8=by_int8)

    def _matrices(
        self,
        weight: ExpertWeight,
        experts: Mapping[str, ExpertRows],
        codes: Mapping[str, Codes],
    ) -> Iterator[Codes]:
        """The matrices of the experts in order, each made when it is its turn."""
        for path in map(weight.path, range(weight.num_experts)):
            rows = experts[path]
            try:
                made = join_rows([codes[name] for name in rows.names], rows.order)
            except ValueError as exc:
                raise CheckpointError(f"{path}, of {rows.names[0]} and others: {exc}") from exc
            yield made.to(self._device)

    def linear_shapes(self, layer_id: int) -> dict[str, torch.Size]:
        """[O, I] of what multiplies in a layer and can be codes, by path: linear layers, and matrices of experts."""
        return {
            path: weight.shape for path, weight in linear_weights(self._templates[layer_id]).items()
        }

    def linear_names(self, layer_id: int, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Find the tensors of a checkpoint that are weights of linear layers as they are, or rows of those of experts.

        Args:
            shapes: of the layer's tensors, by name.

        Returns:
            By name the path in the layer.
        """
        experts = self._expert_rows(layer_id, shapes)
        found = {name: path for path, rows in experts.items() for name in rows.names}
        # Of lists, only those of linear layers: other experts would be put together, as large as they are.
        linears = {numbers_hidden(path) for path in self.linear_shapes(layer_id)}
        stand_ins = {
            name: self._stand_in(shape)
            for name, shape in shapes.items()
            if name not in found
            and (
                "#" not in path_in_layer(name)
                or path_in_layer(name).removesuffix(_WEIGHT) in linears
            )
        }
        try:
            layer = self._load(layer_id, stand_ins, is_whole=False)
        except CheckpointError:
            return found
        return found | find_linears(layer, stand_ins)

    def _expert_rows(
        self, layer_id: int, shapes: Mapping[str, Sequence[int]]
    ) -> dict[str, ExpertRows]:
        """`find_expert_rows`, with the names that tensors have in the checkpoint."""
        template = self._templates[layer_id]
        named = {name_in_layer(name): name for name in shapes}
        sizes = {name_in_layer(name): tuple(shape) for name, shape in shapes.items()}
        kind = (tuple(self.linear_shapes(layer_id).items()), tuple(sorted(sizes.items())))
        if kind not in self._rows_of_experts:

            def load(
                layer: nn.Module, tensors: Mapping[str, torch.Tensor], wanted: frozenset[str]
            ) -> None:
                self._load_into(
                    layer,
                    layer_id,
                    {named[name]: tensor for name, tensor in tensors.items()},
                    is_wanted=wanted.__contains__,
                    may_lack=True,
                )

            # Peers send layers of any kind.
            while len(self._rows_of_experts) >= _MAX_KINDS:
                del self._rows_of_experts[next(iter(self._rows_of_experts))]
            # What nothing goes into is made at random; what draws numbers elsewhere is not to get others.
            with torch.random.fork_rng(devices=()):
                self._rows_of_experts[kind] = find_expert_rows(template, sizes, load)
        return {
            path: replace(rows, names=tuple(named[name] for name in rows.names))
            for path, rows in self._rows_of_experts[kind].items()
        }

    def _stand_in(self, shape: Sequence[int]) -> torch.Tensor:
        """Zeros that occupy one element, in memory of their own: so it can be told where they went."""
        return torch.zeros((), dtype=self._dtype).expand(tuple(shape))

    def _codes_linear(
        self, layer: nn.Module, path: str, codes: Codes, *, by_int8: bool
    ) -> CodesLinear:
        linear = layer.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        return CodesLinear(codes.to(self._device), linear.bias, self._dtype, by_int8=by_int8)

    def _load(
        self,
        layer_id: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        is_whole: bool = True,
        without: Sequence[ExpertWeight] = (),
    ) -> nn.Module:
        """A layer with `tensors` in it, on the CPU; all of it but some weights of experts, or only those."""
        layer = copy.deepcopy(self._templates[layer_id])
        for weight in without:
            shrink_weight(layer, weight, (1, 1))
        absent = {f"{weight.module}.{weight.name}" for weight in without}
        self._load_into(
            layer, layer_id, tensors, is_wanted=lambda path: is_whole and path not in absent
        )
        return layer

    def _load_into(
        self,
        layer: nn.Module,
        layer_id: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        is_wanted: Callable[[str], bool],
        may_lack: bool = False,
    ) -> None:
        """`load_tensors` of a layer of the templates; `is_wanted` is asked for paths in it."""
        # A model that was loaded before is not initialised again, so each load takes a new one.
        model = copy.deepcopy(self._blank)
        module_list(model, self._layers_name)[layer_id] = layer
        prefix = f"{self._layers_name}.{layer_id}."
        load_tensors(
            model,
            tensors,
            dtype=self._dtype,
            is_wanted=lambda name: name.startswith(prefix) and is_wanted(name.removeprefix(prefix)),
            what=f"layer {layer_id}",
            may_lack=may_lack,
        )


def module_list(model: PreTrainedModel, name: str) -> nn.ModuleList:
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    return layers


def find_linears(layer: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The paths of the linear layers whose weight is one of `tensors`, the same memory, by the name of that."""
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    return {
        names[module.weight.data_ptr()]: path
        for path, module in layer.named_modules()
        if type(module) is nn.Linear and module.weight.data_ptr() in names
    }


def _paths(weights: Sequence[ExpertWeight]) -> set[str]:
    """Paths of the matrices of all experts of these weights."""
    return {weight.path(expert) for weight in weights for expert in range(weight.num_experts)}


def _not_coded(layer_id: int, paths: Sequence[str]) -> str:
    return f"{paths[0]} of layer {layer_id} is to be quantised, and is not"
