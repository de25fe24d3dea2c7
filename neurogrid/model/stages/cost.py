"""The cost of each layer of a model in memory, found without allocating any of it.

Weights are counted, and caches measured, on the meta device, where the layers themselves make their
caches: one layer of each kind takes one token, then two. Where that cannot be run, the cache is an
upper bound. What a layer needs for a moment to compute is estimated from its sizes.

Units: bytes, for one session where it says cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedConfig

from neurogrid.model.caches.cache import StageCache
from neurogrid.model.files.model_code import MODEL_CODE_ERRORS, quiet_transformers
from neurogrid.model.files.quantization import Quantization
from neurogrid.model.files.tensor_names import numbers_hidden
from neurogrid.model.kernels import coded_size
from neurogrid.model.stages.experts import linear_weights
from neurogrid.model.stages.skeleton import Skeleton

__all__ = ["LayerCost", "layer_cost", "workspace_bytes"]

# How families call the experts of a layer, and those that a token is given to.
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")

# In the path of what only some of a token's weights are.
_ROUTED = ".experts."


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer.

    Attributes:
        weight_bytes: parameters and buffers, in the dtype that was asked for.
        cache_bytes_per_token: what each token of a session adds.
        cache_bytes_fixed: what a session costs however long it is.
        max_cached_tokens: tokens after which the cache grows no more (a window), None for no bound.
        step_bytes: of the weights that a token goes through; of the experts of a mixture, only those that it is
            given to. None for all weights.
        coded_bytes_per_token: what each token of a session adds to a coded cache; None where that is not known.
    """

    weight_bytes: int
    cache_bytes_per_token: int
    cache_bytes_fixed: int = 0
    max_cached_tokens: int | None = None
    step_bytes: int | None = None
    coded_bytes_per_token: int | None = None

    @property
    def coded(self) -> LayerCost:
        """The same with a coded cache."""
        if self.coded_bytes_per_token is None:
            return self
        return replace(self, cache_bytes_per_token=self.coded_bytes_per_token)

    def cache_bytes(self, num_tokens: int) -> int:
        """Bytes of the cache of one session of `num_tokens` tokens."""
        if self.max_cached_tokens is not None:
            num_tokens = min(num_tokens, self.max_cached_tokens)
        return self.cache_bytes_fixed + num_tokens * self.cache_bytes_per_token


def layer_cost(
    config: PreTrainedConfig, dtype: torch.dtype, quantization: Quantization | None = None
) -> tuple[LayerCost, ...]:
    """The cost of each decoder layer, in order.

    Args:
        config: from `build_config`.
        dtype: what weights and caches are held in.
        quantization: which of the weights are codes.

    Raises:
        UnsupportedModelError: the model cannot be built, or its layers cannot be told.
    """
    skeleton = Skeleton(config, dtype=dtype, device=torch.device("meta"))
    measured: dict[object, tuple[int, int, int]] = {}
    costs = []
    for layer_id, layer in enumerate(skeleton.templates):
        cache = StageCache(skeleton.config)
        window = cache.window(layer_id)
        kind = (type(cache.layers[layer_id]), window, _shapes(layer))
        if kind not in measured:
            measured[kind] = _cache_growth(skeleton, layer_id)
        per_token, fixed, coded = measured[kind]
        costs.append(
            LayerCost(
                weight_bytes=_bytes(layer) - _saved_bytes(layer_id, layer, quantization),
                cache_bytes_per_token=per_token,
                cache_bytes_fixed=fixed,
                max_cached_tokens=window - 1 if window else None,
                step_bytes=_step_bytes(layer_id, layer, config, quantization),
                coded_bytes_per_token=coded,
            )
        )
    return tuple(costs)


