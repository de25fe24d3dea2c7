"""The architectures that are read: where their tensors stand in a checkpoint of transformers, and how they differ.

An architecture is here when a miniature of it has been proven to compute what transformers' own model computes with the
same weights (tests/unit/test_gguf_models.py); every other is refused.

Sources: the converter and the tables of names of llama.cpp.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.gguf.header import TensorInfo

__all__ = [
    "ARCHITECTURES",
    "EMBEDDING",
    "HEAD",
    "NORM",
    "Architecture",
    "Change",
    "Place",
    "architecture_of",
    "check_tensors",
    "layer_tensors",
]

EMBEDDING, NORM, HEAD = "token_embd.weight", "output_norm.weight", "output.weight"
_IN_LAYER: Final = re.compile(r"blk\.(\d{1,6})\.(.+)")


class Change(enum.Enum):
    """Difference of a tensor in the file from the same in transformers."""

    NONE = enum.auto()
    QUERY = enum.auto()
    """The two halves of a head's rows are dealt into one another: those of the query heads."""
    KEY = enum.auto()
    """The same of the key heads."""
    PLUS_ONE = enum.auto()
    """One more: a norm whose weights are around 0."""
    ROW = enum.auto()
    """A vector, which is a matrix of one row."""
    EXPERTS = enum.auto()
    """Matrices of all experts in one tensor, [E, O, I]; each is one with a number in its name there."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a tensor in a layer, and its form in the file.

    Attributes:
        name: behind `model.layers.N.`; with `#` for the number of an expert.
        num_dimensions: in the file.
        change: what it is in the file.
        partner: the tensor of the layer whose rows transformers puts behind its own; "" for none.
    """

    name: str
    num_dimensions: int
    change: Change = Change.NONE
    partner: str = ""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture.

    Attributes:
        layer: the places of a layer's tensors, by name behind `blk.N.`.
        optional: groups of names, of each of which all layers have all, or none has one.
        others: names of tensors outside the layers that may be there.
        norms: what the norms are.
    """

    layer: Mapping[str, Place]
    optional: tuple[frozenset[str], ...] = ()
    others: frozenset[str] = frozenset()
    norms: Change = Change.NONE


def _vectors(names: Mapping[str, str], change: Change = Change.NONE) -> dict[str, Place]:
    return {f"{key}.weight": Place(f"{name}.weight", 1, change) for key, name in names.items()}


def _matrices(**names: str) -> dict[str, Place]:
    return {f"{key}.weight": Place(f"{name}.weight", 2) for key, name in names.items()}


def _biases(*keys: str, of: Mapping[str, Place]) -> dict[str, Place]:
    found = {}
    for key in keys:
        place = of[f"{key}.weight"]
        name = place.name.removesuffix("weight") + "bias"
        found[f"{key}.bias"] = Place(name, 1, place.change)
    return found


def _experts(name: str, partner: str = "") -> Place:
    return Place(f"mlp.experts.#.{name}.weight", 3, Change.EXPERTS, partner)


_NORMS: Final = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS: Final = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_ATTENTION: Final = _matrices(
    attn_q="self_attn.q_proj",
    attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj",
    attn_output="self_attn.o_proj",
)
_DEALT: Final = {
    **_ATTENTION,
    "attn_q.weight": Place("self_attn.q_proj.weight", 2, Change.QUERY),
    "attn_k.weight": Place("self_attn.k_proj.weight", 2, Change.KEY),
}
_MLP: Final = _matrices(ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
_EXPERTS: Final = {
    **_matrices(ffn_gate_inp="mlp.gate"),
    "ffn_gate_exps.weight": _experts("gate_proj", "ffn_up_exps.weight"),
    "ffn_up_exps.weight": _experts("up_proj", "ffn_gate_exps.weight"),
    "ffn_down_exps.weight": _experts("down_proj"),
}
_SHARED_EXPERT: Final = {
    **_matrices(
        ffn_gate_shexp="mlp.shared_expert.gate_proj",
        ffn_up_shexp="mlp.shared_expert.up_proj",
        ffn_down_shexp="mlp.shared_expert.down_proj",
    ),
    "ffn_gate_inp_shexp.weight": Place("mlp.shared_expert_gate.weight", 1, Change.ROW),
}
_LLAMA_BIASES: Final = (
    _biases("attn_q", "attn_k", "attn_v", "attn_output", of=_DEALT),
    _biases("ffn_gate", "ffn_up", "ffn_down", of=_MLP),
)
_QKV_BIASES: Final = _biases("attn_q", "attn_k", "attn_v", of=_ATTENTION)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    # Mistral too, by its converter.
    "llama": Architecture(
        {**_vectors(_NORMS), **_DEALT, **_MLP, **_LLAMA_BIASES[0], **_LLAMA_BIASES[1]},
        optional=tuple(frozenset(each) for each in _LLAMA_BIASES),
        others=frozenset({"rope_freqs.weight"}),
    ),
    "qwen2": Architecture({**_vectors(_NORMS), **_ATTENTION, **_QKV_BIASES, **_MLP}),
    "qwen3": Architecture({**_vectors({**_NORMS, **_HEAD_NORMS}), **_ATTENTION, **_MLP}),
    "qwen2moe": Architecture(
        {**_vectors(_NORMS), **_ATTENTION, **_QKV_BIASES, **_EXPERTS, **_SHARED_EXPERT}
    ),
    "qwen3moe": Architecture({**_vectors({**_NORMS, **_HEAD_NORMS}), **_ATTENTION, **_EXPERTS}),
    "gemma2": Architecture(
        {**_vectors(_GEMMA_NORMS, Change.PLUS_ONE), **_ATTENTION, **_MLP}, norms=Change.PLUS_ONE
    ),
    "gemma3": Architecture(
        {**_vectors({**_GEMMA_NORMS, **_HEAD_NORMS}, Change.PLUS_ONE), **_ATTENTION, **_MLP},
        norms=Change.PLUS_ONE,
    ),
    "phi3": Architecture(
        {
            **_vectors(_NORMS),
            **_matrices(
                attn_qkv="self_attn.qkv_proj",
                attn_output="self_attn.o_proj",
                ffn_up="mlp.gate_up_proj",
                ffn_down="mlp.down_proj",
            ),
        },
        others=frozenset({"rope_factors_long.weight", "rope_factors_short.weight"}),
    ),
}
"""Architectures by their names in a file."""


def architecture_of(name: str, where: str) -> Architecture:
    """The architecture of that name.

    Raises:
        UnsupportedModelError: it is not read.
    """
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where}: GGUF of the architecture {name[:40]!r}; read are {', '.join(ARCHITECTURES)}. Other models "
            "are served from safetensors"
        )
    return ARCHITECTURES[name]


def layer_tensors(names: Mapping[str, TensorInfo]) -> Iterator[tuple[int, str, str]]:
    """Layer, name in the layer, and whole name of each tensor of a layer."""
    for name in names:
        if found := _IN_LAYER.fullmatch(name):
            yield int(found[1]), found[2], name


def check_tensors(
    architecture: Architecture, tensors: Mapping[str, TensorInfo], num_layers: int, where: str
) -> None:
    """Look whether all tensors of the model are there, and no others.

    Raises:
        CheckpointError: one is missing, or of another number of dimensions.
        UnsupportedModelError: there is one that is not known.
    """
    layers: list[set[str]] = [set() for _ in range(num_layers)]
    outside = {EMBEDDING: 2, NORM: 1, HEAD: 2, **dict.fromkeys(architecture.others, 1)}
    for layer_id, name, whole in layer_tensors(tensors):
        place = architecture.layer.get(name)
        if place is None or layer_id >= num_layers:
            raise _unknown(whole, where)
        layers[layer_id].add(name)
        outside[whole] = place.num_dimensions
    for name, info in tensors.items():
        if name not in outside:
            raise _unknown(name, where)
        if len(info.shape) != outside[name]:
            raise CheckpointError(
                f"{where}: {name!r} has {len(info.shape)} dimensions, and {outside[name]} are due"
            )
    expected = set(architecture.layer)
    for group in architecture.optional:
        if not any(group & names for names in layers):
            expected -= group
    lacking = [name for name in (EMBEDDING, NORM) if name not in tensors]
    for layer_id, names in enumerate(layers):
        lacking += [f"blk.{layer_id}.{name}" for name in sorted(expected - names)]
    if lacking:
        raise CheckpointError(
            f"{where}: lacks {lacking[0]!r} ({len(lacking)} tensors of the model are not there); fetch the file again"
        )


def _unknown(name: str, where: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{where}: has {name!r}, which this architecture is not read with; use its safetensors"
    )
