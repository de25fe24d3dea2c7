"""Quantised checkpoints as others publish them, written by plain loops after the description of each format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from neurogrid.model.files.foreign.floats import NF4
from tests.families import FAMILIES, save_checkpoint

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
NF4_CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_compute_dtype": "bfloat16",
}
INT8_CONFIG = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
STATE = ".weight.quant_state.bitsandbytes__nf4"

Written = tuple[dict[str, torch.Tensor], torch.Tensor]


def compressed(
    bits: int = 4,
    group: int | None = 32,
    *,
    stored: str = "pack-quantized",
    scheme: dict[str, Any] | None = None,
    weights: dict[str, Any] | None = None,
    **rest: Any,
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": bits,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "channel" if group is None else "group",
                    "group_size": group,
                    "dynamic": False,
                    "actorder": None,
                    "block_structure": None,
                    **(weights or {}),
                },
                **(scheme or {}),
            }
        },
        **rest,
    }


def random_codes(seed: int, outputs: int, inputs: int, bits: int) -> list[list[int]]:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, (outputs, inputs), generator=made).tolist()


def random_scales(
    seed: int, outputs: int, groups: int, dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed + 1)
    return (torch.rand(outputs, groups, generator=made) * 0.02 + 1e-3).to(dtype)


def word(codes: list[int], bits: int) -> int:
    """Codes of an int32, the first in its lowest bits."""
    unsigned = sum(code << (bits * at) for at, code in enumerate(codes))
    return unsigned - 2**32 if unsigned >= 2**31 else unsigned


def plain(
    codes: list[list[int]], zeros: list[list[int]], scales: torch.Tensor, group: int
) -> torch.Tensor:
    """(code - zero) * scale: float32 [O, I], from exact products in float64."""
    return torch.tensor(
        [
            [
                (code - zeros[o][i // group]) * float(scales[o, i // group])
                for i, code in enumerate(row)
            ]
            for o, row in enumerate(codes)
        ],
        dtype=torch.float64,
    ).float()


def write_gptq(
    seed: int,
    outputs: int,
    inputs: int,
    group: int,
    bits: int = 4,
    *,
    less: int = 1,
    is_symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Written:
    per, groups = 32 // bits, inputs // group
    codes = random_codes(seed, outputs, inputs, bits)
    scales = random_scales(seed, outputs, groups, dtype)
    zeros = random_codes(seed + 2, outputs, groups, bits)
    for row in zeros:
        for at in range(groups):
            # Zero itself cannot be stored less one.
            row[at] = 2 ** (bits - 1) if is_symmetric else max(row[at], less)
    qweight = [
        [word([codes[o][at * per + k] for k in range(per)], bits) for o in range(outputs)]
        for at in range(inputs // per)
    ]
    qzeros = [
        [
            word([zeros[at * per + k][s] - less for k in range(per)], bits)
            for at in range(outputs // per)
        ]
        for s in range(groups)
    ]
    tensors = {
        ".qweight": torch.tensor(qweight, dtype=torch.int32),
        ".qzeros": torch.tensor(qzeros, dtype=torch.int32),
        ".scales": scales.t().contiguous(),
        ".g_idx": torch.tensor([i // group for i in range(inputs)], dtype=torch.int32),
    }
    return tensors, plain(codes, zeros, scales, group)


def write_awq(seed: int, outputs: int, inputs: int, group: int) -> Written:
    order, groups = [0, 2, 4, 6, 1, 3, 5, 7], inputs // group
    codes = random_codes(seed, outputs, inputs, 4)
    zeros = random_codes(seed + 2, outputs, groups, 4)
    scales = random_scales(seed, outputs, groups)
    qweight = [
        [word([codes[at * 8 + k][i] for k in order], 4) for at in range(outputs // 8)]
        for i in range(inputs)
    ]
    qzeros = [
        [word([zeros[at * 8 + k][s] for k in order], 4) for at in range(outputs // 8)]
        for s in range(groups)
    ]
    tensors = {
        ".qweight": torch.tensor(qweight, dtype=torch.int32),
        ".qzeros": torch.tensor(qzeros, dtype=torch.int32),
        ".scales": scales.t().contiguous(),
    }
    return tensors, plain(codes, zeros, scales, group)


def write_packed(
    seed: int,
    outputs: int,
    inputs: int,
    group: int,
    bits: int = 4,
    *,
    is_symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Written:
    per, groups, middle = 32 // bits, inputs // group, 2 ** (bits - 1)
    codes = random_codes(seed, outputs, inputs, bits)
    zeros = random_codes(seed + 2, outputs, groups, bits)
    scales = random_scales(seed, outputs, groups, dtype)
    packed = [[word(row[at : at + per], bits) for at in range(0, inputs, per)] for row in codes]
    tensors = {
        ".weight_packed": torch.tensor(packed, dtype=torch.int32),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([outputs, inputs]),
    }
    if is_symmetric:
        zeros = [[middle] * groups for _ in range(outputs)]
    else:
        zero_words = [
            [word([row[s] for row in zeros[at : at + per]], bits) for s in range(groups)]
            for at in range(0, outputs, per)
        ]
        tensors[".weight_zero_point"] = torch.tensor(zero_words, dtype=torch.int32)
    return tensors, plain(codes, zeros, scales, group)


def write_int(
    seed: int, outputs: int, inputs: int, group: int, *, is_symmetric: bool = True
) -> Written:
    groups = inputs // group
    codes = [[code - 128 for code in row] for row in random_codes(seed, outputs, inputs, 8)]
    zeros = [[code - 128 for code in row] for row in random_codes(seed + 2, outputs, groups, 8)]
    scales = random_scales(seed, outputs, groups, torch.bfloat16)
    if is_symmetric:
        zeros = [[0] * groups for _ in range(outputs)]
    tensors = {".weight": torch.tensor(codes, dtype=torch.int8), ".weight_scale": scales}
    if not is_symmetric:
        tensors[".weight_zero_point"] = torch.tensor(zeros, dtype=torch.int8)
    return tensors, plain(codes, zeros, scales, group)


def state_bytes(**fields: Any) -> torch.Tensor:
    text = json.dumps({"quant_type": "nf4", "dtype": "bfloat16", **fields})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def write_nf4(seed: int, outputs: int, inputs: int, block: int = 64) -> Written:
    codes = random_codes(seed, outputs, inputs, 4)
    absmax = random_scales(seed, outputs, inputs // block, torch.float32).flatten()
    flat = [code for row in codes for code in row]
    pairs = [[flat[at] << 4 | flat[at + 1]] for at in range(0, len(flat), 2)]
    tensors = {
        ".weight": torch.tensor(pairs, dtype=torch.uint8),
        ".weight.absmax": absmax,
        ".weight.quant_map": NF4.clone(),
        STATE: state_bytes(blocksize=block, shape=[outputs, inputs]),
    }
    weights = [NF4[code] * absmax[at // block] for at, code in enumerate(flat)]
    return tensors, torch.stack(weights).view(outputs, inputs)


def write_int8(seed: int, outputs: int, inputs: int) -> Written:
    codes = [[code - 128 for code in row] for row in random_codes(seed, outputs, inputs, 8)]
    scb = random_scales(seed, outputs, 1, torch.float32)[:, 0] * 100
    tensors = {
        ".weight": torch.tensor(codes, dtype=torch.int8),
        ".SCB": scb,
        ".weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    weights = [[code * float(scb[o]) / 127 for code in row] for o, row in enumerate(codes)]
    return tensors, torch.tensor(weights, dtype=torch.float64).float()


FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 64],
}


def write_fp8(
    seed: int,
    outputs: int,
    inputs: int,
    block: tuple[int, int] = (32, 64),
    dtype: torch.dtype = torch.float32,
) -> Written:
    """Blocks at the ends may be smaller."""
    made = torch.Generator().manual_seed(seed)
    weight = (torch.randn(outputs, inputs, generator=made) * 60).to(torch.float8_e4m3fn)
    rows, columns = (-(-size // each) for size, each in zip((outputs, inputs), block, strict=True))
    scales = random_scales(seed, rows, columns, dtype) * 0.05
    dense = torch.tensor(
        [
            [
                float(each) * float(scales[o // block[0], i // block[1]])
                for i, each in enumerate(row)
            ]
            for o, row in enumerate(weight.tolist())
        ],
        dtype=torch.float64,
    ).float()
    return {".weight": weight, ".weight_scale_inv": scales}, dense


# Whole checkpoints.

FORMATS: dict[str, tuple[dict[str, Any], Callable[[int, int, int], Written]]] = {
    "gptq": (GPTQ, lambda seed, o, i: write_gptq(seed, o, i, 32)),
    "gptq 8 bits": (
        {**GPTQ, "bits": 8, "group_size": 64, "sym": True},
        lambda seed, o, i: write_gptq(seed, o, i, 64, 8, is_symmetric=True),
    ),
    "awq": (AWQ, lambda seed, o, i: write_awq(seed, o, i, 32)),
    "compressed-tensors int4": (compressed(), lambda seed, o, i: write_packed(seed, o, i, 32)),
    "compressed-tensors int8": (
        compressed(8, None, stored="int-quantized"),
        lambda seed, o, i: write_int(seed, o, i, i),
    ),
    "bitsandbytes nf4": (NF4_CONFIG, lambda seed, o, i: write_nf4(seed, o, i)),
    "fp8": (FP8_CONFIG, lambda seed, o, i: write_fp8(seed, o, i)),
    "bitsandbytes int8": (INT8_CONFIG, lambda seed, o, i: write_int8(seed, o, i)),
}
"""The config.json's entry, and what writes a matrix, of each."""


