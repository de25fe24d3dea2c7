"""A config of the same structure as a given one, small enough to try things on.

By the names of its keys and by the ratios between its numbers, not by family: head counts shrink by
one common divisor and head sizes by another, so that whatever is their product (hidden size,
projections, state sizes) shrinks by both and every relation between them stays. Layers are a prefix
that reaches the first layer of every kind, kinds being found by comparing the layers of the built
model, so no rule that a config may use to lay them out needs to be known. Lengths at which a model
changes its ways (sliding window, chunk, original length of a scaled rope) become short and remain
distinct. All else, multipliers, caps, flags, stays.

It knows nothing of what the miniature is for. When a guess of it cannot be built, a larger one is
tried: first with full head sizes, then with all heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from neurogrid.model.stages.skeleton import build_on_meta, find_layers, num_decoder_layers

__all__ = ["LengthLimit", "Miniature", "miniatures"]

_VOCAB_SIZE = 128
_MAX_POSITIONS = 512

# The lengths that thresholds shrink to, in order of their true size; the next ones 8 further each.
_FIRST_LENGTH, _NEXT_LENGTH = 8, 8

# A head this wide still has several rotary frequencies, and parts of it that are rotated or not.
_MIN_HEAD_DIM, _MIN_HIDDEN = 12, 32
_MAX_TOP_K = 4

# Integers up to this are counts, kernel widths and the like, that shape the structure: kept.
_SMALL = 16

_HEADS = re.compile(r"(?<!d_)heads?(?:_kv)?$")
_HEAD_DIM = re.compile(r"(?:head_dim|head_size|kv_channels|rotary_dim|rope_dim|d_head)$")
_WIDTH = re.compile(r"(?:size|size_mlp|dim|dim_out|rank|width|embd|d_model|d_ff|inner|d_ssm)$")
_NO_WIDTH = re.compile(r"(?:kernel|patch|image|state|vocab|window|chunk|block)_?size|_L_cache$")
_THRESHOLD = re.compile(r"(?:window|window_size|chunk_size|floor_scale|index_topk)$")
_ORIGINAL = re.compile(r"^original_max_position_embeddings$")
_POSITIONS = re.compile(r"^(?:max_position_embeddings|n_positions|max_seq_len|n_ctx|seq_length)$")
_EXPERTS = re.compile(r"^(?:num|n|moe_num)_(?:routed_|local_|moe_)?experts$")
_TOP_K = re.compile(r"^(?:num_experts_per_tok\w*|moe_(?:top_?)?k|num_selected_experts)$")
_TOKEN = re.compile(r"token_(?:ids?|index)$")
_INDICES = re.compile(r"(?:layers?|idxs?|indices|ids|indexes)$")


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """A length at which the model may change its ways: in the miniature, and in the model."""

    small: int
    full: int


@dataclass(frozen=True, slots=True)
class Miniature:
    """The keys of a small config, and the lengths that it has short."""

    config_class: type[PreTrainedConfig]
    keys: Mapping[str, Any]
    limits: tuple[LengthLimit, ...]

    def build(self) -> PreTrainedConfig:
        """The small config; raises whatever its class does not like."""
        config: PreTrainedConfig = self.config_class.from_dict(dict(self.keys))
        return config


@dataclass(slots=True)
class _Plan:
    """The divisors of one miniature, and what it maps to."""

    head_count_divisor: int
    head_dim_divisor: int
    num_layers: int
    kept_layers: int
    num_groups: int = 1
    groups_used: int = 1
    top_k: int = 1
    lengths: dict[int, int] = field(default_factory=dict)
    whole_lists: frozenset[str] = frozenset()
    stretch: int | None = None

    @property
    def divisor(self) -> int:
        return self.head_count_divisor * self.head_dim_divisor


def miniatures(config: PreTrainedConfig) -> Iterator[Miniature]:
    """Miniatures of `config`, the smallest first; one that cannot be built may be among them.

    Raises:
        UnsupportedModelError: transformers cannot build the model, or its layers cannot be told.
    """
    num_layers = num_decoder_layers(config)
    kept_layers = _kept_layers(config, num_layers)
    raw = config.to_dict()
    main = raw
    text = config.get_text_config(decoder=True)
    if text is not config:
        main = text.to_dict()
    lengths = _short_lengths(raw)
    whole_lists = _whole_lists(text, num_layers)
    seen = []
    for divisors in _divisors(text, main):
        if divisors in seen:
            continue
        seen.append(divisors)
        plan = _Plan(*divisors, num_layers, kept_layers, lengths=lengths, whole_lists=whole_lists)
        _plan_experts(main, plan)
        _plan_positions(raw, plan)
        small = _shrink_mapping(raw, plan, _layers_key(text))
        yield Miniature(
            type(config),
            small,
            tuple(LengthLimit(s, full) for full, s in sorted(lengths.items())),
        )


def _layers_key(text: PreTrainedConfig) -> str:
    return text.attribute_map.get("num_hidden_layers", "num_hidden_layers")


def _whole_lists(text: PreTrainedConfig, num_layers: int) -> frozenset[str]:
    """The keys of lists that have an entry for each layer by chance alone.

    So are those that the family's own defaults have in the same length, for another number of layers.
    """
    try:
        defaults = type(text)()
        if num_decoder_layers(defaults) == num_layers:
            return frozenset()
    except Exception:  # noqa: BLE001  a family without defaults that make sense tells nothing
        return frozenset()
    return frozenset(
        key
        for key, value in defaults.to_dict().items()
        if isinstance(value, (list, tuple)) and len(value) == num_layers
    )


def _kept_layers(config: PreTrainedConfig, num_layers: int) -> int:
    """The length of the shortest prefix with a layer of every kind, and one more; 3 at least."""
    model = build_on_meta(config, torch.float32)
    layers = model.get_submodule(find_layers(model, num_layers))
    traits = [_traits(layer) for layer in layers.children()]
    first: dict[frozenset[tuple[str, object]], int] = {}
    values: dict[str, list[object]] = {}
    for each in traits:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    # What is another in every layer that has it is the layer's number, and no kind.
    numbers = {name for name, seen in values.items() if len(set(seen)) == len(seen) > 1}
    for i, each in enumerate(traits):
        kind = frozenset((k, None if k in numbers else v) for k, v in each.items())
        first.setdefault(kind, i)
    return min(num_layers, max(3, max(first.values()) + 2))


def _traits(layer: nn.Module) -> dict[str, object]:
    """Return the traits that tell one layer from another: classes, plain attributes, shapes of parameters."""
    traits: dict[str, object] = {}
    for path, module in layer.named_modules():
        traits[f"{path}:class"] = type(module).__name__
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, (bool, int, float, str)):
                traits[f"{path}:{name}"] = value
    for path, parameter in layer.named_parameters():
        traits[f"{path}:shape"] = tuple(parameter.shape)
    return traits


def _divisors(text: PreTrainedConfig, main: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Pairs (of head counts, of head sizes) to divide by, the largest first."""
    heads = [v for k, v in main.items() if _HEADS.search(k) and _is_count(v)]
    hidden = getattr(text, "hidden_size", 0) or 0
    dims = {v for k, v in main.items() if _HEAD_DIM.search(k) and _is_count(v)}
    if not dims and heads and hidden:
        dims = {hidden // max(heads)}
    rotated = {int(dim * _rotary_factor(main)) for dim in dims}
    widest = max(dims, default=0)
    dim_divisor = max(
        (
            d
            for d in range(1, widest + 1)
            if widest // d >= _MIN_HEAD_DIM
            and all(dim % d == 0 for dim in dims)
            and all(dim % (2 * d) == 0 for dim in rotated)
        ),
        default=1,
    )
    common = math.gcd(*heads) if heads else max(hidden, 1)
    grouped = [
        (main[prefix + name], groups)
        for key, groups in main.items()
        if key.endswith("n_groups") and _is_count(groups)
        for prefix in [key.removesuffix("n_groups")]
        for name in ("n_heads", "num_heads")
        if _is_count(main.get(prefix + name))
    ]

    def count_divisor(dim_divisor: int) -> int:
        return max(
            (
                g
                for g in range(1, common + 1)
                if all(h % g == 0 and h // g >= min(h, 2) for h in heads)
                and max(heads, default=0) // g >= min(max(heads, default=0), 4)
                and all(h // g % groups == 0 for h, groups in grouped)
                and hidden % (g * dim_divisor) == 0
                and hidden // (g * dim_divisor) >= min(hidden, _MIN_HIDDEN)
            ),
            default=1,
        )

    if hidden and hidden % dim_divisor == 0:
        yield count_divisor(dim_divisor), dim_divisor
    yield count_divisor(1), 1
    yield 1, 1


def _rotary_factor(main: Mapping[str, Any]) -> float:
    rope = main.get("rope_parameters")
    for source in (rope if isinstance(rope, Mapping) else {}, main):
        for name in ("partial_rotary_factor", "rotary_pct"):
            if isinstance(source.get(name), (int, float)):
                return float(source[name])
    return 1.0


def _short_lengths(raw: Mapping[str, Any]) -> dict[int, int]:
    """The thresholds that a config names anywhere, with the short length of each."""
    found: set[int] = set()
    dynamic = False
    for key, value in _walk(raw):
        if (_THRESHOLD.search(key) or _ORIGINAL.match(key)) and _is_count(value):
            found.add(value)
        dynamic |= key in ("rope_type", "type") and value == "dynamic"
    if dynamic:
        found |= {v for k, v in _walk(raw) if _POSITIONS.match(k) and _is_count(v)}
    return {
        full: min(full, _FIRST_LENGTH + i * _NEXT_LENGTH) for i, full in enumerate(sorted(found))
    }


def _plan_experts(main: Mapping[str, Any], plan: _Plan) -> None:
    top_k = max((v for k, v in main.items() if _TOP_K.match(k) and _is_count(v)), default=1)
    plan.top_k = min(top_k, _MAX_TOP_K)
    plan.num_groups = main.get("n_group") or 1
    plan.groups_used = main.get("topk_group") or 1


def _plan_positions(raw: Mapping[str, Any], plan: _Plan) -> None:
    """Keep by how much a scaled rope stretches: some scale attention by it."""
    originals = [v for k, v in _walk(raw) if _ORIGINAL.match(k) and _is_count(v)]
    positions = [v for k, v in _walk(raw) if _POSITIONS.match(k) and _is_count(v)]
    if originals and positions:
        plan.stretch = max(1, max(positions) // max(originals)) * plan.lengths[max(originals)]


def _walk(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _walk(inner, str(name))
    else:
        yield key, value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shrink_mapping(raw: Mapping[str, Any], plan: _Plan, layers_key: str) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            small[key] = _shrink_mapping(value, plan, layers_key)
        elif key == layers_key and value == plan.num_layers:
            small[key] = plan.kept_layers
        elif isinstance(value, (list, tuple)):
            small[key] = _shrink_list(str(key), list(value), plan)
        elif isinstance(value, str) and len(value) == plan.num_layers and "pattern" in str(key):
            small[key] = value[: plan.kept_layers]
        elif _is_count(value):
            small[key] = _shrink_count(str(key), value, plan)
        else:
            small[key] = value
    return small


def _shrink_list(key: str, values: list[Any], plan: _Plan) -> list[Any]:
    whole_numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    if len(values) == plan.num_layers and key not in plan.whole_lists:
        values = values[: plan.kept_layers]
    elif whole_numbers and _INDICES.search(key) and all(0 <= v < plan.num_layers for v in values):
        return [v for v in values if v < plan.kept_layers]
    if key in ("short_factor", "long_factor"):
        return values[:: plan.head_dim_divisor]
    if key.endswith("_section") and whole_numbers:
        return [max(1, v // plan.head_dim_divisor) for v in values]
    return [_shrink_count(key, v, plan) if _is_count(v) else v for v in values]


def _shrink_count(key: str, value: int, plan: _Plan) -> int:
    if _TOKEN.search(key):
        return min(value, _VOCAB_SIZE - 1)
    if "vocab_size" in key:
        return min(value, _VOCAB_SIZE)
    if (_THRESHOLD.search(key) or _ORIGINAL.match(key)) and value in plan.lengths:
        return plan.lengths[value]
    if _POSITIONS.match(key):
        limit = plan.lengths.get(value) or plan.stretch or _MAX_POSITIONS
        return min(value, limit)
    if _TOP_K.match(key):
        return plan.top_k
    if _EXPERTS.match(key):
        in_group = max(2, math.ceil(plan.top_k / plan.groups_used))
        fewest = plan.num_groups * in_group if plan.num_groups > 1 else max(4, 2 * plan.top_k)
        return min(value, fewest)
    if _HEADS.search(key) and value % plan.head_count_divisor == 0:
        return value // plan.head_count_divisor
    if _HEAD_DIM.search(key) and value % plan.head_dim_divisor == 0:
        return value // plan.head_dim_divisor
    if value > _SMALL and _WIDTH.search(key) and not _NO_WIDTH.search(key):
        return _narrowed(value, plan.divisor)
    return value


def _narrowed(width: int, divisor: int) -> int:
    """`width` divided exactly where that goes, else up to the next multiple of 8."""
    if width % divisor == 0 and width // divisor >= 4:
        return width // divisor
    return max(8, math.ceil(width / divisor / 8) * 8)
