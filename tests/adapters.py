"""Adapters by PEFT itself, with random weights that matter: its files, and what it computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch

__all__ = ["add_adapter", "peft_tokens", "save_adapters"]

SEED = 11


def add_adapter(
    model: Any, name: str, *, seed: int, dtype: torch.dtype | None = None, **config: Any
) -> Any:
    """The model with one more adapter, whose matrices are random: a `PeftModel`.

    Args:
        model: of transformers, or a `PeftModel` already.
        dtype: of the matrices; None for what PEFT makes them.
        config: of `LoraConfig`, beside what is the same for all.
    """
    lora = peft.LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 9,
            "target_modules": "all-linear",
            "task_type": "CAUSAL_LM",
            **config,
        }
    )
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, lora)
    else:
        model = peft.get_peft_model(model, lora, adapter_name=name)
    generator = torch.Generator().manual_seed(SEED + seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f".{name}.weight" in key:
                # As much as the weights beside it give, so that a token shows that it is there.
                value = (
                    torch.randn(parameter.shape, generator=generator)
                    * 0.5
                    / parameter.shape[-1] ** 0.5
                )
                parameter.copy_(value)
                if dtype is not None:
                    parameter.data = parameter.data.to(dtype)
    return model.eval()


def save_adapters(model: Any, directory: Path) -> dict[str, Path]:
    """Write each adapter of a `PeftModel` to a directory of its own; those, by name."""
    places = {}
    for name in model.peft_config:
        places[name] = directory / name
        model.save_pretrained(directory / f"{name}-as-saved", selected_adapters=[name])
        # PEFT puts one that is not called `default` a directory deeper.
        (directory / f"{name}-as-saved" / name).rename(places[name])
    return places


def peft_tokens(
    model: Any, name: str | None, prompt: Sequence[int], max_tokens: int, **more: Any
) -> list[int]:
    """What PEFT's `generate` writes with one of the adapters, or with none, greedily."""
    asked = {
        "input_ids": torch.tensor([list(prompt)]),
        "attention_mask": torch.ones(1, len(prompt), dtype=torch.long),
        "max_new_tokens": max_tokens,
        "do_sample": False,
        **more,
    }
    with torch.inference_mode():
        if name is None:
            with model.disable_adapter():
                output = model.generate(**asked)
        else:
            model.set_adapter(name)
            output = model.generate(**asked)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
