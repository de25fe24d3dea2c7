"""The proof that a model's hidden states can be kept in a subspace, on a miniature of its own config.

Which parameters write into the hidden state is found by trying: all that have a dimension of its size are projected,
and those that make no difference to it are let go, one after the other. What is left are the writers. So no family is
known by name, and one whose hidden states leave the subspace all the same (a norm behind a block, an embedding that is
scaled) is refused, with the reason.

Then some steps are taken, and loss and gradients in stages are compared with those of the unsplit model with the same
weights.

Shape legend: B sequences, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from neurogrid.errors import ConfigurationError, UnsupportedModelError
from neurogrid.model.files.tensor_names import numbers_hidden
from neurogrid.model.proof.miniature import proving, small_model
from neurogrid.model.proof.miniature_split import saved_tensors
from neurogrid.model.proof.training_proof import (
    gradients_of,
    loss_of,
    pass_through,
    require_equal,
    require_gradients,
    without_dropout,
)
from neurogrid.model.stages.skeleton import find_layers, num_decoder_layers
from neurogrid.model.stages.subspace import (
    NUM_FREE_LAYERS,
    Subspace,
    SubspaceTraits,
    Writer,
    project_gradients,
    project_weights,
)
from neurogrid.model.stages.training_stage import TrainingStage

__all__ = ["check_subspace", "subspace_of"]

MOST_OUTSIDE: Final = 1e-4
"""Part of a hidden state's norm that may be outside of the subspace, in float32."""

# What is no writer makes less of a difference than this, and what is one more.
_NO_DIFFERENCE: Final = 1e-5
# Of a gradient's norm: what travels is rounded, by one projection more than in the unsplit model.
_TOLERANCE: Final = 1e-4
_SEQUENCES, _LENGTH, _STEPS = 2, 12, 3


def check_subspace(config: PreTrainedConfig) -> SubspaceTraits:
    """Prove on a miniature of `config` that its hidden states can be kept in a subspace; what is projected for it.

    On the CPU, in float32; takes about a second.

    Raises:
        UnsupportedModelError: with the reason, in one line.
    """
    with proving(f"hidden states of model type {config.model_type!r} cannot be in a subspace"):
        least = NUM_FREE_LAYERS + 1
        if (num_layers := num_decoder_layers(config)) < least:
            raise UnsupportedModelError(
                f"its last {NUM_FREE_LAYERS} layers write anything, so it is cut before them, and it has {num_layers} "
                "in all"
            )
        _, model = small_model(without_dropout(config))
        return _Check(model).run()


def subspace_of(
    config: PreTrainedConfig, num_dims: int, *, seed: int, device: torch.device | str = "cpu"
) -> Subspace:
    """The subspace of a model in a run.

    Args:
        num_dims: K.
        seed: of the run.

    Raises:
        ConfigurationError: K is not below the hidden size.
    """
    text = config.get_text_config(decoder=True)
    # As the embedding begins, so that what it learns is as large as the table.
    found = getattr(text, "initializer_range", None)
    scale = float(found) if isinstance(found, (int, float)) and found > 0 else 0.02
    try:
        return Subspace(num_dims, text.hidden_size, seed=seed, scale=scale, device=device)
    except ValueError as exc:
        raise ConfigurationError(f"[layout] subspace: {exc}") from exc


