"""A model that takes images is two: one of text, cut into layers as any other, and what makes embeddings of images.

Here the first is told apart: its config, as a checkpoint of its own would have it. What the tensors of either are
called is in tensor_names.py. Equality with the whole model is not promised here but proven, on a miniature
(proof/miniature_images.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
)

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.files.config import build_whole_config
from neurogrid.model.files.text_models import has_text_model

__all__ = ["image_model_class", "text_part"]

# What a config of text has from the whole model's, where it does not say itself.
_INHERITED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")


def image_model_class(config: Mapping[str, object]) -> Any | None:
    """transformers' class of the model that a config.json describes, if that takes images and has a part of text."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    config_class = CONFIG_MAPPING[model_type]
    if not {"text_config", "vision_config"} <= set(config_class.sub_configs):
        return None
    if config_class not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return None
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    # Some are known to transformers by their text model, and are served so.
    text_class = config_class.sub_configs["text_config"]
    if causal is not None and getattr(causal, "config_class", None) is text_class:
        return None
    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    return model_class if hasattr(model_class, "get_image_features") else None


def text_part(config: Mapping[str, object]) -> dict[str, object] | None:
    """config.json of the text model within a model that takes images; None for a model that does not.

    Raises:
        UnsupportedModelError: the config is refused, or transformers has no model of text for that part.
    """
    if image_model_class(config) is None:
        return None
    built = build_whole_config(config)
    text: PreTrainedConfig = built.get_text_config(decoder=True)
    if text is built or not has_text_model(type(text)):
        raise UnsupportedModelError(
            f"model type {str(config.get('model_type'))[:64]!r} takes images, and what of it is text "
            f"({text.model_type}) is no causal language model of transformers by itself: it cannot be served yet"
        )
    told = config.get("text_config")
    part: dict[str, object] = dict(told) if isinstance(told, Mapping) else text.to_dict()
    for key in _INHERITED:
        if part.get(key) is None and config.get(key) is not None:
            part[key] = config[key]
    # That of the whole model decides whether there is a head.
    part["tie_word_embeddings"] = bool(getattr(built, "tie_word_embeddings", False))
    part["model_type"] = text.model_type
    part.pop("architectures", None)
    return part
