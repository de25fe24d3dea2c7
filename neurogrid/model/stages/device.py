"""Devices: the choice of one to compute on, and the memory that it has and uses.

Knows the CPU and whatever accelerator `torch.accelerator` finds: CUDA (by that name ROCm goes, too), XPU, MPS, or a
backend that torch was extended with. There is one kind of accelerator in a process, and any number of it. What that
interface cannot tell of some is asked of the accelerator's own module, `torch.get_device_module`.

The memory of a CPU is that of the machine or of its control group, whichever is less, and a limit that the user gave
goes before both.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from neurogrid.errors import ConfigurationError

__all__ = [
    "CPU",
    "DeviceMemory",
    "allocated_bytes",
    "avoid_planned_attention",
    "device_memory",
    "device_name",
    "seed_device",
    "select_device",
    "wait_for",
]

CPU = torch.device("cpu")
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
# `gpu:1` is the second accelerator, whatever it is called.
_ANY = "gpu"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device's memory: all of it, and what is taken by anybody."""

    total_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """Bytes that are left; never negative."""
        return max(self.total_bytes - self.used_bytes, 0)


def select_device(name: str | None) -> torch.device:
    """The device of that name, or the best one there is for None: the first accelerator, else the CPU.

    Args:
        name: `cpu`; the kind of accelerator that is here, such as `cuda`, `xpu` or `mps`, or one of several, such as
            `cuda:1`; or `gpu:1`, which is the second of whatever kind.

    Raises:
        ConfigurationError: no such device here.
    """
    found = _accelerators()
    if name is None:
        return found[0] if found else CPU
    kind, _, number = name.partition(":")
    if kind == _ANY and found:
        kind = found[0].type
    try:
        device = torch.device(f"{kind}:{number}" if number else kind)
    except RuntimeError:
        device = None
    if device is not None and device.type == CPU.type:
        return CPU
    if device is not None and (chosen := torch.device(device.type, device.index or 0)) in found:
        return chosen
    *most, last = map(str, (CPU, *found))
    seen = f"{', '.join(most)} and {last}" if most else f"{last} alone"
    raise ConfigurationError(f"there is no {name} here: torch sees {seen}")


def _accelerators() -> list[torch.device]:
    """All that are there and can be used."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return []
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]


def avoid_planned_attention(device: torch.device) -> None:
    """Have this process compute attention on `device` without kernels that are planned for each length of a sequence.

    cuDNN's are, for each of them in each thread anew, and torch takes them first on NVIDIA's newer GPUs. While tokens
    are decoded every step has another length: on an H100 with torch 2.11 a token took 48 ms through 16 layers, and 9 on
    an H200 without them (benchmarks/results/2026-11-26-gpu-cuda-intel-xeon.md). The other kernels stay.
    """
    backend: Any = getattr(torch.backends, device.type, None)
    if hasattr(backend, "enable_cudnn_sdp"):
        backend.enable_cudnn_sdp(False)


def device_name(device: torch.device) -> str:
    """Return the name that a person calls the device by: the GPU's, or the CPU's."""
    if device.type == CPU.type:
        return f"CPU ({_cpu_name()})"
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return ask(device) if ask else f"{device.type.upper()} ({_cpu_name()})"


def seed_device(device: torch.device, seed: int) -> None:
    """Begin the random numbers of the CPU and of `device` anew, those of other devices not."""
    # Not torch.manual_seed, which takes 0.5 ms for devices that are not in use.
    torch.default_generator.manual_seed(seed)
    if device.type != CPU.type:
        # An accelerator's own function is about the device that is current, which is the first one.
        with torch.accelerator.device_index(device.index):
            torch.get_device_module(device).manual_seed(seed)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was given, in whatever stream."""
    if device.type != CPU.type:
        torch.accelerator.synchronize(device)


def allocated_bytes(device: torch.device) -> int:
    """Bytes of an accelerator that tensors of this process take."""
    return torch.accelerator.memory_allocated(device)


def device_memory(device: torch.device) -> DeviceMemory:
    """Memory of the device as it stands now."""
    return _cpu_memory() if device.type == CPU.type else _accelerator_memory(device)


def _accelerator_memory(device: torch.device) -> DeviceMemory:
    try:
        free, total = torch.accelerator.get_memory_info(device)
        return DeviceMemory(total_bytes=total, used_bytes=total - free)
    except RuntimeError:  # MPS tells it otherwise, and some drivers of XPU do not tell what is free
        module = torch.get_device_module(device)
    if hasattr(module, "recommended_max_memory"):
        # Of the machine's own memory: what of it a GPU may use, and what it has.
        total, used = module.recommended_max_memory(), module.driver_allocated_memory()
        return DeviceMemory(total_bytes=total, used_bytes=used)
    # What others take of it nobody knows.
    total = module.get_device_properties(device).total_memory
    return DeviceMemory(total_bytes=total, used_bytes=torch.accelerator.memory_reserved(device))


def _cpu_memory() -> DeviceMemory:
    meminfo = _meminfo()
    total, available = meminfo["MemTotal"], meminfo["MemAvailable"]
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and limit < total:
        available = min(available, max(limit - (used or 0), 0))
        total = limit
    return DeviceMemory(total_bytes=total, used_bytes=max(total - available, 0))


def _meminfo() -> dict[str, int]:
    """`/proc/meminfo` in bytes; the kernel gives KiB. Elsewhere than on Linux all memory counts as available."""
    if not _MEMINFO.exists():
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return {"MemTotal": total, "MemAvailable": total}
    result = {}
    for line in _MEMINFO.read_text().splitlines():
        key, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            result[key] = int(value.split()[0]) * 1024
    return result


def _cgroup_bytes(name: str) -> int | None:
    """A number from the control group (v2); None where there is no group or no limit."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the name is decoration, and platform has one
    return platform.processor() or platform.machine()
