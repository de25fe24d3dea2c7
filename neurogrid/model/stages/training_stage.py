"""Some layers of a model that learn: a forward pass, and later the backward pass of what went through.

What a `TrainingStage` does with a micro-batch is a part of what the whole model does with it: the first stage embeds
token ids, the last one gives a loss, and gradients go the way back. The passes are those of the skeleton (skeleton.py),
without a cache; so nothing here knows a family, and that the parts give loss and gradients of the whole is proven for
each config (proof/training_proof.py).

Not thread-safe: one call at a time.

Shape legend: B sequences, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from neurogrid.model.files.tensor_names import is_end_tensor, layer_of
from neurogrid.model.stages.skeleton import Skeleton

__all__ = ["LossOf", "TrainingStage"]

LossOf = Callable[[Tensor], Tensor]
"""Makes the loss of a micro-batch, a scalar, from its logits [B, T, V]."""


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
            checkpoint names. They are copied.
        dtype: of the weights.
        device: where all is.
        keeps_graphs: whether what a forward pass computed is kept for the backward pass. Else its input is, and it is
            computed again, with the same random numbers.

    Attributes:
        parameters: what learns, by its name in the whole model. At the first and the last stage everything outside the
            layers is among it: what gets no gradient here is another stage's.

    Raises:
        UnsupportedModelError: the config names no causal language model whose layers can be told.
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
    ) -> None:
        self._device, self._dtype = torch.device(device), dtype
        self._keeps_graphs = keeps_graphs
        skeleton = self._skeleton = Skeleton(config, dtype=dtype, device=self._device)
        if not 0 <= start < stop <= skeleton.num_layers:
            raise ValueError(
                f"layers {start} to {stop} given, the model has layers 0..{skeleton.num_layers - 1}"
            )
        self.start, self.stop = start, stop
        self.parameters: dict[str, nn.Parameter] = {}
        self._under_way: dict[int, _UnderWay] = {}
        if self.is_first or self.is_last:
            skeleton.load_ends({n: t.clone() for n, t in tensors.items() if is_end_tensor(n)})
            skeleton.model.train()
            self._let_learn("", skeleton.model)
        else:
            skeleton.shape_ends()
            skeleton.model.train()
        for layer_id in range(start, stop):
            own = {
                name: tensor.clone()
                for name, tensor in tensors.items()
                if layer_of(name, skeleton.num_layers) == layer_id
            }
            skeleton.load_layer(layer_id, own)
            layer = skeleton.layer(layer_id)
            layer.train()
            self._let_learn(f"{skeleton.layer_name(layer_id)}.", layer)

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

    def forward(self, number: int, given: Tensor) -> Tensor:
        """What the next stage is given of a micro-batch: [B, T, D]; not at the last stage.

        Args:
            number: of the micro-batch, for its backward pass.
            given: the hidden state [B, T, D] that the stage before sent, or at the first stage token ids [B, T], int64.

        Raises:
            ValueError: that micro-batch is under way here, or this is the last stage.
        """
        if self.is_last:
            raise ValueError("the last stage gives a loss: it needs labels")
        return self._begin(number, given, lambda hidden_BTD: hidden_BTD)

    def forward_loss(self, number: int, given: Tensor, loss_of: LossOf) -> Tensor:
        """The loss of a micro-batch, a scalar; at the last stage.

        Args:
            number, given: as for `forward`.
            loss_of: makes it from the logits.

        Raises:
            ValueError: that micro-batch is under way here, or this is not the last stage.
        """
        if not self.is_last:
            raise ValueError("only the last stage gives a loss")
        return self._begin(
            number,
            given,
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
        result.backward(gradient)
        return None if given is None else given.grad

    def forget(self, number: int) -> None:
        """Let go of a micro-batch without its backward pass; of one that is not under way nothing."""
        self._under_way.pop(number, None)

    def is_of_layer(self, name: str) -> bool:
        """Whether a parameter is one of a layer."""
        return name.startswith(self._skeleton.layer_name(0)[:-1])

    def _begin(self, number: int, given: Tensor, ending: Callable[[Tensor], Tensor]) -> Tensor:
        if number in self._under_way:
            raise ValueError(f"micro-batch {number} is under way here")
        given = given.to(self._device)
        if not self.is_first:
            given = given.detach().to(self._dtype).requires_grad_(True)

        def run(entering: Tensor) -> Tensor:
            if self.is_first:
                entering = self._skeleton.run_embedding(entering, 0, None)
            return ending(self._skeleton.run_layers(entering, self.start, self.stop, 0, None))

        result: Tensor = (
            run(given) if self._keeps_graphs else checkpoint(run, given, use_reentrant=False)
        )
        self._under_way[number] = _UnderWay(None if self.is_first else given, result)
        return result.detach()

    def _let_learn(self, prefix: str, module: nn.Module) -> None:
        """Have the parameters of `module` learn, those of layers that are not here left out."""
        for name, parameter in module.named_parameters():
            if parameter.device.type != "meta" and parameter.is_floating_point():
                parameter.requires_grad_(True)
                self.parameters[prefix + name] = parameter
