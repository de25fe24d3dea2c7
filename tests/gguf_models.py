"""Models in GGUF: a writer of the format, and miniatures of each architecture beside the same model in transformers.

Blocks are random bytes with scales of a sensible size; what they are as numbers the format's own package says.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
import transformers
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = ["ARCHITECTURES", "BLOCKS", "File", "random_blocks", "save_gguf", "tokens_of"]

# Of float16 numbers in a block: at which byte, and of what size for weights of about 1.
BLOCKS: dict[str, dict[int, float]] = {
    "Q4_0": {0: 1 / 4.6},
    "Q4_1": {0: 1 / 4.6, 2: -7.5 / 4.6},
    "Q5_0": {0: 1 / 9.2},
    "Q5_1": {0: 1 / 9.2, 2: -15.5 / 9.2},
    "Q8_0": {0: 1 / 74},
    "Q4_K": {0: 1 / 160, 2: 7.5 / 160},
    "Q5_K": {0: 1 / 320, 2: 15.5 / 320},
    "Q6_K": {208: 1 / 1360},
    "IQ4_NL": {0: 1 / 70},
    "IQ4_XS": {0: 1 / 1290},
}
VOCAB_SIZE = 320
U32, F32, BOOL, TEXT, ARRAY = 4, 6, 7, 8, 9


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def typed(value: object) -> tuple[int, bytes]:
    """The number of a value's type, and the value."""
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return U32, struct.pack("<I", value)
    if isinstance(value, float):
        return F32, struct.pack("<f", value)
    if isinstance(value, str):
        return TEXT, text(value)
    assert isinstance(value, Sequence)
    found = [(5, struct.pack("<i", each)) if type(each) is int else typed(each) for each in value]
    (number,) = {number for number, _ in found}
    return ARRAY, struct.pack("<IQ", number, len(found)) + b"".join(data for _, data in found)


@dataclass
class File:
    """A file that can be written, right or wrong.

    Attributes:
        values: by key; bytes are written as they are, the number of the type in front.
        tensors: type, shape (the last dimension's elements are neighbours) and bytes, by name.
    """

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[str, Sequence[int], bytes]] = field(default_factory=dict)
    version: int = 3
    alignment: int = 32

    def header(self) -> bytes:
        parts = [b"GGUF", struct.pack("<IQQ", self.version, len(self.tensors), len(self.values))]
        for key, value in self.values.items():
            number, data = (0, value) if isinstance(value, bytes) else typed(value)
            parts += [
                text(key),
                data if isinstance(value, bytes) else struct.pack("<I", number) + data,
            ]
        offset = 0
        for name, (kind, shape, data) in self.tensors.items():
            sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
            number = GGMLQuantizationType[kind].value
            parts += [
                text(name),
                struct.pack("<I", len(shape)),
                sizes,
                struct.pack("<IQ", number, offset),
            ]
            offset += len(data) + -len(data) % self.alignment
        whole = b"".join(parts)
        return whole + bytes(-len(whole) % self.alignment)

    def data(self) -> bytes:
        padded = (data + bytes(-len(data) % self.alignment) for _, _, data in self.tensors.values())
        return self.header() + b"".join(padded)

    def save(self, path: Path) -> Path:
        path.write_bytes(self.data())
        return path


def random_blocks(
    kind: str, shape: Sequence[int], size: float, seed: int
) -> tuple[bytes, torch.Tensor]:
    """Bytes of a matrix of that type, and what they are in float32.

    Args:
        size: of the weights.
    """
    made = numpy.random.default_rng(seed)
    number = GGMLQuantizationType[kind]
    if kind in ("F32", "F16", "BF16"):
        plain = (made.standard_normal(shape) * size).astype(numpy.float32)
        raw = gguf.quantize(plain, number)
        dense = gguf.dequantize(raw, number)
    else:
        elements, num_bytes = gguf.GGML_QUANT_SIZES[number]
        rows = int(numpy.prod(shape)) // elements
        blocks = made.integers(0, 256, (rows, num_bytes), dtype=numpy.uint8)
        signs = made.choice([-1.0, 1.0], rows)
        for at, scale in BLOCKS[kind].items():
            half = (signs * scale * size * made.uniform(0.8, 1.25, rows)).astype(numpy.float16)
            blocks[:, at : at + 2] = half.view(numpy.uint8).reshape(-1, 2)
        raw = blocks
        dense = gguf.dequantize(blocks.reshape(*shape[:-1], -1), number)
    return raw.tobytes(), torch.from_numpy(numpy.array(dense, numpy.float32)).reshape(tuple(shape))


# Tokenizers.


