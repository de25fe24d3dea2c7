"""Which device computes, and how much memory it has and uses.

Knows CUDA and the CPU. The memory of a CPU is that of the machine or of its control group, whichever is
less, and a limit that the user gave goes before both.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from neurogrid.errors import ConfigurationError

__all__ = ["DeviceMemory", "device_memory", "device_name", "select_device"]

_CGROUP = Path("/sys/fs/cgroup")


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
    """The device of that name (`cpu`, `cuda`, `cuda:1`), or the best one there is for None.

    Raises:
        ConfigurationError: no such device here.
    """
    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigurationError(f"no device is named {name!r}: try cpu or cuda:0") from exc
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"{device.type} devices are not supported: use cpu or cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigurationError(f"there is no {name} here: {count} CUDA devices were found")
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Return the name that a person calls the device by: the GPU's, or the CPU's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({_cpu_name()})"


def device_memory(device: torch.device) -> DeviceMemory:
    """Memory of the device as it stands now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total_bytes=total, used_bytes=total - free)
    meminfo = _meminfo()
    total, available = meminfo["MemTotal"], meminfo["MemAvailable"]
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and limit < total:
        available = min(available, max(limit - (used or 0), 0))
        total = limit
    return DeviceMemory(total_bytes=total, used_bytes=max(total - available, 0))


def _meminfo() -> dict[str, int]:
    """`/proc/meminfo` in bytes; the kernel gives KiB."""
    result = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
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
