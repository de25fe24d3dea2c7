"""Finding peers: by multicast DNS on a local network, by Kademlia beyond it."""

from neurogrid.p2p.discovery.changes import PeerChanges
from neurogrid.p2p.discovery.dht import Announcement, Dht, DhtTiming
from neurogrid.p2p.discovery.dht_bootstrap import read_bootstrap
from neurogrid.p2p.discovery.discovery import Discovery
from neurogrid.p2p.discovery.explanation import Explanation
from neurogrid.p2p.discovery.known import PeerChange, PeerFound, PeerLost
from neurogrid.p2p.discovery.records import MemberRecord, RecordFault, RecordRefusedError
from neurogrid.p2p.discovery.sighting import Attempt, Sighting

__all__ = [
    # Who is there
    "Discovery",
    "PeerChanges",
    "PeerFound",
    "PeerLost",
    "PeerChange",
    # Kademlia
    "Dht",
    "Announcement",
    "DhtTiming",
    "read_bootstrap",
    "MemberRecord",
    "RecordFault",
    "RecordRefusedError",
    # What was tried
    "Explanation",
    "Attempt",
    "Sighting",
]
