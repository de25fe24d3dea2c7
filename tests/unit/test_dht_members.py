"""Members that are told what we say of ourselves: of the latest, whatever they were being told when it changed."""

from __future__ import annotations

import time
from typing import cast

import trio
import trio.testing

from neurogrid.p2p.discovery.dht_key import cluster_key
from neurogrid.p2p.discovery.dht_members import Members
from neurogrid.p2p.discovery.records import MemberRecord, sign_record
from neurogrid.p2p.discovery.records_book import Acceptance, RecordBook
from neurogrid.p2p.discovery.records_exchange import RecordExchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.hosts.identity import Identity

CLUSTER = cluster_key("a cluster")
OWN = Identity.generate().peer_id


class Linked:
    """A host that is connected to everybody."""

    peer_id = OWN

    def is_linked(self, peer_id: str) -> bool:
        return True


class Exchange:
    """Exchanges records with one member, a second for each; `told` is what it was told."""

    def __init__(self, book: RecordBook) -> None:
        self.says = "before"
        self.told: list[str] = []
        self._book = book
        self._member = Identity.generate()

    def introduce(self) -> Acceptance:
        record = MemberRecord(
            cluster=CLUSTER,
            peer_id=self._member.peer_id,
            sequence=len(self.told) + 1,
            expires=int(time.time()) + 600,
            role="worker",
            addresses=(),
        )
        signed = sign_record(record, self._member)
        return self._book.accept(signed, from_peer=self._member.peer_id)

    async def ask(self, peer_id: str) -> Acceptance:
        self.told.append(self.says)
        await trio.sleep(1)
        return self.introduce()


async def scenario() -> list[str]:
    book = RecordBook(CLUSTER, OWN)
    exchange = Exchange(book)
    members = Members(
        cast(Host, Linked()), book, on_sighting=lambda seen: None, on_attempt=lambda made: None
    )
    members.note_accepted(exchange.introduce())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(members.run, cast(RecordExchange, exchange))
        members.tell_all()
        await trio.sleep(0.5)
        exchange.says = "after"
        members.tell_all()
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    return exchange.told


def test_what_changes_while_a_member_is_told_is_told_as_well() -> None:
    told = trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))
    assert told == ["before", "after"]
