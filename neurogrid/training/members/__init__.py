"""A worker that trains: it offers itself, takes part in a run, and goes on after what goes wrong.

service         what a leader asks, orders and ends
participation   one run: model, group, works one after the other
chain_part      one run in stages: one arrangement after another
chain_stage     a stage of one arrangement: its steps
chain_rounds    what it does with other replicas
obedience       whom it obeys, and what it promised
failures        what it says of what it cannot do
sources         peers that slices come from
settings        what its owner lends
status          how it stands, for people
"""

from neurogrid.training.members.service import MemberService
from neurogrid.training.members.settings import MemberSettings
from neurogrid.training.members.status import PartStatus

__all__ = ["MemberService", "MemberSettings", "PartStatus"]
