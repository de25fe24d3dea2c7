"""A worker that trains: it offers itself, takes part in a run, and goes on after what goes wrong.

service         what a leader asks, orders and ends
participation   one run: model, group, works one after the other
sources         peers that slices come from
settings        what its owner lends
"""

from neurogrid.training.members.service import MemberService
from neurogrid.training.members.settings import MemberSettings

__all__ = ["MemberService", "MemberSettings"]
