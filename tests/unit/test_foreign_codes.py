"""Matrices of others' quantised checkpoints: each format written by plain loops, and decoded; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.foreign.codes import ForeignFormat
from neurogrid.model.files.foreign.formats import foreign_format
from neurogrid.model.kernels import E4M3, Codes
from tests.foreign_checkpoints import (
    AWQ,
    FP8_CONFIG,
    GPTQ,
    INT8_CONFIG,
    NF4_CONFIG,
    STATE,
    Written,
    compressed,
    state_bytes,
    write_awq,
    write_fp8,
    write_gptq,
    write_int,
    write_int8,
    write_nf4,
    write_packed,
)


def checked(form: ForeignFormat, tensors: dict[str, torch.Tensor]) -> Codes:
    """What was decoded, held against what its format promises."""
    told = tensors.get(form.shape_teller or "")
    outputs, inputs = form.shape({key: tuple(each.shape) for key, each in tensors.items()}, told)
    codes = form.decode(tensors)
    assert (codes.num_outputs, codes.num_inputs, codes.bits) == (outputs, inputs, form.bits)
    assert codes.codes.dtype == (torch.int8 if form.bits == 8 else torch.uint8)
    assert codes.codes.shape == (outputs, codes.num_columns * form.bits // 8)
    assert codes.codes.is_contiguous()
    assert codes.scales.is_contiguous()
    assert codes.num_columns // 32 % codes.scales.shape[1] == 0
    assert (codes.minimums is not None) == form.has_minimums
    if codes.minimums is not None:
        assert codes.minimums.dtype == codes.scales.dtype == torch.float32
        assert codes.minimums.shape == codes.scales.shape
        assert codes.minimums.is_contiguous()
    if form.scale_dtype is not None:
        assert codes.scales.dtype == form.scale_dtype
    assert (codes.table is None) == (form.table is None)
    assert form.marker in tensors
    assert tensors.keys() <= set(form.suffixes)
    return codes


# Formats decoded.

SEEDS = st.integers(0, 2**20)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([32, 64, 96]))


def cases(function: Callable[..., None]) -> Callable[..., None]:
    """Seeds, and shapes in units: of outputs, of groups, and the group's size."""
    return settings(max_examples=15, deadline=None)(given(SEEDS, SHAPES)(function))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
@cases
def test_gptq(bits: int, stored: str, seed: int, shape: tuple[int, int, int]) -> None:
    units, groups, group = shape
    form = foreign_format({**GPTQ, "bits": bits, "group_size": group, "checkpoint_format": stored})
    less = 1 if stored == "gptq" else 0
    written, expected = write_gptq(seed, units * 8, groups * group, group, bits, less=less)
    assert torch.equal(checked(form, written).dense(torch.float32), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [32, 128, 40])
