"""Peers of several sources as one, and the stream of changes that a slow reader reads."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.p2p.discovery.changes import PeerChanges
from neurogrid.p2p.discovery.known import (
    MAX_ADDRESSES_FROM_SOURCE,
    MAX_PEERS,
    KnownPeers,
    PeerFound,
    PeerLost,
)
from neurogrid.p2p.discovery.sighting import Sighting


def seen(peer_id: str, *addresses: str, source: str = "mdns") -> Sighting:
    return Sighting(peer_id, addresses, source)


def lost(peer_id: str, *, source: str = "mdns") -> Sighting:
    return Sighting(peer_id, (), source, is_lost=True)


def found(peer_id: str, *addresses: str, sources: str = "mdns") -> PeerFound:
    return PeerFound(peer_id, addresses, frozenset(sources.split()))


def test_a_peer_of_two_sources_is_one_peer() -> None:
    known = KnownPeers("us")
    assert known.take(seen("a", "/far", source="dht")) == found("a", "/far", sources="dht")
    both = found("a", "/near", "/far", sources="dht mdns")
    assert known.take(seen("a", "/near", "/far")) == both
    assert known.take(seen("a", "/near", "/far")) is None
    assert known.peers == {"a": both}
    # It is lost when both have lost it.
    assert known.take(lost("a")) == found("a", "/far", sources="dht")
    assert known.take(lost("a")) is None
    assert known.take(lost("a", source="dht")) == PeerLost("a")
    assert known.take(lost("a", source="dht")) is None
    assert known.peers == {}


def test_we_are_no_peer_of_ours() -> None:
    known = KnownPeers("us")
    assert known.take(seen("us", "/here")) is None
    assert known.peers == {}


def test_what_is_kept_is_bounded() -> None:
    known = KnownPeers("us")
    for number in range(MAX_PEERS + 5):
        known.take(seen(f"peer{number}", "/x"))
    assert len(known.peers) == MAX_PEERS
    assert known.num_left_out == 5
    # Those that are known go on.
    many = tuple(f"/{number}" for number in range(100))
    change = known.take(seen("peer0", *many))
    assert change == found("peer0", *many[:MAX_ADDRESSES_FROM_SOURCE])


peers = st.sampled_from("abc")
sources = st.sampled_from(["mdns", "dht", "ticket"])
sightings = st.builds(lost, peers, source=sources) | st.builds(
    lambda peer, places, source: seen(peer, *places, source=source),
    peers,
    st.lists(st.sampled_from(["/1", "/2", "/3"]), min_size=1, unique=True),
    sources,
)


@settings(deadline=None)
@given(st.lists(sightings | st.just("read"), max_size=60))
def test_a_reader_ends_with_what_is_known(steps: list[Sighting | str]) -> None:
    """Whenever it reads. In between, what waits for it is one change a peer at most, and none is a repetition."""

    async def main() -> None:
        known = KnownPeers("us")
        reader = PeerChanges(())
        view: dict[str, PeerFound] = {}

        async def read() -> None:
            change = await reader.__anext__()
            if isinstance(change, PeerLost):
                del view[change.peer_id]  # it was found before
            else:
                view[change.peer_id] = change

        for step in steps:
            if isinstance(step, Sighting):
                change = known.take(step)
                if change is not None:
                    reader.put(change)
            elif reader.num_waiting:
                await read()
            assert reader.num_waiting <= 3
        while reader.num_waiting:
            await read()
        assert view == known.peers

    trio.run(main)


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    reader = PeerChanges(())
    with trio.move_on_after(0):
        await reader.__anext__()
    reader.put(found("a", "/1"))
    with trio.CancelScope() as scope:
        scope.cancel()
        await reader.__anext__()
    assert await reader.__anext__() == found("a", "/1")


async def test_the_stream_ends_after_what_waits() -> None:
    reader = PeerChanges([found("a", "/1")])
    reader.put(found("b", "/2"))
    reader.close()
    assert [change.peer_id async for change in reader] == ["a", "b"]
    with pytest.raises(StopAsyncIteration):
        await reader.__anext__()
