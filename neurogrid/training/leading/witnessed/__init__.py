"""A leader's side of a witnessed run: it says where the run is, counts what witnesses have, and keeps the weights.

lead            opens what the leader needs
leader          what members say, and what follows from that
epoch_messages  the Epoch that all of them are told
common_weights  the weights at the beginning of an epoch, in pieces
agreement       which weights most members have
audits          whose claims are looked at, and what becomes of what is found
suspicion       whose claims to look at sooner
trials          strangers at an open run
round_events    what happens between two ticks
"""

from neurogrid.training.leading.witnessed.lead import lead_witnessed

__all__ = ["lead_witnessed"]
