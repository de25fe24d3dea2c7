"""A checkpoint's own transformers model with slots in place of its decoder layers.

The model is built on the meta device, so that every layer gets its own index and what depends on
it, and costs no memory. Each layer then moves into a slot: until its weights are loaded, the slot
shows the attributes that base models read off a layer, and skips. What stands outside the layers is
there in shape only: parameters of zeros that occupy one element, and buffers with their values.

A pass runs layers [start, stop) of the base model. The slot of layer `start` puts the hidden state
that arrived in place of the one that the base model made, the slot of layer stop-1 keeps the result
and ends the pass. So no code here knows a family; `check_splittable` proves that it works for one.

Weights go through `from_pretrained` (layer_loading.py, weight_loading.py): transformers converts checkpoints on load.

Shape legend: B batch (1, or the rows of a batch that decodes), T tokens, D hidden size.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Cache, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.caches.cache import StageCache
from neurogrid.model.caches.prepared import LayerCall, Recorder, same_values
from neurogrid.model.files.model_code import MODEL_CODE_ERRORS, one_line, quiet_transformers
from neurogrid.model.files.quantization import CodesForm, Quantization, gather_codes
from neurogrid.model.files.tensor_names import is_end_tensor, layer_of, numbers_hidden
from neurogrid.model.images.places import ImagePlaces
from neurogrid.model.kernels import Codes
from neurogrid.model.stages.layer_loading import LayerLoader, module_list
from neurogrid.model.stages.weight_loading import Pristine, load_tensors, move_to

__all__ = ["Skeleton", "build_on_meta", "find_layers", "num_decoder_layers"]


class _PassEnded(Exception):
    """Leaves a base model from the middle: raised by a slot, the result is in `_Pass.result`."""


class _Pass:
    """The state that the slots of one skeleton share: the range that runs, what enters it, what came out.

    Attributes:
        start, stop: the layers that run; start == stop skips all and injects after the last.
        hidden_BTD: what enters layer `start`.
        result: what left layer stop - 1, or what reached the first slot of a capturing pass.
        num_results: how many things a layer of this model returns in a tuple, 0 for a bare tensor.
        capturing: whether the pass ends at the first slot, keeping what would enter layer 0.
        recorder: visits the layers that would run, in their place.
    """

    __slots__ = ("capturing", "hidden_BTD", "num_results", "recorder", "result", "start", "stop")

    def __init__(self) -> None:
        self.start = self.stop = 0
        self.hidden_BTD: torch.Tensor | None = None
        self.result: Any = None
        self.num_results = 0
        self.capturing = False
        self.recorder: Recorder | None = None

    def given(self) -> torch.Tensor:
        """`hidden_BTD`, in a pass that runs."""
        assert self.hidden_BTD is not None, "a pass began without what enters it"
        return self.hidden_BTD

    def dress(self, hidden_BTD: torch.Tensor) -> Any:
        """`hidden_BTD` in the shape that a real layer returns."""
        if self.num_results == 0:
            return hidden_BTD
        return (hidden_BTD, *([None] * (self.num_results - 1)))


class _Placeholder(nn.Module):
    """Shows the attributes of a layer and owns none of its parameters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Into __dict__, past nn.Module's registration: else loading would ask for its parameters.
        self.__dict__["layer"] = layer

    def __getattr__(self, name: str) -> Any:
        # Base models read `attention_type`, `layer_type`, `self_attn` and the like off a layer.
        return getattr(self.__dict__["layer"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Placeholder:
        return _Placeholder(self.__dict__["layer"])


class _Slot(_Placeholder):
    """The place of decoder layer `layer_id`: runs it, or skips it."""

    def __init__(self, layer_id: int, layer: nn.Module, shared: _Pass, *, is_last: bool) -> None:
        super().__init__(layer)
        self.layer_id = layer_id
        self.is_last = is_last
        self.shared = shared

    # __call__ and not forward: a skipped slot stands in every step, and nn.Module's own costs more
    # than all that a slot does.
    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shared = self.shared
        if shared.capturing:
            shared.result = hidden_states
            raise _PassEnded
        if self.layer_id < shared.start:
            if self.is_last and shared.start == shared.stop:
                return shared.dress(shared.given())
            return shared.dress(hidden_states)
        if shared.recorder is not None:
            recorder = shared.recorder
            if not recorder.visit(self.__dict__["layer"], hidden_states, args, kwargs):
                raise _PassEnded
            return shared.dress(recorder.marker)
        if self.layer_id == shared.start:
            hidden_states = shared.given()
        result = self.__dict__["layer"](hidden_states, *args, **kwargs)
        if self.layer_id == shared.stop - 1:
            shared.result = result
            raise _PassEnded
        return result


class _Slots(nn.ModuleList):
    """All slots. Base models walk over `self.layers[:n]`, for which a list of modules makes itself anew each time.

    Of eight layers that takes 100 of the 170 us of a pass that embeds a token, and a step has two passes more than
    it has stages.
    """

    def __getitem__(self, idx: Any) -> Any:
        if isinstance(idx, slice) and idx.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(idx)


class Skeleton:
    """The model of a config with slots for layers, and nothing loaded.

    Args:
        config: from `build_config`; its attention implementation is used as it is.
        dtype: what weights are cast to and activations are computed in.
        device: where everything that gets loaded goes.

    Attributes:
        loader: of its layers; it knows which matrices they have.

    Raises:
        UnsupportedModelError: no causal language model is known for the config, or its decoder
            layers cannot be told from the rest.
    """

    def __init__(
        self, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_layers = num_decoder_layers(config)
        self.dtype = dtype
        self.device = device
        model = build_on_meta(config, dtype)
        self.config: PreTrainedConfig = model.config
        self.hidden_size: int = self.config.get_text_config(decoder=True).hidden_size
        # Some embed in fewer dimensions than they compute in.
        embedding: Any = model.get_input_embeddings()
        self._embedding_size: int = embedding.weight.shape[-1]
        # All rows pass the final norm, as in the whole model: what multiplies matrices there gives
        # other bits for one row than for many. The head itself is for the last row.
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._head_arguments: dict[str, Any] = {"logits_to_keep": 1} if keeps else {}
        self._layers_name = find_layers(model, self.num_layers)
        self.templates = list(module_list(model, self._layers_name))
        self._pass = _Pass()
        self._slots = [
            _Slot(i, layer, self._pass, is_last=i == self.num_layers - 1)
            for i, layer in enumerate(self.templates)
        ]
        self._blank = _with_layers(
            model, self._layers_name, [_Placeholder(layer) for layer in self.templates]
        )
        self.loader = LayerLoader(
            self._blank, self._layers_name, self.templates, dtype=dtype, device=device
        )
        self._install(copy.deepcopy(self._blank))
        self._arguments = _accepted(self._base)
        self._pass.num_results = self._probe_num_results()

    def load_layer(
        self,
        layer_id: int,
        tensors: Mapping[str, torch.Tensor],
        codes: Mapping[str, Codes] = MappingProxyType({}),
        *,
        coded: Mapping[str, CodesForm] = MappingProxyType({}),
        by_int8: bool = False,
    ) -> None:
        """Load one layer; see `LayerLoader.load`. Keeps what was there if it raises.

        Raises:
            ValueError: a tensor of another layer.
            CheckpointError: as there.
        """
        strangers = [
            name for name in (*tensors, *codes) if layer_of(name, self.num_layers) != layer_id
        ]
        if strangers:
            raise ValueError(f"{strangers[0]!r} is no tensor of layer {layer_id}")
        self._slots[layer_id].__dict__["layer"] = self.loader.load(
            layer_id, tensors, codes, coded=coded, by_int8=by_int8
        )

    def load_quantized_layer(
        self, layer_id: int, tensors: Mapping[str, torch.Tensor], quantization: Quantization
    ) -> None:
        """Load one layer whose matrices are codes, in `tensors` as their parts; errors as of `load_layer`."""
        plain, codes = gather_codes(tensors, quantization)
        coded = self.coded_forms(layer_id, quantization)
        # Of codes others are made. A norm that lies beside them would keep them all.
        plain = {name: tensor.clone() for name, tensor in plain.items()}
        self.load_layer(layer_id, plain, codes, coded=coded, by_int8=quantization.by_int8)

    def coded_forms(self, layer_id: int, quantization: Quantization) -> dict[str, CodesForm]:
        """Forms of a layer's matrices that are codes, by their paths."""
        forms = {
            path: quantization.form(layer_id, numbers_hidden(path), shape)
            for path, shape in self.loader.linear_shapes(layer_id).items()
        }
        return {path: form for path, form in forms.items() if form is not None}

    def layer_name(self, layer_id: int) -> str:
        """Name of a layer's module in the whole model."""
        return f"{self._layers_name}.{layer_id}"

    def linear_layers(self, layer_id: int) -> dict[str, tuple[int, int]]:
        """[O, I] of the linear layers of a layer, by path: what adapters may stand beside."""
        return {
            path: (module.out_features, module.in_features)
            for path, module in self.templates[layer_id].named_modules()
            if isinstance(module, nn.Linear)
        }

    def layer(self, layer_id: int) -> nn.Module:
        """The module that runs as that layer, or its template while it is not loaded."""
        layer: nn.Module = self._slots[layer_id].__dict__["layer"]
        return layer

    def drop_layer(self, layer_id: int) -> None:
        """Free a layer's memory."""
        self._slots[layer_id].__dict__["layer"] = self.templates[layer_id]

    def load_ends(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load what stands outside the layers."""
        self._load_outside(tensors, is_end_tensor)

    def shape_ends(self) -> None:
        """Give what stands outside the layers its shapes and buffers, and no memory."""
        self._load_outside({}, lambda name: False)

    def _load_outside(
        self, tensors: Mapping[str, torch.Tensor], is_wanted: Callable[[str], bool]
    ) -> None:
        model = copy.deepcopy(self._blank)
        load_tensors(
            model,
            tensors,
            dtype=self.dtype,
            is_wanted=is_wanted,
            what="the embedding, norm and head",
        )
        move_to(self.device, list(model.modules()))
        self._install(model)

    def _install(self, model: PreTrainedModel) -> None:
        """Make `model` the one that runs, with our slots in it."""
        self._pristine = Pristine(list(model.modules()))
        self.model = _with_layers(model, self._layers_name, self._slots)
        self._base = model.get_submodule(self._layers_name.rpartition(".")[0])

    def in_checkpoint(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters by their names in the model as transformers writes them into a checkpoint."""
        # The blank model was not loaded, so that it knows the names of its family alone.
        return dict(revert_weight_conversion(self._blank, dict(tensors)))

    def restore(self) -> None:
        """Put the state that modules keep beside their weights back as it was loaded."""
        self._pristine.restore()

    def modules_outside(self) -> list[nn.Module]:
        """All modules but the layers and those that hold them."""
        layers = f"{self._layers_name}."
        return [
            module
            for name, module in self.model.named_modules()
            if name and not layers.startswith(f"{name}.") and not name.startswith(layers)
        ]

    def run_layers(
        self,
        hidden_BTD: torch.Tensor,
        start: int,
        stop: int,
        position: int | Sequence[int],
        cache: Cache | None,
        images: ImagePlaces | None = None,
    ) -> torch.Tensor:
        """One pass over loaded layers [start, stop), whose cache has begun; in inference mode, or to learn.

        Args:
            position: of the first token; one for each row of a batch whose rows differ.
            cache: of the sequence; None for one that is learned from whole.
            images: of the sequence, where layers have to know; None for none.
        """
        shared = self._pass
        shared.start, shared.stop, shared.hidden_BTD = start, stop, hidden_BTD
        try:
            dummy_BTD = self._dummy(hidden_BTD)
            self._call(self._base, cache, position, images, inputs_embeds=dummy_BTD)
        except _PassEnded:
            return _hidden_state(shared.result)
        finally:
            shared.hidden_BTD = shared.result = None
        raise UnsupportedModelError(f"the base model never called its layer {stop - 1}")

    def record_layers(
        self,
        marker_BTD: torch.Tensor,
        start: int,
        stop: int,
        position: int,
        cache: Cache,
        images: ImagePlaces | None = None,
    ) -> list[LayerCall] | None:
        """Record the base model's calls of loaded layers [start, stop) for a token at `position`; in inference mode.

        Args:
            marker_BTD: [1, 1, D], stands for what the layers return.
            images: as of `run_layers`.

        Returns:
            None where it does something to what it was returned, or layers return more than one thing.
        """
        shared = self._pass
        if shared.num_results:
            return None
        recorder = Recorder(start, stop, marker_BTD, cache)
        shared.start, shared.stop, shared.recorder = start, stop, recorder
        expected_BTD = marker_BTD.clone()
        try:
            dummy_BTD = self._dummy(marker_BTD)
            self._call(self._base, cache, position, images, inputs_embeds=dummy_BTD)
        except _PassEnded:
            pass
        finally:
            shared.recorder = None
        is_plain = recorder.is_plain and same_values(marker_BTD, expected_BTD)
        return recorder.calls if is_plain and len(recorder.calls) == stop - start else None

    def run_embedding(
        self, input_ids_BT: torch.Tensor, position: int | Sequence[int], cache: Cache | None
    ) -> torch.Tensor:
        """Return the hidden state that would enter layer 0; in inference mode, or to learn."""
        return self._entering(cache, position, input_ids=input_ids_BT)

    def run_embedded(self, embedded_BTE: torch.Tensor, position: int, cache: Cache) -> torch.Tensor:
        """As `run_embedding`, of what the embedding's module returned, or what stands in its place."""
        return self._entering(cache, position, inputs_embeds=embedded_BTE)

    def _entering(
        self, cache: Cache | None, position: int | Sequence[int], **given: Any
    ) -> torch.Tensor:
        """The hidden state that enters layer 0, of what the base model is given."""
        shared = self._pass
        shared.capturing = True
        try:
            self._call(self._base, cache, position, **given)
        except _PassEnded:
            return _hidden_state(shared.result)
        finally:
            shared.capturing = False
            shared.result = None
        raise UnsupportedModelError("the base model never called its first layer")

    def embed(self, input_ids_BT: torch.Tensor) -> torch.Tensor:
        """Call the embedding's module, [B, T, E]; what else is done before layer 0 is `run_embedded`'s."""
        embedding: Any = self.model.get_input_embeddings()
        embedded_BTE: torch.Tensor = embedding(input_ids_BT)
        return embedded_BTE

    def run_head(
        self, hidden_BTD: torch.Tensor, position: int | Sequence[int], cache: Cache | None
    ) -> torch.Tensor:
        """Logits of what left the last layer, the last token's last; in inference mode.

        Or of all tokens, to learn: where there is no cache.
        """
        shared = self._pass
        shared.start = shared.stop = self.num_layers
        shared.hidden_BTD = hidden_BTD
        try:
            output = self._call(
                self.model,
                cache,
                position,
                inputs_embeds=self._dummy(hidden_BTD),
                **(self._head_arguments if cache is not None else {}),
            )
        finally:
            shared.hidden_BTD = None
        logits: torch.Tensor = output.logits
        return logits

    def run_head_of_all(
        self, hidden_BTD: torch.Tensor, position: int, cache: Cache
    ) -> torch.Tensor:
        """Logits [1, T, V] of all tokens of what left the last layer; in inference mode."""
        output = self._run_after_layers(self.model, hidden_BTD, position, cache)
        logits_BTV: torch.Tensor = output.logits
        return logits_BTV

    def run_norm(self, hidden_BTD: torch.Tensor, position: int, cache: Cache) -> torch.Tensor:
        """Run what the base model does behind its last layer, on what left that: [1, T, D]; in inference mode."""
        output = self._run_after_layers(self._base, hidden_BTD, position, cache)
        final_BTD: torch.Tensor = output.last_hidden_state
        return final_BTD

    def _run_after_layers(
        self, module: nn.Module, hidden_BTD: torch.Tensor, position: int, cache: Cache
    ) -> Any:
        shared = self._pass
        shared.start = shared.stop = self.num_layers
        shared.hidden_BTD = hidden_BTD
        try:
            dummy_BTD = self._dummy(hidden_BTD)
            return self._call(module, cache, position, inputs_embeds=dummy_BTD)
        finally:
            shared.hidden_BTD = None

    def _dummy(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Make the embedding that the base model works on before its layers, for nothing: zeros."""
        return hidden_BTD.new_zeros(*hidden_BTD.shape[:2], self._embedding_size)

    def _call(
        self,
        module: nn.Module,
        cache: Cache | None,
        position: int | Sequence[int],
        images: ImagePlaces | None = None,
        **inputs: Any,
    ) -> Any:
        self._pristine.restore(anew=cache is None)
        first = next(iter(inputs.values()))
        if "position_ids" in self._arguments:
            if isinstance(position, int):
                end = position + first.shape[1]
                position_ids = torch.arange(position, end, device=first.device)[None]
            else:
                position_ids = torch.tensor(position, device=first.device)[:, None]
            inputs["position_ids"] = position_ids
        if images is not None and cache is not None and isinstance(position, int):
            inputs |= images.arguments(self.config, first, position, cache)
        if cache is None:
            return module(use_cache=False, **inputs)
        return module(past_key_values=cache, use_cache=True, **inputs)

    def _probe_num_results(self) -> int:
        """Size of the tuple that a layer returns, 0 for a bare tensor: found by running layer 0 without memory.

        A layer that cannot run on the meta device is taken to return a bare tensor, as nearly all
        do; the check on a miniature assumes the same, so it shows when that is wrong.
        """
        shared = self._pass
        hidden_BTD = torch.zeros(1, 1, self.hidden_size, device="meta", dtype=self.dtype)
        # A copy runs: some keep states in the layer, and no layer is to be made from those.
        self._slots[0].__dict__["layer"] = copy.deepcopy(self.templates[0])
        shared.start, shared.stop, shared.hidden_BTD = 0, 1, hidden_BTD
        try:
            with torch.inference_mode(), quiet_transformers():
                cache = StageCache(self.config)
                self._call(self._base, cache, 0, inputs_embeds=self._dummy(hidden_BTD))
        except _PassEnded:
            result = shared.result
            return len(result) if isinstance(result, tuple) else 0
        except RuntimeError:
            return 0
        except MODEL_CODE_ERRORS as exc:
            raise UnsupportedModelError(
                f"its layers cannot be run one by one: {one_line(exc)}"
            ) from exc
        finally:
            self.drop_layer(0)
            shared.hidden_BTD = shared.result = None
        return 0


def build_on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of `config` without memory; its own copy of the config."""
    try:
        with torch.device("meta"), quiet_transformers():
            # transformers is not typed here. Its models have a config of their own: they change it.
            from_config: Any = AutoModelForCausalLM.from_config
            model: Any = from_config(copy.deepcopy(config), dtype=dtype)
    except MODEL_CODE_ERRORS as exc:
        raise UnsupportedModelError(
            f"transformers cannot build a causal language model of it: {one_line(exc)}"
        ) from exc
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"model type {config.model_type!r} is not one of transformers'")
    model.train(False)
    return model


def num_decoder_layers(config: PreTrainedConfig) -> int:
    """Decoder layers that the config names; raises UnsupportedModelError if it names none."""
    num_layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} names no number of decoder layers"
        )
    return num_layers


def find_layers(model: PreTrainedModel, num_layers: int) -> str:
    """The name of the list of decoder layers."""
    names: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and layer_of(f"{name}.0.", num_layers) == 0
    ]
    if len(names) != 1:
        found = " and ".join(names) or "none outside an encoder or another tower"
        raise UnsupportedModelError(
            f"cannot tell the {num_layers} decoder layers of {type(model).__name__}: found {found}"
        )
    return names[0]


def _with_layers(model: PreTrainedModel, name: str, layers: Sequence[nn.Module]) -> PreTrainedModel:
    """`model` itself, with `layers` in place of those it had."""
    slots = module_list(model, name)
    for i, layer in enumerate(layers):
        slots[i] = layer
    if type(slots) is nn.ModuleList:
        slots.__class__ = _Slots
    return model


def _hidden_state(result: Any) -> torch.Tensor:
    hidden_BTD = result[0] if isinstance(result, tuple) else result
    if not isinstance(hidden_BTD, torch.Tensor) or hidden_BTD.dim() != 3:
        raise UnsupportedModelError("what passes between the layers is not one hidden state")
    return hidden_BTD


def _accepted(base: nn.Module) -> frozenset[str]:
    accepted = frozenset(inspect.signature(base.forward).parameters)
    for needed, why in (
        ("inputs_embeds", "takes no hidden state from outside"),
        ("past_key_values", "takes no cache of the common kind"),
    ):
        if needed not in accepted:
            raise UnsupportedModelError(f"{type(base).__name__} {why} ({needed})")
    return accepted
