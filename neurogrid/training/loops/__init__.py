"""Training loops of one's own: a model and an optimiser become a member of a run.

meeting        a host, and the ticket or the address by which others find it
outer_loop     when a sync is due, and what it makes of the weights
run            a member of a run, under trio
blocking       the same for scripts and notebooks
"""

from neurogrid.training.loops.blocking import Run, join_run, open_run
from neurogrid.training.loops.outer_loop import Rules

__all__ = ["Rules", "Run", "join_run", "open_run"]
