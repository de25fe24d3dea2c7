"""Our own address, as a peer sees it: identify's `observedAddr`.

Source: https://github.com/libp2p/specs/blob/master/identify/README.md
"""

from __future__ import annotations

import logging
from typing import Final

import trio
from libp2p.identity.identify.pb.identify_pb2 import Identify
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from neurogrid.errors import PeerUnreachableError, RemoteProtocolError, StreamBrokenError
from neurogrid.p2p.hosts.host import Host, ip_place
from neurogrid.p2p.reach.protobuf_frames import receive_message

__all__ = ["IDENTIFY_PROTOCOL", "observed_address"]

logger = logging.getLogger(__name__)

IDENTIFY_PROTOCOL: Final = "/ipfs/id/1.0.0"
TIMEOUT: Final = 10.0  # seconds
# Bytes: a key, all addresses and protocols, and a signed record of them.
MAX_IDENTIFY: Final = 64 * 1024


async def observed_address(host: Host, peer_id: str) -> str | None:
    """Ask a connected peer; None if it does not say, or no IP address with a port. It has no `/p2p/` part."""
    try:
        with trio.fail_after(TIMEOUT):
            stream = await host.open_stream(peer_id, [IDENTIFY_PROTOCOL])
            try:
                identify = await receive_message(stream, Identify, max_bytes=MAX_IDENTIFY)
            finally:
                await stream.reset()
        seen = str(Multiaddr(bytes(identify.observed_addr)))
        # It may be any multiaddr, however long; what is returned is taken apart, and sent on to others.
        if ip_place(seen) is not None:
            return seen.partition("/p2p/")[0]
        if identify.observed_addr:
            logger.debug("%s sees us at a strange address: %.200s", peer_id, seen)
    except (PeerUnreachableError, RemoteProtocolError, StreamBrokenError, trio.TooSlowError) as exc:
        logger.debug("%s does not say at which address it sees us: %s", peer_id, exc)
    except (MultiaddrError, ValueError) as exc:
        logger.debug("%s sees us at a strange address: %s", peer_id, exc)
    return None
