"""NeuroGrid: one model on several machines, weights and activations over libp2p.

`neurogrid.p2p` is the transport library and needs no torch. `Worker`, `Coordinator` and what opens them
need the extra `neurogrid[inference]`; they are imported when first asked for. For programs that are not on
trio, `neurogrid.blocking` has the same.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from neurogrid.extras import missing_extra

if TYPE_CHECKING:
    from neurogrid.assembly.coordinator import open_coordinator
    from neurogrid.assembly.coordinator_settings import CoordinatorSettings
    from neurogrid.assembly.worker import Worker, WorkerSettings, open_worker
    from neurogrid.fleet.remote_worker import Timeouts
    from neurogrid.inference.board.status import ClusterStatus
    from neurogrid.inference.generation.coordinator import Coordinator
    from neurogrid.inference.generation.sampling import GeneratedToken
    from neurogrid.inference.generation.sampling_params import SamplingParams
    from neurogrid.node.cache_directory import CacheSettings
    from neurogrid.node.discovery import FindingSettings
    from neurogrid.node.reach_settings import ReachSettings

# Of the distribution, whose metadata takes it from here.
__version__ = "0.1.0"

__all__ = [
    "Coordinator",
    "CoordinatorSettings",
    "ClusterStatus",
    "SamplingParams",
    "GeneratedToken",
    "Worker",
    "WorkerSettings",
    "open_coordinator",
    "open_worker",
    "CacheSettings",
    "FindingSettings",
    "ReachSettings",
    "Timeouts",
    "__version__",
]

_HOMES = {
    "CacheSettings": "neurogrid.node.cache_directory",
    "ClusterStatus": "neurogrid.inference.board.status",
    "Coordinator": "neurogrid.inference.generation.coordinator",
    "CoordinatorSettings": "neurogrid.assembly.coordinator_settings",
    "open_coordinator": "neurogrid.assembly.coordinator",
    "FindingSettings": "neurogrid.node.discovery",
    "ReachSettings": "neurogrid.node.reach_settings",
    "Timeouts": "neurogrid.fleet.remote_worker",
    "GeneratedToken": "neurogrid.inference.generation.sampling",
    "SamplingParams": "neurogrid.inference.generation.sampling_params",
    "Worker": "neurogrid.assembly.worker",
    "WorkerSettings": "neurogrid.assembly.worker",
    "open_worker": "neurogrid.assembly.worker",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as exc:
        if missing := missing_extra(exc):
            raise ImportError(f"neurogrid.{name}: {missing}") from exc
        raise
