"""Reports of a source of peers: which it saw or lost, and what it tried to that end.

Sources know neither each other nor what is done with a peer; `Discovery` gathers what they report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Attempt", "OnAttempt", "OnSighting", "Sighting"]


@dataclass(frozen=True, slots=True)
class Sighting:
    """A peer that a source has seen, or lost.

    Attributes:
        peer_id: whom (base58). Nothing proves it until a connection does.
        addresses: full multiaddrs that end in `/p2p/` and this peer id, the most useful first; none when lost.
        source: which source reports it: "mdns", "dht", "bootstrap" or "ticket".
        is_lost: whether the peer said goodbye or has not been heard of for too long.
        role: what the peer says that it is; empty where the source does not know.
    """

    peer_id: str
    addresses: tuple[str, ...]
    source: str
    is_lost: bool = False
    role: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Something that a source tried, for `Discovery.explain`.

    Attributes:
        source: as in `Sighting`.
        what: what was tried, and where, as one line.
        outcome: what came of it, and why, as one line; empty while it is under way.
        is_good: whether it helped.
    """

    source: str
    what: str
    outcome: str
    is_good: bool


OnSighting: TypeAlias = Callable[[Sighting], None]
"""Called with each report; must not block or raise."""

OnAttempt: TypeAlias = Callable[[Attempt], None]
"""Called with each attempt, again when its outcome is known; must not block or raise."""
