"""The side of a run that leads it.

settings         what the leader and a data node are told, and what they tell
model_numbers    how large a model is, from its config alone
facts            what all members of a run are told alike
opening          what any leader opens: rules, journal, workers of this machine
lead             opens all that a leader needs
data             the data, where the leader has them
sources          nodes that have them, too
data_node        one of those
deputies/        who copies the journal, and leads when the leader is dead
hiring           workers that are asked, started, and kept
leader           members, orders, the group
chains/          the same of a model that lies in a chain of stages
group_watch      whether that can still decide
digests          of weights: whether all members have the same
waiting          for members: said, and not for ever
board, status    what is known of the run, for whoever shows it
keeper           journal, figures, evaluation, checkpoints
round_figures    of rounds that have no line yet
"""

from neurogrid.training.leading.data_node import serve_data
from neurogrid.training.leading.lead import lead

__all__ = ["lead", "serve_data"]
