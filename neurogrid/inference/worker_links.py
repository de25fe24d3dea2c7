"""A worker's links to the workers after it: brought up with a session, used for its activations.

Knows no sessions. What it cannot reach becomes an error that says so, for the coordinator.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from neurogrid.errors import NeuroGridError, RequestRefusedError, TransportError
from neurogrid.p2p.dialing import connect_any
from neurogrid.p2p.protocol import Protocol
from neurogrid.p2p.routes import Place
from neurogrid.p2p.wire import PROTOCOL_V11, ErrorCode, TensorMessage

__all__ = ["WorkerLinks"]

logger = logging.getLogger(__name__)

# Seconds to connect to a successor and to open the stream. Less than a coordinator waits for a SessionAck.
DIAL_TIMEOUT = 8.0
# Seconds until an activation must be on its way. A successor grants credit as it computes: a long prefill before it.
HAND_ON_TIMEOUT = 60.0


class WorkerLinks:
    """The links of one worker.

    Args:
        protocol: its protocol.
        connect: dials one full multiaddr; `Host.connect`, or what knows relays as well.
    """

    def __init__(self, protocol: Protocol, connect: Callable[[str], Awaitable[str]]) -> None:
        self._protocol = protocol
        self._connect = connect

    async def prepare(self, place: Place | None) -> None:
        """Make sure of the stream to the successor, if there is one.

        Raises:
            RequestRefusedError: it cannot be reached, in time or at all (PEER_UNREACHABLE).
        """
        if place is None or place.successor is None:
            return
        peer_id = place.successor
        try:
            with trio.fail_after(DIAL_TIMEOUT):
                await self._open(peer_id, place.route.addresses_of(peer_id))
        except trio.TooSlowError as exc:
            error = TransportError(f"no answer in {DIAL_TIMEOUT:g} s")
            raise self.unreachable(peer_id, error) from exc
        except NeuroGridError as exc:
            raise self.unreachable(peer_id, exc) from exc

    async def _open(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        host = self._protocol.host
        if peer_id not in host.connected_peers:
            ways = host.ways_to(peer_id, addresses)
            if not ways:
                raise TransportError("the route has no address of it")
            await connect_any(self._connect, ways)
        if await self._protocol.open(peer_id) != PROTOCOL_V11:
            raise TransportError("it speaks 1.0.0, which has no routes")

    async def hand_on(self, peer_id: str, message: TensorMessage) -> None:
        """Send an activation to the successor.

        Raises:
            RequestRefusedError: it does not get there (PEER_UNREACHABLE).
        """
        try:
            with trio.fail_after(HAND_ON_TIMEOUT):
                await self._protocol.send(peer_id, message)
        except trio.TooSlowError as exc:
            error = TransportError(f"it took no activation for {HAND_ON_TIMEOUT:g} s")
            raise self.unreachable(peer_id, error) from exc
        except TransportError as exc:
            raise self.unreachable(peer_id, exc) from exc

    def unreachable(self, peer_id: str, reason: NeuroGridError) -> RequestRefusedError:
        """What the coordinator is told."""
        return RequestRefusedError(
            f"cannot reach {peer_id}: {reason}", code=ErrorCode.PEER_UNREACHABLE
        )