def workspace_bytes(
    config: PreTrainedConfig, dtype: torch.dtype, num_tokens: int, num_keys: int | None = None
) -> int:
    """Estimate the bytes a stage needs for a moment while tokens of one session go through a layer.

    Counted: some hidden states, queries, keys and values, the three products of an MLP, and a mask. Kernels of
    attention that keep no scores are assumed (`sdpa`).

    Args:
        num_tokens: that go through at once.
        num_keys: that they see at most; None for as many.
    """
    text = config.get_text_config(decoder=True)
    hidden = int(text.hidden_size)
    dense = _whole(text, "intermediate_size") or 4 * hidden
    routed = (_whole(text, "moe_intermediate_size") or dense) * _whole(text, *ACTIVE_EXPERTS)
    elements_per_token = 9 * hidden + 3 * max(dense, routed) + (num_keys or num_tokens)
    return num_tokens * elements_per_token * dtype.itemsize


def _step_bytes(
    layer_id: int, layer: nn.Module, config: PreTrainedConfig, quantization: Quantization | None
) -> int | None:
    text = config.get_text_config(decoder=True)
    num_experts, num_active = _whole(text, *NUM_EXPERTS), _whole(text, *ACTIVE_EXPERTS)
    routed = sum(
        tensor.numel() * tensor.itemsize
        for name, tensor in layer.named_parameters()
        if _ROUTED in name
    ) - _saved_bytes(layer_id, layer, quantization, _ROUTED)
    if not routed or not 0 < num_active < num_experts:
        return None
    whole = _bytes(layer) - _saved_bytes(layer_id, layer, quantization)
    return whole - routed + routed * num_active // num_experts


def _whole(config: PreTrainedConfig, *names: str) -> int:
    """The first of these that the config has as a positive number; 0 if none."""
    values = (getattr(config, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and v > 0), 0)


def _cache_growth(skeleton: Skeleton, layer_id: int) -> tuple[int, int, int]:
    """Bytes of cache for each token, for a session of none, and for each token of a coded one."""
    sizes = []
    heads: list[tuple[int, int]] = []
    for num_tokens in (1, 2):
        cache = StageCache(skeleton.config)
        before = cache.state_bytes(layer_id)
        hidden_BTD = torch.zeros(
            1, num_tokens, skeleton.hidden_size, dtype=skeleton.dtype, device="meta"
        )
        try:
            with torch.inference_mode(), quiet_transformers():
                skeleton.run_layers(hidden_BTD, layer_id, layer_id + 1, 0, cache)
        except MODEL_CODE_ERRORS:
            # What looks at values cannot run without memory. Most do so behind the attention.
            if cache.state_bytes(layer_id) == before:
                most = _most_heads(skeleton.config)
                return (
                    _plain_bytes(most, skeleton.dtype),
                    before,
                    _coded_bytes(most),
                )
        sizes.append(cache.state_bytes(layer_id))
        heads = cache.state_heads(layer_id)
    per_token = sizes[1] - sizes[0]
    coded = per_token - _plain_bytes(heads, skeleton.dtype) + _coded_bytes(heads)
    return per_token, sizes[0] - per_token, coded


def _plain_bytes(heads: Sequence[tuple[int, int]], dtype: torch.dtype) -> int:
    """Bytes that one token's keys and values take.

    Args:
        heads: how many, and their size, of keys and of values each.
    """
    return sum(count * size for count, size in heads) * dtype.itemsize


def _coded_bytes(heads: Sequence[tuple[int, int]]) -> int:
    return sum(count * coded_size(size) for count, size in heads)


def _most_heads(config: PreTrainedConfig) -> list[tuple[int, int]]:
    """An upper bound for attention: a key and a value for each head, none of them shared."""
    text = config.get_text_config(decoder=True)
    num_heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or math.ceil(text.hidden_size / num_heads)
    return [(num_heads, head_dim)] * 2


def _shapes(layer: nn.Module) -> tuple[object, ...]:
    return tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())


def _saved_bytes(
    layer_id: int, layer: nn.Module, quantization: Quantization | None, part: str = ""
) -> int:
    """Bytes that weights take less as codes, those whose path has `part` in it."""
    if quantization is None:
        return 0
    saved = 0
    for path, weight in linear_weights(layer).items():
        form = quantization.form(layer_id, numbers_hidden(path), weight.shape)
        if part in path and form is not None:
            saved += weight.nbytes - form.num_bytes(weight.shape)
    return saved


def _bytes(layer: nn.Module) -> int:
    tensors = [*layer.parameters(), *layer.buffers()]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
