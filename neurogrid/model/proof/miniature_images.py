"""The proof, before images are taken, that a model sees them through its stages as it does whole: on a miniature.

Of the whole model's config: its text as small as for the proof of that (miniature_config.py), its tower with few and
narrow layers of the same kind, and images of few patches. With random weights it is saved as a checkpoint and loaded
again as one is that is served: its text into stages, cut in several places, and what sees images by itself. Then what
transformers' own `generate` gives for text with two images is compared with what the stages give: in one go and in
pieces, beside other sessions, and by compiled layers.

No family is known here; what layers make of images is `ImageWay`, and is right where the numbers are.

Shape legend: V vocabulary, T tokens, D hidden size.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.files.config import build_config, build_whole_config
from neurogrid.model.files.image_part import image_model_class, text_part
from neurogrid.model.files.model_code import one_line
from neurogrid.model.files.tensor_names import is_image_tensor, name_in_text_model
from neurogrid.model.images.places import ImagePlaces, image_way
from neurogrid.model.proof.miniature import proving, randomise
from neurogrid.model.proof.miniature_config import miniatures
from neurogrid.model.proof.miniature_split import Session, Split, saved_tensors
from neurogrid.model.stages.image_tower import ImageTower
from neurogrid.p2p.wire import ImageSpan

__all__ = ["check_images"]

# Relative to the largest logit, as in miniature.py.
_TOLERANCE = 1e-5
# In pieces, and beside others: other shapes, other order of summation.
_PIECES_TOLERANCE = 1e-3

_NUM_NEW = 4
# Patches a side of an image, where the model has one size for all; of tokens that a pooling leaves of them.
_SIDE, _POOLED_SIDE = 4, 2
_MIN_LAYERS, _NUM_HEADS, _INTERMEDIATE = 3, 2, 64
_MAX_PARAMETERS = 50_000_000
_TOKEN = re.compile(r"token_(?:id|index)$")


@dataclass(frozen=True)
class _Sample:
    """Text with two images.

    Attributes:
        inputs: what the whole model is given beside the tokens.
        counts: tokens of each image.
    """

    token_ids: list[int]
    inputs: dict[str, torch.Tensor]
    counts: list[int]
    places: ImagePlaces


def check_images(config: Mapping[str, object]) -> None:
    """Prove on a miniature of `config`, of a model that takes images, that stages see them as the whole model does.

    Raises:
        UnsupportedModelError: with the reason, in one line.
    """
    what = f"images of model type {str(config.get('model_type'))[:64]!r} cannot be served"
    with proving(what):
        model = _small_model(config)
        _compare(model)


def _small_model(config: Mapping[str, object]) -> Any:
    whole = build_whole_config(config)
    text = text_part(config)
    model_class = image_model_class(config)
    if text is None or model_class is None:
        raise UnsupportedModelError("it takes none")
    failure = "none"
    for small in miniatures(build_config(text)):
        try:
            small_config = _small_config(whole, small.keys)
            with torch.device("meta"):
                on_meta = model_class._from_config(small_config)
            count = sum(parameter.numel() for parameter in on_meta.parameters())
            if count > _MAX_PARAMETERS:
                failure = f"it would have {count} parameters; {failure}"
                break
            model = model_class._from_config(small_config).float().eval()
            randomise(model)
        except Exception as exc:  # noqa: BLE001  a guess that its code refuses; the next may do
            failure = f"{type(exc).__name__}: {one_line(exc)}"
            continue
        return model
    raise UnsupportedModelError(f"no miniature of it can be built ({failure})")


def _small_config(whole: PreTrainedConfig, text: Mapping[str, Any]) -> PreTrainedConfig:
    keys: dict[str, Any] = whole.to_dict()
    full_text = whole.get_text_config(decoder=True)
    vocab_size = text["vocab_size"]
    names = sorted(key for key, value in keys.items() if _TOKEN.search(key) and type(value) is int)
    keys |= {name: vocab_size - 1 - i for i, name in enumerate(names)}
    keys["text_config"] = dict(text)
    layers = keys.get("vision_feature_layer")
    wanted = layers if isinstance(layers, (list, tuple)) else [layers]
    num_layers = max([_MIN_LAYERS, *(abs(layer) for layer in wanted if isinstance(layer, int))])
    side = _SIDE
    if "mm_tokens_per_image" in keys:
        pooled = round(keys["mm_tokens_per_image"] ** 0.5)
        vision = whole.vision_config
        side = _POOLED_SIDE * max(vision.image_size // vision.patch_size // pooled, 1)
        keys["mm_tokens_per_image"] = _POOLED_SIDE**2
    keys["vision_config"] = _small_vision(
        keys["vision_config"],
        num_layers=num_layers,
        side=side,
        widths={full_text.hidden_size: text["hidden_size"]},
    )
    small: PreTrainedConfig = type(whole).from_dict(keys)
    return small


def _small_vision(
    vision: Mapping[str, Any], *, num_layers: int, side: int, widths: Mapping[int, int]
) -> dict[str, Any]:
    """A tower of the same kind: few layers, few heads, each as wide as it was."""
    small = dict(vision)
    for key in ("num_hidden_layers", "depth"):
        if isinstance(small.get(key), int):
            small[key] = min(small[key], num_layers)
            num_layers = small[key]
    if isinstance(small.get("fullatt_block_indexes"), list):
        small["fullatt_block_indexes"] = [num_layers - 1]
    heads = next((k for k in ("num_attention_heads", "num_heads") if k in small), None)
    width = "embed_dim" if "embed_dim" in small else "hidden_size"
    if heads is not None and isinstance(small.get(width), int):
        head_dim, num_heads = small[width] // small[heads], min(small[heads], _NUM_HEADS)
        small[width], small[heads] = head_dim * num_heads, num_heads
    for key in ("out_hidden_size", *(("hidden_size",) if width == "embed_dim" else ())):
        if key in small:
            small[key] = widths.get(small[key], small[key])
    for key in ("intermediate_size", "projection_dim"):
        if isinstance(small.get(key), int):
            small[key] = min(small[key], _INTERMEDIATE)
    if isinstance(small.get("image_size"), int) and isinstance(small.get("patch_size"), int):
        small["image_size"] = small["patch_size"] * side
    return small


def _compare(model: Any) -> None:
    raw = model.config.to_dict()
    tensors = saved_tensors(model)
    tower = ImageTower(
        raw,
        dtype=torch.float32,
        device="cpu",
        tensors={name: each for name, each in tensors.items() if is_image_tensor(name)},
    )
    text = text_part(raw)
    assert text is not None, "it was a moment ago"
    config = build_config(text)
    of_text = {
        name_in_text_model(name): each
        for name, each in tensors.items()
        if not is_image_tensor(name)
    }
    sample = _sample(model, config, tower)
    tokens, expected = _generate(model, sample)
    found = tower.embeddings(sample.inputs, sample.counts)
    embeddings = [(span.start, each) for span, each in zip(sample.places.spans, found, strict=True)]
    num_layers: int = config.num_hidden_layers
    num_prompt = len(sample.token_ids)
    middle = sample.places.spans[0].stop + 1
    for cuts, is_fused in (((1,), False), ((1, num_layers - 1), False), ((1,), True)):
        split = Split(
            config, of_text, cuts if num_layers > 2 else (1,)[: num_layers - 1], is_fused=is_fused
        )
        where = f"cut into layers {split.ranges}" + (", compiled" if is_fused else "")
        tolerance = _PIECES_TOLERANCE if is_fused else _TOLERANCE
        session = split.new_session(sample.places, embeddings)
        _require_close(session.step(tokens[:num_prompt]), expected[0], tolerance, where)
        for i in range(1, _NUM_NEW):
            got = session.step([tokens[num_prompt + i - 1]])
            _require_close(got, expected[i], tolerance, where)
        in_pieces = split.new_session(sample.places, embeddings)
        in_pieces.step(tokens[:middle])
        got = in_pieces.step(tokens[middle:num_prompt])
        _require_close(got, expected[0], _PIECES_TOLERANCE, f"{where}, in pieces")
        _compare_rows(split, in_pieces, tokens[num_prompt:], expected, where)


def _compare_rows(
    split: Split,
    session: Session,
    new_tokens: Sequence[int],
    expected: Sequence[torch.Tensor],
    where: str,
) -> None:
    """A session with images decodes beside one of text."""
    beside = split.new_session()
    beside.step(new_tokens[:2])
    for i in range(1, _NUM_NEW):
        got, _ = split.step_rows([session, beside], [new_tokens[i - 1]] * 2)
        _require_close(got, expected[i], _PIECES_TOLERANCE, f"{where}, beside text")


def _sample(model: Any, config: PreTrainedConfig, tower: ImageTower) -> _Sample:
    whole = model.config
    vision = whole.vision_config
    inputs: dict[str, torch.Tensor] = {}
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    if "image_grid_thw" in inspect.signature(model.base_model.get_image_features).parameters:
        merge = vision.spatial_merge_size
        shapes = [(2, 3), (3, 2)]
        grid_N3 = torch.tensor([(1, rows * merge, columns * merge) for rows, columns in shapes])
        width = channels * vision.temporal_patch_size * vision.patch_size**2
        inputs["pixel_values"] = torch.randn(int(grid_N3.prod(-1).sum()), width)
        inputs["image_grid_thw"] = grid_N3
    else:
        size = vision.image_size
        inputs["pixel_values"] = torch.randn(2, channels, size, size)
        with torch.inference_mode():
            pooled: Any = model.get_image_features(**inputs, return_dict=True).pooler_output
        shapes = [(1, each.reshape(-1, each.shape[-1]).shape[0]) for each in pooled]
    token_ids = torch.randint(0, config.vocab_size // 2, (3,)).tolist()
    spans = []
    for rows, columns in shapes:
        spans.append(ImageSpan(len(token_ids), rows, columns))
        token_ids += [tower.token_id] * (rows * columns)
        token_ids += torch.randint(0, config.vocab_size // 2, (3,)).tolist()
    places = ImagePlaces(tuple(spans), image_way(config))
    return _Sample(token_ids, inputs, [span.num_tokens for span in spans], places)


def _generate(model: Any, sample: _Sample) -> tuple[list[int], list[torch.Tensor]]:
    """Run `generate`: return all tokens, and the logits [V] of each step."""
    prompt_BT = torch.tensor([sample.token_ids])
    taken = inspect.signature(model.forward).parameters
    types_BT = torch.zeros_like(prompt_BT)
    for span in sample.places.spans:
        types_BT[0, span.start : span.stop] = 1
    inputs: dict[str, torch.Tensor] = dict(sample.inputs)
    inputs |= {name: types_BT for name in ("token_type_ids", "mm_token_type_ids") if name in taken}
    greedy: Any = GenerationConfig  # not typed by transformers
    output = model.generate(
        prompt_BT,
        attention_mask=torch.ones_like(prompt_BT),
        **inputs,
        generation_config=greedy(
            max_new_tokens=_NUM_NEW,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        ),
    )
    return output.sequences[0].tolist(), [step[0].float() for step in output.logits]


def _require_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float, where: str) -> None:
    off = float((got - expected).abs().max())
    if not off <= tolerance * float(expected.abs().max()):
        raise UnsupportedModelError(
            f"its stages do not give the logits of the whole model for text with images: off by {off:.2g} {where}"
        )
