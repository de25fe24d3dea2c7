"""Finding peers: by multicast DNS on a local network, by Kademlia beyond it."""

from neurogrid.p2p.discovery.changes import PeerChanges
from neurogrid.p2p.discovery.discovery import Discovery
from neurogrid.p2p.discovery.explanation import Explanation
from neurogrid.p2p.discovery.known import PeerChange, PeerFound, PeerLost
from neurogrid.p2p.discovery.sighting import Attempt, Sighting

__all__ = [
    "Attempt",
    "Discovery",
    "Explanation",
    "PeerChange",
    "PeerChanges",
    "PeerFound",
    "PeerLost",
    "Sighting",
]
