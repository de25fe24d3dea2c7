"""Some layers of a model, and its two ends: what a worker and what the coordinator run.

A `Stage` holds any of the decoder layers, takes a hidden state and gives one back. `Ends` turns
token ids into the first hidden state and the last one into logits. Both are the checkpoint's own
model with slots for layers (skeleton.py), so nothing here knows a family. Equality with the whole
model is not promised by these classes but proven by `check_splittable`, for each config.

Not thread-safe: one call at a time. No I/O, no sessions: who keeps the caches is another's concern.

Shape legend: B batch (always 1), T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from neurogrid.model.cache import StageCache
from neurogrid.model.skeleton import Skeleton

__all__ = ["Ends", "Stage"]


class Stage:
    """Decoder layers of a model, loaded one by one.

    Args:
        config: the model's config, from `build_config`.
        dtype: what weights are cast to and hidden states are computed in.
        device: where the layers live.

    Attributes:
        num_layers: decoder layers of the whole model.
        hidden_size: the D of hidden states.

    Raises:
        UnsupportedModelError: the config names no causal language model whose layers can be told.
    """

    def __init__(
        self, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._device = torch.device(device)
        self._skeleton = Skeleton(config, dtype=dtype, device=self._device)
        self._skeleton.shape_ends()
        self._dtype = dtype
        self._held: set[int] = set()
        self.num_layers = self._skeleton.num_layers
        self.hidden_size = self._skeleton.hidden_size

    @property
    def held_layers(self) -> frozenset[int]:
        """The layers that are loaded."""
        return frozenset(self._held)

    @property
    def model(self) -> PreTrainedModel:
        """The model that runs: what stands outside the layers is there in shape only."""
        return self._skeleton.model

    def layer(self, layer_id: int) -> nn.Module:
        """The module of a held layer."""
        if layer_id not in self._held:
            raise ValueError(f"layer {layer_id} is not held here")
        return self._skeleton.layer(layer_id)

    def load_layer(self, layer_id: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a layer, in place of what it held before.

        On the CPU a tensor that needs no cast and no conversion and is aligned to 64 bytes is used
        as it is: the caller gives it up and must not change it afterwards.

        Args:
            layer_id: 0..num_layers-1.
            tensors: under their checkpoint names, in the checkpoint's layout; all of the layer's.

        Raises:
            ValueError: no such layer, or a tensor of another layer.
            CheckpointError: a tensor is missing, unknown, or of a wrong shape.
        """
        if not 0 <= layer_id < self.num_layers:
            raise ValueError(
                f"layer {layer_id} given, the model has layers 0..{self.num_layers - 1}"
            )
        self._skeleton.load_layer(layer_id, tensors)
        self._held.add(layer_id)

    def drop_layer(self, layer_id: int) -> None:
        """Free one layer. Caches made for it are of no use any more."""
        if layer_id in self._held:
            self._skeleton.drop_layer(layer_id)
            self._held.discard(layer_id)

    def new_cache(self) -> StageCache:
        """An empty cache for one session."""
        return StageCache(self._skeleton.config)

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        *,
        start: int,
        stop: int,
        position: int,
        cache: StageCache,
    ) -> torch.Tensor:
        """Run layers [start, stop), all of them held.

        Args:
            hidden_BTD: [1, T, D], what left layer start-1, or the embedding; any floating dtype.
            position: of its first token in the sequence: the tokens that these layers have cached.
            cache: the session's, from `new_cache`. Advanced by T; if the forward raises after it
                may have been written to, it is spoiled and says so when it is used again.

        Returns:
            [1, T, D] in the stage's dtype, on its device.

        Raises:
            ValueError: a layer that is not held, a wrong shape, or a position that does not
                continue the cache. The cache is unchanged.
            ModelError: the cache was spoiled before.
        """
        if not 0 <= start < stop <= self.num_layers:
            raise ValueError(f"layers {start}..{stop - 1} are no range of {self.num_layers} layers")
        absent = [i for i in range(start, stop) if i not in self._held]
        if absent:
            raise ValueError(f"layer {absent[0]} is not held here")
        _check_hidden(hidden_BTD, self.hidden_size)
        num_tokens = hidden_BTD.shape[1]
        with torch.inference_mode():
            hidden_BTD = hidden_BTD.to(self._device, self._dtype)
            cache.begin(start, stop, position)
            try:
                result_BTD = self._skeleton.run_layers(hidden_BTD, start, stop, position, cache)
                cache.commit(start, stop, num_tokens)
            except BaseException as exc:
                cache.spoil(f"{type(exc).__name__}: {exc}")
                raise
        return result_BTD


class Ends:
    """Embedding and head of a model: what stands before its first and after its last layer.

    Args, errors: as for `Stage`. Attributes: `num_layers`, `hidden_size`.
    """

    def __init__(
        self, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._device = torch.device(device)
        self._skeleton = Skeleton(config, dtype=dtype, device=self._device)
        self._dtype = dtype
        self._cache = StageCache(self._skeleton.config)
        self._is_loaded = False
        self.num_layers = self._skeleton.num_layers
        self.hidden_size = self._skeleton.hidden_size
        self.vocab_size: int = self._skeleton.config.get_text_config(decoder=True).vocab_size

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors outside the layers, under their checkpoint names.

        Raises:
            CheckpointError: one is missing (a head that is tied to the embedding need not be
                there), unknown, or of a wrong shape.
        """
        self._skeleton.load_ends(tensors)
        self._is_loaded = True

    def embed(self, token_ids: Sequence[int], *, position: int) -> torch.Tensor:
        """What enters layer 0: [1, T, D] in the model's dtype.

        Args:
            token_ids: at least one, each in 0..vocab_size-1.
            position: of the first one in the sequence.
        """
        self._check(position)
        if not token_ids or not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ValueError(f"token ids must be one or more of 0..{self.vocab_size - 1}")
        with torch.inference_mode():
            self._cache.pretend(position)
            input_ids_BT = torch.tensor([token_ids], device=self._device)
            return self._skeleton.run_embedding(input_ids_BT, position, self._cache)

    def logits(self, hidden_BTD: torch.Tensor, *, position: int) -> torch.Tensor:
        """Logits [V] in float32 for the token after the last one of `hidden_BTD`.

        Args:
            hidden_BTD: [1, T, D], what left the last layer. Only the last token matters; with all
                of them the bits are those of the whole model, with the last alone they may differ
                by rounding in families that multiply matrices between the layers and the head.
            position: of the first token of `hidden_BTD` in the sequence.
        """
        self._check(position)
        _check_hidden(hidden_BTD, self.hidden_size)
        with torch.inference_mode():
            self._cache.pretend(position)
            hidden_BTD = hidden_BTD.to(self._device, self._dtype)
            return self._skeleton.run_head(hidden_BTD, position, self._cache)[0, -1].float()

    def _check(self, position: int) -> None:
        if not self._is_loaded:
            raise ValueError("the ends of the model are not loaded yet")
        if position < 0:
            raise ValueError(f"position {position} is negative")


def _check_hidden(hidden_BTD: torch.Tensor, hidden_size: int) -> None:
    shape = tuple(hidden_BTD.shape)
    if len(shape) != 3 or shape[0] != 1 or shape[1] < 1 or shape[2] != hidden_size:
        raise ValueError(f"a hidden state of shape [1, T, {hidden_size}] is due, got {list(shape)}")
    if not hidden_BTD.is_floating_point():
        raise ValueError(f"a hidden state of a floating dtype is due, got {hidden_BTD.dtype}")
