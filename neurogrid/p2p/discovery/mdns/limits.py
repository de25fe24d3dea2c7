"""The numbers of multicast DNS: what we send and how often, and what we take from a network that anybody is on.

Times are in seconds, sizes in bytes of DNS.
"""

from __future__ import annotations

__all__ = [
    "ANSWER_DELAY",
    "DEFAULT_EXPIRY",
    "FIRST_QUERY_INTERVAL",
    "FRAME_BYTES",
    "MAX_ADDRESSES",
    "MAX_ENTRIES",
    "MAX_ENTRIES_FROM_SOURCE",
    "MAX_EXPIRY",
    "MAX_HOST_ADDRESSES",
    "MAX_INSTANCES_IN_PACKET",
    "MAX_KNOWN_ANSWERS",
    "MAX_PACKET_BYTES",
    "MAX_QUERY_INTERVAL",
    "MAX_TEXT_BYTES",
    "MIN_EXPIRY",
    "MIN_GAP",
    "NUM_ANNOUNCEMENTS",
    "PACKET_BURST",
    "PACKET_RATE",
    "REFRESH_AT",
    "REFRESH_JITTER",
]

# A peer that was killed is gone after this long: the lifetime that libp2p's peers give their records.
DEFAULT_EXPIRY = 120.0
# Below, a query that is lost once would cost a peer; above, the dead stay for longer than anybody wants.
MIN_EXPIRY, MAX_EXPIRY = 2.0, 4500.0

# RFC 6762, section 6: answers to a question that many may answer wait a random time, and the same records are
# multicast at most once a second.
ANSWER_DELAY = (0.020, 0.120)
MIN_GAP = 1.0
# RFC 6762, section 8.3: at least two, a second apart.
NUM_ANNOUNCEMENTS = 2
# RFC 6762, section 5.2: a second after the first, then twice as long each time. The RFC allows an hour; a minute
# is how long two halves of a network may take to find each other again.
FIRST_QUERY_INTERVAL = 1.0
MAX_QUERY_INTERVAL = 60.0
# RFC 6762, section 5.2: when this much of a record's lifetime is over, it is asked for again.
REFRESH_AT = (0.80, 0.85, 0.90, 0.95)
REFRESH_JITTER = 0.02

# RFC 6762, section 17: with the headers of IP and UDP, 9000.
MAX_PACKET_BYTES = 8972
# So that an announcement is one Ethernet frame: names and other records take some 250 B.
MAX_TEXT_BYTES = 1000
# A peer has a few addresses for each interface.
MAX_ADDRESSES = 16
MAX_HOST_ADDRESSES = 8
# So that a query is one Ethernet frame: each takes at most 79 B.
MAX_KNOWN_ANSWERS = 14
# A packet of 8972 B has room for so many that have a text worth reading.
MAX_INSTANCES_IN_PACKET = 64

# A local network has some hundred peers, two services each; a machine may run some dozen.
MAX_ENTRIES = 2048
MAX_ENTRIES_FROM_SOURCE = 128
# Packets a second from one interface that are read: all answers of a large network at once, then what is
# left. A flood is dropped by the kernel, and costs us some percent of a core. One that is longer than an Ethernet frame
# counts as so many: it may have as many names in it, and takes as long to read.
PACKET_BURST = 256
PACKET_RATE = 128.0
FRAME_BYTES = 1500
