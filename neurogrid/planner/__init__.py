"""Planner: pure functions from a model, peers and links to a plan, by which each worker computes its layers.

Nothing here knows torch, the network or time. `world` is what goes in, `plan` what comes out.

    problem      memory and seconds as prefix sums: how far a peer gets from a layer
    cuts         where to cut, once the order of the peers is known (exact)
    search       which peers, in which order (exact where it can be afforded)
    fewer_moves  peers keep the layers that they have, where that costs little
    replicas     what the left-over peers stand by with
    planning     all of these, in this order
    lines        several plans side by side, for data parallel
    sharing      what several models may plan with, on the same peers
    replanning   what to do when the world changes
    explanation  why a plan is as it is
"""

from neurogrid.planner.explanation import Explanation, PeerReport, explain
from neurogrid.planner.lines import make_lines
from neurogrid.planner.plan import Plan, PlannedStage, Replica, name_range
from neurogrid.planner.planning import make_plan, make_replicas
from neurogrid.planner.replanning import Replanned, replan
from neurogrid.planner.sharing import (
    Division,
    Room,
    SharedLayer,
    SharedModel,
    divide,
    taken_bytes,
)
from neurogrid.planner.sizes import format_bytes
from neurogrid.planner.world import (
    KeptLayers,
    LayerSize,
    Link,
    Links,
    ModelSize,
    PeerCapacity,
    PeerSpeed,
)

__all__ = [
    "Division",
    "Explanation",
    "KeptLayers",
    "LayerSize",
    "Link",
    "Links",
    "ModelSize",
    "PeerCapacity",
    "PeerReport",
    "PeerSpeed",
    "Plan",
    "PlannedStage",
    "Replanned",
    "Replica",
    "Room",
    "SharedLayer",
    "SharedModel",
    "divide",
    "explain",
    "format_bytes",
    "make_lines",
    "make_plan",
    "make_replicas",
    "name_range",
    "replan",
    "taken_bytes",
]