class _Check:
    """The steps of the proof, over one miniature."""

    def __init__(self, model: Any) -> None:
        self._model = model.train()
        self._num_layers = num_decoder_layers(model.config)
        self._layers = list(model.get_submodule(find_layers(model, self._num_layers)))
        text = model.config.get_text_config(decoder=True)
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._embedding = self._name_of_embedding(text.hidden_size)
        self._ids_BT = torch.randint(0, text.vocab_size, (_SEQUENCES, _LENGTH))
        size = text.hidden_size
        scale = float(self._parameters[self._embedding].detach().std())
        self._subspace = Subspace(max(1, size // 4), size, seed=1, scale=scale)
        self._begun = {name: each.detach().clone() for name, each in self._parameters.items()}

    def run(self) -> SubspaceTraits:
        """All of it; what is projected."""
        traits = SubspaceTraits(self._embedding, self._writers())
        self._learn(traits)
        for cuts in self._ways():
            self._compare(traits, cuts)
        return traits

    def _name_of_embedding(self, hidden_size: int) -> str:
        weight = self._model.get_input_embeddings().weight
        if weight.shape[-1] != hidden_size:
            raise UnsupportedModelError(
                f"it embeds tokens in {weight.shape[-1]} dimensions, and has hidden states of {hidden_size}"
            )
        return next(name for name, each in self._parameters.items() if each is weight)

    def _writers(self) -> tuple[Writer, ...]:
        size = self._subspace.hidden_size
        writers = sorted(
            {
                Writer(numbers_hidden(name), dim)
                for name, parameter in self._parameters.items()
                if name != self._embedding
                for dim, each in enumerate(parameter.shape)
                if each == size
            },
            key=lambda writer: (writer.pattern, writer.dim),
        )
        outside = self._outside_of(writers)
        for boundary, off in enumerate(outside):
            if not off <= MOST_OUTSIDE:
                raise UnsupportedModelError(
                    "what enters its first layer is not the embedding of tokens as it is: it is scaled, or has a norm"
                    if boundary == 0
                    else f"layer {boundary - 1} writes what no projection of its matrices keeps there, such as a norm "
                    f"behind a block ({off:.2g} of the hidden state is beside it)"
                )
        for writer in list(writers):
            fewer = [each for each in writers if each != writer]
            if max(self._outside_of(fewer)) <= max(_NO_DIFFERENCE, *outside):
                writers = fewer
        return tuple(writers)

    def _outside_of(self, writers: Sequence[Writer]) -> list[float]:
        """Distances of hidden states between layers from the subspace, with those writers projected in all layers."""
        self._begin_again()
        traits = SubspaceTraits(self._embedding, tuple(writers))
        project_weights(self._subspace, traits, self._parameters, self._num_layers, num_free=0)
        return [self._subspace.outside(each, self._ids_BT) for each in self._hidden_states()]

    @torch.no_grad()
    def _begin_again(self) -> None:
        for name, value in self._begun.items():
            self._parameters[name].copy_(value)

    def _hidden_states(self) -> list[Tensor]:
        """Hidden states that enter each layer, and those that leave the last: [B, T, D] each."""
        found: list[Tensor] = []

        def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append((args[0] if args else kwargs["hidden_states"]).detach())

        def leaving(_: nn.Module, __: Any, result: Any) -> None:
            found.append((result[0] if isinstance(result, tuple) else result).detach())

        hooks = [
            layer.register_forward_pre_hook(entering, with_kwargs=True) for layer in self._layers
        ]
        hooks.append(self._layers[-1].register_forward_hook(leaving))
        try:
            with torch.no_grad():
                self._model(input_ids=self._ids_BT, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _learn(self, traits: SubspaceTraits) -> None:
        """Some steps of the unsplit model, its weights kept in the subspace: its hidden states have to stay there."""
        self._begin_again()
        parameters, num_layers = self._parameters, self._num_layers
        project_weights(self._subspace, traits, parameters, num_layers)
        optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0.1)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            self._whole_loss().backward()
            project_gradients(self._subspace, traits, parameters, num_layers)
            optimizer.step()
            project_weights(self._subspace, traits, parameters, num_layers)
        for hidden_BTD in self._hidden_states()[: num_layers - NUM_FREE_LAYERS + 1]:
            off = self._subspace.outside(hidden_BTD, self._ids_BT)
            if not off <= MOST_OUTSIDE:
                raise UnsupportedModelError(
                    f"after {_STEPS} steps {off:.2g} of a hidden state is beside the subspace"
                )

    def _whole_loss(self) -> Tensor:
        logits_BTV = self._model(input_ids=self._ids_BT, use_cache=False).logits
        return loss_of(logits_BTV, self._ids_BT)

    def _ways(self) -> list[tuple[tuple[int, ...], bool]]:
        """Cuts to prove, each with whether graphs are kept: none is behind the last layer that is projected."""
        last = self._num_layers - NUM_FREE_LAYERS
        most = (1, last) if last > 1 else (1,)
        return [((last,), True), (most, True), (most, False)]

    def _compare(self, traits: SubspaceTraits, way: tuple[tuple[int, ...], bool]) -> None:
        cuts, keeps_graphs = way
        where = f"cut before layer {' and '.join(map(str, cuts))}"
        self._model.zero_grad()
        whole = self._whole_loss()
        whole.backward()
        project_gradients(self._subspace, traits, self._parameters, self._num_layers)
        expected = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        tensors = saved_tensors(self._model)
        stages = [
            TrainingStage(
                self._model.config,
                start,
                stop,
                tensors,
                keeps_graphs=keeps_graphs,
                subspace=self._subspace,
            )
            for start, stop in pairwise((0, *cuts, self._num_layers))
        ]
        loss = pass_through(stages, self._ids_BT)
        for stage in stages:
            project_gradients(self._subspace, traits, stage.parameters, self._num_layers)
        require_equal("the loss", loss, whole.detach(), where, tolerance=_TOLERANCE)
        found: Mapping[str, Tensor] = gradients_of(stages)
        require_gradients(found, expected, where, tolerance=_TOLERANCE)
