"""The bounds of trust: sizes, numbers, times, each with its unit and reason (`protocol_spec/trust.md`)."""

from __future__ import annotations

from typing import Final

__all__ = [
    "ADMISSION_TIMEOUT",
    "CERTIFICATE_LIFETIME",
    "CLOCK_SKEW",
    "GOODBYE_TIMEOUT",
    "ISSUER_RECHECK_INTERVAL",
    "MAX_ADDRESS_BYTES",
    "MAX_ADDRESSES",
    "MAX_CERTIFICATE_BYTES",
    "MAX_EXCHANGES_PER_PEER",
    "MAX_HELD_STREAMS",
    "MAX_JOINED",
    "MAX_LOG_LINES",
    "MAX_MESSAGE_BYTES",
    "MAX_PEER_ID_CHARS",
    "MAX_RELAYS",
    "MAX_REVOKED",
    "MAX_REVOCATION_BYTES",
    "MAX_ROLE_CHARS",
    "MAX_TEXT_CHARS",
    "MAX_TICKET_CHARS",
    "MAX_TIME",
    "MAX_TOKEN_BYTES",
    "MAX_TOKEN_USES",
    "MAX_TOKENS_COUNTED",
    "MAX_UNADMITTED",
    "MAX_USES_COUNTED",
    "RECHECK_INTERVAL",
    "TICKET_LIFETIME",
    "TOKEN_MEMORY",
]

# Formats

# A peer id of an Ed25519 key has 52 characters; those of hashed RSA keys have 46.
MAX_PEER_ID_CHARS: Final = 128
MAX_ROLE_CHARS: Final = 32
# Seconds of the Unix epoch: the year 36,812. Sums of two fit everywhere.
MAX_TIME: Final = 2**40 - 1
# Today's are about 250 B and 110 B; the rest is for keys that a newer version adds.
MAX_CERTIFICATE_BYTES: Final = 1024
MAX_TOKEN_BYTES: Final = 512
# Peer ids and serials that one list names, together. A cluster is some dozens of machines, and a peer id that is
# revoked stays on the list for as long as its certificate would be valid.
MAX_REVOKED: Final = 512
MAX_REVOCATION_BYTES: Final = 40 * 1024  # 512 entries of 55 B, and room
MAX_MESSAGE_BYTES: Final = 64 * 1024  # a list of revocations, a certificate, a token
MAX_TEXT_CHARS: Final = 256

# Tickets

# A host has a few addresses for each interface; a line to be copied should stay one.
MAX_ADDRESSES: Final = 8
MAX_RELAYS: Final = 4
MAX_ADDRESS_BYTES: Final = 255  # what its length in one byte can say
MAX_TICKET_CHARS: Final = 8192  # twice what all of the above come to
MAX_TOKEN_USES: Final = 4096
# Tokens with a limited number of uses that an issuer counts, until they expire and some time longer.
MAX_TOKENS_COUNTED: Final = 1024
# Certificates that those have given, together: twice what one token can give.
MAX_USES_COUNTED: Final = 2 * MAX_TOKEN_USES
# Peers that have joined by a token while an issuer runs, and that it remembers: dozens join at a time, and a peer
# that was forgotten is a member all the same.
MAX_JOINED: Final = 1024

# Times, in seconds

# Machines that set their clock by the network differ by less than a second; those that do not drift by minutes.
CLOCK_SKEW: Final = 300.0
# A machine that is switched off for two weeks is still a member: renewal begins at half of it.
CERTIFICATE_LIFETIME: Final = 30 * 86_400.0
TICKET_LIFETIME: Final = 86_400.0
# How long the uses of a token that has expired are known: longer than a clock that is wrong goes unnoticed.
TOKEN_MEMORY: Final = 30 * 86_400.0
# Four messages over a relayed path of several seconds.
ADMISSION_TIMEOUT: Final = 10.0
# For a refusal to arrive before the connection goes.
GOODBYE_TIMEOUT: Final = 2.0
# Wall clocks jump and machines sleep: so expiry is looked at again and again, not waited for.
RECHECK_INTERVAL: Final = 30.0
# Where the cluster's key is: who revokes a peer there, by another process, waits to see it gone.
ISSUER_RECHECK_INTERVAL: Final = 2.0

# Peers

# Connections whose peer has shown nothing yet. An honest one takes some milliseconds, so the oldest has to go.
MAX_UNADMITTED: Final = 32
# Connections to peers that are served a DHT and nothing else. A server of one knows some dozens of others; of a host's
# 256 connections most are to be its cluster's.
MAX_STRANGERS: Final = 64
# A peer has one exchange under way from each side, and one more while a connection is replaced.
MAX_EXCHANGES_PER_PEER: Final = 2
# Streams of a peer that wait until its exchange, which is under way, is over.
MAX_HELD_STREAMS: Final = 16
MAX_LOG_LINES: Final = 30  # a minute
