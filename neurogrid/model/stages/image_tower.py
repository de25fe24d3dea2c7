"""Image tower and projection of a model that takes images, which make their embeddings, by transformers' own class.

The whole model is built without memory and without its decoder layers, and what is of images is loaded. No family is
known: which inputs `get_image_features` takes is read off it, and so is what it returns.

Shape legend: N images, T tokens of one of them, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from neurogrid.errors import ModelError, UnsupportedModelError
from neurogrid.model.files.config import build_whole_config
from neurogrid.model.files.image_part import image_model_class
from neurogrid.model.files.model_code import MODEL_CODE_ERRORS, one_line, quiet_transformers
from neurogrid.model.stages.weight_loading import load_tensors, move_to

__all__ = ["ImageTower", "build_image_model"]

# What of such a model is its model of text.
_TEXT_MODELS = ("language_model", "text_model")
_TEXT_NAMES = (
    *(f"{each}." for each in _TEXT_MODELS),
    *(f"model.{each}." for each in _TEXT_MODELS),
    "lm_head.",
)


def build_image_model(config: Mapping[str, object]) -> tuple[Any, PreTrainedConfig]:
    """The whole model of a config.json that takes images, on the meta device, and its config.

    Raises:
        UnsupportedModelError: transformers cannot build it.
    """
    model_class = image_model_class(config)
    if model_class is None:
        raise UnsupportedModelError("this model takes no images")
    built = build_whole_config(config)
    try:
        with torch.device("meta"), quiet_transformers():
            model = model_class._from_config(built)
    except MODEL_CODE_ERRORS as exc:
        raise UnsupportedModelError(
            f"transformers cannot build what sees its images: {one_line(exc)}"
        ) from exc
    model.train(False)
    return model, built


class ImageTower:
    """Tower and projection, in memory. Blocks, and is not thread-safe: one call at a time.

    Args:
        config: the whole model's config.json.
        dtype: what it computes in.
        device: where it lives.
        tensors: of images, by their names in the whole model's checkpoint.

    Attributes:
        token_id: of the token in whose places embeddings stand.
        num_bytes: of its weights.

    Raises:
        UnsupportedModelError: transformers cannot build it.
        CheckpointError: a tensor is missing, unknown, or of a wrong shape.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        model, built = build_image_model(config)
        base = model.base_model
        text = next((getattr(base, each) for each in _TEXT_MODELS if hasattr(base, each)), None)
        if text is None or not isinstance(getattr(text, "layers", None), nn.ModuleList):
            raise UnsupportedModelError("its model of text cannot be told from the rest")
        text.layers = nn.ModuleList()
        load_tensors(
            model,
            tensors,
            dtype=dtype,
            is_wanted=lambda name: not name.startswith(_TEXT_NAMES),
            what="what sees its images",
        )
        move_to(torch.device(device), list(model.modules()))
        self._model = model
        self._dtype = dtype
        self._device = torch.device(device)
        self._inputs = frozenset(inspect.signature(base.get_image_features).parameters)
        self.token_id = _image_token_id(built)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def embeddings(
        self, inputs: Mapping[str, torch.Tensor], counts: list[int]
    ) -> list[torch.Tensor]:
        """Compute the embeddings that stand for the tokens of each image, N of [T, D], in the dtype of the tower.

        Args:
            inputs: of the images, as the model's processor makes them; what `get_image_features` does not take is
                left out.
            counts: of each image, how many tokens it has.

        Raises:
            ModelError: it gives embeddings for another number of tokens, or none.
        """
        given = {
            name: each.to(self._device, self._dtype if each.is_floating_point() else None)
            for name, each in inputs.items()
            if name in self._inputs
        }
        try:
            with torch.inference_mode():
                output: Any = self._model.get_image_features(**given, return_dict=True)
                features: Any = output.pooler_output
                if not isinstance(features, torch.Tensor):
                    features = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
                features_TD = features.reshape(-1, features.shape[-1])
        except MODEL_CODE_ERRORS as exc:
            raise ModelError(
                f"the model cannot make embeddings of these images: {one_line(exc)}"
            ) from exc
        if len(features_TD) != sum(counts):
            raise ModelError(
                f"the model makes {len(features_TD)} embeddings of images that have {sum(counts)} tokens: do its "
                "processor and its config belong together?"
            )
        return list(features_TD.split(counts))


def _image_token_id(config: PreTrainedConfig) -> int:
    for name in ("image_token_id", "image_token_index"):
        token_id = getattr(config, name, None)
        if isinstance(token_id, int):
            return token_id
    raise UnsupportedModelError("its config does not say which token stands for an image")
