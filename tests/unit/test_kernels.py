"""Products with bfloat16 and with codes: equal to plain ones, and row by row the same bits."""

from __future__ import annotations

import copy
import ctypes
import logging
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from neurogrid.errors import ConfigurationError
from neurogrid.model.kernels import (
    Bfloat16Linear,
    Codes,
    CodesLinear,
    Library,
    LowRank,
    Matrix,
    chosen,
    hold_as_bfloat16,
    library,
    quantize,
)
from neurogrid.model.kernels import linear as linear_module
from neurogrid.model.kernels.compiled import open_library
from neurogrid.model.stages.few_rows import speed_up_few_rows

NF4 = torch.tensor(
    [-1.0, -0.7, -0.5, -0.4, -0.3, -0.2, -0.1, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.7, 1.0]
)


def levels() -> list[Library]:
    """All levels of this processor; the tests have them built."""
    best = library()
    assert best is not None, "kernels.so is not there: make kernels"
    return (
        [best] if best.level in ("avx2", "neon") else [best, *filter(None, [open_library("avx2")])]
    )


@pytest.fixture(params=levels(), ids=lambda found: found.level)
def found(request: pytest.FixtureRequest) -> Library:
    level: Library = request.param
    return level


@pytest.fixture
def as_if_new() -> Iterator[None]:
    """Choose the products anew, in the test and after it."""
    library.cache_clear()
    yield
    library.cache_clear()


