"""Decoder layer that a checkpoint tensor belongs to, told from its name alone.

Families name their decoder layers `PREFIX.CONTAINER.NUMBER.REST`, the prefix empty in some
checkpoints of the hub (`h.0.ln_1.weight`). The first numbered container counts: what is numbered
further in (experts) is inside the layer. Layers of other towers (vision, audio, an encoder) and of
multi-token prediction are nobody's: neither a decoder layer's nor one of the ends'.

This module knows no family and imports no torch; `check_splittable` proves its answer on a
miniature of the model before anything is served.
"""

from __future__ import annotations

import re

__all__ = [
    "is_end_tensor",
    "is_image_tensor",
    "layer_of",
    "name_in_layer",
    "name_in_text_model",
    "numbers_hidden",
    "path_in_layer",
]

_NUMBERED = re.compile(r"^((?:[A-Za-z_]\w*\.)*?)(?:layers|layer|h|blocks|block)\.(\d{1,6})\.")

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

# What stands before the container when the layers are not the decoder's.
_OTHER_TOWER = re.compile(
    r"(?:^|\.)(?:vision|visual|audio|speech|image|mtp|encoder|embed_vision|embed_audio)\w*\."
)

# What a model that takes images has beside its model of text: a tower, and what stands between the two.
_IMAGE_PART = re.compile(
    r"^(?:model\.)?(?:vis\w*|multi_modal\w*|multimodal\w*|mm_\w*|image_\w*|connector)\."
)
_TEXT_PART = re.compile(r"^(?:model\.)?(?:language|text)_model\.(?:model\.)?")
_TEXT_HEAD = "lm_head."


def layer_of(name: str, num_layers: int) -> int | None:
    """The decoder layer that the tensor called `name` belongs to, in 0..num_layers-1.

    None for a tensor of the ends (embedding, final norm, head) and for one that is nobody's: a
    layer of another tower, or one past `num_layers` such as DeepSeek's multi-token prediction.
    """
    match = _NUMBERED.match(name)
    if match is None or _OTHER_TOWER.search(match[1]):
        return None
    layer_id = int(match[2])
    return layer_id if layer_id < num_layers else None


def path_in_layer(name: str) -> str:
    """Path of a tensor in its layer, with `#` for each number: `mlp.experts.#.up_proj.weight`.

    The whole name, where it is in no numbered layer.
    """
    return numbers_hidden(name_in_layer(name))


def name_in_layer(name: str) -> str:
    """The same with its numbers: `mlp.experts.7.up_proj.weight`."""
    return _NUMBERED.sub("", name)


def numbers_hidden(path: str) -> str:
    """`path` with `#` for each number between its dots."""
    return _NUMBER.sub("#", path)


def is_end_tensor(name: str) -> bool:
    """Whether the tensor called `name` is of the ends: in no numbered layer, no other tower."""
    return _NUMBERED.match(name) is None and _OTHER_TOWER.search(name) is None


def is_image_tensor(name: str) -> bool:
    """Whether, in a model that takes images, the tensor called `name` is of what makes embeddings of them."""
    return _IMAGE_PART.match(name) is not None


def name_in_text_model(name: str) -> str:
    """Name that a tensor of text, of a model that takes images, has in a checkpoint of that model of text alone."""
    rest = _TEXT_PART.sub("", name)
    if rest == name:
        return name
    return rest if rest.startswith(_TEXT_HEAD) else f"model.{rest}"