def test_gptq_with_one_symmetric_group(bits: int, inputs: int) -> None:
    form = foreign_format({**GPTQ, "bits": bits, "group_size": -1, "sym": True})
    written, expected = write_gptq(3, 16, inputs, inputs, bits, is_symmetric=True)
    codes = checked(form, written)
    assert codes.scales.dtype == torch.float16
    assert torch.equal(codes.dense(torch.float32), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_without_order_and_in_plain_order_though_ordered_by_activations(bits: int) -> None:
    written, expected = write_gptq(4, 8, 64, 32, bits)
    form = foreign_format({**GPTQ, "bits": bits, "desc_act": True})
    assert torch.equal(checked(form, written).dense(torch.float32), expected)
    del written[".g_idx"]
    form = foreign_format({**GPTQ, "bits": bits})
    assert torch.equal(checked(form, written).dense(torch.float32), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_of_32_bits_are_off_by_a_rounding_of_the_largest_weight(bits: int) -> None:
    written, expected = write_gptq(5, 16, 256, 64, bits, dtype=torch.float32)
    codes = checked(foreign_format({**GPTQ, "bits": bits, "group_size": 64}), written)
    off = (codes.dense(torch.float32) - expected).abs().max()
    assert off <= 2.0**-24 * 2 * 2**bits * float(codes.scales.max())


@cases
def test_awq(seed: int, shape: tuple[int, int, int]) -> None:
    units, groups, group = shape
    form = foreign_format({**AWQ, "group_size": group})
    written, expected = write_awq(seed, units * 8, groups * group, group)
    assert torch.equal(checked(form, written).dense(torch.float32), expected)


@pytest.mark.parametrize("inputs", [64, 36])
def test_awq_with_one_group(inputs: int) -> None:
    form = foreign_format({**AWQ, "group_size": -1, "version": "GEMM"})
    written, expected = write_awq(6, 8, inputs, inputs)
    assert torch.equal(checked(form, written).dense(torch.float32), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
@cases
def test_packed(bits: int, is_symmetric: bool, seed: int, shape: tuple[int, int, int]) -> None:
    units, groups, group = shape
    # Outputs that do not fill the words of their zeros, too.
    outputs = units * 5
    form = foreign_format(compressed(bits, group, weights={"symmetric": is_symmetric}))
    written, expected = write_packed(
        seed, outputs, groups * group, group, bits, is_symmetric=is_symmetric
    )
    assert torch.equal(checked(form, written).dense(torch.float32), expected)
    if is_symmetric:
        assert form.decode(written).scales.dtype == torch.bfloat16


@pytest.mark.parametrize("is_symmetric", [True, False])
@cases
def test_int_quantized(is_symmetric: bool, seed: int, shape: tuple[int, int, int]) -> None:
    units, groups, group = shape
    stored = "int-quantized"
    weights = {"symmetric": is_symmetric}
    form = foreign_format(compressed(8, group, stored=stored, weights=weights))
    written, expected = write_int(seed, units * 3, groups * group, group, is_symmetric=is_symmetric)
    assert torch.equal(checked(form, written).dense(torch.float32), expected)


@pytest.mark.parametrize("inputs", [64, 50])
def test_channels(inputs: int) -> None:
    written, expected = write_int(7, 5, inputs, inputs)
    # Older files have the zeros of symmetric matrices, too.
    written[".weight_zero_point"] = torch.zeros(5, 1, dtype=torch.int8)
    form = foreign_format(compressed(8, None, stored="int-quantized"))
    assert torch.equal(checked(form, written).dense(torch.float32), expected)
    if inputs == 64:
        for bits in (4, 8):
            written, expected = write_packed(8, 5, inputs, inputs, bits)
            form = foreign_format(compressed(bits, None))
            assert torch.equal(checked(form, written).dense(torch.float32), expected)


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 3), st.sampled_from([32, 64, 96, 128]))
def test_nf4(seed: int, outputs: int, blocks: int, block: int) -> None:
    form = foreign_format(NF4_CONFIG)
    written, expected = write_nf4(seed, outputs, blocks * block, block)
    codes = checked(form, written)
    assert codes.scales.shape[1] == blocks
    assert torch.equal(codes.dense(torch.float32), expected)


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 100))
def test_int8(seed: int, outputs: int, inputs: int) -> None:
    written, expected = write_int8(seed, outputs, inputs)
    dense = checked(foreign_format(INT8_CONFIG), written).dense(torch.float32)
    # The scale is rounded before the product is.
    torch.testing.assert_close(dense, expected, rtol=2**-22, atol=0)


