"""Routes: what a worker believes, and what it does not, each misdeed by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from libp2p.crypto.rsa import create_new_key_pair
from libp2p.peer.id import ID

from neurogrid.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.exchange.routes import (
    Direction,
    Place,
    can_sign,
    open_route,
    place_in,
    sign_route,
)
from neurogrid.p2p.hosts.identity import Identity, signing_key
from neurogrid.p2p.trust.limits import CLOCK_SKEW
from neurogrid.p2p.wire import MAX_STAGES, ErrorCode, Route
from tests.unit.vectors import in_turn, subject

COORDINATOR, STRANGER = Identity.generate(), Identity.generate()
PEERS = tuple(Identity.generate().peer_id for _ in range(3))
UNTIL = 1_800_000_000
ROUTE = Route(7, UNTIL, PEERS, (0, 4, 6, 9), tuple(f"/memory/1/p2p/{peer}" for peer in PEERS))


def judged(data: bytes, **changes: Any) -> Place:
    """As worker 1 judges it."""
    arguments: dict[str, Any] = {
        "coordinator": COORDINATOR.peer_id,
        "own_id": PEERS[1],
        "session_id": 7,
        "start": 4,
        "stop": 6,
        "clock": lambda: UNTIL - 60.0,
        **changes,
    }
    return place_in(data, **arguments)


def test_a_worker_finds_its_place() -> None:
    data = sign_route(ROUTE, COORDINATOR)
    place = judged(data)
    assert place.route == ROUTE
    assert (place.predecessor, place.successor) == (PEERS[0], PEERS[2])
    assert place.route.addresses_of(PEERS[2]) == (f"/memory/1/p2p/{PEERS[2]}",)
    first = judged(data, own_id=PEERS[0], start=0, stop=4)
    last = judged(data, own_id=PEERS[2], start=6, stop=9)
    assert (first.predecessor, first.successor) == (None, PEERS[1])
    assert (last.predecessor, last.successor) == (PEERS[1], None)
    forward, backward = Direction.FORWARD, Direction.BACKWARD
    assert (place.source(forward), place.target(forward)) == (PEERS[0], PEERS[2])
    assert (place.source(backward), place.target(backward)) == (PEERS[2], PEERS[0])
    assert (first.target(backward), last.source(backward)) == (None, None)


def test_clocks_may_differ() -> None:
    data = sign_route(ROUTE, COORDINATOR)
    judged(data, clock=lambda: UNTIL + CLOCK_SKEW - 1)
    with pytest.raises(RemoteProtocolError, match="the route expired 300 s ago"):
        judged(data, clock=lambda: UNTIL + CLOCK_SKEW)


@pytest.mark.parametrize(
    ("forge", "changes", "says"),
    [
        (lambda: sign_route(ROUTE, STRANGER), {}, "was not signed by"),
        (lambda: sign_route(ROUTE, COORDINATOR), {"coordinator": STRANGER.peer_id}, "not signed"),
        (lambda: altered(replace(ROUTE, bounds=(0, 4, 6, 8))), {}, "was not signed by"),
        (lambda: altered(replace(ROUTE, peers=(STRANGER.peer_id, *PEERS[1:]), addresses=())), {}, "not"),
        (lambda: sign_route(ROUTE, COORDINATOR), {"session_id": 8}, "that of session 7, not of 8"),
        (lambda: sign_route(ROUTE, COORDINATOR), {"own_id": STRANGER.peer_id}, "does not name this"),
        (lambda: sign_route(ROUTE, COORDINATOR), {"stop": 7}, "layers 4 to 5, not 4 to 6"),
        (lambda: sign_route(ROUTE, COORDINATOR), {"start": 3}, "layers 4 to 5, not 3 to 5"),
    ],
)  # fmt: skip
def test_a_forged_route(forge: Callable[[], bytes], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says) as caught:
        judged(forge(), **changes)
    assert caught.value.code == ErrorCode.UNAUTHORIZED


def altered(route: Route) -> bytes:
    """Another body under the coordinator's signature."""
    return sign_route(ROUTE, COORDINATOR)[:64] + route.encode()


def test_a_signature_for_something_else() -> None:
    body = ROUTE.encode()
    signature = COORDINATOR.key_pair.private_key.sign(b"neurogrid/member-record/1\x00" + body)
    with pytest.raises(RemoteProtocolError, match="was not signed by"):
        judged(signature + body)


def test_what_nobody_could_read_is_not_signed() -> None:
    peers = tuple(f"peer{i:04}" for i in range(MAX_STAGES))
    addresses = tuple(f"/dns4/{'x' * 400}/tcp/1/p2p/{peer}" for peer in peers)
    route = Route(1, UNTIL, peers, tuple(range(MAX_STAGES + 1)), addresses)
    with pytest.raises(LocalProtocolError):
        sign_route(route, COORDINATOR)
    assert len(sign_route(replace(route, addresses=()), COORDINATOR)) < 8192


def test_other_keys_cannot_sign() -> None:
    pair = create_new_key_pair(1024)
    rsa = Identity(pair, ID.from_pubkey(pair.public_key).to_base58())
    assert can_sign(COORDINATOR)
    assert not can_sign(rsa)
    with pytest.raises(ConfigurationError, match="not the id of an Ed25519 key"):
        signing_key(rsa.peer_id)
    with pytest.raises(ConfigurationError, match="is not a peer id"):
        signing_key("0OIl")
    with pytest.raises(RemoteProtocolError, match="was not signed by"):
        open_route(sign_route(ROUTE, rsa), rsa.peer_id)


VECTOR = subject("signed_route")


@in_turn("signed_route")
def test_vectors(name: str, case: Any) -> None:
    data = bytes.fromhex(case["hex"])
    if case["result"] == "invalid":
        with pytest.raises(RemoteProtocolError) as caught:
            open_route(data, VECTOR["signer"])
        assert caught.value.code == ErrorCode[case["error"]]
        return
    route, fields = open_route(data, VECTOR["signer"]), case["fields"]
    assert (str(route.session_id), route.until) == (fields["session_id"], fields["until"])
    assert list(route.peers) == fields["peers"]
    assert (list(route.bounds), list(route.addresses)) == (fields["bounds"], fields["addresses"])
