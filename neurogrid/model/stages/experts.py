"""Experts of a mixture whose matrices are codes: each one is multiplied as it is, and none is made dense for good.

transformers keeps all experts of a layer in parameters of three dimensions, and says beside them how they lie (its
`use_experts_implementation`): that is all that is read here, no family is named. A matrix of one expert has the path
EXPERTS.PARAMETER.NUMBER in its layer, such as `mlp.experts.gate_up_proj.7`.

A token gets the same bits whichever others are with it: its products are those of `kernels.Matrix`, and what its
experts give is added in the order in which they were chosen.

Shape legend: E experts, O outputs, I inputs, T tokens, K experts of a token, S = T K, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from neurogrid.model.kernels import Codes, Matrix, held_codes

__all__ = ["ExpertWeight", "expert_weights", "hold_experts", "linear_weights", "shrink_weight"]

# The flags that transformers puts on a module of experts, and what applies its gate.
_TRAITS: Final = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_apply_gate")
# Tokens that go through the experts together: what their products take at once is bounded by it.
_MAX_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """A parameter with a matrix of each expert.

    Attributes:
        module: the path of the experts in the layer.
        name: of the parameter.
        num_experts, num_outputs, num_inputs: E, O, I.
        is_transposed: whether it lies as [E, I, O] and not as [E, O, I].
    """

    module: str
    name: str
    num_experts: int
    num_outputs: int
    num_inputs: int
    is_transposed: bool

    def path(self, expert: int) -> str:
        """The path of one expert's matrix."""
        return f"{self.module}.{self.name}.{expert}"

    def lying(self, num_outputs: int, num_inputs: int) -> tuple[int, int, int]:
        """The shape of such a parameter with matrices of another size."""
        sizes = (num_inputs, num_outputs) if self.is_transposed else (num_outputs, num_inputs)
        return (self.num_experts, *sizes)

    def matrices(self, layer: nn.Module) -> torch.Tensor:
        """[E, O, I] of a layer, as it lies."""
        parameter = layer.get_submodule(self.module).get_parameter(self.name).detach()
        return parameter.transpose(1, 2) if self.is_transposed else parameter


def expert_weights(layer: nn.Module) -> list[ExpertWeight]:
    """The parameters of a layer that have matrices of experts, of modules that say how those lie."""
    return [
        weight
        for path, module in layer.named_modules()
        if all(hasattr(module, trait) for trait in _TRAITS)
        for weight in _weights_of(path, module)
    ]


def shrink_weight(layer: nn.Module, weight: ExpertWeight, size: tuple[int, int]) -> None:
    """Give a parameter matrices of another size [O, I], without memory."""
    parameter = torch.empty(weight.lying(*size), device="meta")
    layer.get_submodule(weight.module)._parameters[weight.name] = nn.Parameter(parameter)


def _weights_of(path: str, module: Any) -> Iterator[ExpertWeight]:
    for name in _names(module):
        parameter = module._parameters.get(name)
        if parameter is None or parameter.dim() != 3:
            continue
        sizes = parameter.shape[1:]
        num_outputs, num_inputs = reversed(sizes) if module.is_transposed else sizes
        yield ExpertWeight(
            path, name, parameter.shape[0], num_outputs, num_inputs, module.is_transposed
        )


