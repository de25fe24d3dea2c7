"""Groups: members that found or join one, contribute vectors, and are told what was decided."""

from neurogrid.training.averaging.groups.errors import GroupError, NotAMemberError, RoundTimeout
from neurogrid.training.averaging.groups.group import Group, Outcome, open_group
from neurogrid.training.averaging.groups.left_over import fetch_state_left_over
from neurogrid.training.averaging.groups.states import State

__all__ = [
    "Group",
    "GroupError",
    "NotAMemberError",
    "Outcome",
    "RoundTimeout",
    "State",
    "fetch_state_left_over",
    "open_group",
]
