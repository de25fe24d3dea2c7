"""How fast are the products with bfloat16 and with codes, against torch's in float32?

    python benchmarks/kernels.py

One thread. Every product is called in turn, each time with another matrix, so that no cache has it: between two
calls with the same one all others were read. "As int8" rounds activations to 8 bits first, "by dot" takes them in
bfloat16; elsewhere they are float32. A time is the mean of the quickest fifth of the calls of a round, a ratio that of
torch's float32 in the same round.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from report import spread, table, write_report
from torch.nn import functional

from neurogrid.errors import ConfigurationError
from neurogrid.model.kernels import Codes, Library, Matrix, quantize
from neurogrid.model.kernels.compiled import open_library

NUM_OUTPUTS = (1024, 3072)
NUM_INPUTS = 1024
ROWS = (1, 8, 512)
MIN_CALLS = 10  # of a round
# What the float32 matrices have together, at least; with those of the others it is five times that.
MIN_BYTES = 48 * 1024 * 1024
LEVELS = ("avx512", "avx2", "neon")
PLAIN = ("torch", "float32")
BITS = (8, 4)

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """One product with several matrices of the same shape.

    Attributes:
        dtype: of activations.
        num_bytes: of one matrix, as it is read.
    """

    dtype: torch.dtype
    num_bytes: int
    products: Sequence[Product]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round, about")
    options = parser.parse_args()
    torch.set_num_threads(1)
    libraries = list(_libraries())
    if not libraries:
        raise SystemExit("no products were built: make kernels")
    rows, plain_rows = [], []
    for num_outputs in NUM_OUTPUTS:
        variants = make_variants((num_outputs, NUM_INPUTS), libraries)
        seconds = {
            num_rows: measure(variants, num_rows, options.rounds, options.seconds)
            for num_rows in ROWS
        }
        name = f"{num_outputs} x {NUM_INPUTS}"
        plain_rows.append(
            [
                name,
                *(
                    spread([1e3 * taken for taken in seconds[num_rows][PLAIN]]).show(2)
                    for num_rows in ROWS
                ),
            ]
        )
        for key, variant in variants.items():
            ratios = [
                spread(
                    [
                        plain / taken
                        for plain, taken in zip(
                            seconds[num_rows][PLAIN], seconds[num_rows][key], strict=True
                        )
                    ]
                ).show(2)
                for num_rows in ROWS
            ]
            rate = spread([variant.num_bytes / taken / 1e9 for taken in seconds[1][key]]).show(1)
            rows.append([name, *key, ratios[0], rate, *ratios[1:]])
    write_report(
        "kernels",
        "Products with matrices [outputs x inputs] that no cache holds, one thread, all in turn; a time is the mean of "
        "the quickest fifth of a round's calls; median (minimum to maximum) of "
        f"{options.rounds} rounds. Ratios are speeds, of torch's linear in float32 in the same round; GB/s is what of "
        "a matrix is read in a second. `torch` is torch.nn.functional.linear; where nothing else is said, "
        "activations are float32.",
        table(["matrix", *(f"float32 of torch, {_rows(n)}: ms" for n in ROWS)], plain_rows)
        + "\n\n"
        + table(
            ["matrix", "level", "product", "1 row: x float32", "GB/s", "8 rows", "512 rows"], rows
        )
        + f"\n\nMaking codes of a matrix {NUM_OUTPUTS[-1]} x {NUM_INPUTS} in bfloat16, and laying them out as products "
        "read them; million weights a second:\n\n"
        + table(["codes", "made", "laid out"], _quantising_rows(options.rounds, libraries[0])),
    )


def _libraries() -> Iterator[Library]:
    for level in LEVELS:
        try:
            found = open_library(level)
        except ConfigurationError:
            continue
        if found is not None:
            yield found


def _rows(num_rows: int) -> str:
    return "1 row" if num_rows == 1 else f"{num_rows} rows"


def make_variants(
    shape: tuple[int, int], libraries: Sequence[Library]
) -> Mapping[tuple[str, str], Variant]:
    """All products by level and name, each with matrices of its own."""
    num_matrices = 1 + MIN_BYTES // (4 * shape[0] * shape[1])
    weights = [torch.randn(shape) for _ in range(num_matrices)]
    variants = {
        ("torch", f"{dtype}".removeprefix("torch.")): Variant(
            dtype,
            shape[0] * shape[1] * dtype.itemsize,
            [_linear(weight.to(dtype, copy=True)) for weight in weights],
        )
        for dtype in (torch.float32, torch.bfloat16)
    }
    codes = {bits: [quantize(weight, bits) for weight in weights] for bits in BITS}
    for library in libraries:
        for by_dot in (False, True) if library.has_bf16_dot else (False,):
            name = "bfloat16 by dot" if by_dot else "bfloat16"
            matrices = [
                Matrix.of_bfloat16(library, weight.bfloat16(), None, by_dot=by_dot)
                for weight in weights
            ]
            variants[library.level, name] = _of_matrices(
                matrices, torch.bfloat16 if by_dot else torch.float32
            )
        for bits in BITS:
            for by_int8 in (False, True):
                name = f"int{bits}, activations as int8" if by_int8 else f"int{bits}"
                matrices = [
                    Matrix.of_codes(library, each, None, by_int8=by_int8) for each in codes[bits]
                ]
                variants[library.level, name] = _of_matrices(matrices, torch.float32)
    return variants


def _linear(weight: torch.Tensor) -> Product:
    return lambda given: functional.linear(given, weight)


def _of_matrices(matrices: Sequence[Matrix], dtype: torch.dtype) -> Variant:
    num_bytes = sum(part.nbytes for part in matrices[0].parts)
    return Variant(dtype, num_bytes, [matrix.multiply for matrix in matrices])


def measure(
    variants: Mapping[tuple[str, str], Variant], num_rows: int, num_rounds: int, seconds: float
) -> Mapping[tuple[str, str], list[float]]:
    """Seconds of a call in each round, by variant."""
    given = {
        dtype: torch.randn(num_rows, NUM_INPUTS).to(dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    rounds: dict[tuple[str, str], list[float]] = {key: [] for key in variants}
    with torch.inference_mode():
        _one_turn(variants, given, 0)
        for _ in range(num_rounds):
            calls: dict[tuple[str, str], list[float]] = {key: [] for key in variants}
            stop, turn = time.perf_counter() + seconds, 0
            while turn < MIN_CALLS or time.perf_counter() < stop:
                turn += 1
                for key, taken in _one_turn(variants, given, turn).items():
                    calls[key].append(taken)
            for key, times in calls.items():
                times.sort()
                rounds[key].append(mean(times[: len(times) // 5]))
    return rounds


def _one_turn(
    variants: Mapping[tuple[str, str], Variant],
    given: Mapping[torch.dtype, torch.Tensor],
    turn: int,
) -> Mapping[tuple[str, str], float]:
    taken = {}
    for key, variant in variants.items():
        product = variant.products[turn % len(variant.products)]
        x = given[variant.dtype]
        started = time.perf_counter()
        product(x)
        taken[key] = time.perf_counter() - started
    return taken


def _quantising_rows(num_rounds: int, library: Library) -> list[list[str]]:
    weight = torch.randn(NUM_OUTPUTS[-1], NUM_INPUTS).bfloat16()
    rows = []
    for bits in BITS:
        made, laid_out = [], []
        for _ in range(4 * num_rounds):
            started = time.perf_counter()
            codes: Codes = quantize(weight, bits)
            at = time.perf_counter()
            Matrix.of_codes(library, codes, None, by_int8=True)
            made.append(weight.numel() / (at - started) / 1e6)
            laid_out.append(weight.numel() / (time.perf_counter() - at) / 1e6)
        rows.append([f"int{bits}", spread(made).show(0), spread(laid_out).show(0)])
    return rows


if __name__ == "__main__":
    main()
