"""Layers for several workers: each leaves the coordinator once, and nobody waits for nothing."""

from __future__ import annotations

from random import Random

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.fleet.spread import MAX_HOLDERS, Choice, Spread, choose
from neurogrid.p2p.wire import MAX_ADDRESS_CHARS, MAX_SOURCES


def pick(wanted: set[int], **more: object) -> Choice | None:
    known: dict[str, object] = {
        "said_held": (),
        "holders": {},
        "under_way": (),
        "is_sent_to": False,
    }
    return choose(wanted, **{**known, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, Choice(4)),
        ({"said_held": [5, 9]}, Choice(5)),
        ({"said_held": [5], "holders": {5: ["a"]}}, Choice(5, ("a",))),
        ({"under_way": [4]}, Choice(5)),
        ({"under_way": [4, 5]}, None),
        ({"holders": {5: ["a"]}}, Choice(4)),
        ({"holders": {5: ["a"]}, "is_sent_to": True}, Choice(5, ("a",))),
        ({"holders": {5: ["a", "b"]}, "under_way": [4]}, Choice(5, ("a", "b"))),
        ({"holders": {5: []}, "under_way": [4]}, Choice(5)),
        ({"is_sent_to": True}, Choice(4)),
    ],
)
def test_what_to_offer_next(more: dict[str, object], expected: Choice | None) -> None:
    assert pick({4, 5}, **more) == expected


class Swarm:
    """Workers that take layers at random speeds."""

    def __init__(self, wants: dict[str, range], held: dict[str, set[int]], seed: int) -> None:
        self.spread = Spread(lambda peer_id: [f"/p2p/{peer_id}"])
        self.wants, self.held = wants, held
        self.random = Random(seed)
        self.sent: list[int] = []
        self.got: dict[str, list[int]] = {peer: [] for peer in wants}

    async def run(self) -> None:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for peer_id in self.wants:
                    nursery.start_soon(self.work, peer_id)

    async def work(self, peer_id: str) -> None:
        await self.pause()
        wanted = set(self.wants[peer_id])
        self.spread.said_held(peer_id, self.held.get(peer_id, set()) & wanted)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(self.lane, peer_id, wanted)

    async def lane(self, peer_id: str, wanted: set[int]) -> None:
        while choice := await self.spread.next(peer_id, wanted):
            wanted.remove(choice.layer_id)
            with self.spread.giving(peer_id, choice):
                await self.pause()
                for holder in choice.holders:
                    assert choice.layer_id in self.got[holder]
                    assert holder != peer_id
                is_held = choice.layer_id in self.held.get(peer_id, set())
                if not choice.holders and not is_held:
                    self.sent.append(choice.layer_id)
                self.got[peer_id].append(choice.layer_id)

    async def pause(self) -> None:
        for _ in range(self.random.randrange(4)):
            await trio.lowlevel.checkpoint()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), min_size=1, max_size=5),
    st.lists(st.sets(st.integers(0, 17)), max_size=5),
    st.integers(0, 2**16),
)
def test_everybody_gets_all_and_no_layer_is_sent_twice(
    ranges: list[tuple[int, int]], held: list[set[int]], seed: int
) -> None:
    wants = {
        str(number): range(start, start + length) for number, (start, length) in enumerate(ranges)
    }
    swarm = Swarm(wants, dict(zip(wants, held, strict=False)), seed)
    trio.run(swarm.run)
    assert {peer: sorted(got) for peer, got in swarm.got.items()} == {
        peer: list(layers) for peer, layers in wants.items()
    }
    assert len(swarm.sent) == len(set(swarm.sent))


async def test_who_waits_for_a_worker_that_is_lost_gets_the_layer_from_the_coordinator() -> None:
    spread = Spread(lambda peer_id: ())
    spread.said_held("a", {0})
    with spread.giving("a", Choice(1)):
        pass
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            assert await spread.next("b", {0}) == Choice(0)

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert await spread.next("b", {0, 1}) == Choice(1, ("a",))
        spread.lost("a")
    assert await spread.next("b", {1}) == Choice(1)


async def test_a_layer_that_failed_is_nobodys() -> None:
    spread = Spread(lambda peer_id: ())
    with pytest.raises(ValueError, match="cut"), spread.giving("a", Choice(0)):
        raise ValueError("cut")
    assert await spread.next("b", {0}) == Choice(0)


async def test_the_least_asked_holder_is_named_first_and_not_all_of_many() -> None:
    spread = Spread(lambda peer_id: ())
    for peer_id in "abcde":
        with spread.giving(peer_id, Choice(0)):
            pass
    choice = await spread.next("x", {0})
    assert choice is not None
    assert len(choice.holders) == MAX_HOLDERS
    with spread.giving("x", choice):
        other = await spread.next("y", {0})
        assert other is not None
        assert other.holders[0] != choice.holders[0]


def test_addresses_are_mixed_and_bounded() -> None:
    known = {"a": ["/a1", "/a2"], "b": ["/b1", "/" + "b" * MAX_ADDRESS_CHARS], "c": []}
    spread = Spread(known.__getitem__)
    assert spread.sources(Choice(0, ("a", "b", "c"))) == ("/a1", "/b1", "/a2")
    assert spread.sources(Choice(0)) == ()
    known["a"] = [f"/{number}" for number in range(40)]
    assert len(spread.sources(Choice(0, ("a",)))) == MAX_SOURCES