@settings(max_examples=15, deadline=None)
@given(
    SEEDS,
    st.integers(1, 70),
    st.integers(1, 5),
    st.sampled_from([(32, 64), (48, 32), (1, 128)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_fp8(
    seed: int, outputs: int, columns: int, block: tuple[int, int], dtype: torch.dtype
) -> None:
    form = foreign_format({**FP8_CONFIG, "weight_block_size": list(block)})
    written, expected = write_fp8(seed, outputs, columns * 32, block, dtype)
    codes = form.decode(written)
    assert codes.are_floats
    assert codes.scales.dtype == dtype
    assert torch.equal(codes.dense(torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_what_transformers_makes_of_it(dtype: torch.dtype) -> None:
    form = foreign_format({**FP8_CONFIG, "weight_block_size": [128, 128], "fmt": None})
    written, _ = write_fp8(5, 256, 384, (128, 128), dtype)
    its = Fp8Dequantize(None)._dequantize_one(
        written[".weight"], written[".weight_scale_inv"], torch.float32
    )
    assert torch.equal(form.decode(written).dense(torch.float32), its)


@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        (".weight", lambda each: each.view(torch.uint8).fill_(0x7F).view(E4M3), "not a number"),
        (".weight", lambda each: each.view(torch.uint8).fill_(0xFF).view(E4M3), "not a number"),
        (".weight", lambda each: each.view(torch.int8), "is int8"),
        (".weight_scale_inv", lambda each: each.fill_(torch.nan), "not finite"),
        (".weight_scale_inv", lambda each: each.fill_(torch.inf), "not finite"),
        (".weight_scale_inv", lambda each: each.fill_(1e37), "not finite"),
        (".weight_scale_inv", lambda each: each.double(), "is float64"),
        (".weight_scale_inv", lambda each: each[:1], "is .* and not"),
        (".weight_scale_inv", lambda each: each.flatten(), "is .* and not"),
    ],
)
def test_fp8_that_is_not_what_it_says_is_refused(suffix: str, change: Any, words: str) -> None:
    written, _ = write_fp8(6, 64, 96)
    written[suffix] = change(written[suffix])
    with pytest.raises(CheckpointError, match=words):
        foreign_format(FP8_CONFIG).decode(written)


def test_blocks_of_fp8_that_codes_cannot_have_are_refused() -> None:
    written, _ = write_fp8(7, 8, 72)
    with pytest.raises(UnsupportedModelError, match="72 inputs in blocks of 64"):
        foreign_format(FP8_CONFIG).decode(written)


# Configs that are refused, with what the refusal says.


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "None"),
        ({"quant_method": "quark"}, "'quark'"),
        ({"quant_method": "fp8"}, "in blocks of None"),
        ({**FP8_CONFIG, "weight_block_size": None}, "in blocks of None"),
        ({**FP8_CONFIG, "weight_block_size": [128]}, "in blocks of a list"),
        ({**FP8_CONFIG, "weight_block_size": [128, "128"]}, "in blocks of '128'"),
        ({**FP8_CONFIG, "weight_block_size": [0, 128]}, "in blocks of 0"),
        ({**FP8_CONFIG, "weight_block_size": [1, 16]}, "in blocks of 16 inputs"),
        ({**FP8_CONFIG, "activation_scheme": "static"}, "static"),
        ({**FP8_CONFIG, "fmt": "e5m2"}, "e5m2"),
        ({**FP8_CONFIG, "expert_dtype": "fp4"}, "fp4"),
        ({"quant_method": ["gptq"]}, "a list"),
        ({"quant_method": "x" * 1000}, "supported are gptq, awq"),
        ({**GPTQ, "bits": 3}, "3 bits"),
        ({**GPTQ, "bits": True}, "True bits"),
        ({**GPTQ, "bits": 10**5000}, "a int bits"),
        ({**GPTQ, "bits": None}, "None bits"),
        ({**GPTQ, "group_size": 16}, "groups of 16"),
        ({**GPTQ, "group_size": 0}, "groups of 0"),
        ({**GPTQ, "group_size": -32}, "groups of -32"),
        ({**GPTQ, "group_size": 32.0}, "groups of 32.0"),
        ({**GPTQ, "group_size": None}, "groups of None"),
        ({**GPTQ, "sym": "yes"}, "sym"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**GPTQ, "is_marlin_format": True}, "Marlin"),
        ({**GPTQ, "pack_dtype": "int8"}, "pack_dtype"),
        ({**GPTQ, "dynamic": {"-:.*mlp.*": {}}}, "dynamic"),
        ({**AWQ, "bits": 8}, "8 bits"),
        ({**AWQ, "version": "gemv"}, "gemv"),
        ({**AWQ, "version": 1}, "version = 1"),
        ({**AWQ, "backend": "llm-awq"}, "llm-awq"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        (compressed(stored="marlin-24"), "marlin-24"),
        (compressed(stored="float-quantized"), "float-quantized"),
        (compressed(format=None), "without a format"),
        (compressed(3), "3 bits"),
        (compressed(4, stored="int-quantized"), "4 bits"),
        (compressed(scheme={"input_activations": {"num_bits": 8}}), "input_activations"),
        (compressed(scheme={"output_activations": {}}), "output_activations"),
        (compressed(scheme={"weights": None}), "nothing of weights"),
        (compressed(scheme={"format": "nvfp4-pack-quantized"}), "nvfp4"),
        (compressed(weights={"type": "float"}), "float"),
        (compressed(weights={"actorder": "group"}), "actorder"),
        (compressed(weights={"actorder": True}), "actorder"),
        (compressed(weights={"dynamic": True}), "dynamically"),
        (compressed(weights={"block_structure": [128, 128]}), "blocks"),
        (compressed(weights={"strategy": "tensor"}), "tensor"),
        (compressed(weights={"strategy": ["group"]}), "a list"),
        (compressed(weights={"group_size": -1}), "group"),
        (compressed(weights={"group_size": 48}), "48"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "cache"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
        (compressed(sparsity_config="2:4"), "sparse"),
        (compressed(transform_config={"config_groups": {}}), "rotation"),
        (compressed(config_groups={}), "config_groups"),
        (compressed(config_groups=[1]), "config_groups"),
        (compressed(config_groups={"a": 1}), "nothing of weights"),
        ({**NF4_CONFIG, "bnb_4bit_use_double_quant": True}, "double_quant"),
        ({**NF4_CONFIG, "bnb_4bit_quant_type": "fp4"}, "fp4"),
        ({**NF4_CONFIG, "bnb_4bit_quant_type": None}, "fp4"),
        ({**NF4_CONFIG, "bnb_4bit_quant_storage": "bfloat16"}, "storage"),
        ({**NF4_CONFIG, "load_in_8bit": True}, "both"),
        ({"quant_method": "bitsandbytes"}, "neither"),
        ({**INT8_CONFIG, "llm_int8_has_fp16_weight": True}, "fp16"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        foreign_format(config)
    assert len(str(caught.value)) < 200


def test_config_groups_must_agree() -> None:
    two = compressed()
    groups = two["config_groups"]
    groups["group_1"] = compressed()["config_groups"]["group_0"]
    assert foreign_format(two).group == 32
    groups["group_1"] = compressed(8)["config_groups"]["group_0"]
    with pytest.raises(UnsupportedModelError, match="several ways"):
        foreign_format(two)


def test_configs_that_say_the_same_in_other_words() -> None:
    assert foreign_format({**GPTQ, "format": "gptq_v2"}).are_zeros_less_one is False
    without_method = {key: value for key, value in NF4_CONFIG.items() if key != "quant_method"}
    assert foreign_format(without_method) == foreign_format(NF4_CONFIG)
    in_group = compressed(scheme={"format": "pack-quantized"}, stored="mixed-precision")
    assert foreign_format(in_group) == foreign_format(compressed())
    by_weight = compressed(weights={"actorder": "weight"}, sparsity_config={"format": "dense"})
    assert foreign_format(by_weight) == foreign_format(compressed())
    assert hash(foreign_format(by_weight)) == hash(foreign_format(compressed()))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([GPTQ, AWQ, NF4_CONFIG, INT8_CONFIG, compressed()]), st.data())
def test_any_value_anywhere_in_a_config_is_taken_or_refused(
    config: dict[str, Any], data: st.DataObject
) -> None:
    changed = json.loads(json.dumps(config))
    places = list(_places(changed))
    place, key = data.draw(st.sampled_from(places))
    place[key] = data.draw(JSON)
    try:
        form = foreign_format(changed)
    except UnsupportedModelError as exc:
        sentence = str(exc)
    else:
        assert form.bits in (4, 8)
        assert form.group is None or form.group % 32 == 0
        sentence = ""
    assert len(sentence) < 250


def _places(within: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for key, value in within.items():
        yield within, key
        if isinstance(value, dict):
            yield from _places(value)


# Tensors that are refused.

WRITTEN: dict[str, tuple[dict[str, Any], Callable[[], Written]]] = {
    "gptq": (GPTQ, lambda: write_gptq(1, 8, 64, 32)),
    "gptq-sym": (
        {**GPTQ, "sym": True, "bits": 8},
        lambda: write_gptq(1, 8, 64, 32, 8, is_symmetric=True),
    ),
    "awq": (AWQ, lambda: write_awq(1, 8, 64, 32)),
    "packed": (compressed(), lambda: write_packed(1, 8, 64, 32)),
    "packed-zeros": (
        compressed(weights={"symmetric": False}),
        lambda: write_packed(1, 8, 64, 32, is_symmetric=False),
    ),
    "int": (compressed(8, stored="int-quantized"), lambda: write_int(1, 8, 64, 32)),
    "int-zeros": (
        compressed(8, stored="int-quantized", weights={"symmetric": False}),
        lambda: write_int(1, 8, 64, 32, is_symmetric=False),
    ),
    "nf4": (NF4_CONFIG, lambda: write_nf4(1, 8, 64)),
    "int8": (INT8_CONFIG, lambda: write_int8(1, 8, 64)),
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("name", WRITTEN)
def test_each_tensor_must_be_there_and_of_its_shape_and_dtype(name: str) -> None:
    config, write = WRITTEN[name]
    form = foreign_format(config)
    tensors, expected = write()
    assert torch.equal(checked(form, tensors).dense(torch.float32), expected) or name == "int8"
    for suffix, tensor in tensors.items():
        without = {key: value for key, value in tensors.items() if key != suffix}
        if suffix in form.required:
            with pytest.raises(CheckpointError, match=f"lacks its {suffix}"):
                form.decode(without)
        broken = [
            tensor.unsqueeze(0),
            tensor[:0] if tensor.dim() else tensor.view(1),
            torch.cat([tensor, tensor]) if tensor.dim() else tensor.expand(2),
            tensor.double(),
            tensor.to(torch.complex64),
        ]
        for each in broken:
            with pytest.raises((CheckpointError, UnsupportedModelError)):
                form.decode({**without, suffix: each})
        if tensor.dtype in FLOATS and suffix != ".weight.quant_map":
            for value in (float("nan"), float("inf"), -float("inf")):
                bad = tensor.clone()
                bad.view(-1)[-1] = value
                with pytest.raises(CheckpointError, match="not finite"):
                    form.decode({**without, suffix: bad})
    with pytest.raises(CheckpointError, match="belongs to no matrix"):
        form.decode({**tensors, ".weight_g_idx": torch.zeros(64, dtype=torch.int32)})


@pytest.mark.parametrize("name", ["packed", "nf4", "int8", "int"])
def test_weights_must_not_overflow(name: str) -> None:
    config, write = WRITTEN[name]
    tensors, _ = write()
    suffix = next(key for key in (".weight_scale", ".weight.absmax", ".SCB") if key in tensors)
    tensors[suffix] = torch.full_like(tensors[suffix].float(), 3e38)
    with pytest.raises(CheckpointError, match="makes weights that are not"):
        foreign_format(config).decode(tensors)


def test_inputs_grouped_by_their_activations_are_refused() -> None:
    tensors, _ = write_gptq(1, 8, 64, 32)
    for order in (torch.arange(64) % 2, torch.zeros(64), torch.full((64,), -1)):
        tensors[".g_idx"] = order.int()
        with pytest.raises(UnsupportedModelError, match="grouped by their activations"):
            foreign_format({**GPTQ, "desc_act": True}).decode(tensors)
    del tensors[".g_idx"]
    with pytest.raises(CheckpointError, match=r"lacks its \.g_idx"):
        foreign_format({**GPTQ, "desc_act": True}).decode(tensors)


def test_a_zero_that_readers_disagree_about_is_refused() -> None:
    tensors, _ = write_gptq(1, 8, 64, 32)
    tensors[".qzeros"][0, 0] |= 15
    with pytest.raises(UnsupportedModelError, match="stored as 15"):
        foreign_format(GPTQ).decode(tensors)
    foreign_format({**GPTQ, "checkpoint_format": "gptq_v2"}).decode(tensors)


def test_zeros_in_symmetric_matrices_are_refused() -> None:
    tensors, _ = write_gptq(1, 8, 64, 32)
    with pytest.raises(CheckpointError, match="zeros other than 8"):
        foreign_format({**GPTQ, "sym": True}).decode(tensors)
    tensors, _ = write_int(1, 8, 64, 32)
    tensors[".weight_zero_point"] = torch.ones(8, 2, dtype=torch.int8)
    with pytest.raises(CheckpointError, match="zero point in a symmetric"):
        foreign_format(compressed(8, stored="int-quantized")).decode(tensors)


@pytest.mark.parametrize(
    ("write", "config"),
    [
        (lambda: write_gptq(1, 8, 80, 80), {**GPTQ, "group_size": 64}),
        (lambda: write_awq(1, 8, 80, 80), {**AWQ, "group_size": 64}),
        (lambda: write_packed(1, 8, 80, 80), compressed(4, 64)),
        (lambda: write_int(1, 8, 80, 80), compressed(8, 64, stored="int-quantized")),
        (lambda: write_nf4(1, 8, 96, 96), None),
        (lambda: write_nf4(1, 8, 48, 48), NF4_CONFIG),
    ],
)
def test_groups_must_be_whole(write: Callable[[], Written], config: dict[str, Any] | None) -> None:
    tensors, _ = write()
    if config is None:
        config = NF4_CONFIG
        tensors[STATE] = state_bytes(blocksize=64, shape=[8, 96])
    with pytest.raises(UnsupportedModelError, match="whole"):
        foreign_format(config).decode(tensors)


def test_outputs_must_fill_the_words_of_their_zeros() -> None:
    form = foreign_format(GPTQ)
    shapes = {".qweight": (8, 12), ".qzeros": (2, 2), ".scales": (2, 12), ".g_idx": (64,)}
    with pytest.raises(CheckpointError, match="do not fill"):
        form.shape(shapes)
    with pytest.raises(UnsupportedModelError, match="odd"):
        foreign_format({**AWQ, "group_size": -1}).shape(
            {".qweight": (35, 1), ".qzeros": (1, 1), ".scales": (1, 8)}
        )


def test_a_packed_matrix_must_have_the_shape_that_it_says() -> None:
    tensors, _ = write_packed(1, 8, 64, 32)
    for said in ([8, 63], [64, 8], [-8, -64]):
        tensors[".weight_shape"] = torch.tensor(said)
        with pytest.raises(UnsupportedModelError, match="says"):
            foreign_format(compressed()).decode(tensors)


@pytest.mark.parametrize(
    "state",
    [
        state_bytes(blocksize=64, shape=[64, 8]),
        state_bytes(blocksize=64, shape=[8, 64, 1]),
        state_bytes(blocksize=64, shape=None),
        state_bytes(blocksize=64, shape=[8.0, 64]),
        state_bytes(blocksize=64, shape=[-8, -64]),
        state_bytes(blocksize=64, shape=[True, 512]),
        state_bytes(blocksize=64, shape=[2**50, 64]),
        state_bytes(blocksize=0, shape=[8, 64]),
        state_bytes(blocksize=None, shape=[8, 64]),
        state_bytes(blocksize=32, shape=[8, 64]),
        state_bytes(blocksize=64, shape=[8, 64], quant_type="fp4"),
        state_bytes(blocksize=64, shape=[8, 64], nested_blocksize=256),
        state_bytes(blocksize=64, shape=[8, 64], more="x" * 5000),
        torch.tensor(list(b"[1]"), dtype=torch.uint8),
        torch.tensor(list(b"{"), dtype=torch.uint8),
        torch.tensor(list(b"\xff\xfe\xff"), dtype=torch.uint8),
        torch.tensor(list(b"[" * 4096), dtype=torch.uint8),
        torch.zeros(0, dtype=torch.uint8),
    ],
)
def test_states_of_nf4_that_are_refused(state: torch.Tensor) -> None:
    tensors, _ = write_nf4(1, 8, 64)
    with pytest.raises((CheckpointError, UnsupportedModelError), match="bitsandbytes nf4: "):
        foreign_format(NF4_CONFIG).decode({**tensors, STATE: state})


def test_other_tables_and_layouts_of_bitsandbytes_are_refused() -> None:
    tensors, _ = write_nf4(1, 8, 64)
    tensors[".weight.quant_map"][3] = float("nan")
    with pytest.raises(UnsupportedModelError, match="table"):
        foreign_format(NF4_CONFIG).decode(tensors)
    tensors, _ = write_int8(1, 8, 64)
    tensors[".weight_format"].fill_(2)
    with pytest.raises(UnsupportedModelError, match="GPU"):
        foreign_format(INT8_CONFIG).decode(tensors)