def _names(module: Any) -> tuple[str, str]:
    """Names of the parameters that multiply first and last."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def linear_weights(layer: nn.Module) -> dict[str, torch.Tensor]:
    """[O, I] of what multiplies in a layer and can be codes, by path: of linear layers, and of single experts."""
    linears = {
        path: module.weight.detach()
        for path, module in layer.named_modules()
        if type(module) is nn.Linear
    }
    experts = {
        weight.path(expert): matrix
        for weight in expert_weights(layer)
        for expert, matrix in enumerate(weight.matrices(layer))
    }
    return linears | experts


def hold_experts(
    module: nn.Module,
    codes: Mapping[str, Iterable[Codes]],
    dtype: torch.dtype,
    *,
    by_int8: bool,
) -> None:
    """Let a module of experts multiply with codes, in the place of some of its parameters.

    Args:
        module: with everything else of it loaded.
        codes: of each expert in order, by the name of the parameter; where the products are to be, on that device.
        dtype: of activations.
        by_int8: round activations to 8 bits in groups of 32, where that is faster.
    """
    held: dict[str, list[Codes | Matrix]] = {}
    for name, matrices in codes.items():
        biases = module._parameters.get(f"{name}_bias")
        held[name] = [
            held_codes(made, None if biases is None else biases[expert], dtype, by_int8=by_int8)
            for expert, made in enumerate(matrices)
        ]
        del module._parameters[name]
        # As parameters, too: whoever counts a module's memory counts those.
        for expert, each in enumerate(held[name]):
            for number, part in enumerate(each.parts):
                parameter = nn.Parameter(part, requires_grad=False)
                module.register_parameter(f"held_{name}_{expert}_{number}", parameter)
    module.__dict__["_held_matrices"] = held
    kind: Any = type(module)
    module.__class__ = _codes_class(kind)


@cache
def _codes_class(kind: Any) -> Any:
    """A kind of experts with another forward: all that reads something else of them finds it."""
    return type(f"Codes{kind.__name__}", (_CodesExperts, kind), {})


class _CodesExperts(nn.Module):
    """Forward pass of experts with matrices of codes, mixed into transformers' own class."""

    # Of transformers' module.
    has_gate: bool
    has_post_expert_norm: bool
    is_transposed: bool
    _apply_gate: Any
    act_fn: Any
    post_expert_norm: Any
    # What is codes, by name of the parameter.
    _held_matrices: Mapping[str, Sequence[Codes | Matrix]]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, D] by the experts [T, K] of each token, weighted."""
        pieces = zip(
            hidden_states.split(_MAX_TOKENS),
            top_k_index.split(_MAX_TOKENS),
            top_k_weights.split(_MAX_TOKENS),
            strict=True,
        )
        results = [self._mixed(*piece) for piece in pieces]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _mixed(
        self, hidden_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        num_tokens, num_chosen = experts_TK.shape
        experts_S = experts_TK.flatten()
        if num_tokens == 1:
            order_S, given_SD = None, hidden_TD.expand(num_chosen, -1)
        else:
            order_S = experts_S.argsort(stable=True)
            experts_S, given_SD = experts_S[order_S], hidden_TD[order_S // num_chosen]
        # Where the rows of each expert begin and end.
        runs, start = [], 0
        for expert, rows in groupby(experts_S.cpu().tolist()):
            stop = start + len(list(rows))
            runs.append((expert, start, stop))
            start = stop
        first, last = _names(self)
        inner_SO = self._products(first, given_SD, runs)
        inner_SI = self._apply_gate(inner_SO) if self.has_gate else self.act_fn(inner_SO)
        made_SD = self._products(last, inner_SI.contiguous(), runs)
        if self.has_post_expert_norm:
            made_SD = self.post_expert_norm(made_SD)
        if order_S is not None:
            made_SD = torch.empty_like(made_SD).index_copy_(0, order_S, made_SD)
        parts_TKD = made_SD.unflatten(0, (num_tokens, num_chosen)) * weights_TK[..., None]
        # One after another, which `sum` does not promise for any number of tokens.
        total_TD: torch.Tensor = parts_TKD[:, 0]
        for place in range(1, num_chosen):
            total_TD = total_TD + parts_TKD[:, place]
        return total_TD.to(hidden_TD.dtype)

    def _products(
        self, name: str, given_SI: torch.Tensor, runs: Sequence[tuple[int, int, int]]
    ) -> torch.Tensor:
        """[S, O]: each run of rows by the matrix of its expert; nothing of one that there is not."""
        held = self._held_matrices.get(name)
        matrices: Sequence[Any] | torch.Tensor = self._dense(name) if held is None else held
        biases = self._parameters.get(f"{name}_bias")
        first = matrices[0]
        num_outputs = first.shape[0] if isinstance(first, torch.Tensor) else first.num_outputs
        made_SO = given_SI.new_empty(given_SI.shape[0], num_outputs)
        for expert, start, stop in runs:
            rows, into = given_SI[start:stop], made_SO[start:stop]
            # Families number what takes a token past the experts behind them.
            if not 0 <= expert < len(matrices):
                into.zero_()
                continue
            each = matrices[expert]
            if isinstance(each, Matrix):
                each.multiply(rows, into)
            else:
                weight = each.dense(rows.dtype) if isinstance(each, Codes) else each
                bias = None if biases is None else biases[expert]
                into.copy_(functional.linear(rows, weight, bias))
        return made_SO

    def _dense(self, name: str) -> torch.Tensor:
        """[E, O, I] of a parameter that is no codes."""
        parameter = self.get_parameter(name)
        return parameter.transpose(1, 2) if self.is_transposed else parameter
