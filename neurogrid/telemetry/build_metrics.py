"""Metric of the build: the version of NeuroGrid and of Python, and the role of this process."""

from __future__ import annotations

import platform
from typing import Final

from neurogrid import __version__
from neurogrid.telemetry.metric import MetricSpec, Reading

__all__ = ["BUILD_METRICS", "BuildSource"]

BUILD: Final = MetricSpec(
    "neurogrid_build_info",
    "gauge",
    "Always 1; its labels say what runs.",
    ("role", "version", "python"),
)
BUILD_METRICS: Final = (BUILD,)


class BuildSource:
    """Source of the metric of the build: version and Python, in this role: `coordinator` or `worker`."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __call__(self, reading: Reading) -> None:
        reading.add(BUILD, 1, self._role, __version__, platform.python_version())
