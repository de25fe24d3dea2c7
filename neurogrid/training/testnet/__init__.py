"""A run on one machine, with workers in processes of their own, some of which are killed: does it end, and is it sound?

plan        which processes are killed, and when, by a seed
network     namespaces with slow lines between them; its process is the forwarder, which knows lines
seats       which workers take part
processes   a leader and its workers, started and killed
testnet     the run from its beginning to its end
report      what came of it
"""

from neurogrid.training.testnet.network import Lines
from neurogrid.training.testnet.plan import Chaos, PlannedKill, planned_kills
from neurogrid.training.testnet.processes import ProcessSettings
from neurogrid.training.testnet.report import ChaosReport, Kill
from neurogrid.training.testnet.testnet import run_testnet

__all__ = [
    "Chaos",
    "Kill",
    "Lines",
    "PlannedKill",
    "ChaosReport",
    "ProcessSettings",
    "planned_kills",
    "run_testnet",
]
