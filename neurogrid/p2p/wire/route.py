"""The way of a session through several workers: the body of a signed route (`protocol_spec/messages.md`).

Which peer signs, and whether a route is believed, is not known here: `neurogrid.p2p.exchange.routes` does that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.forms import Map, array, text, uint
from neurogrid.p2p.wire.limits import (
    MAX_ADDRESS_CHARS,
    MAX_LAYERS,
    MAX_PEER_ID_CHARS,
    MAX_ROUTE_BYTES,
    MAX_STAGE_ADDRESSES,
    MAX_STAGES,
)
from neurogrid.p2p.wire.maps import MAX_U64

__all__ = ["Route"]

_MAX_TIME: Final = 2**40 - 1


@dataclass(frozen=True, slots=True)
class Route(ControlPayload):
    """The workers that a session's activations go through, in order.

    Attributes:
        session_id: u64, not 0.
        until: Unix time in whole seconds from which on it is no good.
        peers: 1 to `MAX_STAGES` peer ids (base58), none twice.
        bounds: one number more than `peers`, rising, at most `MAX_LAYERS`: worker i computes layers
            [bounds[i], bounds[i + 1]).
        addresses: multiaddrs of the workers, each ending in `/p2p/` and one of `peers`; at most
            `MAX_STAGE_ADDRESSES` of each.
    """

    session_id: int
    until: int
    peers: tuple[str, ...]
    bounds: tuple[int, ...]
    addresses: tuple[str, ...] = ()

    _map = Map(
        "the route",
        {
            "sid": uint(MAX_U64, smallest=1),
            "until": uint(_MAX_TIME),
            "peers": array(text(MAX_PEER_ID_CHARS), MAX_STAGES),
            "bounds": array(uint(MAX_LAYERS), MAX_STAGES + 1),
            "addresses": array(text(MAX_ADDRESS_CHARS), MAX_STAGES * MAX_STAGE_ADDRESSES),
        },
        max_bytes=MAX_ROUTE_BYTES,
        version=1,
    )

    def layers_of(self, index: int) -> tuple[int, int]:
        """The layers [start, stop) of worker `index`."""
        return self.bounds[index], self.bounds[index + 1]

    def addresses_of(self, peer_id: str) -> tuple[str, ...]:
        """Return the addresses at which a worker can be dialled."""
        return tuple(a for a in self.addresses if a.rpartition("/p2p/")[2] == peer_id)

    def _check(self) -> None:
        peers = set(self.peers)
        if not peers or "" in peers or len(peers) != len(self.peers):
            raise violation("the route names no worker, one without an id, or one twice")
        rises = all(low < high for low, high in pairwise(self.bounds))
        if len(self.bounds) != len(peers) + 1 or not rises:
            raise violation(
                f"the route does not give each of {len(peers)} workers a range of layers"
            )
        places = Counter(
            at if separator else ""
            for _, separator, at in (a.rpartition("/p2p/") for a in self.addresses)
        )
        if not peers.issuperset(places):
            raise violation("the route has an address of none of its workers")
        if places and max(places.values()) > MAX_STAGE_ADDRESSES:
            raise violation(
                f"the route has more than {MAX_STAGE_ADDRESSES} addresses of one worker"
            )