def save_foreign(name: str, folder: Path, *, num_layers: int = 2) -> Any:
    """Save a Llama whose layers are quantised, the first two of a whole one; returns the same model, dense."""
    config, write = FORMATS[name]
    family = next(family for family in FAMILIES if family.name == "llama-tied")
    model = save_checkpoint(family, folder)
    model.config.num_hidden_layers = num_layers
    del model.model.layers[num_layers:]
    tensors = dict(model.state_dict())
    tensors.pop("lm_head.weight")
    for seed, (path, module) in enumerate(model.named_modules()):
        if isinstance(module, nn.Linear) and ".layers." in path:
            parts, dense = write(seed, module.out_features, module.in_features)
            module.weight.data = dense
            del tensors[f"{path}.weight"]
            tensors |= {path + suffix: part for suffix, part in parts.items()}
    save_file(
        {key: each.contiguous().clone() for key, each in tensors.items()},
        folder / "model.safetensors",
    )
    _add_to_config(folder, quantization_config=config, num_hidden_layers=num_layers)
    return model


def save_foreign_mixture(name: str, folder: Path, model: Any) -> Any:
    """Save a mixture whose layers are quantised, all but what chooses experts; returns the same model, dense."""
    config, write = FORMATS[name]
    model.save_pretrained(folder)
    kept = load_file(folder / "model.safetensors")
    dense = dict(kept)
    for seed, (key, tensor) in enumerate(sorted(kept.items())):
        prefix = key.removesuffix(".weight")
        is_router = prefix.endswith((".gate", "router"))
        if ".layers." in key and key != prefix and tensor.dim() == 2 and not is_router:
            parts, dense[key] = write(seed, *tensor.shape)
            del kept[key]
            kept |= {prefix + suffix: part for suffix, part in parts.items()}
    save_file(dense, folder / "model.safetensors", {"format": "pt"})
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    save_file(kept, folder / "model.safetensors")
    _add_to_config(folder, quantization_config=config)
    return whole


MXFP4_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def write_mxfp4(seed: int, experts: int, outputs: int, inputs: int) -> Written:
    """Blocks and scales of all experts; and the weights, as transformers unpacks them."""
    made = torch.Generator().manual_seed(seed)
    shape = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=made, dtype=torch.uint8)
    scales = torch.randint(119, 126, shape, generator=made, dtype=torch.uint8)
    dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {"_blocks": blocks, "_scales": scales}, dense


def save_mxfp4(folder: Path, model: Any) -> Any:
    """Save a mixture whose experts are in mxfp4, as gpt-oss is; returns the same model, dense."""
    tensors = dict(model.state_dict())
    for seed, (path, parameter) in enumerate(model.named_parameters()):
        if path.endswith((".gate_up_proj", ".down_proj")):
            experts, inputs, outputs = parameter.shape
            parts, parameter.data = write_mxfp4(seed, experts, outputs, inputs)
            del tensors[path]
            tensors |= {path + suffix: part for suffix, part in parts.items()}
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _add_to_config(folder, quantization_config=MXFP4_CONFIG)
    return model


def _add_to_config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
