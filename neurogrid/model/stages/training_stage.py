"""Some layers of a model that learn: a forward pass, and later the backward pass of what went through.

What a `TrainingStage` does with a micro-batch is a part of what the whole model does with it: the first stage embeds
token ids, the last one gives a loss, and gradients go the way back. The passes are those of the skeleton (skeleton.py),
without a cache; so nothing here knows a family, and that the parts give loss and gradients of the whole is proven for
each config (proof/training_proof.py).

Not thread-safe: one call at a time.

Shape legend: B sequences, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.files.quantization import Quantization
from neurogrid.model.files.tensor_names import is_end_tensor, layer_of
from neurogrid.model.stages.added_gradients import add_gradients_in_place
from neurogrid.model.stages.experts import expert_weights
from neurogrid.model.stages.narrow import compute_wide
from neurogrid.model.stages.skeleton import Skeleton
from neurogrid.model.stages.subspace import Subspace
from neurogrid.model.unused_memory import give_back_memory

__all__ = ["Adapt", "LossOf", "TrainingStage"]

LossOf = Callable[[Tensor], Tensor]
"""Makes the loss of a micro-batch, a scalar, from its logits [B, T, V]."""

Adapt = Callable[[int, str, nn.Module], Mapping[str, nn.Parameter]]
"""Puts what learns into a layer, given its number, its name in the whole model and its module; what that is, by name.
"""

# Tokens of a pass that shows which parameters have a part in it.
_NUM_PROBED = 2


class _UnderWay(NamedTuple):
    """A micro-batch whose backward pass is to come.

    Attributes:
        given: the hidden state that came, and gets a gradient; None at the first stage.
        result: what was sent on; of the last stage the loss.
    """

    given: Tensor | None
    result: Tensor


class TrainingStage:
    """Layers [start, stop) of a model, and its ends where they lie there; in training mode.

    Args:
        config: the model's config, from `build_config`.
        start, stop: its layers, at least one.
        tensors: of these layers, and at the first and the last stage of all that stands outside the layers, under their
            checkpoint names. Each is asked for once, a layer's when it is its turn.
        dtype: of the weights.
        device: where all is.
        keeps_graphs: whether what a forward pass computed is kept for the backward pass. Else its input is, and it is
            computed again, with the same random numbers.
        adapt: puts what learns into each layer, whose weights do not learn then, nor what stands outside the layers.
            None for all weights.
        quantization: what of the layers comes as codes, and stays so; with `adapt` alone. None for nothing.
        subspace: what hidden states between stages are kept in, so that K numbers of each travel: then "the hidden
            state" below is [B, T, K], and all stages but the first need the token ids, too. To keep the weights in it
            is the caller's (`project_weights`). None for whole ones.
        takes_over: whether what `tensors` gives is the stage's own from then on; else it is copied.
        is_wide: with `adapt` and a narrower `dtype`, whether all is computed in float32 nevertheless.

    Attributes:
        parameters: what learns, by its name in the whole model. At the first and the last stage everything outside the
            layers is among it: what gets no gradient here is another stage's.

    Raises:
        UnsupportedModelError: the config names no causal language model whose layers can be told; or experts are codes,
            through which no gradients go.
        CheckpointError: a tensor is missing, unknown, or of a wrong shape.
        ValueError: there are no such layers.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        start: int,
        stop: int,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        keeps_graphs: bool = True,
        adapt: Adapt | None = None,
        quantization: Quantization | None = None,
        subspace: Subspace | None = None,
        takes_over: bool = False,
        is_wide: bool = False,
    ) -> None:
        if is_wide and adapt is None:
            raise ValueError("what learns is as wide as what it is computed in")
        if quantization is not None and adapt is None:
            raise ValueError("codes do not learn")
        self._device, self._dtype = torch.device(device), torch.float32 if is_wide else dtype
        self._keeps_graphs, self._subspace = keeps_graphs, subspace
        skeleton = self._skeleton = Skeleton(config, dtype=dtype, device=self._device)
        if not 0 <= start < stop <= skeleton.num_layers:
            raise ValueError(
                f"layers {start} to {stop} given, the model has layers 0..{skeleton.num_layers - 1}"
            )
        self.start, self.stop = start, stop
        self.parameters: dict[str, nn.Parameter] = {}
        self._ends: dict[int, str] = {}
        self._under_way: dict[int, _UnderWay] = {}
        if self.is_first or self.is_last:
            ends = [name for name in tensors if is_end_tensor(name)]
            skeleton.load_ends(_of(tensors, ends, takes_over))
        else:
            skeleton.shape_ends()
        if is_wide:
            compute_wide(skeleton.model)
        if adapt is not None:
            skeleton.model.requires_grad_(False)
        elif self.is_first or self.is_last:
            self._let_learn("", skeleton.model)
            self._ends = {id(parameter): name for name, parameter in self.parameters.items()}
        names = _by_layer(tensors, skeleton.num_layers)
        for layer_id in self._layer_ids:
            # What it takes on its way is given back before the next one.
            give_back_memory()
            if quantization is None:
                skeleton.load_layer(layer_id, _of(tensors, names[layer_id], takes_over))
            else:
                self._require_gradients(layer_id, quantization)
                skeleton.load_quantized_layer(
                    layer_id, _of(tensors, names[layer_id], takes_over), quantization
                )
            layer, name = skeleton.layer(layer_id), skeleton.layer_name(layer_id)
            if adapt is None:
                self._let_learn(f"{name}.", layer)
            else:
                layer.requires_grad_(False)
                if is_wide:
                    compute_wide(layer)
                self.parameters |= adapt(layer_id, name, layer)
        give_back_memory()
        layers = [skeleton.layer(layer_id) for layer_id in self._layer_ids]
        add_gradients_in_place(nn.ModuleList([skeleton.model, *layers]))
        self._train(True)

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole model."""
        return self._skeleton.num_layers

    @property
    def templates(self) -> Sequence[nn.Module]:
        """All layers of the model in shape only, as they are before anything is put into them."""
        return self._skeleton.templates

    @property
    def is_first(self) -> bool:
        """Whether it embeds token ids."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with a loss."""
        return self.stop == self._skeleton.num_layers

    @property
    def under_way(self) -> frozenset[int]:
        """The micro-batches whose backward passes are to come."""
        return frozenset(self._under_way)

    def forward(self, number: int, given: Tensor, tokens_BT: Tensor | None = None) -> Tensor:
        """Compute a micro-batch's hidden states for the next stage: [B, T, D]; not at the last stage.

        Args:
            number: of the micro-batch, for its backward pass.
            given: the hidden state [B, T, D] that the stage before sent, or at the first stage token ids [B, T], int64.
            tokens_BT: token ids, int64, at the other stages where there is a subspace.

        Raises:
            ValueError: token ids are missing, that micro-batch is under way here, or this is the last stage.
        """
        if self.is_last:
            raise ValueError("the last stage gives a loss: it needs labels")
        return self._begin(number, given, tokens_BT, lambda hidden_BTD: hidden_BTD)

    def forward_loss(
        self, number: int, given: Tensor, loss_of: LossOf, tokens_BT: Tensor | None = None
    ) -> Tensor:
        """The loss of a micro-batch, a scalar; at the last stage.

        Args:
            number, given, tokens_BT: as for `forward`.
            loss_of: makes it from the logits.

        Raises:
            ValueError: token ids are missing, that micro-batch is under way here, or this is not the last stage.
        """
        if not self.is_last:
            raise ValueError("only the last stage gives a loss")
        return self._begin(
            number,
            given,
            tokens_BT,
            lambda hidden_BTD: loss_of(self._skeleton.run_head(hidden_BTD, 0, None)),
        )

    def backward(self, number: int, gradient: Tensor | None = None) -> Tensor | None:
        """Add a micro-batch's gradients to those of the parameters.

        Args:
            number: of a micro-batch that is under way here. It is not any more, unless this raises.
            gradient: of what `forward` gave; None at the last stage, of the loss itself.

        Returns:
            The gradient of what was given, [B, T, D]; None at the first stage.

        Raises:
            KeyError: it is not under way here.
            ValueError: the gradient is none of what was given.
        """
        given, result = self._under_way[number]
        if gradient is None:
            if not self.is_last:
                raise ValueError("a stage that is not the last needs the next one's gradient")
        elif gradient.shape != result.shape:
            raise ValueError(
                f"a gradient of shape {list(result.shape)} is due, got {list(gradient.shape)}"
            )
        else:
            gradient = gradient.to(self._device, result.dtype)
        del self._under_way[number]
        if result.requires_grad:  # else nothing learns here, nor in a stage before
            result.backward(gradient)
        return None if given is None else given.grad

    def forget(self, number: int) -> None:
        """Let go of a micro-batch without its backward pass; of one that is not under way nothing."""
        self._under_way.pop(number, None)

    @torch.no_grad()
    def infer(self, given: Tensor, tokens_BT: Tensor | None = None) -> Tensor:
        """Compute what the next stage is given, [B, T, D], or at the last logits [B, T, V]; nothing is dropped or kept.

        Args:
            given, tokens_BT: as for `forward`.
        """
        given = given.to(self._device)
        ids_BT = self._ids(given, tokens_BT)
        self._train(False)
        try:
            hidden_BTD = self._run(given if self.is_first else given.to(self._dtype), ids_BT)
            return self._skeleton.run_head(hidden_BTD, 0, None) if self.is_last else hidden_BTD
        finally:
            self._train(True)

    def ends_that_learn(self) -> tuple[frozenset[str], frozenset[str]]:
        """Names of parameters that learn outside the layers: with a part in the embedding, and with a part in the head.

        Both are known at the first and at the last stage; elsewhere there are none.
        """
        if not self._ends:
            return frozenset(), frozenset()
        skeleton = self._skeleton
        ids_BT = torch.zeros(1, _NUM_PROBED, dtype=torch.int64, device=self._device)
        shape = (1, _NUM_PROBED, skeleton.hidden_size)
        hidden_BTD = torch.zeros(shape, dtype=self._dtype, device=self._device)
        with torch.enable_grad():
            results = (
                skeleton.run_embedding(ids_BT, 0, None),
                skeleton.run_head(hidden_BTD, 0, None),
            )
        first, last = (
            frozenset(self._ends[leaf] for leaf in _leaves(result) if leaf in self._ends)
            for result in results
        )
        return first, last

    def in_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that have names of `parameters` as transformers writes them into a checkpoint.

        Args:
            tensors: all of a layer, or of what stands outside the layers, or none of it: some are put together.
        """
        return self._skeleton.in_checkpoint(tensors)

    def is_of_layer(self, name: str) -> bool:
        """Whether a parameter is one of a layer."""
        return name.startswith(self._skeleton.layer_name(0)[:-1])

    def _begin(
        self,
        number: int,
        given: Tensor,
        tokens_BT: Tensor | None,
        ending: Callable[[Tensor], Tensor],
    ) -> Tensor:
        if number in self._under_way:
            raise ValueError(f"micro-batch {number} is under way here")
        given = given.to(self._device)
        ids_BT = self._ids(given, tokens_BT)
        if not self.is_first:
            given = given.detach().to(self._dtype).requires_grad_(True)

        def run(entering: Tensor) -> Tensor:
            return ending(self._run(entering, ids_BT))

        result: Tensor = (
            run(given) if self._keeps_graphs else checkpoint(run, given, use_reentrant=False)
        )
        self._under_way[number] = _UnderWay(None if self.is_first else given, result)
        return result.detach()

    def _require_gradients(self, layer_id: int, quantization: Quantization) -> None:
        coded = self._skeleton.coded_forms(layer_id, quantization)
        for weight in expert_weights(self.templates[layer_id]):
            if weight.path(0) in coded:
                raise UnsupportedModelError(
                    f"{weight.module} of layer {layer_id} are experts in codes, through which no gradients go; train a "
                    "checkpoint that is not quantised"
                )

    def _ids(self, given: Tensor, tokens_BT: Tensor | None) -> Tensor | None:
        """The token ids that the subspace needs; None where there is none."""
        if self._subspace is None:
            return None
        if self.is_first:
            return given
        if tokens_BT is None:
            raise ValueError("a hidden state in a subspace says nothing without its token ids")
        return tokens_BT.to(self._device)

    def _run(self, entering: Tensor, ids_BT: Tensor | None) -> Tensor:
        if self.is_first:
            entering = self._skeleton.run_embedding(entering, 0, None)
        elif self._subspace is not None and ids_BT is not None:
            entering = self._subspace.expand(entering, ids_BT).to(self._dtype)
        left = self._skeleton.run_layers(entering, self.start, self.stop, 0, None)
        if self._subspace is None or ids_BT is None or self.is_last:
            return left
        return self._subspace.compress(left, ids_BT)

    def _train(self, is_training: bool) -> None:
        for module in (self._skeleton.model, *map(self._skeleton.layer, self._layer_ids)):
            module.train(is_training)

    @property
    def _layer_ids(self) -> range:
        return range(self.start, self.stop)

    def _let_learn(self, prefix: str, module: nn.Module) -> None:
        """Have the parameters of `module` learn, those of layers that are not here left out."""
        for name, parameter in module.named_parameters():
            if parameter.device.type != "meta" and parameter.is_floating_point():
                parameter.requires_grad_(True)
                self.parameters[prefix + name] = parameter


def _by_layer(names: Iterable[str], num_layers: int) -> defaultdict[int | None, list[str]]:
    found: defaultdict[int | None, list[str]] = defaultdict(list)
    for name in names:
        found[layer_of(name, num_layers)].append(name)
    return found


def _of(tensors: Mapping[str, Tensor], names: Sequence[str], takes_over: bool) -> dict[str, Tensor]:
    """Some of the tensors, the stage's own."""
    return {name: tensors[name] if takes_over else tensors[name].clone() for name in names}


def _leaves(result: Tensor) -> set[int]:
    """The ids of the tensors that `result` was computed from and that learn."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [each for each, _ in node.next_functions]
    return found
