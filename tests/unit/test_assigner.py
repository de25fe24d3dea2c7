"""A connection that breaks around the end of a placement: whose layers are counted on afterwards, and whose not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from neurogrid.errors import NoRouteError
from neurogrid.fleet.member import Member
from neurogrid.fleet.placing import assigner
from neurogrid.fleet.placing.assigner import Assigner
from neurogrid.fleet.placing.placer import Placer
from neurogrid.fleet.progress import FleetProgress
from neurogrid.fleet.roster import Roster
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.p2p.wire import PROTOCOL_V11

PEER = "one"


class Placing:
    """A leader with one worker, and a placer that does what a function says.

    Attributes:
        lost: peer ids of members that are gone.
    """

    def __init__(self, place: Callable[[Callable[[], None]], None]) -> None:
        self.lost: list[str] = []
        self.roster = Roster(
            FleetProgress(), on_lost=self.lost.append, on_given_up=lambda peer_id: None
        )
        worker: Any = SimpleNamespace(peer_id=PEER, shown=PEER)
        self.member = Member(worker, WorkerInfo(PEER, "a device", 1, PROTOCOL_V11, True, ()))
        self.roster.add(self.member)
        self._place = place
        self._assigner = Assigner(self.roster, cast(Placer, self), FleetProgress())

    def num_bytes(self, layers: range) -> int:
        return len(layers)

    async def place(
        self, *given: object, is_back: Callable[[], None] = lambda: None, **options: object
    ) -> None:
        await trio.lowlevel.checkpoint()
        self._place(is_back)

    def cut(self) -> None:
        self.roster.lost(PEER, "its connection has ended")

    async def bring(self) -> None:
        await self._assigner.layers(self.member, range(4), patience=1.0)


async def test_a_connection_that_breaks_with_the_last_word_of_a_placement_is_noticed() -> None:
    """Its worker has said that it has the layers, and dropped them with the connection."""
    placing = Placing(lambda is_back: placing.cut())
    with pytest.raises(NoRouteError, match="was lost before it had layers 0 to 3"):
        await placing.bring()
    assert placing.lost == [PEER]
    assert not placing.roster.members
    assert not placing.roster.holdings


async def test_a_connection_that_breaks_when_all_is_placed_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While memory is given back, which another thread does."""
    placing = Placing(lambda is_back: None)

    def cut() -> None:
        trio.from_thread.run_sync(placing.cut)

    monkeypatch.setattr(assigner, "give_back_memory", cut, raising=False)
    await placing.bring()
    assert placing.lost == [PEER]
    assert not placing.roster.holdings


async def test_a_connection_that_is_there_again_is_as_good_as_the_one_before() -> None:
    def place(is_back: Callable[[], None]) -> None:
        placing.cut()
        assert not placing.lost
        is_back()

    placing = Placing(place)
    await placing.bring()
    assert not placing.lost
    assert placing.roster.holdings == {PEER: range(4)}
    assert placing.member.is_configured
    assert not placing.member.is_placing
