"""Tiny models that take images, with random weights, processors and tokenizers, by transformers' own classes.

One of each way in which images reach the layers: as embeddings alone (Llava), with attention both ways among the tokens
of an image (Gemma 3), and with positions in a plane (Qwen2.5-VL).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

__all__ = ["IMAGE_MODELS", "png", "some_image", "write_image_model"]

# The placeholder stands where the checkpoint's own template puts it.
_TEMPLATE = """
{%- for message in messages -%}
{{ '<|' + message.role + '|>' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ 'PLACE' }}{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
_MARKS = ["<pad>", "<eos>", "<|user|>", "<|system|>", "<|assistant|>", "<|end|>"]


def write_image_model(folder: Path, family: str, *, seed: int = 0) -> Any:
    """Write a checkpoint of `family`, one of IMAGE_MODELS, to `folder`; returns its model, in float32."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return IMAGE_MODELS[family](folder)


def some_image(seed: int, *, width: int = 40, height: int = 24) -> Image.Image:
    """Noise in colour."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image, kind: str = "PNG") -> bytes:
    """The bytes of a file."""
    written = io.BytesIO()
    image.save(written, kind)
    return written.getvalue()


def _tokenizer(special: Mapping[str, str], place: str) -> PreTrainedTokenizerFast:
    """One token a byte, and some that are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = [*_MARKS, *special.values()]
    vocabulary = {token: i for i, token in enumerate([*marks, *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens=dict(special),
        chat_template=_TEMPLATE.replace("PLACE", place),
    )


def _text_sizes() -> dict[str, Any]:
    return {
        "vocab_size": 272,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }


def _finish(folder: Path, model: Any, processor: Any) -> Any:
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def _llava(folder: Path) -> Any:
    tokenizer = _tokenizer({"image_token": "<image>"}, "<image>")
    config = LlavaConfig(
        text_config={"model_type": "llama", **_text_sizes(), "tie_word_embeddings": False},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "projection_dim": 32,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        tie_word_embeddings=False,
    )
    size = {"height": 32, "width": 32}
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size)
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return _finish(folder, LlavaForConditionalGeneration(config), processor)


def _gemma3(folder: Path) -> Any:
    special = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tokenizer = _tokenizer(special, "<start_of_image>")
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in special.items()}
    config = Gemma3Config(
        text_config={
            **_text_sizes(),
            "query_pre_attn_scalar": 12,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 1
            + ["sliding_attention"],
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 4,
        },
        mm_tokens_per_image=16,
        image_token_id=ids["image_token"],
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
    )
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, image_seq_length=16)
    processor = Gemma3Processor(
        images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=16
    )
    return _finish(folder, Gemma3ForConditionalGeneration(config), processor)


def _qwen2_5_vl(folder: Path) -> Any:
    special = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
    }
    tokenizer = _tokenizer(special, "<|vision_start|><|image_pad|><|vision_end|>")
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in special.items()}
    text = _text_sizes()
    del text["head_dim"]
    config = Qwen2_5_VLConfig(
        text_config={
            **text,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 2, 2],
            },
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 48,
        },
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=False,
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=8 * 8,
        max_pixels=32 * 32,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model = _finish(folder, model, images)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text('{"processor_class": "Qwen2_5_VLProcessor"}')
    return model


IMAGE_MODELS: Mapping[str, Callable[[Path], Any]] = {
    "llava": _llava,
    "gemma3": _gemma3,
    "qwen2_5_vl": _qwen2_5_vl,
}
