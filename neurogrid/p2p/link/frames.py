"""Yamux frames: the header of twelve bytes, its types, flags and codes. Knows nothing of streams.

| bytes | 1 | 1 | 2 | 4 | 4 |
|---|---|---|---|---|---|
| field | version 0 | type | flags | stream id | length |

All big-endian. The length is that of the payload for DATA, a credit for WINDOW_UPDATE, an opaque value for PING and
a code for GO_AWAY.

Source: https://github.com/hashicorp/yamux/blob/master/spec.md
"""

from __future__ import annotations

from struct import Struct
from typing import Final

__all__ = [
    "ACK",
    "DATA",
    "FIN",
    "GO_AWAY",
    "GO_AWAY_NORMAL",
    "GO_AWAY_PROTOCOL_ERROR",
    "HEADER_BYTES",
    "INITIAL_WINDOW",
    "PING",
    "RST",
    "SYN",
    "WINDOW_UPDATE",
    "pack_header",
    "unpack_header_from",
]

HEADER_BYTES: Final = 12

DATA: Final = 0
WINDOW_UPDATE: Final = 1
PING: Final = 2
GO_AWAY: Final = 3

SYN: Final = 1
ACK: Final = 2
FIN: Final = 4
RST: Final = 8

GO_AWAY_NORMAL: Final = 0
GO_AWAY_PROTOCOL_ERROR: Final = 1

# Bytes that either side may send on a new stream before it has any credit; the specification's.
INITIAL_WINDOW: Final = 256 * 1024

_HEADER: Final = Struct(">BBHII")
_HEADER_OF_VERSION_0: Final = Struct(">xBHII")

# (type, flags, stream id, length) to bytes, version 0.
pack_header = _HEADER_OF_VERSION_0.pack
# (buffer, offset) to (version, type, flags, stream id, length).
unpack_header_from = _HEADER.unpack_from