def tokens_of(kind: str) -> dict[str, Any]:
    """Keys of a tokenizer of VOCAB_SIZE tokens."""
    if kind == "gpt2":
        alphabet = list(bytes_to_unicode().values())
        merges = [(a, b) for a in "tshain" for b in "heior"]
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        tokens = [*alphabet, *(a + b for a, b in merges), *special]
        unused = [f"[PAD{number}]" for number in range(VOCAB_SIZE - len(tokens))]
        kinds = [
            3 if token in special else 5 if token in unused else 1 for token in [*tokens, *unused]
        ]
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": [*tokens, *unused],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
            "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
            "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        }
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    pieces = ["\u2581", "t", "h", "e", "th", "the", "\u2581the", "a", "c", "ca", "cat", "\u2581cat"]
    unused = [f"[PAD{number}]" for number in range(VOCAB_SIZE - 259 - len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*special, *bytes_, *pieces, *unused],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(VOCAB_SIZE - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), *[5] * len(unused)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


# Models.

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Written:
    """An architecture as its converter writes it.

    Attributes:
        config: of transformers' model, beside SIZES.
        keys: of the file beside the usual ones; without the architecture's name.
        tokenizer: its kind.
        heads_dealt: whether rows of queries and keys are.
        norms_plus: what the norms are more.
    """

    class_name: str
    config: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = "gpt2"
    heads_dealt: bool = False
    norms_plus: float = 0.0


def _longrope(start: float) -> list[float]:
    return [start + 0.25 * number for number in range(32)]


ARCHITECTURES: dict[str, Written] = {
    "llama": Written("LlamaConfig", tokenizer="llama", heads_dealt=True),
    "llama tied, with biases": Written(
        "LlamaConfig",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        tokenizer="llama",
        heads_dealt=True,
    ),
    "llama 3.1": Written(
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {".rope.freq_base": 500_000.0},
        heads_dealt=True,
    ),
    "mistral": Written(
        "MistralConfig",
        {"sliding_window": 16},
        {".attention.sliding_window": 16},
        tokenizer="llama",
        heads_dealt=True,
    ),
    "qwen2": Written("Qwen2Config"),
    "qwen2 yarn": Written(
        "Qwen2Config",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
        {
            ".rope.freq_base": 1_000_000.0,
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 4.0,
            ".rope.scaling.original_context_length": 128,
        },
    ),
    "qwen3": Written("Qwen3Config", {"head_dim": 128}),
    "qwen2moe": Written(
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
        },
    ),
    "qwen3moe": Written(
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": Written(
        "Gemma2Config",
        {"sliding_window": 16, "query_pre_attn_scalar": 64, "tie_word_embeddings": True},
        {
            ".attention.sliding_window": 16,
            ".attn_logit_softcapping": 50.0,
            ".final_logit_softcapping": 30.0,
        },
        tokenizer="llama",
        norms_plus=1.0,
    ),
    "gemma3": Written(
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 7,
            "sliding_window": 16,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 8.0,
                    "rope_theta": 1_000_000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        {
            ".attention.sliding_window": 16,
            ".rope.freq_base": 1_000_000.0,
            ".rope.scaling.type": "linear",
            ".rope.scaling.factor": 8.0,
        },
        tokenizer="llama",
        norms_plus=1.0,
    ),
    "phi3": Written(
        "Phi3Config",
        {"sliding_window": 16},
        {".attention.sliding_window": 16, ".rope.dimension_count": 64},
        tokenizer="llama",
    ),
    "phi3 of which a part turns": Written(
        "Phi3Config",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
            },
        },
        {".attention.sliding_window": 0, ".rope.dimension_count": 48},
    ),
    "phi3 longrope": Written(
        "Phi3Config",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 128,
                "short_factor": _longrope(1.0),
                "long_factor": _longrope(2.0),
            },
        },
        {".attention.sliding_window": 0, ".rope.scaling.original_context_length": 128},
        tokenizer="llama",
    ),
}
"""By the name in a file, and perhaps what is special."""


def architecture_name(name: str) -> str:
    """What the file calls it: Mistral is a Llama there."""
    return {"mistral": "llama"}.get(name.split()[0], name.split()[0])


def save_gguf(name: str, path: Path, types: Iterable[str] = ("Q8_0",), **more: Any) -> Any:
    """Save a random model; returns it in transformers, with the same weights.

    Args:
        name: a key of ARCHITECTURES.
        types: of the layers' matrices, in turn.
        more: as of `make_gguf`.
    """
    model, made = make_gguf(name, types, **more)
    made.save(path)
    return model


