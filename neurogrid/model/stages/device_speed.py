"""Speed of a device's computing, measured in half a second.

Three figures that decode and prefill are made of: how fast a matrix-vector product reads weights that lie in no
cache, how fast large matrices are multiplied, and what a layer costs besides, in calls of small kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from neurogrid.model.stages.device import CPU, wait_for
from neurogrid.model.stages.few_rows import measure_few_rows, speed_up_few_rows

__all__ = ["DeviceSpeed", "measure_speed"]

MIB = 1024**2
# Read once, so that no cache has it: the largest last-level caches have some hundred MiB.
CPU_BYTES = 256 * MIB
ACCELERATOR_BYTES = 1024 * MIB
# Of the memory that may be used, at most this share; less than this, a cache would have all of it.
MEMORY_SHARE = 0.125
MIN_BYTES = 64 * MIB
# Weight matrices of this many columns, as in models of a few billion parameters, in pieces that a CPU reads in a
# millisecond or two: the fastest of many such moments is there on a busy machine too.
NUM_COLUMNS = 4096
MATRIX_BYTES = 16 * MIB
# The matrices that are multiplied: 0.3 and 137 GFLOP. Chips of both kinds need milliseconds for them.
CPU_SQUARE = 512
ACCELERATOR_SQUARE = 4096
# Small operations in a decoder layer with everything around them: 187 us for a Llama layer of hidden size 128, 40 of
# them for its weights, where an addition takes 0.77 us (transformers 5.23, one core of an EPYC).
OPERATIONS_PER_LAYER = 200
NUM_OPERATIONS = 200
NUM_PRODUCTS = 5
REPEATS = 3


@dataclass(frozen=True)
class DeviceSpeed:
    """The measured speed of a device.

    Attributes:
        bytes_per_second: at which a matrix-vector product goes through its matrix.
        flops: floating point operations a second in a product of large matrices.
        layer_seconds: estimate of what one token through one layer costs besides reading weights.
    """

    bytes_per_second: float
    flops: float
    layer_seconds: float


def measure_speed(
    device: torch.device, dtype: torch.dtype, *, free_bytes: int
) -> DeviceSpeed | None:
    """Measure; None where the dtype cannot be computed with, or no memory is left for it.

    Blocks for half a second or so; run it where nothing else computes.

    Args:
        free_bytes: of the device, of which an eighth is used at most, and only for the moment.
    """
    is_accelerator = device.type != CPU.type
    num_bytes = min(
        ACCELERATOR_BYTES if is_accelerator else CPU_BYTES, int(free_bytes * MEMORY_SHARE)
    )
    if num_bytes < MIN_BYTES:
        return None
    num_rows = MATRIX_BYTES // (NUM_COLUMNS * dtype.itemsize)
    square = ACCELERATOR_SQUARE if is_accelerator else CPU_SQUARE
    try:
        with torch.inference_mode():
            # Now, and not when a layer has come.
            measure_few_rows(device, dtype)
            layers = [_layer(num_rows, dtype, device) for _ in range(num_bytes // MATRIX_BYTES)]
            row = torch.full((1, 1, NUM_COLUMNS), 0.01, dtype=dtype, device=device)
            factor = torch.full((square, square), 0.01, dtype=dtype, device=device)
            small = row[..., :64]

            def read(some: list[nn.Module]) -> None:
                for layer in some:
                    layer(row)

            def call_often() -> None:
                for _ in range(NUM_OPERATIONS):
                    small + small

            # A GPU waits longer for a call than it takes to read a matrix: there, all in one go.
            parts = [layers] if is_accelerator else [[layer] for layer in layers]
            seconds = _fastest([partial(read, part) for part in parts], device)
            multiply = [lambda: factor @ factor] * NUM_PRODUCTS
            return DeviceSpeed(
                bytes_per_second=len(parts[0]) * num_rows * NUM_COLUMNS * dtype.itemsize / seconds,
                flops=2 * square**3 / _fastest(multiply, device),
                layer_seconds=OPERATIONS_PER_LAYER
                * _fastest([call_often] * NUM_PRODUCTS, device)
                / NUM_OPERATIONS,
            )
    except (RuntimeError, MemoryError):
        return None


def _layer(num_outputs: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A linear layer as those of a stage are, of which every page is written to."""
    layer = nn.Linear(NUM_COLUMNS, num_outputs, bias=False, dtype=dtype, device="meta")
    weight = torch.full((num_outputs, NUM_COLUMNS), 0.01, dtype=dtype, device=device)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    speed_up_few_rows(layer)
    return layer


def _fastest(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Seconds of the fastest of these calls, all made a few times: what disturbs one only makes it slower."""
    for call in calls:
        call()  # the first round chooses kernels and fills pools
    best = float("inf")
    for call in [*calls] * REPEATS:
        wait_for(device)
        started = time.perf_counter()
        call()
        wait_for(device)
        best = min(best, time.perf_counter() - started)
    return max(best, 1e-9)