def some_codes(
    bits: int, shape: tuple[int, int], scale_dtype: torch.dtype, *, shared: int, has_minimums: bool
) -> Codes:
    """Codes as foreign formats have them: any code, scales for `shared` groups, minimums, a table."""
    num_outputs, num_inputs = shape
    num_columns = -(-num_inputs // (32 * shared)) * 32 * shared
    if bits == 8:
        codes = torch.randint(-128, 128, (num_outputs, num_columns), dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (num_outputs, num_columns // 2), dtype=torch.uint8)
    scales = (torch.rand(num_outputs, num_columns // 32 // shared) + 0.1).to(scale_dtype)
    minimums = torch.randn_like(scales.float()).to(scale_dtype) if has_minimums else None
    return Codes(bits, codes, scales, num_inputs, minimums, NF4 if bits == 4 else None)


@pytest.mark.parametrize("has_minimums", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("shape", "shared"), [((48, 128), 1), ((37, 192), 2), ((5, 128), 4)])
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_multiply_as_their_dense_matrix(
    found: Library,
    bits: int,
    shape: tuple[int, int],
    shared: int,
    scale_dtype: torch.dtype,
    has_minimums: bool,
) -> None:
    codes = some_codes(bits, shape, scale_dtype, shared=shared, has_minimums=has_minimums)
    dense = codes.dense(torch.float32)
    bias = torch.randn(shape[0])
    matrix = Matrix.of_codes(found, codes, bias, by_int8=False)
    assert torch.equal(matrix.dense(torch.float32), dense)
    x = torch.randn(3, 2, shape[1])
    expected = functional.linear(x.double(), dense.double(), bias.double())
    assert (matrix.multiply(x) - expected).norm() <= 1e-6 * expected.norm()


def half_groups(shape: tuple[int, int], scale_dtype: torch.dtype = torch.float32) -> Codes:
    """Codes of 8 bits with a scale for each 16 inputs."""
    num_outputs, num_inputs = shape
    num_columns = -(-num_inputs // 32) * 32
    codes = torch.randint(-128, 128, (num_outputs, num_columns), dtype=torch.int8)
    scales = (torch.rand(num_outputs, num_columns // 16) + 0.1).to(scale_dtype)
    return Codes(8, codes, scales, num_inputs)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(48, 128), (37, 200), (5, 32), (1, 7)])
def test_codes_in_groups_of_16_multiply_as_their_dense_matrix(
    found: Library, shape: tuple[int, int], scale_dtype: torch.dtype
) -> None:
    codes = half_groups(shape, scale_dtype)
    dense = codes.dense(torch.float32)
    wide = codes.scales.float().repeat_interleave(16, dim=1)
    assert torch.equal(dense, (codes.codes.float() * wide)[:, : shape[1]])
    bias = torch.randn(shape[0])
    matrix = Matrix.of_codes(found, codes, bias, by_int8=False)
    assert torch.equal(matrix.dense(torch.float32), dense)
    x = torch.randn(3, 2, shape[1])
    expected = functional.linear(x.double(), dense.double(), bias.double())
    assert (matrix.multiply(x) - expected).norm() <= 1e-6 * expected.norm()


def floats(shape: tuple[int, int], scale_dtype: torch.dtype = torch.float32) -> Codes:
    """Every float of 8 bits that is a number, and a scale for each row."""
    num_outputs, num_inputs = shape
    codes = torch.randint(0, 254, (num_outputs, -(-num_inputs // 32) * 32), dtype=torch.uint8)
    # NaN is 127 and 255.
    codes += codes >= 127
    scales = (torch.rand(num_outputs, 1) + 0.1).to(scale_dtype)
    return Codes(8, codes.view(torch.float8_e4m3fn), scales, num_inputs)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(48, 128), (37, 200), (5, 32), (1, 7)])
def test_floats_of_8_bits_multiply_as_their_dense_matrix(
    found: Library, shape: tuple[int, int], scale_dtype: torch.dtype
) -> None:
    codes = floats(shape, scale_dtype)
    dense = codes.dense(torch.float32)
    bias = torch.randn(shape[0])
    matrix = Matrix.of_codes(found, codes, bias, by_int8=False)
    assert torch.equal(matrix.dense(torch.float32), dense)
    x = torch.randn(3, 2, shape[1])
    expected = functional.linear(x.double(), dense.double(), bias.double())
    assert (matrix.multiply(x) - expected).norm() <= 1e-6 * expected.norm()


def test_each_float_of_8_bits_is_exact(found: Library) -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[numbers % 128 != 127]
    codes = Codes(
        8,
        functional.pad(numbers[:, None], (0, 31)).view(torch.float8_e4m3fn),
        torch.ones(254, 1),
        32,
    )
    x = functional.pad(torch.ones(1, 1), (0, 31))
    result = Matrix.of_codes(found, codes, None, by_int8=False).multiply(x)
    assert torch.equal(result[0], numbers.view(torch.float8_e4m3fn).float())
    with pytest.raises(ValueError, match="floats"):
        Matrix.of_codes(found, codes, None, by_int8=True)


def test_groups_of_16_are_those_of_one_form(found: Library) -> None:
    codes = half_groups((16, 64))
    with pytest.raises(ValueError, match="groups of 16 multiply no activations of 8 bits"):
        Matrix.of_codes(found, codes, None, by_int8=True)
    with_minimums = Codes(8, codes.codes, codes.scales, 64, codes.scales)
    of_4_bits = Codes(4, torch.zeros(16, 32, dtype=torch.uint8), codes.scales, 64)
    for other in (with_minimums, of_4_bits):
        with pytest.raises(ValueError, match="groups of 16 are of codes of 8 bits"):
            Matrix.of_codes(found, other, None, by_int8=False)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [
        "bfloat16",
        "bfloat16 by dot",
        "int8",
        "int8 by int8",
        "int4",
        "int4 by int8",
        "half groups",
        "float8",
    ],
)
def test_a_row_gets_the_bits_that_it_gets_alone(
    found: Library, kind: str, num_threads: int
) -> None:
    name, _, how = kind.partition(" ")
    if how == "by dot" and not found.has_bf16_dot:
        # One level has it, whichever others are tried beside: nothing that is there goes untried.
        pytest.skip("no instruction for it at this level")
    weight = torch.randn(600, 200)
    if name == "bfloat16":
        matrix = Matrix.of_bfloat16(found, weight.bfloat16(), None, by_dot=how == "by dot")
    elif name == "half":
        matrix = Matrix.of_codes(found, half_groups((600, 200)), None, by_int8=False)
    elif name == "float8":
        matrix = Matrix.of_codes(found, floats((600, 200)), None, by_int8=False)
    else:
        codes = quantize(weight, int(name[-1]))
        matrix = Matrix.of_codes(found, codes, None, by_int8=how == "by int8")
    x = with_spikes(64, 200).to(torch.bfloat16 if how == "by dot" else torch.float32)
    alone = torch.cat([matrix.multiply(row) for row in x.split(1)])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_rows in (1, 2, 7, 64):
            assert torch.equal(matrix.multiply(x[:num_rows]), alone[:num_rows]), num_rows
    finally:
        torch.set_num_threads(before)


def with_spikes(num_rows: int, num_inputs: int) -> torch.Tensor:
    """Activations, [R, I]; in some groups of some rows, a number beside which the others of the group are small."""
    x = torch.randn(num_rows, num_inputs)
    x[::3, 7::64] *= 50
    return x


@pytest.mark.parametrize("num_rows", [1, 9])
def test_what_stands_beside_a_spike_is_not_lost(found: Library, num_rows: int) -> None:
    codes = quantize(torch.randn(48, 128), 8)
    x = torch.randn(num_rows, 128)
    x[:, 7::32] = 50.0
    matrix = Matrix.of_codes(found, codes, None, by_int8=True)
    dense = codes.dense(torch.float64)
    off = matrix.multiply(x) - functional.linear(x.double(), dense)
    x[:, 7::32] = 0.0
    assert off.norm() <= 1e-3 * functional.linear(x.double(), dense).norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_levels_give_the_same_bits(bits: int) -> None:
    codes = quantize(torch.randn(50, 130), bits)
    x = with_spikes(9, 130)
    for by_int8 in (False, True):
        results = [
            Matrix.of_codes(each, codes, None, by_int8=by_int8).multiply(x) for each in levels()
        ]
        assert all(torch.equal(result, results[0]) for result in results)
    for codes in (half_groups((50, 130)), floats((50, 130))):
        results = [
            Matrix.of_codes(each, codes, None, by_int8=False).multiply(x) for each in levels()
        ]
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_not_finite_does_not_come_out_finite(
    found: Library, bits: int, dtype: torch.dtype
) -> None:
    codes = quantize(torch.rand(20, 64) + 1, bits)
    x = torch.ones(4, 64, dtype=dtype)
    x[1, 3], x[2, 40], x[3, 0] = torch.nan, torch.inf, -torch.inf
    for by_int8 in (False, True):
        result = Matrix.of_codes(found, codes, None, by_int8=by_int8).multiply(x)
        assert torch.isfinite(result[0]).all()
        assert not torch.isfinite(result[1:]).any()


def test_rows_of_another_width_or_place_are_refused_before_memory_is_read(found: Library) -> None:
    codes = quantize(torch.randn(20, 64), 8)
    for matrix in (
        Matrix.of_codes(found, codes, None, by_int8=False),
        Matrix.of_bfloat16(found, torch.randn(20, 64).bfloat16(), None, by_dot=False),
    ):
        for rows in (torch.randn(2, 63), torch.randn(2, 128), torch.randn(2, 64, device="meta")):
            with pytest.raises(ValueError, match="rows of 64 on the CPU are due"):
                matrix.multiply(rows)
        assert matrix.multiply(torch.randn(0, 64)).shape == (0, 20)
        x, into = torch.randn(2, 64), torch.empty(3, 20)
        assert matrix.multiply(x, into[1:]).data_ptr() == into[1].data_ptr()
        assert torch.equal(into[1:], matrix.multiply(x))
        for place in (
            torch.empty(3, 20),
            torch.empty(20, 2).t(),
            torch.empty(2, 20, device="meta"),
        ):
            with pytest.raises(ValueError, match=r"a result of \[2, 20\] is due"):
                matrix.multiply(x, place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("inputs", "outputs", "rank"), [(64, 128, 4), (80, 33, 1), (7, 5, 3), (512, 96, 17)]
)
def test_what_adapters_add_is_that_of_torch_for_each_row_by_itself(
    found: Library, inputs: int, outputs: int, rank: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rank)
    lows = [
        LowRank(
            torch.randn(rank, inputs, generator=generator).to(dtype),
            torch.randn(outputs, rank, generator=generator).to(dtype),
            0.5,
            device=torch.device("cpu"),
        )
        for _ in range(3)
    ]
    padded = -(-outputs // 16) * 16
    assert all(each.num_bytes == rank * (inputs + padded) * dtype.itemsize for each in lows)
    its = [lows[0], None, lows[1], lows[2], lows[0]]
    x = torch.randn(len(its), inputs, generator=generator)
    before = torch.randn(len(its), outputs, generator=generator)

    def added(rows: Sequence[int]) -> torch.Tensor:
        addresses = (ctypes.c_void_p * len(rows))(
            *(each.address if each else None for each in (its[row] for row in rows))
        )
        result = before[list(rows)].clone()
        found.adapt(addresses, x[list(rows)].contiguous(), result)
        return result

    together = added(range(len(its)))
    for row, each in enumerate(its):
        expected = before[row] if each is None else each.added(x[row], before[row])
        assert torch.allclose(together[row], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(together[row], added([row])[0])
    assert torch.equal(together[1], before[1])
    with pytest.raises(ValueError, match="adapters are given"):
        found.adapt((ctypes.c_void_p * 2)(), x, before)


def test_a_table_is_not_forgotten_for_activations_of_8_bits(found: Library) -> None:
    codes = some_codes(4, (16, 64), torch.float32, shared=1, has_minimums=False)
    with pytest.raises(ValueError, match="table"):
        Matrix.of_codes(found, codes, None, by_int8=True)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(1, 130),
    st.sampled_from([8, 4]),
    st.floats(-20, 10),
    st.integers(0, 2**31),
)
def test_quantised_weights_are_off_by_at_most_half_a_step(
    num_outputs: int, num_inputs: int, bits: int, exponent: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=generator) * 2**exponent
    codes = quantize(weight, bits)
    assert codes.scales.dtype == torch.float16
    steps = codes.scales.float().abs().repeat_interleave(32, dim=1)[:, :num_inputs]
    off = (codes.dense(torch.float32) - weight).abs()
    # Of 4 bits the side without the largest magnitude ends at 7; a scale in float16 is off by 2^-11, or 2^-25.
    at_ends = steps if bits == 4 else steps / 2
    assert (off <= at_ends * 1.001 + weight.abs() * 2**-10 + 130 * 2**-24).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e9])
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_that_have_no_scale_are_refused(bits: int, value: float) -> None:
    weight = torch.randn(8, 64)
    weight[3, 40] = value
    with pytest.raises(ValueError, match="not finite, or beyond"):
        quantize(weight, bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros(bits: int) -> None:
    assert not quantize(torch.zeros(3, 40), bits).dense(torch.float32).any()


# Linear layers


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_of_codes_compute_in_their_dtype_and_show_their_weight(
    dtype: torch.dtype, has_bias: bool
) -> None:
    weight = torch.randn(48, 96)
    bias = nn.Parameter(torch.randn(48, dtype=dtype)) if has_bias else None
    codes = quantize(weight, 8)
    layer = CodesLinear(codes, bias, dtype, by_int8=False)
    assert torch.equal(layer.weight, codes.dense(dtype))
    x = torch.randn(2, 5, 96, dtype=dtype)
    with torch.inference_mode():
        result = layer(x)
        expected = functional.linear(
            x.float(), codes.dense(torch.float32), None if bias is None else bias.float()
        )
    assert result.dtype == dtype
    eps = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.allclose(result.float(), expected, rtol=eps, atol=20 * eps)
    assert sum(part.nbytes for part in layer.parameters()) < 0.6 * weight.nbytes


def test_without_kernels_layers_of_codes_are_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = quantize(torch.randn(48, 96), 4)
    by_kernels = CodesLinear(codes, None, torch.float32, by_int8=False)
    monkeypatch.setattr("neurogrid.model.kernels.linear.library", lambda: None)
    by_torch = CodesLinear(codes, None, torch.float32, by_int8=True)
    x = torch.randn(3, 96)
    with torch.inference_mode():
        assert torch.allclose(by_torch(x), by_kernels(x), atol=1e-5)
    assert sum(part.nbytes for part in by_torch.parameters()) == sum(
        part.nbytes for part in codes.parts
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize(
    "form", ["8", "8, shared by all", "4", "4, minimums", "halves", "floats", "not whole"]
)
def test_a_gradient_goes_through_codes_some_inputs_at_a_time(
    form: str, has_kernels: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (37, 224)
    codes = {
        "8": quantize(torch.randn(shape), 8),
        "8, shared by all": some_codes(8, shape, torch.float32, shared=7, has_minimums=False),
        "4": quantize(torch.randn(shape), 4),
        "4, minimums": some_codes(4, shape, torch.float16, shared=1, has_minimums=True),
        "halves": half_groups(shape),
        "floats": floats(shape),
        "not whole": half_groups((37, 200)),
    }[form]
    if not has_kernels:
        monkeypatch.setattr(linear_module, "library", lambda: None)
    layer = CodesLinear(codes, None, dtype, by_int8=False)
    x = torch.randn(2, 5, codes.num_inputs, dtype=dtype, requires_grad=True)
    result = layer(x)
    gradient = torch.randn_like(result)
    expected = gradient @ codes.dense(dtype)
    made = []
    write_dense = Codes.write_dense

    def counted(self: Codes, into: torch.Tensor) -> None:
        made.append(into.numel())
        write_dense(self, into)

    # A multiple of 32 inputs, once as many as there are and more.
    for widened in (1, 70 * 37, 2**20):
        monkeypatch.setattr(linear_module, "_WIDENED", widened)
        monkeypatch.setattr(Codes, "write_dense", counted)
        (got,) = torch.autograd.grad(result, x, gradient, retain_graph=True)
        # A product with a few columns at its end may have other bits there.
        is_whole = codes.num_inputs % 32 == 0
        assert torch.equal(got, expected) if is_whole else torch.allclose(got, expected, atol=1e-3)
        assert sum(made) == 37 * codes.num_inputs
        assert max(made) <= max(widened, 32 * 37)
        made.clear()


def test_float32_that_is_bfloat16_is_held_so_and_gives_the_same() -> None:
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 48, bias=False))
    model[0].weight.data = model[0].weight.data.bfloat16().float()
    plain = copy.deepcopy(model)
    speed_up_few_rows(model)
    assert sum(part.nbytes for part in model[0].parameters()) == 2 * 64 * 96 + 4 * 64
    assert isinstance(model[1], nn.Linear)
    assert model[1].weight.dtype == torch.float32
    x = torch.randn(1, 7, 96)
    with torch.inference_mode():
        assert torch.allclose(model(x), plain(x), atol=1e-6)
        assert torch.equal(model[0].weight, plain[0].weight)


def test_a_weight_that_is_shared_stays_what_it_is() -> None:
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(32, 64), "head": nn.Linear(64, 32, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    model["head"].weight.data = model["head"].weight.data.bfloat16().float()
    speed_up_few_rows(model)
    assert model["head"].weight is model["embedding"].weight


def test_bfloat16_is_multiplied_where_it_lies_and_follows_a_new_weight() -> None:
    layer = nn.Linear(96, 48, dtype=torch.bfloat16)
    plain = copy.deepcopy(layer)
    speed_up_few_rows(layer)
    assert type(layer) is Bfloat16Linear
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.allclose(layer(x), plain(x), rtol=1e-2, atol=1e-2)
        other = torch.randn(48, 96, dtype=torch.bfloat16)
        layer.weight.data = plain.weight.data = other
        assert torch.allclose(layer(x), plain(x), rtol=1e-2, atol=0.3)
        assert torch.allclose(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.parametrize("has_bias", [True, False])
def test_nothing_else_is_held_as_bfloat16(has_bias: bool) -> None:
    layer = nn.Linear(8, 8, bias=has_bias)
    with torch.no_grad():
        layer.weight.copy_(torch.ones(8, 8))
        layer.weight[7, 7] = 1 + 2**-10
    assert hold_as_bfloat16(layer) is layer
    half = nn.Linear(8, 8, bias=has_bias, dtype=torch.float16)
    assert hold_as_bfloat16(half) is half


# The choice


@pytest.mark.usefixtures("as_if_new")
def test_a_level_can_be_forced_or_all_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = levels()[-1].level
    library.cache_clear()
    monkeypatch.setenv("NEUROGRID_KERNELS", lowest)
    found = library()
    assert found is not None
    assert found.level == lowest
    library.cache_clear()
    monkeypatch.setenv("NEUROGRID_KERNELS", "none")
    assert library() is None


@pytest.mark.usefixtures("as_if_new")
def test_a_level_that_is_not_there_is_an_error_that_names_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NEUROGRID_KERNELS", "avx1024")
    with pytest.raises(ConfigurationError, match="'avx1024'; this processor has"):
        library.__wrapped__()


@pytest.mark.usefixtures("as_if_new")
def test_wrong_products_are_not_used_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = Library.multiply

    def wrong(self: Library, fields: int, given: torch.Tensor, result: torch.Tensor) -> None:
        right(self, fields, given, result)
        result[0, 0] += 1

    monkeypatch.setattr(Library, "multiply", wrong)
    with caplog.at_level(logging.WARNING):
        assert library() is None
    assert "bfloat16 [64, 256] (off by" in caplog.text


@pytest.mark.usefixtures("as_if_new")
def test_where_nothing_was_built_torch_serves_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("neurogrid.model.kernels.compiled._FILE", "/nowhere/kernels.so")
    with caplog.at_level(logging.INFO):
        assert library() is None
    assert "make kernels" in caplog.text
    monkeypatch.setenv("NEUROGRID_KERNELS", "avx2")
    with pytest.raises(ConfigurationError, match="built without"):
        chosen.library.__wrapped__()


def test_kernels_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = "neurogrid.model.kernels.compiled"
    with monkeypatch.context() as patch:
        # Of a library that says nothing of it, and of one that says something else.
        patch.setattr(f"{compiled}._FILE", "libm.so.6")
        with pytest.raises(ConfigurationError, match="build it anew"):
            open_library(None)
    monkeypatch.setattr(f"{compiled}._INTERFACE", 1)
    with pytest.raises(ConfigurationError, match="build it anew"):
        open_library(None)
