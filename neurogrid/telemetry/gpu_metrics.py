"""The GPU that a worker computes on, as torch and the GPU's driver tell; nothing where there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from neurogrid.model.stages.device import CPU, allocated_bytes, device_memory
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
    "Part of the last moments in which the GPU computed, by whatever program; 0 to 1. Only where torch can "
    "tell at once: of NVIDIA's with the package nvidia-ml-py.",
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
    if device.type == CPU.type:
        return None
    memory = device_memory(device)
    return Gpu(
        index=device.index or 0,
        total_bytes=memory.total_bytes,
        used_bytes=memory.used_bytes,
        allocated_bytes=allocated_bytes(device),
        use=_use(device),
    )


def _use(device: torch.device) -> float | None:
    ask = getattr(torch.get_device_module(device), "utilization", None)
    # Intel's takes 100 ms, in which a worker would serve nobody.
    if ask is None or device.type == "xpu":
        return None
    # No package that asks the driver, or a driver that does not tell, as of a part of a GPU.
    unknown: tuple[type[Exception], ...] = (ModuleNotFoundError, RuntimeError)
    if nvml := sys.modules.get("pynvml"):
        unknown += (nvml.NVMLError,)
    try:
        return float(ask(device)) / 100
    except unknown:
        return None


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
