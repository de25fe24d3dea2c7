"""The GPU that a worker computes on, as CUDA and its driver tell; nothing where there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from neurogrid.telemetry.metric import MetricSpec, Reading

__all__ = ["GPU_METRICS", "Gpu", "GpuSource", "read_gpu"]

TOTAL: Final = MetricSpec(
    "neurogrid_gpu_memory_total_bytes", "gauge", "Memory of the GPU.", ("gpu",)
)
USED: Final = MetricSpec(
    "neurogrid_gpu_memory_used_bytes", "gauge", "Of it, taken by whatever program.", ("gpu",)
)
ALLOCATED: Final = MetricSpec(
    "neurogrid_gpu_memory_allocated_bytes",
    "gauge",
    "Of it, taken by tensors of this worker.",
    ("gpu",),
)
USE: Final = MetricSpec(
    "neurogrid_gpu_use_ratio",
    "gauge",
    "Part of the last moments in which the GPU computed, by whatever program; 0 to 1. Only where the package "
    "nvidia-ml-py is installed.",
    ("gpu",),
)
GPU_METRICS: Final = (TOTAL, USED, ALLOCATED, USE)


@dataclass(frozen=True)
class Gpu:
    """A GPU at one moment; `use` is None where nobody can tell."""

    index: int
    total_bytes: int
    used_bytes: int
    allocated_bytes: int
    use: float | None


def read_gpu(device: torch.device) -> Gpu | None:
    """The GPU that is `device`; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return Gpu(
        index=device.index or 0,
        total_bytes=total,
        used_bytes=total - free,
        allocated_bytes=torch.cuda.memory_allocated(device),
        use=_use(device),
    )


def _use(device: torch.device) -> float | None:
    unknown: tuple[type[Exception], ...] = (ModuleNotFoundError, RuntimeError)
    if nvml := sys.modules.get("pynvml"):
        unknown += (nvml.NVMLError,)
    try:
        return torch.cuda.utilization(device) / 100
    except unknown:
        return None  # no nvidia-ml-py, or a driver that does not tell, as of a part of a GPU


class GpuSource:
    """Reads one GPU."""

    def __init__(
        self, device: torch.device, read: Callable[[torch.device], Gpu | None] = read_gpu
    ) -> None:
        self._device = device
        self._read = read

    def __call__(self, reading: Reading) -> None:
        gpu = self._read(self._device)
        if gpu is None:
            return
        name = str(gpu.index)
        reading.add(TOTAL, gpu.total_bytes, name)
        reading.add(USED, gpu.used_bytes, name)
        reading.add(ALLOCATED, gpu.allocated_bytes, name)
        if gpu.use is not None:
            reading.add(USE, gpu.use, name)
