"""Sizes of the layers of a model, and of what an adapter adds to each, from its config: no weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from neurogrid.errors import ConfigurationError
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config
from neurogrid.model.files.quantization import METHODS, CodesForm
from neurogrid.model.stages.skeleton import build_on_meta, find_layers, num_decoder_layers
from neurogrid.training.leading.chains.weights import codes_of
from neurogrid.training.leading.model_numbers import read_config
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.run_file.stage_sections import AdapterSection
from neurogrid.training.stages.chain_estimate import ChainNumbers
from neurogrid.training.stages.holdings import FIRST, LAST, layer_piece, state_pieces
from neurogrid.training.stages.lora import num_adapter_parameters, require_targets

__all__ = ["chain_numbers", "pieces_that_learn"]


def chain_numbers(place: Path, adapter: AdapterSection) -> ChainNumbers:
    """Count the language model at a place, layer by layer.

    Args:
        place: a directory with config.json, or that file.
        adapter: what learns in the place of the weights.

    Raises:
        ConfigurationError: there is no config, the layers have nothing of what the adapter names, something is to be
            made of what is quantised already, or codes would have to learn.
        CheckpointError: its weights are there, and damaged.
        UnsupportedModelError: transformers has no such model, or its layers cannot be told from the rest.
    """
    config = build_config(read_config(place))
    model = build_on_meta(config, torch.float32)
    num_layers = num_decoder_layers(config)
    name = find_layers(model, num_layers)
    layers = list(model.get_submodule(name).children())
    if adapter.r:
        require_targets(adapter, layers)
    before, after = _ends(model, f"{name}.")
    text = config.get_text_config(decoder=True)
    return ChainNumbers(
        layers=tuple(sum(each.numel() for each in layer.parameters()) for layer in layers),
        adapters=tuple(num_adapter_parameters(adapter, layer) for layer in layers),
        coded=_coded(place, adapter, layers),
        ends=_count(before | after),
        first=_count(before),
        last=_count(after),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )


def pieces_that_learn(
    run: RunFile, numbers: ChainNumbers, bounds: Sequence[int], index: int
) -> frozenset[str]:
    """The pieces of state that a stage has: of `state_pieces` those in which something learns."""
    if run.adapter.r:
        ends, layers = {FIRST: 0, LAST: 0}, numbers.adapters
    else:
        ends = {FIRST: numbers.first, LAST: numbers.last - numbers.num_tied}
        layers = numbers.layers
    learning = ends | {layer_piece(layer_id): num for layer_id, num in enumerate(layers)}
    return frozenset(name for name in state_pieces(bounds, index) if learning[name])


def _coded(place: Path, adapter: AdapterSection, layers: list[nn.Module]) -> tuple[int, ...]:
    """Bytes of each layer that has matrices in codes, as it is held; none where nothing is codes."""
    if place.is_dir() and any(place.glob("*.safetensors")):
        checkpoint = Checkpoint.open(place)
        form = codes_of(checkpoint, adapter.quantize)
        if form is None:
            return ()
        if not adapter.r:
            raise ConfigurationError(
                "the checkpoint is quantised, and codes do not learn: train an adapter beside them ([adapter] r)"
            )
        return tuple(checkpoint.layer_blob(i, form).num_bytes for i in range(len(layers)))
    made = METHODS.get(adapter.quantize)
    return () if made is None else tuple(_bytes_in_codes(layer, made) for layer in layers)


def _bytes_in_codes(layer: nn.Module, form: CodesForm) -> int:
    """Bytes of a layer in which all matrices that can be are made codes, and the rest is float32."""
    matrices = {
        id(module.weight)
        for module in layer.modules()
        if isinstance(module, nn.Linear) and form.takes(module.weight.shape)
    }
    return sum(
        form.num_bytes(each.shape) if id(each) in matrices else each.nbytes
        for each in layer.parameters()
    )


def _ends(model: nn.Module, layers: str) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """The parameters before the layers, and those behind them; tied ones are both."""
    before: set[nn.Parameter] = set()
    after: set[nn.Parameter] = set()
    found = before
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(layers):
            found = after
        else:
            found.add(parameter)
    return before, after


def _count(parameters: set[nn.Parameter]) -> int:
    return sum(each.numel() for each in parameters)
