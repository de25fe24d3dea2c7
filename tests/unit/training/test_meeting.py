"""What a founder gives to those who join."""

from __future__ import annotations

import time

import pytest

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.hosts.host import is_loopback_address
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


async def test_who_joins_without_a_ticket_listens_where_it_is_told_to() -> None:
    async with (
        open_meeting(None, listen=["/ip4/127.0.0.1/tcp/0"]) as founder,
        open_meeting(founder.invitation) as joiner,
        open_meeting(founder.invitation, listen=[]) as silent,
    ):
        assert is_loopback_address(joiner.host.addresses[0])
        assert silent.host.addresses == ()
        with pytest.raises(ConfigurationError, match="of this machine alone, and listen= has"):
            async with open_meeting(founder.invitation, listen=["/ip4/0.0.0.0/tcp/4001"]):
                pass
