"""Whom a walk asks: the closest, until enough of them have answered, in a network that only the test knows."""

from __future__ import annotations

import hashlib
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from libp2p.peer.id import ID

from neurogrid.p2p.discovery.dht_lookup import MAX_ASKED, Lookup, distance

KEY = b"where"
OWN = ID(b"own")


def peers(number: int) -> list[ID]:
    """Peers, the closest to the key first."""
    some = [ID(hashlib.sha256(bytes([i, i >> 8])).digest()) for i in range(number)]
    return sorted(some, key=lambda peer: distance(KEY, peer))


def test_it_ends_when_the_closest_have_answered() -> None:
    near = peers(10)
    lookup = Lookup(KEY, OWN, near, enough=3)
    asked = [lookup.next_peer() for _ in range(4)]
    assert asked == [*near[:3], None]
    for peer in near[:3]:
        lookup.answered(peer, [OWN, *near])
    assert lookup.next_peer() is None
    assert lookup.closest == near[:3]


def test_one_that_fails_gives_way_to_the_next() -> None:
    near = peers(5)
    lookup = Lookup(KEY, OWN, near, enough=2)
    assert [lookup.next_peer(), lookup.next_peer()] == near[:2]
    lookup.failed(near[0])
    assert lookup.next_peer() == near[2]
    lookup.answered(near[1], [])
    lookup.answered(near[2], [])
    assert (lookup.next_peer(), lookup.closest) == (None, near[1:3])


@given(st.integers(1, 60), st.integers(1, 20), st.sets(st.integers(0, 59)), st.integers(0, 2**32))
def test_the_closest_that_live_are_found_in_whatever_order_they_answer(
    number: int, enough: int, dead: set[int], seed: int
) -> None:
    network = peers(number)
    alive = [peer for place, peer in enumerate(network) if place not in dead or place == number - 1]
    random = Random(seed)
    lookup = Lookup(KEY, OWN, [network[-1]], enough=enough)  # the farthest, which lives
    under_way: list[ID] = []
    while True:
        while (peer := lookup.next_peer()) is not None:
            under_way.append(peer)
        if not under_way:
            break
        peer = under_way.pop(random.randrange(len(under_way)))
        if peer in alive:
            lookup.answered(peer, [one for one in alive if one != peer][:20] + network[:1])
        else:
            lookup.failed(peer)
    assert lookup.closest == alive[:enough]


def test_peers_that_do_not_exist_cannot_prolong_it() -> None:
    liar = peers(1)[0]
    lookup = Lookup(KEY, OWN, [liar], enough=20)
    number = 0
    while (peer := lookup.next_peer()) is not None:
        number += 1
        lookup.answered(
            peer, [ID(hashlib.sha256(b"%d %d" % (number, i)).digest()) for i in range(500)]
        )
    assert lookup.num_asked <= MAX_ASKED
