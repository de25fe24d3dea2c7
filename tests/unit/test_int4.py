"""Codes of 4 bits as torch's kernel for GPUs reads them: by its twin for the CPU, and on a GPU where there is one."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from neurogrid.model.kernels import Codes, CodesLinear, int4, quantize
from neurogrid.model.kernels.int4 import Int4Matrix, int4_matrix

HALF = torch.bfloat16
GROUPS = (32, 64, 128, 256)
CUDA = torch.device("cuda", 0)


def codes_of(num_outputs: int, num_inputs: int, group: int, *, with_minimums: bool) -> Codes:
    """Random codes with scales that bfloat16 has, so that nothing is lost."""
    generator = torch.Generator().manual_seed(group)
    plain = torch.randint(0, 256, (num_outputs, num_inputs // 2), generator=generator)
    shape = (num_outputs, num_inputs // group)
    scales = torch.rand(shape, generator=generator).bfloat16().float().half()
    minimums = torch.randn(shape, generator=generator).bfloat16() if with_minimums else None
    return Codes(4, plain.to(torch.uint8), scales, num_inputs, minimums)


@pytest.mark.parametrize("with_minimums", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("num_rows", [1, 5, 33])
def test_products_are_those_of_the_dense_matrix(
    group: int, num_rows: int, with_minimums: bool
) -> None:
    codes = codes_of(48, 3 * 256, group, with_minimums=with_minimums)
    matrix = Int4Matrix(codes)
    generator = torch.Generator().manual_seed(num_rows)
    given = torch.randn(1, num_rows, codes.num_inputs, generator=generator).to(HALF)
    result, dense = matrix.multiply(given), codes.dense(torch.float32)
    assert (result.dtype, result.shape) == (HALF, (1, num_rows, 48))
    expected = given.double() @ dense.double().t()
    assert (result.double() - expected).norm() < 5e-3 * expected.norm()
    # Each weight by itself, rounded once.
    assert torch.equal(matrix.dense(HALF), dense.to(HALF))


def test_a_product_takes_any_shape_and_any_strides() -> None:
    matrix = Int4Matrix(codes_of(16, 64, 32, with_minimums=False))
    given = torch.randn(64, 3, 2).to(HALF).transpose(0, 2)
    rows = torch.stack([matrix.multiply(row) for row in given.reshape(-1, 64)])
    assert torch.equal(matrix.multiply(given), rows.view(2, 3, 16))


@pytest.mark.parametrize("shape", [(0,), (1, 0)])
def test_of_no_rows_there_is_no_product(shape: tuple[int, ...]) -> None:
    matrix = Int4Matrix(codes_of(48, 128, 32, with_minimums=False))
    result = matrix.multiply(torch.empty(*shape, 128, dtype=HALF))
    assert (result.shape, result.dtype) == ((*shape, 48), HALF)


def test_the_bytes_that_cuda_gets_have_the_even_input_in_the_high_half() -> None:
    assert int4._halves_swapped(torch.tensor([0x21, 0xF0], dtype=torch.uint8)).tolist() == [
        0x12,
        0x0F,
    ]


@pytest.mark.parametrize(
    ("num_inputs", "tiles"), [(256, 8), (64, 4), (96, 2), (32, 2), (192, 4), (11008, 8)]
)
def test_as_many_tiles_go_together_as_divide_the_inputs(num_inputs: int, tiles: int) -> None:
    assert next(each for each in (8, 4, 2) if num_inputs % (16 * each) == 0) == tiles
    codes = codes_of(16, num_inputs, 32, with_minimums=False)
    assert torch.equal(Int4Matrix(codes).dense(torch.float32), codes.dense(HALF).float())


# When it is used


def test_what_the_kernel_takes() -> None:
    def taken(codes: Codes, dtype: torch.dtype = HALF) -> bool:
        return int4._takes(codes, dtype)

    weight = torch.randn(48, 512)
    codes = quantize(weight, 4)
    assert taken(codes)
    assert not taken(codes, torch.float16)
    assert not taken(codes, torch.float32)
    assert not taken(quantize(weight, 8))
    assert not taken(quantize(weight[:40], 4))
    assert not taken(quantize(weight[:, :500], 4))
    for group, is_taken in {**dict.fromkeys(GROUPS, True), 512: False}.items():
        assert taken(codes_of(16, 512, group, with_minimums=True)) is is_taken
    table = Codes(4, codes.codes, codes.scales, codes.num_inputs, table=torch.arange(16.0))
    assert not taken(table)
    # On the CPU there are better ones.
    assert int4_matrix(codes, HALF) is None


@pytest.mark.parametrize("group", GROUPS)
def test_the_check_passes_what_is_right_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    own, device = torch._weight_int4pack_mm_for_cpu, torch.device("cpu")
    assert int4._wrong_product(device, group) == ""

    def other(
        row: torch.Tensor, packed: torch.Tensor, size: int, scales: torch.Tensor
    ) -> torch.Tensor:
        scales = scales.clone()
        scales[0, 0, 1] += 4  # one zero of one output
        return own(row, packed, size, scales)

    monkeypatch.setattr(torch, "_weight_int4pack_mm_for_cpu", other)
    assert int4._wrong_product(device, group).startswith("multiplies them wrongly (off by")


def test_a_gpu_without_the_kernel_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = SimpleNamespace(get_device_capability=lambda device: (7, 5))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    int4._is_right.cache_clear()
    assert not int4._is_right(CUDA, 32)
    assert not int4._is_right(CUDA, 32)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "4 bits in groups of 32 are made dense for each product: cuda:0 has no" in caplog.text
    # A build of torch for another GPU, or for none: whatever it says is passed on.
    monkeypatch.setattr(module, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(int4, "_wrong_product", _refuse)
    assert not int4._is_right(CUDA, 64)
    assert "cuda:0 refuses it (not available for build)" in caplog.text
    int4._is_right.cache_clear()


def test_memory_that_runs_out_in_the_check_says_nothing_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = SimpleNamespace(get_device_capability=lambda device: (9, 0))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(int4, "_wrong_product", _find_no_memory)
    int4._is_right.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        int4._is_right(CUDA, 32)
    monkeypatch.setattr(int4, "_wrong_product", lambda device, group: "")
    assert int4._is_right(CUDA, 32)
    int4._is_right.cache_clear()


def _find_no_memory(device: torch.device, group: int) -> str:
    raise torch.OutOfMemoryError("CUDA out of memory")


def _refuse(device: torch.device, group: int) -> str:
    raise RuntimeError("not available for build\nException raised from ...")


def test_a_layer_multiplies_by_it_and_gives_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = quantize(torch.randn(48, 128, generator=torch.Generator().manual_seed(0)), 4)
    bias = nn.Parameter(torch.randn(48).to(HALF))
    monkeypatch.setattr("neurogrid.model.kernels.linear.library", lambda: None)
    monkeypatch.setattr(
        "neurogrid.model.kernels.linear.int4_matrix", lambda codes, dtype: Int4Matrix(codes)
    )
    linear = CodesLinear(codes, bias, HALF, by_int8=True)
    row = torch.randn(1, 3, 128).to(HALF)
    expected = functional.linear(row, codes.dense(HALF), bias).float()
    assert (linear(row).float() - expected).norm() < 1e-2 * expected.norm()
    assert torch.allclose(linear.weight.float(), codes.dense(torch.float32), rtol=2**-7)
    # Codes and scales, and the bias.
    assert sum(part.nbytes for part in linear.parameters()) == 48 * 128 // 2 + 48 * 4 * 4 + 48 * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("group", GROUPS)
def test_on_a_gpu(group: int) -> None:
    codes = codes_of(4096, 1024, group, with_minimums=True).to(CUDA)
    if torch.cuda.get_device_capability(CUDA) < (8, 0):
        pytest.skip("there is no kernel for this GPU")
    matrix = int4_matrix(codes, HALF)
    assert matrix is not None
    for num_rows in (1, 7, 64):
        given = torch.randn(1, num_rows, 1024, device=CUDA).to(HALF)
        expected = given.double() @ codes.dense(torch.float64).t()
        assert (matrix.multiply(given).double() - expected).norm() < 5e-3 * expected.norm()
    assert torch.equal(matrix.dense(HALF), codes.dense(HALF))
