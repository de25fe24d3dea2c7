"""A member's side of a witnessed run: results of its own, those of others, and what it says of them.

witnessed_part  the part in the run, from the leader's word to the end
round_exchange  results of one round: commitments, blobs, what a witness has
neighbours      connections to the other members of the epoch
own_weights     the weights, the momentum, and pieces of them
samples         the batches of a round, from whoever has them
"""

from neurogrid.training.members.witnessed.witnessed_part import WitnessedPart

__all__ = ["WitnessedPart"]
