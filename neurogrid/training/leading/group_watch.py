"""Whether a group can still decide, or so many of it are lost at once that it never will again. Pure.

A group goes on when some of its members are lost, and after that the next ones may be. When more than half of it is
lost at once nobody may go on alone, as far as the group can know: the others may have gone on without it. The leader of
a run knows more: what is in no journal of a run is in no run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from neurogrid.training.averaging.rounds import num_to_decide, num_to_lead
from neurogrid.training.wire import Member

__all__ = ["GroupWatch"]


@dataclass(slots=True)
class GroupWatch:
    """Looks after one group.

    Attributes:
        patience: seconds that members are waited for which may come back.
    """

    patience: float
    _since: float | None = None

    def look(
        self,
        members: Sequence[Member],
        *,
        leader: str | None,
        lost: Collection[Member],
        ended: Collection[Member],
        now: float,
    ) -> str:
        """Return why the group is given up; empty where it can decide, or where it is too early to say.

        Args:
            members: of the group.
            leader: the peer id of its leader; None where it has none.
            lost: members that are not connected, or have ended.
            ended: members whose processes have ended: they do not come back.
            now: seconds.
        """
        num_there = len(members) - len({*lost, *ended} & {*members})
        is_led = any(m.peer == leader and m not in lost and m not in ended for m in members)
        needed = (num_to_decide if is_led else num_to_lead)(len(members))
        if num_there >= needed:
            self._since = None
            return ""
        if self._since is None:
            self._since = now
        can_come_back = len(members) - len({*ended} & {*members}) >= needed
        if can_come_back and now - self._since < self.patience:
            return ""
        return f"{num_there} of {len(members)} are left, leader included, and it takes {needed}"
