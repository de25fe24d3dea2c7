"""Products with codes by kernels that Triton compiles: on a GPU where there is one, and interpreted where Triton is."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from neurogrid.model.kernels import E4M3, Codes, CodesLinear, gpu_codes, int4, launches, quantize
from neurogrid.model.kernels.gpu_codes import GpuMatrix, gpu_matrix
from neurogrid.model.kernels.int4 import Int4Matrix, int4_matrix
from neurogrid.model.kernels.launches import Launcher

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HAS_TRITON = importlib.util.find_spec("triton") is not None
# Where there is none, as beside torch for CPUs, that of .ci/setup.
APART = Path(sys.prefix) / "triton"
on_a_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and HAS_TRITON), reason="there is no CUDA device with Triton"
)


def forms_of(num_outputs: int, num_inputs: int) -> dict[str, Codes]:
    """A matrix of each form that codes have."""
    generator = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    eight, four = quantize(weight, 8), quantize(weight, 4)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=generator) - 0.5

    shape = (num_outputs, eight.num_columns // 32)
    return {
        "8 bits": eight,
        "8 bits with minimums": replace(eight, minimums=random(shape).half()),
        "8 bits in groups of 16": replace(eight, scales=random((num_outputs, 2 * shape[1]))),
        "8 bits, a scale for each row": replace(eight, scales=random((num_outputs, 1)).bfloat16()),
        "floats": replace(eight, codes=(eight.codes.float() / 16).to(E4M3)),
        "4 bits": four,
        "4 bits with minimums": replace(four, minimums=random(shape).float()),
        "4 bits with a table": replace(four, table=random((16,))),
    }


def off_by(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double().cpu() - expected).norm() / expected.norm())


FORMS = list(forms_of(4, 32))


@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(96, 1024), (50, 100)])
def test_products_are_those_of_the_dense_matrix(
    shape: tuple[int, int], form: str, dtype: torch.dtype
) -> None:
    codes = forms_of(*shape)[form]
    matrix = gpu_matrix(codes.to(CUDA), dtype)
    assert matrix is not None
    dense = codes.dense(torch.float32)
    for other in DTYPES:  # whichever comes first
        assert torch.equal(matrix.dense(other).cpu(), dense.to(other))
    most = max(1e-6, 2 * torch.finfo(dtype).eps)
    for num_rows in (1, 2, 3, 4, 5, 40, 4, 1):
        given = torch.randn(1, num_rows, shape[1]).to(dtype)
        result = matrix.multiply(given.to(CUDA))
        assert (result.dtype, result.shape) == (dtype, (1, num_rows, shape[0]))
        expected = given.double() @ dense.to(dtype if num_rows > 4 else torch.float32).double().t()
        assert off_by(result, expected) < most


@on_a_gpu
def test_rows_may_lie_anywhere() -> None:
    codes = forms_of(64, 96)["8 bits"]
    matrix = gpu_matrix(codes.to(CUDA), torch.float32)
    assert matrix is not None
    held = torch.randn(1000, device=CUDA)
    for strides, start in (((96, 1), 1), ((97, 1), 4), ((1, 2), 0), ((96, 1), 0)):
        given = held.as_strided((2, 96), strides, start)
        expected = given.cpu().double() @ codes.dense(torch.float64).t()
        for _ in range(2):
            assert off_by(matrix.multiply(given), expected) < 1e-6
    assert matrix.multiply(torch.empty(0, 96, device=CUDA)).shape == (0, 64)


@on_a_gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_a_layer_learns_through_them_there(bits: int) -> None:
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    learns_as_dense(quantize(weight, bits), CUDA)


def learns_as_dense(codes: Codes, device: torch.device) -> None:
    """Compare the products of a layer with codes, and gradients through it, with those of the dense weights."""
    bias = nn.Parameter(torch.randn(codes.num_outputs).to(device))
    linear = CodesLinear(codes.to(device), bias, torch.float32, by_int8=True)
    assert isinstance(linear._held, GpuMatrix)
    given = torch.randn(1, 3, codes.num_inputs, requires_grad=True)
    on_gpu = given.detach().to(device).requires_grad_()
    dense = codes.dense(torch.float32)
    expected = given @ dense.t() + bias.cpu()
    result = linear(on_gpu)
    assert off_by(result, expected.double()) < 1e-6
    expected.square().sum().backward()
    result.square().sum().backward()
    assert given.grad is not None
    assert on_gpu.grad is not None
    assert off_by(on_gpu.grad, given.grad.double()) < 1e-5
    assert torch.equal(linear.weight.cpu(), dense)
    parts = sum(part.nbytes for part in codes.parts)
    assert sum(part.nbytes for part in linear.parameters()) == parts + bias.nbytes


@on_a_gpu
@pytest.mark.parametrize("num_inputs", [1024, 192, 96])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_weights_in_the_order_of_torchs_kernel_are_made_at_once(
    group: int, num_inputs: int
) -> None:
    if num_inputs % group:
        pytest.skip("no whole groups")
    codes = int4._checked_codes(group, num_inputs).to(CUDA)
    matrix = int4_matrix(codes, torch.bfloat16)
    if matrix is None:
        pytest.skip("there is no kernel for this GPU")
    assert matrix._make_dense is not None
    weights = matrix.dense(torch.bfloat16)
    assert torch.equal(weights, Int4Matrix(codes).dense(torch.bfloat16))
    given = torch.randn(1, 33, num_inputs, device=CUDA).bfloat16()
    expected = given.double() @ weights.double().t()
    assert off_by(matrix.multiply(given), expected.cpu()) < 8e-3


# Without a GPU

INTERPRETED = """
import torch
from neurogrid.model.kernels import gpu_codes, linear
from neurogrid.model.kernels.gpu_codes import GpuMatrix, _Form, _wrong_product
from tests.unit.test_gpu_codes import forms_of, learns_as_dense
gpu_codes._CHECKED = ((6, 96, (1, 3)), (5, 100, (2,)))
linear.gpu_matrix = lambda codes, dtype: GpuMatrix(codes)
for name, codes in forms_of(4, 64).items():
    # Not bfloat16, which the interpreter does not round.
    for dtype in (torch.float32, torch.float16):
        wrong = _wrong_product(torch.device("cpu"), _Form.of(codes), dtype)
        assert not wrong, (name, dtype, wrong)
    learns_as_dense(codes, torch.device("cpu"))
