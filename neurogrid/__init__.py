"""NeuroGrid: one model on several machines, weights and activations over libp2p.

`neurogrid.p2p` is the transport library and needs no torch. `Worker`, `Coordinator` and what opens them
need the extra `neurogrid[inference]`; they are imported when first asked for. For programs that are not on
trio, `neurogrid.blocking` has the same. What trains together in a loop of one's own, `open_run`, `join_run` and
`open_group`, is for `with` blocks, and needs the same extra.
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
    from neurogrid.training.averaging.groups.blocking import open_group
    from neurogrid.training.loops.blocking import Run, join_run, open_run
    from neurogrid.training.loops.trainer_callback import NeuroGridCallback
    from neurogrid.training.wire import GroupSettings

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
    "open_run",
    "join_run",
    "Run",
    "NeuroGridCallback",
    "open_group",
    "GroupSettings",
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
    "GroupSettings": "neurogrid.training.wire",
    "NeuroGridCallback": "neurogrid.training.loops.trainer_callback",
    "Run": "neurogrid.training.loops.blocking",
    "join_run": "neurogrid.training.loops.blocking",
    "open_group": "neurogrid.training.averaging.groups.blocking",
    "open_run": "neurogrid.training.loops.blocking",
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
