"""Routes that are believed: signed by the coordinator's own key, and judged by each worker that they name.

A signature made here is good for routes alone: what is signed begins with their name.

Source: protocol_spec/messages.md, "Route"; protocol_spec/sessions.md, "Routes".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from cryptography.exceptions import InvalidSignature

from neurogrid.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.hosts.identity import Identity, signing_key
from neurogrid.p2p.trust.limits import CLOCK_SKEW
from neurogrid.p2p.wire import MAX_ROUTE_BYTES, ErrorCode, Route

__all__ = ["Direction", "Place", "can_sign", "open_route", "place_in", "sign_route"]

_DOMAIN: Final = b"neurogrid/route/1\x00"
_SIGNATURE_BYTES: Final = 64


class Direction(Enum):
    """The way along a route: activations go forward, gradients would go backward."""

    FORWARD = 1
    BACKWARD = -1


@dataclass(frozen=True)
class Place:
    """A worker's place in a route that it believes.

    Attributes:
        route: the whole.
        index: its own, from 0.
    """

    route: Route
    index: int

    @property
    def predecessor(self) -> str | None:
        """The worker that sends it activations; None where the coordinator does."""
        return self.route.peers[self.index - 1] if self.index else None

    @property
    def successor(self) -> str | None:
        """The worker that it hands its results to; None where the coordinator gets them."""
        is_last = self.index + 1 == len(self.route.peers)
        return None if is_last else self.route.peers[self.index + 1]

    def source(self, direction: Direction) -> str | None:
        """The worker that may send what goes in this direction; None where the coordinator does."""
        return self.predecessor if direction == Direction.FORWARD else self.successor

    def target(self, direction: Direction) -> str | None:
        """The worker that what goes in this direction is handed to; None where the coordinator gets it."""
        return self.successor if direction == Direction.FORWARD else self.predecessor


def can_sign(identity: Identity) -> bool:
    """Whether others can check what this identity signs: its peer id has to be an Ed25519 key."""
    try:
        signing_key(identity.peer_id)
    except ConfigurationError:
        return False
    return True


def sign_route(route: Route, identity: Identity) -> bytes:
    """The signed form of a route, for `SessionOpen.route`.

    Raises:
        LocalProtocolError: a value is out of its range, or it is too long to be read.
    """
    body = route.encode()
    if _SIGNATURE_BYTES + len(body) > MAX_ROUTE_BYTES:
        raise LocalProtocolError(f"a route of {len(body)} B is too long to be read")
    return identity.key_pair.private_key.sign(_DOMAIN + body) + body


def open_route(data: bytes, signer: str) -> Route:
    """Read a signed route.

    Args:
        data: the signed form.
        signer: the peer id whose key must have signed it.

    Raises:
        RemoteProtocolError: UNAUTHORIZED: it was not signed by that key; or malformed.
    """
    if not _SIGNATURE_BYTES < len(data) <= MAX_ROUTE_BYTES:
        raise RemoteProtocolError(
            f"a signed route has more than {_SIGNATURE_BYTES} B and at most {MAX_ROUTE_BYTES}, and this "
            f"one {len(data)}",
            code=ErrorCode.PROTOCOL_VIOLATION,
        )
    signature, body = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    try:
        signing_key(signer).verify(signature, _DOMAIN + body)
    except (InvalidSignature, ConfigurationError) as exc:
        raise _unauthorized(f"was not signed by {signer}") from exc
    return Route.decode(body)


def place_in(
    data: bytes,
    *,
    coordinator: str,
    own_id: str,
    session_id: int,
    start: int,
    stop: int,
    clock: Callable[[], float] = time.time,
) -> Place:
    """Judge a route as the worker `own_id`, and find the own place in it.

    Args:
        data: the signed form, as it came in a SessionOpen.
        coordinator: the peer that sent that.
        session_id, start, stop: what the SessionOpen says.
        clock: gives seconds of the Unix epoch.

    Raises:
        RemoteProtocolError: UNAUTHORIZED, with the reason; or malformed.
    """
    route = open_route(data, coordinator)
    late = clock() - route.until
    if late >= CLOCK_SKEW:
        raise _unauthorized(f"expired {late:.0f} s ago")
    if route.session_id != session_id:
        raise _unauthorized(f"is that of session {route.session_id}, not of {session_id}")
    if own_id not in route.peers:
        raise _unauthorized("does not name this worker")
    place = Place(route, route.peers.index(own_id))
    if route.layers_of(place.index) != (start, stop):
        first, last = route.layers_of(place.index)
        raise _unauthorized(
            f"gives this worker layers {first} to {last - 1}, not {start} to {stop - 1}"
        )
    return place


def _unauthorized(text: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"the route {text}", code=ErrorCode.UNAUTHORIZED)