print("right")
"""

# As a launch does it, but for a device that is not there.
COMPILED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from neurogrid.model.kernels import Codes, int4, launches, quantize, triton_kernels
from neurogrid.model.kernels.gpu_codes import GpuMatrix
from neurogrid.model.kernels.int4 import Int4Matrix
from tests.unit.test_gpu_codes import forms_of

NAMES = {torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.float16: "fp16", torch.bfloat16: "bf16"}
NAMES[torch.float32] = "fp32"
compiled = set()

def type_of(argument):
    return "*" + NAMES[argument.dtype] if torch.is_tensor(argument) else "i32"

class Kernel:
    def __init__(self, name):
        self.name, self.function = name, getattr(triton_kernels, name)

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            names = self.function.arg_names
            is_constant = {each.name: each.is_constexpr for each in self.function.params}
            given = dict(zip(names, arguments, strict=True))
            signature = {key: "constexpr" if is_constant[key] else type_of(each) for key, each in given.items()}
            constants = {key: each for key, each in given.items() if is_constant[key]}
            source = ASTSource(self.function, signature, constants)
            made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert made.asm["cubin"]
            compiled.add((self.name, *constants.values()))
        return launch

class Kernels:
    multiply_rows, make_dense, make_dense_of_tiles = map(Kernel, ("multiply_rows", "make_dense", "make_dense_of_tiles"))

launches._kernels = lambda: Kernels
# Where the first launch is, there is no device, and nothing is launched again.
torch.accelerator.device_index = lambda index: torch.no_grad()
for codes in forms_of(8, 64).values():
    matrix = GpuMatrix(codes)
    for num_rows in (1, 3):
        matrix.multiply(torch.zeros(num_rows, 64, dtype=torch.bfloat16))
    matrix.dense(torch.bfloat16)
for group, num_inputs in ((32, 96), (256, 1024)):
    Int4Matrix(int4._checked_codes(group, num_inputs), makes_dense=True).dense(torch.bfloat16)
print(len(compiled))
"""
with_triton = pytest.mark.skipif(
    not (HAS_TRITON or (APART / "triton").is_dir()), reason="there is no Triton"
)


