"""Decoder layers that are compiled, where their modules are those of a plain block.

A plain block is: norm, projections of queries, keys and values, rotary embedding, attention, output, and an MLP with a
gate, each half added to what entered it. Many families are that, under the same names of modules; in which places
their norms stand, what a norm's weight means and which function the gate has is tried out on the modules themselves.
That a family does nothing else is not assumed but proven, for each config, on a miniature (proof/miniature_fused.py):
`fuse_layer` is called for layers of such a config alone.

What gets anything from its base model that is not known here goes the family's own way. So do experts in the place of
an MLP, between two compiled halves.

Shape legend: R rows, T tokens, D hidden size, F rotary size, N keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from neurogrid.model.adapters.row_adapters import RowAdapters
from neurogrid.model.files.model_code import MODEL_CODE_ERRORS
from neurogrid.model.kernels import (
    NUM_PLACES,
    Activation,
    CompiledLayer,
    LayerParts,
    Library,
    Matrix,
    Norm,
    NormPart,
    library,
    matrix_of,
)

__all__ = ["fuse_layer", "has_same_bits", "is_fused"]

# In which places a layer has its norms, by their names.
_NORMS: Final[Mapping[frozenset[str], Mapping[str, Norm]]] = {
    frozenset(names): names
    for names in (
        {
            "input_layernorm": Norm.BEFORE_ATTENTION,
            "post_attention_layernorm": Norm.BEFORE_MLP,
        },
        {
            "input_layernorm": Norm.BEFORE_ATTENTION,
            "post_attention_layernorm": Norm.AFTER_ATTENTION,
            "pre_feedforward_layernorm": Norm.BEFORE_MLP,
            "post_feedforward_layernorm": Norm.AFTER_MLP,
        },
        {
            "post_attention_layernorm": Norm.AFTER_ATTENTION,
            "post_feedforward_layernorm": Norm.AFTER_MLP,
        },
    )
}
_HEAD_NORMS: Final = {"q_norm": Norm.QUERIES, "k_norm": Norm.KEYS}
_PROJECTIONS: Final = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP: Final = (("gate_proj", "up_proj"), ("gate_up_proj",))
_ACTIVATIONS: Final = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
}
# Plain attributes of attention and of configs that stand for more than is computed here, if they are set.
_MORE: Final = ("sinks", "clip_qkv", "qk_clip")
# What base models give their layers for a pass, of which the rest says nothing that these do not.
_KNOWN: Final = frozenset(
    {
        "attention_mask",
        "cache_position",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "use_cache",
    }
)
_TOLERANCE: Final = 1e-5


def fuse_layer(
    layer: nn.Module, dtype: torch.dtype, *, adapters: RowAdapters | None = None
) -> bool:
    """Compile a layer, if it is a plain block on the CPU with products of ours.

    Args:
        layer: loaded and sped up; its class changes.
        dtype: of its hidden states.
        adapters: of the rows of each pass; None where there are never any.
    """
    found = library()
    try:
        fused = None if found is None else _Fused.of(found, layer, dtype)
    except MODEL_CODE_ERRORS:
        return False  # it has other parts under these names
    if fused is None:
        return False
    fused.adapters = adapters
    cls: Any = type(layer)  # hashable, which its stubs do not know
    layer.__class__ = _fused_class(cls)
    layer.__dict__["_fused"] = fused
    return True


def is_fused(layer: nn.Module) -> bool:
    """Whether `fuse_layer` did."""
    return "_fused" in vars(layer)


def has_same_bits(layer: nn.Module) -> bool:
    """Whether a token gets the same bits in it, whatever it is computed with, as far as it has run: it is compiled
    from end to end, and no pass went the family's own way."""
    fused = vars(layer).get("_fused")
    return isinstance(fused, _Fused) and fused.is_whole and not fused.went_own_way


