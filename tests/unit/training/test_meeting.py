"""What a founder gives to those who join."""

from __future__ import annotations

import time

import pytest

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.trust import Ticket
from neurogrid.training.loops.meeting import open_meeting

DAY = 86_400.0


async def test_the_ticket_of_a_founder_is_good_for_a_month() -> None:
    """Its key is in the founder's process alone, so there will be no other one."""
    async with open_meeting(None) as meeting:
        left = Ticket.parse(meeting.invitation).token.not_after - time.time()
    assert left == pytest.approx(30 * DAY, abs=60)


async def test_a_founder_that_listens_nowhere_is_told_so() -> None:
    with pytest.raises(ConfigurationError, match="listen= is empty"):
        async with open_meeting(None, listen=[]):
            pass
