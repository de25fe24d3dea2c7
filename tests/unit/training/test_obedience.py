"""A member that is asked to obey: by its leader's deputy, and by others that merely ask."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from neurogrid.p2p import TensorMessage, new_request_id
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.identity import is_signed_by
from neurogrid.p2p.memory import open_memory_network
from neurogrid.training.members.obedience import Obedience
from neurogrid.training.runs.terms import Place, promise_bytes
from neurogrid.training.wire.runs import (
    Appoint,
    Appointed,
    Claim,
    Claimed,
    RunMessage,
    run_table,
)

RUN, DIGEST = bytes(range(16)), b"\x11" * 32


@dataclass
class World:
    """A member, its leader, and two others that could lead."""

    member: Exchange
    obedience: Obedience
    leaders: list[Exchange]
    changes: list[tuple[str, str]]

    async def appoint(self, sender: Exchange, number: int, deputy: str) -> Appointed:
        """What the member answers to who says that there is such a deputy."""
        said = Appoint(RUN, number, deputy=deputy).encode()
        message = TensorMessage(RunMessage.APPOINT, request_id=new_request_id(), data=said)
        answer = await sender.request(
            self.member.host.peer_id, message, RunMessage.APPOINTED, timeout=10
        )
        return Appointed.decode(answer.data)

    async def claim(self, sender: Exchange, term: int = 1, line: int = 12) -> Claimed:
        """What the member answers to who asks for a term."""
        said = Claim(RUN, term, line, DIGEST).encode()
        message = TensorMessage(RunMessage.CLAIM, request_id=new_request_id(), data=said)
        answer = await sender.request(
            self.member.host.peer_id, message, RunMessage.CLAIMED, timeout=10
        )
        return Claimed.decode(answer.data)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    with trio.fail_after(30):
        async with (
            open_memory_network() as network,
            network.open_host() as host,
            network.open_host() as first,
            network.open_host() as second,
            network.open_host() as third,
        ):
            member = Exchange(host, run_table())
            leaders = [Exchange(each, run_table()) for each in (first, second, third)]
            changes: list[tuple[str, str]] = []
            obedience = Obedience(
                member, RUN, first.peer_id, lambda: 77, lambda old, new: changes.append((old, new))
            )
            member.on_message(
                RunMessage.APPOINT,
                lambda m: obedience.take_appoint(m, Appoint.decode(m.data)),
            )
            member.on_message(
                RunMessage.CLAIM, lambda m: obedience.take_claim(m, Claim.decode(m.data))
            )
            for each in leaders:
                await each.host.connect(host.addresses[0])
                await each.open(host.peer_id)
            yield World(member, obedience, leaders, changes)


async def test_who_merely_asks_is_promised_nothing() -> None:
    async with world() as told:
        leader, deputy, other = told.leaders
        # Not before the leader has named it; not by its own word, nor by that of a third.
        assert (await told.claim(deputy)).signature == b""
        assert (await told.appoint(deputy, 9, deputy.host.peer_id)).deputy == ""
        assert (await told.claim(deputy)).leader == leader.host.peer_id
        named = await told.appoint(leader, 9, deputy.host.peer_id)
        assert (named.number, named.deputy, named.incarnation) == (9, deputy.host.peer_id, 77)
        assert (await told.claim(other, term=50)).signature == b""
        assert told.obedience.obeys(leader.host.peer_id, 0)
        assert told.changes == []


async def test_a_promise_is_signed_and_holds() -> None:
    async with world() as told:
        leader, deputy, other = (each for each in told.leaders)
        await told.appoint(leader, 9, deputy.host.peer_id)
        claimed = await told.claim(deputy)
        said = promise_bytes(RUN, 1, deputy.host.peer_id, 77, Place(12, DIGEST))
        assert is_signed_by(told.member.host.peer_id, claimed.signature, said)
        assert not is_signed_by(other.host.peer_id, claimed.signature, said)
        assert (claimed.term, claimed.leader, claimed.line) == (1, deputy.host.peer_id, 12)
        assert told.changes == [(leader.host.peer_id, deputy.host.peer_id)]
        # The same again; of another place the promise stays what it was.
        assert await told.claim(deputy) == claimed
        assert (await told.claim(deputy, line=13)).line == 12
        assert not told.obedience.obeys(leader.host.peer_id, 0)
        assert told.obedience.obeys(deputy.host.peer_id, 1)
        late = await told.appoint(leader, 10, other.host.peer_id)
        assert (late.term, late.leader, late.deputy) == (1, deputy.host.peer_id, "")
        assert told.changes == [(leader.host.peer_id, deputy.host.peer_id)]