@cache
def _fused_class(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args:
            result = self.__dict__["_fused"].run(self, hidden_states, kwargs)
            if result is not None:
                return result
        return cls.forward(self, hidden_states, *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


class _Fused:
    """The compiled halves of one layer. Refers to its parts, and not to the layer.

    Attributes:
        went_own_way: whether a pass was not to be computed here.
        adapters: of the rows of each pass.
    """

    def __init__(
        self,
        found: Library,
        parts: LayerParts,
        layer_id: int,
        experts: str | None,
        places: Sequence[str | None],
    ) -> None:
        self._library, self._parts = found, parts
        self._places = places
        self.adapters: RowAdapters | None = None
        self._layer_id = layer_id
        self._experts = experts
        self._compiled: CompiledLayer | None = None
        self.went_own_way = False

    @property
    def is_whole(self) -> bool:
        """Whether there are no experts between the halves, whose scores are torch's."""
        return self._experts is None

    @classmethod
    def of(cls, found: Library, layer: nn.Module, dtype: torch.dtype) -> _Fused | None:
        """None where the layer is no plain block."""
        modules = _children(layer)
        attention, mlp = modules.pop("self_attn", None), modules.pop("mlp", None)
        places = _NORMS.get(frozenset(modules))
        if attention is None or mlp is None or places is None or _has_own(layer):
            return None
        norms = {place: _norm_part(modules[name]) for name, place in places.items()}
        children = _children(attention)
        for name, place in _HEAD_NORMS.items():
            if name in children:
                norms[place] = _norm_part(children.pop(name))
        output = children.pop("o_proj", None)
        projections = _matrices(children, _PROJECTIONS)
        output_matrix = None if output is None else matrix_of(output)
        layer_id, scaling = (
            getattr(attention, "layer_idx", None),
            getattr(attention, "scaling", None),
        )
        head_size = getattr(attention, "head_dim", None)
        if (
            None in norms.values()
            or projections is None
            or output_matrix is None
            or not isinstance(layer_id, int)
            or not isinstance(scaling, float)
            or not isinstance(head_size, int)
            or _has_own(attention)
            or any(
                getattr(of, name, None) is not None
                for name in _MORE
                for of in (attention, getattr(attention, "config", None))
            )
        ):
            return None
        num_heads = output_matrix.num_inputs // head_size
        if len(projections) == 1:
            num_kv_heads = (projections[0].num_outputs // head_size - num_heads) // 2
        else:
            num_kv_heads = projections[1].num_outputs // head_size
        parts = LayerParts(
            projections,
            output_matrix,
            (),
            None,
            {place: part for place, part in norms.items() if part is not None},
            num_heads,
            num_kv_heads,
            head_size,
            0,
            scaling,
            float(getattr(attention, "attn_logit_softcapping", None) or 0),
            Activation.SILU,
            dtype,
        )
        with_mlp = _with_mlp(parts, mlp)
        if with_mlp is None and Norm.AFTER_MLP in norms:
            return None
        fused = cls(
            found,
            with_mlp or parts,
            layer_id,
            None if with_mlp else "mlp",
            _places(attention, mlp if with_mlp else None),
        )
        fused._compile(0)
        return fused

    def _compile(self, rotary_size: int) -> CompiledLayer:
        self._parts = replace(self._parts, rotary_size=rotary_size)
        self._compiled = CompiledLayer(self._library, self._parts)
        return self._compiled

    def run(
        self, layer: nn.Module, hidden_RTD: torch.Tensor, kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """The layer's result; None where it is to go its own way."""
        states, angles = kwargs.get("past_key_values"), kwargs.get("position_embeddings")
        mask = _seen(kwargs.get("attention_mask"))
        if (
            states is None
            or not hasattr(states, "first_keys")
            or not isinstance(angles, tuple)
            or not kwargs.keys() <= _KNOWN
            or not (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
            # A prompt of which no mask is made has nothing before it: what is to be seen is not told otherwise.
            or (mask is None and hidden_RTD.shape[1] > 1 and states.get_seq_length(self._layer_id))
            or not torch.is_inference_mode_enabled()
        ):
            self.went_own_way = True
            return None
        cosines, sines = angles
        compiled = self._compiled
        if compiled is None or cosines.shape[-1] != self._parts.rotary_size:
            compiled = self._compile(cosines.shape[-1])
        adapters = None
        if self.adapters is not None:
            adapters = self.adapters.addresses(self._layer_id, self._places)
        queries, keys, values = compiled.project(
            hidden_RTD, cosines, sines, adapters, is_coded=getattr(states, "is_coded", False)
        )
        first_keys = states.first_keys(self._layer_id)
        keys, values = states.update(keys, values, self._layer_id)
        mask_RTN = None if mask is None else mask[:, 0]
        result_RTD, normed_RTD = compiled.finish(
            hidden_RTD, queries, keys, values, mask_RTN, adapters, first_keys=first_keys
        )
        if normed_RTD is None:
            return result_RTD
        return result_RTD + _hidden_of(getattr(layer, str(self._experts))(normed_RTD))


def _seen(mask: Any) -> Any:
    """A mask as what a token sees; one that is added to scores, and leaves those alone that it does not rule out, is
    that, too."""
    if not isinstance(mask, torch.Tensor) or not mask.is_floating_point():
        return mask
    seen = mask == 0
    return seen if bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()) else mask


def _hidden_of(result: Any) -> torch.Tensor:
    """Hidden states that experts return, in some families beside how they were chosen."""
    hidden: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return hidden


def _with_mlp(parts: LayerParts, mlp: nn.Module) -> LayerParts | None:
    """The parts with those of an MLP; None where it is something else."""
    children = _children(mlp)
    down = children.pop("down_proj", None)
    down_matrix = None if down is None else matrix_of(down)
    names = next((each for each in _GATE_UP if set(each) <= children.keys()), ())
    gate_up = _matrices({name: children.pop(name) for name in names}, _GATE_UP)
    functions: list[Any] = [*children.values()] or [getattr(mlp, "act_fn", None)]
    activation = _activation(functions[0]) if len(functions) == 1 else None
    if down_matrix is None or gate_up is None or activation is None or _has_own(mlp):
        return None
    return replace(parts, gate_up=gate_up, down=down_matrix, activation=activation)


def _places(attention: nn.Module, mlp: nn.Module | None) -> list[str | None]:
    """The paths of the linear layers whose matrices are multiplied here, in the order of `NUM_PLACES`; None where one
    is all of several, or the MLP is not computed here."""
    names: list[str | None] = [
        *_filled_up("self_attn", attention, _PROJECTIONS),
        "self_attn.o_proj",
        *([None] * 2 if mlp is None else _filled_up("mlp", mlp, _GATE_UP)),
        None if mlp is None else "mlp.down_proj",
    ]
    assert len(names) == NUM_PLACES
    return names


def _filled_up(
    path: str, module: nn.Module, layouts: tuple[tuple[str, ...], ...]
) -> list[str | None]:
    """The paths of the layout that a module has, as many as the longest has."""
    names = next(each for each in layouts if set(each) <= dict(module.named_children()).keys())
    most = max(map(len, layouts))
    return [*(f"{path}.{name}" for name in names), *[None] * (most - len(names))]


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """Its modules by name, without those that do nothing but in training."""
    return {
        name: child
        for name, child in module.named_children()
        if type(child) not in (nn.Dropout, nn.Identity)
    }


def _has_own(module: nn.Module) -> bool:
    """Whether it has parameters or buffers beside its children."""
    return bool(module._parameters or module._buffers)


def _matrices(
    children: Mapping[str, nn.Module], layouts: tuple[tuple[str, ...], ...]
) -> tuple[Matrix, ...] | None:
    """The matrices of linear layers that are just one of the layouts; None where they are not."""
    for names in layouts:
        if children.keys() == set(names):
            matrices = [matrix_of(children[name]) for name in names]
            whole = tuple(each for each in matrices if each is not None)
            return whole if len(whole) == len(names) else None
    return None


def _norm_part(module: nn.Module) -> NormPart | None:
    """Factor and epsilon of a norm: the factor is its weight, or one more; None where it is another kind of norm."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        not isinstance(weight, nn.Parameter)
        or weight.dim() != 1
        or not isinstance(eps, float)
        or len(module._parameters) != 1
        or module._buffers
        or any(module.children())
    ):
        return None
    with torch.inference_mode():
        given = _waves(2, weight.numel()).to(weight.dtype)
        result = module(given).float()
        plain = given.float()
        plain = plain * torch.rsqrt(plain.pow(2).mean(-1, keepdim=True) + eps)
        for factor in (weight.detach().float(), 1 + weight.detach().float()):
            # Rounded to its dtype once or twice on the way.
            most = max(_TOLERANCE, 2 * torch.finfo(weight.dtype).eps)
            if torch.allclose(result, plain * factor, rtol=most, atol=most):
                return NormPart(factor, eps)
    return None


def _activation(function: Any) -> Activation | None:
    if not callable(function):
        return None
    with torch.inference_mode():
        given = 3 * _waves(8, 64)
        result: torch.Tensor = function(given)
        for activation, its in _ACTIVATIONS.items():
            as_callable: Any = its  # torch's own are not typed
            expected = as_callable(given)
            if torch.allclose(result, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                return activation
    return None


def _waves(*shape: int) -> torch.Tensor:
    """Numbers of -2 to 2 that have nothing in common. Not random: what draws numbers elsewhere is not to get others."""
    count = torch.Size(shape).numel()
    steps = torch.arange(1, count + 1, dtype=torch.float64, device="cpu")
    return (2 * torch.sin(steps * steps)).float().view(shape)