def make_gguf(
    name: str,
    types: Iterable[str] = ("Q8_0",),
    *,
    ends: str = "F32",
    parts_experts: bool = False,
    **changes: Any,
) -> tuple[Any, File]:
    """The same, not saved yet.

    Args:
        ends: the type of embedding and head.
        parts_experts: gates of experts are of another type than what they gate.
        changes: of the config.
    """
    written = ARCHITECTURES[name]
    torch.manual_seed(7)
    config = getattr(transformers, written.class_name)(**{**SIZES, **written.config, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    architecture = architecture_name(name)
    made = File(_keys(architecture, config) | _with_name(architecture, written.keys))
    made.values |= tokens_of(written.tokenizer)
    names = _names_of(architecture, config.num_hidden_layers)
    turn = cycle(types)
    state = model.state_dict()
    for number, (hf_name, tensor) in enumerate(state.items()):
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        is_end = tensor.dim() == 2 and ".layers." not in hf_name
        size = 0.3 / tensor.shape[-1] ** 0.25
        if ".mlp.experts." in hf_name:
            kind = next(turn)
            kinds = kind, next(turn) if parts_experts else kind
            _write_experts(made, hf_name, tensor, kinds, size, number)
            continue
        gguf_name = names(hf_name)
        is_dealt = written.heads_dealt and ("q_proj" in hf_name or "k_proj" in hf_name)
        if tensor.dim() == 1:
            is_norm = hf_name.endswith("norm.weight")
            stored = torch.randn(tensor.shape) * 0.1 + is_norm
            # What the file has in float32 is what counts.
            tensor.copy_(stored - written.norms_plus if is_norm else stored)
            if is_dealt:
                stored = _dealt(stored, _heads(config, hf_name))
            made.tensors[gguf_name] = "F32", tuple(stored.shape), stored.numpy().tobytes()
            continue
        is_router = hf_name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        kind = ends if is_end else "F32" if is_router else next(turn)
        raw, dense = random_blocks(kind, tensor.shape, size, number)
        tensor.copy_(_undealt(dense, _heads(config, hf_name)) if is_dealt else dense)
        shape = tensor.shape[1:] if "shared_expert_gate" in hf_name else tensor.shape
        made.tensors[gguf_name] = kind, tuple(shape), raw
    _write_factors(made, config)
    return model, made


def _keys(architecture: str, config: Any) -> dict[str, Any]:
    keys = {
        ".block_count": config.num_hidden_layers,
        ".context_length": config.max_position_embeddings,
        ".embedding_length": config.hidden_size,
        ".feed_forward_length": config.intermediate_size,
        ".attention.head_count": config.num_attention_heads,
        ".attention.head_count_kv": config.num_key_value_heads,
        ".attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        ".attention.key_length": config.head_dim,
        ".attention.value_length": config.head_dim,
        ".rope.freq_base": 10_000.0,
    }
    if hasattr(config, "num_experts"):
        keys[".expert_count"] = config.num_experts
        keys[".expert_used_count"] = config.num_experts_per_tok
    return {"general.architecture": architecture, **_with_name(architecture, keys)}


def _with_name(architecture: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {architecture + key: value for key, value in keys.items()}


def _names_of(architecture: str, num_layers: int) -> Callable[[str], str]:
    """The names of the format's own package."""
    (number,) = (key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(number, num_layers)

    def name_of(hf_name: str) -> str:
        found = table.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert found is not None, hf_name
        return found

    return name_of


def _heads(config: Any, hf_name: str) -> int:
    return int(config.num_attention_heads if "q_proj" in hf_name else config.num_key_value_heads)


def _dealt(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What the converter makes of the rows of heads: row i of the first half, row i of the second, and so on."""
    size = rows.shape[0] // num_heads
    order = [
        head * size + half * size // 2 + at
        for head in range(num_heads)
        for at in range(size // 2)
        for half in (0, 1)
    ]
    return rows[order]


def _undealt(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    order = _dealt(torch.arange(rows.shape[0]), num_heads)
    found = torch.empty_like(rows)
    found[order] = rows
    return found


def _write_experts(
    made: File, hf_name: str, tensor: torch.Tensor, kinds: tuple[str, str], size: float, seed: int
) -> None:
    """Experts, [E, O, I], which transformers has with gate and up in one, here of two types perhaps."""
    layer = f"blk.{hf_name.split('.')[2]}"
    kind = kinds[0]
    if hf_name.endswith("down_proj"):
        raw, dense = random_blocks(kind, tensor.shape, size, seed)
        tensor.copy_(dense)
        made.tensors[f"{layer}.ffn_down_exps.weight"] = kind, tuple(tensor.shape), raw
        return
    halves = tensor.chunk(2, dim=1)
    for at, (part, half, kind) in enumerate(zip(("gate", "up"), halves, kinds, strict=True)):
        raw, dense = random_blocks(kind, half.shape, size, seed + 1000 * at)
        half.copy_(dense)
        made.tensors[f"{layer}.ffn_{part}_exps.weight"] = kind, tuple(half.shape), raw


def _write_factors(made: File, config: Any) -> None:
    """The tensors that change frequencies, as the converter writes them."""
    rope = config.rope_parameters
    found: dict[str, torch.Tensor] = {}
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        found["rope_freqs.weight"] = plain / scaled
    if rope.get("rope_type") == "longrope":
        found["rope_factors_long.weight"] = torch.tensor(rope["long_factor"])
        found["rope_factors_short.weight"] = torch.tensor(rope["short_factor"])
    for name, tensor in found.items():
        made.tensors[name] = "F32", tuple(tensor.shape), tensor.float().numpy().tobytes()