def run_with_triton(program: str, folder: Path, **variables: str) -> str:
    """What a program prints, in a process of its own: Triton is told by its environment when it is imported."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), **variables}
    if not HAS_TRITON:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(APART), *sys.path]))
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert not ran.returncode, ran.stderr
    return ran.stdout.strip()


@with_triton
def test_kernels_are_right_as_triton_interprets_them(tmp_path: Path) -> None:
    assert run_with_triton(INTERPRETED, tmp_path, TRITON_INTERPRET="1") == "right"


@with_triton
def test_kernels_are_compiled_where_there_is_no_gpu(tmp_path: Path) -> None:
    """For Hopper's; each form's rows, several rows and weights, and weights of two orders of tiles."""
    assert run_with_triton(COMPILED, tmp_path) == "26"


def test_codes_on_the_cpu_are_multiplied_by_others() -> None:
    assert gpu_matrix(quantize(torch.randn(4, 32), 8), torch.float32) is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(64, 256), (37, 100), (5, 96)])
def test_what_is_checked_has_the_form_of_what_is_multiplied(
    shape: tuple[int, int], form: str
) -> None:
    its = gpu_codes._Form.of(forms_of(*shape)[form])
    checked = gpu_codes._checked_codes(its, 37, 100, torch.Generator().manual_seed(0))
    assert gpu_codes._Form.of(checked) == its
    assert checked.num_inputs >= 100
    assert checked.dense(torch.float32).isfinite().all()


def test_where_there_is_no_triton_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launches, "_kernels", lambda: None)
    form = gpu_codes._Form.of(forms_of(4, 32)["8 bits"])
    gpu_codes._is_right.cache_clear()
    int4._makes_dense.cache_clear()
    for _ in range(2):
        assert not gpu_codes._is_right(CUDA, form, torch.float16)
        assert not int4._makes_dense(CUDA, 32, 8)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "codes of 8 bits are made dense by torch for each product on cuda:0: of our kernels, there is no Triton"
    )
    assert second == (
        "codes of 4 bits in groups of 32 are slow for prompts on cuda:0: of our kernels, there is no Triton"
    )
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    gpu_codes._is_right.cache_clear()
    int4._makes_dense.cache_clear()


class _Kernels:
    """Stands for the kernels of a Triton that is not there."""

    class TritonError(Exception):
        pass


@pytest.mark.parametrize(
    "error",
    [_Kernels.TritonError, RuntimeError, OSError, ImportError, subprocess.SubprocessError],
)
def test_what_triton_says_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    monkeypatch.setattr(launches, "_kernels", lambda: _Kernels)

    def fail() -> str:
        raise error("there is no compiler\nin /usr/bin")

    said = "they cannot be compiled (there is no compiler)"
    assert launches.what_is_wrong(fail) == said
    assert launches.what_is_wrong(lambda: "3 is wrong") == "3 is wrong"


def test_memory_that_runs_out_in_a_check_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_kernels", lambda: _Kernels)

    def fail() -> str:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        launches.what_is_wrong(fail)


def test_what_was_compiled_once_is_launched_again_for_the_same_dtypes_and_alignment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Triton's dispatch else: what is compiled for wide loads must not get other pointers."""
    launched: list[tuple[str, tuple[object, ...]]] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: object, **options: object) -> Kernel:
                launched.append((self.name, arguments))
                return Kernel("compiled")

            return launch

    class Kernels(_Kernels):
        multiply = Kernel("dispatch")

    monkeypatch.setattr(launches, "_kernels", lambda: Kernels)
    matrix, given = torch.zeros(4), torch.zeros(64)
    launcher = Launcher("multiply", (matrix,), (7,), {"BITS": 8}, num_warps=2)

    def launch(tensor: torch.Tensor) -> tuple[str, tuple[object, ...]]:
        launcher((1, 1, 1), (tensor,), 5)
        return launched.pop()

    off = torch.zeros(64)[1:]
    assert launch(off) == ("dispatch", (matrix, 7, off, 5, 8))
    assert launch(given) == ("dispatch", (matrix, 7, given, 5, 8))
    assert launch(given) == ("compiled", (matrix.data_ptr(), 7, given.data_ptr(), 5, 8))
    assert launch(off)[0] == "dispatch"
    half = given.half()
    assert [launch(half)[0], launch(half)[0], launch(given)[0]] == [
        "dispatch",
        "compiled",
        "compiled",
    ]
