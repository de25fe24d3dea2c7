"""Models, data and plain loops for the tests of the trainer: what its results are held against.

B samples, T tokens of each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    ResNetConfig,
)

from neurogrid.training.optimizers import schedule_of
from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.trainer import FileRange, TrainerSettings

VOCABULARY = 300
IGNORED = -100
TOTAL_STEPS = 50
NUM_CLASSES = 3
INNER = InnerSection(lr=1e-2, warmup=2, micro_batch=64)


def text_config(**changes: Any) -> LlamaConfig:
    """A Llama of hidden size 64 and 2 layers."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaConfig(**(sizes | changes))


def dropping_config() -> GPT2Config:
    """A GPT-2 with dropout, and tied embeddings."""
    return GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64, n_inner=64
    )


def image_config() -> ResNetConfig:
    """A ResNet with batch normalisation."""
    return ResNetConfig(
        num_channels=3,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=NUM_CLASSES,
    )


def settings_of(
    config: PreTrainedConfig, inner: InnerSection = INNER, **changes: Any
) -> TrainerSettings:
    """A trainer's settings."""
    kind = "image-classification" if config.model_type == "resnet" else "causal-lm"
    text = json.dumps(config.to_dict())
    return TrainerSettings(kind, text, seed=3, inner=inner, total_steps=TOTAL_STEPS, **changes)


def write_slice(path: Path, num_samples: int = 64, length: int = 24, seed: int = 0) -> Path:
    """A slice of ids that can be learned: each is the one before and a few."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, VOCABULARY, (num_samples, 1), generator=generator)
    steps = torch.randint(1, 4, (num_samples, length), generator=generator)
    ids = (starts + steps.cumsum(1)) % VOCABULARY
    save_file({"input_ids": ids.to(torch.int32)}, path)
    return path


def write_labelled_slice(path: Path) -> Path:
    """A slice of which sample i has labels at its first 2 + i % 20 tokens alone."""
    ids = load_file(write_slice(path))["input_ids"]
    labels = ids.clone()
    for number, row in enumerate(labels):
        row[2 + number % 20 :] = IGNORED
    save_file({"input_ids": ids, "labels": labels}, path)
    return path


def write_images(path: Path, num_samples: int = 96) -> Path:
    """A slice of images in which the class is a brighter channel."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
    pixels = torch.randint(0, 100, (num_samples, 3, 16, 16), generator=generator)
    pixels[torch.arange(num_samples), labels] += 100
    save_file({"pixel_values": pixels.to(torch.uint8), "labels": labels}, path)
    return path


def batches_of(path: Path, num_batches: int, size: int = 8) -> list[list[FileRange]]:
    """The first samples of a slice in batches, each of two ranges."""
    half = size // 2
    starts = range(0, num_batches * size, size)
    return [
        [FileRange(path, start, start + half), FileRange(path, start + half, start + size)]
        for start in starts
    ]


def plain_model(config: PreTrainedConfig) -> Any:
    """The same model, made by transformers alone."""
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def mean_loss(model: Any, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
    """Mean over the label tokens of a batch."""
    logits = model(input_ids=ids_BT, use_cache=False).logits
    shifted = functional.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)
    total = functional.cross_entropy(
        logits.reshape(-1, VOCABULARY), shifted.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )
    return total / (shifted != IGNORED).sum()


def plain_loop(
    config: PreTrainedConfig, batches: Sequence[Sequence[FileRange]]
) -> tuple[Any, list[float]]:
    """The model after some steps of AdamW, in twenty lines of torch, and the losses."""
    model = plain_model(config).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    factor = schedule_of("cosine", num_steps=TOTAL_STEPS, num_warmup_steps=2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses = []
    for batch in batches:
        parts = [
            {
                name: each[part.start : part.stop].long()
                for name, each in load_file(part.path).items()
            }
            for part in batch
        ]
        ids = torch.cat([part["input_ids"] for part in parts])
        labels = torch.cat([part.get("labels", part["input_ids"]) for part in parts])
        loss = mean_loss(model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def vector_of(model: Any) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])
