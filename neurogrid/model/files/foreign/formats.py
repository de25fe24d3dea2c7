"""Format of a quantised checkpoint, by the quantization_config of its config.json: read exactly, or refused.

What is not known is refused, and so is a setting that changes what is stored in a way that `codes` does not
read. Settings of the run that change nothing there are passed by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.files.foreign.codes import ForeignFormat
from neurogrid.model.files.foreign.layout import MAX_SIZE
from neurogrid.model.kernels import CODE_GROUP

__all__ = ["foreign_format"]

# What bitsandbytes has unless it is told otherwise; each matrix says its own.
_NF4_BLOCK: Final = 64


def foreign_format(quantization_config: Mapping[str, object]) -> ForeignFormat:
    """Format of a checkpoint's matrices, by the quantization_config of its config.json.

    Raises:
        UnsupportedModelError: the format is none that is exactly supported.
    """
    method = quantization_config.get("quant_method")
    if method is None and any(
        quantization_config.get(key) for key in ("load_in_4bit", "load_in_8bit")
    ):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModelError(
            f"the checkpoint is quantised by {_shown(method)}; supported are {', '.join(_METHODS)}"
        )
    return _METHODS[method](quantization_config)


def _shown(value: object) -> str:
    """A value of unknown origin in a sentence."""
    if isinstance(value, str):
        return repr(value[:40])
    if value is None or isinstance(value, bool | float):
        return str(value)
    if isinstance(value, int) and abs(value) <= MAX_SIZE:
        return str(value)
    return f"a {type(value).__name__}"


def _refuse(method: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the checkpoint is quantised by {method} {reason}")


def _bits(method: str, value: object, known: tuple[int, ...]) -> int:
    if type(value) is not int or value not in known:
        raise _refuse(
            method, f"with {_shown(value)} bits; supported are {' and '.join(map(str, known))}"
        )
    return value


def _group(method: str, value: object) -> int | None:
    """The size of a group; None for -1."""
    if type(value) is int and value == -1:
        return None
    if type(value) is not int or not 0 < value <= MAX_SIZE or value % CODE_GROUP:
        raise _refuse(
            method, f"in groups of {_shown(value)}; supported are multiples of {CODE_GROUP}"
        )
    return value


def _flag(method: str, config: Mapping[str, object], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _refuse(method, f"with {key} = {_shown(value)}, which is neither true nor false")
    return value


def _words(
    method: str, config: Mapping[str, object], keys: tuple[str, ...], known: tuple[str, ...]
) -> str:
    """The text of the first of some keys, in small letters; the first that is known if none is there."""
    for key in keys:
        value = config.get(key)
        if value is not None:
            text = value.lower() if isinstance(value, str) else None
            if text is None or text not in known:
                raise _refuse(
                    method, f"with {key} = {_shown(value)}; supported is {' or '.join(known)}"
                )
            return text
    return known[0]


def _of_gptq(config: Mapping[str, object]) -> ForeignFormat:
    method = "gptq"
    stored = _words(method, config, ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    _words(method, config, ("pack_dtype",), ("int32",))
    if _flag(method, config, "is_marlin_format", False):
        raise _refuse(method, "in the layout of Marlin, which is for one kind of GPU")
    if config.get("dynamic"):
        raise _refuse(method, "in several ways (dynamic)")
    return ForeignFormat(
        stored,
        "gptq",
        _bits(method, config.get("bits"), (4, 8)),
        _group(method, config.get("group_size")),
        has_minimums=not _flag(method, config, "sym", False),
        are_zeros_less_one=stored == "gptq",
        is_order_told=_flag(method, config, "desc_act", False),
    )


def _of_awq(config: Mapping[str, object]) -> ForeignFormat:
    method = "awq"
    _words(method, config, ("version", "format"), ("gemm",))
    if config.get("backend") == "llm-awq":
        raise _refuse(method, "in the layout of llm-awq; supported is that of AutoAWQ (gemm)")
    if not _flag(method, config, "zero_point", True):
        raise _refuse(method, "without zeros (zero_point)")
    bits = _bits(method, config.get("bits"), (4,))
    return ForeignFormat(
        method, "awq", bits, _group(method, config.get("group_size")), has_minimums=True
    )


def _of_compressed(config: Mapping[str, object]) -> ForeignFormat:
    method = "compressed-tensors"
    layouts = {"pack-quantized": "packed", "int-quantized": "int"}
    if config.get("kv_cache_scheme") is not None:
        raise _refuse(method, "with a quantised key-value cache")
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise _refuse(method, "and sparse (sparsity_config), which is not supported")
    if config.get("transform_config"):
        raise _refuse(method, "after a rotation (transform_config), which is not supported")
    groups = config.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    if not schemes:
        raise _refuse(method, "without config_groups")
    found = [_of_scheme(method, config, scheme, layouts) for scheme in schemes]
    if any(each != found[0] for each in found):
        raise _refuse(method, "in several ways (config_groups)")
    return found[0]


def _of_scheme(
    method: str, config: Mapping[str, object], scheme: object, layouts: Mapping[str, str]
) -> ForeignFormat:
    weights = scheme.get("weights") if isinstance(scheme, dict) else None
    if not isinstance(scheme, dict) or not isinstance(weights, dict):
        raise _refuse(method, "with a config_group that says nothing of weights")
    for key in ("input_activations", "output_activations"):
        if scheme.get(key) is not None:
            raise _refuse(method, f"with quantised {key}; only weights are supported")
    told = scheme if scheme.get("format") is not None else config
    if told.get("format") is None:
        raise _refuse(method, "without a format")
    stored = _words(method, told, ("format",), tuple(layouts))
    _words(method, weights, ("type",), ("int",))
    # Ordered by "weight" while it was made, a matrix has its groups in the plain order.
    order = weights.get("actorder")
    if order is not None and order is not False and order not in ("weight", "static"):
        raise _refuse(method, f"with actorder = {_shown(order)}: inputs out of their order")
    if weights.get("dynamic") not in (None, False) or weights.get("block_structure") is not None:
        raise _refuse(method, "dynamically or in blocks; only groups and channels are supported")
    bits = _bits(method, weights.get("num_bits"), (4, 8) if stored == "pack-quantized" else (8,))
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise _refuse(
            method, f"with the strategy {_shown(strategy)}; supported are group and channel"
        )
    group = None
    if strategy == "group":
        group = _group(method, weights.get("group_size"))
        if group is None:
            raise _refuse(method, "with the strategy group and none")
    return ForeignFormat(
        f"{method} int{bits}",
        layouts[stored],
        bits,
        group,
        has_minimums=not _flag(method, weights, "symmetric", True),
    )


def _of_bitsandbytes(config: Mapping[str, object]) -> ForeignFormat:
    method = "bitsandbytes"
    is_4, is_8 = (_flag(method, config, f"load_in_{bits}bit", False) for bits in (4, 8))
    if is_4 == is_8:
        raise _refuse(method, "with neither 4 nor 8 bits, or with both")
    if is_8:
        if _flag(method, config, "llm_int8_has_fp16_weight", False):
            raise _refuse(method, "with weights that are not quantised (llm_int8_has_fp16_weight)")
        return ForeignFormat(f"{method} int8", "int8", 8, None)
    if _flag(method, config, "bnb_4bit_use_double_quant", False):
        raise _refuse(
            method, "with scales that are quantised, too (bnb_4bit_use_double_quant): not supported"
        )
    # Their own default is fp4.
    _words(
        method,
        {"bnb_4bit_quant_type": config.get("bnb_4bit_quant_type") or "fp4"},
        ("bnb_4bit_quant_type",),
        ("nf4",),
    )
    _words(method, config, ("bnb_4bit_quant_storage",), ("uint8",))
    return ForeignFormat(f"{method} nf4", "nf4", 4, _NF4_BLOCK)


def _of_fp8(config: Mapping[str, object]) -> ForeignFormat:
    method = "fp8"
    # Rounded while it computes, or not at all, as here; what is stored for it would have to be used.
    _words(method, config, ("activation_scheme",), ("dynamic",))
    _words(method, config, ("fmt",), ("e4m3",))
    _words(method, config, ("expert_dtype",), ("fp8",))
    block = config.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2:
        raise _refuse(method, f"in blocks of {_shown(block)}; supported are those with two sizes")
    for size in block:
        if type(size) is not int or not 0 < size <= MAX_SIZE:
            raise _refuse(method, f"in blocks of {_shown(size)}")
    if block[1] % CODE_GROUP:
        raise _refuse(
            method, f"in blocks of {block[1]} inputs; supported are multiples of {CODE_GROUP}"
        )
    return ForeignFormat(method, method, 8, block[1], block=(block[0], block[1]))


def _of_mxfp4(config: Mapping[str, object]) -> ForeignFormat:
    return ForeignFormat("mxfp4", "mxfp4", 4, 32)


_METHODS: Final[Mapping[str, Callable[[Mapping[str, object]], ForeignFormat]]] = {
    "gptq": _of_gptq,
    "awq": _of_awq,
    "compressed-tensors": _of_compressed,
    "bitsandbytes": _of_bitsandbytes,
    "fp8": _of_fp8,
    "mxfp4": _of_mxfp4,
}
