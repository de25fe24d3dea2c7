"""The state that a member gives to newcomers, copy by copy."""

from __future__ import annotations

import math

import torch

from neurogrid.training.averaging.groups import State
from neurogrid.training.averaging.groups.states import States
from tests.unit.training.reducing import DEADLINE, open_group

SIZE = 10


async def test_a_vector_that_two_copies_have_is_there_until_both_are_gone() -> None:
    """Of a round that leaves the momentum as it is, say."""
    async with open_group(2) as group:
        member, newcomer = (
            States(peer.exchange, peer.reductions, is_of_group=lambda peer_id: True)
            for peer in group.peers
        )

        async def fetch() -> State | None:
            return await newcomer.fetch([group.ids[0]], [SIZE, SIZE], oldest=0, timeout=DEADLINE)

        momentum = torch.ones(SIZE)
        for round_ in (1, 2):
            member.show(State(round_, (torch.full((SIZE,), float(round_)), momentum)))
            assert await fetch() is not None
        member.expire(member._kept[0].until)
        assert [kept.round for kept in member._kept] == [2]
        fetched = await fetch()
        assert fetched is not None
        assert torch.equal(fetched.vectors[1], momentum)
        member.expire(math.inf)
        assert not group.peers[0].reductions._held
