"""A worker's links to its neighbours in a route: brought up with a session, used for its tensors, made again when cut.

While they are up, the transport pings them, so that no NAT forgets them.

Knows no sessions. What it cannot reach becomes an error that says so, for the coordinator.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from neurogrid.errors import (
    HeaderWriteError,
    NeuroGridError,
    RequestRefusedError,
    TransportError,
)
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.exchange.routes import Direction, Place
from neurogrid.p2p.hosts.dialing import connect_any
from neurogrid.p2p.wire import ErrorCode, TensorMessage

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

    def __init__(self, protocol: Exchange, connect: Callable[[str], Awaitable[str]]) -> None:
        self._protocol = protocol
        self._connect = connect
        self._locks: dict[str, trio.Lock] = {}

    async def prepare(self, place: Place | None) -> None:
        """Make sure of the stream to the successor, if there is one; it serves both directions.

        Raises:
            RequestRefusedError: it cannot be reached, in time or at all (PEER_UNREACHABLE).
        """
        if place is None or place.successor is None:
            return
        peer_id = place.successor
        try:
            await self._open(peer_id, place.route.addresses_of(peer_id))
        except NeuroGridError as exc:
            raise self.unreachable(peer_id, exc) from exc

    async def _open(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        """Connect to a neighbour unless that is so, and bring up the stream.

        Raises:
            NeuroGridError: it cannot be reached, in time or at all.
        """
        host = self._protocol.host
        with trio.move_on_after(DIAL_TIMEOUT):
            if not host.is_connected(peer_id):
                async with self._dialling(peer_id):
                    await self._dial(peer_id, addresses)
            await self._protocol.open(peer_id)
            if self._protocol.hello_of(peer_id) is None:
                raise TransportError("it speaks 1.0.0, which has no routes")
            return
        raise TransportError(f"no answer in {DIAL_TIMEOUT:g} s")

    @asynccontextmanager
    async def _dialling(self, peer_id: str) -> AsyncIterator[None]:
        """One at a time for each peer: of two connections that come up together, one would be closed again."""
        lock = self._locks.setdefault(peer_id, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._locks.pop(peer_id, None)

    async def _dial(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        host = self._protocol.host
        if host.is_connected(peer_id):
            return  # by now
        ways = host.ways_to(peer_id, addresses)
        if not ways:
            raise TransportError("the route has no address of it")
        await connect_any(self._connect, ways)

    async def hand_on(
        self, place: Place, message: TensorMessage, direction: Direction = Direction.FORWARD
    ) -> None:
        """Send a tensor to the next worker in this direction; a link that was cut since the last one is made again.

        Raises:
            RequestRefusedError: it does not get there (PEER_UNREACHABLE).
        """
        peer_id = place.target(direction)
        assert peer_id is not None
        try:
            with trio.fail_after(HAND_ON_TIMEOUT):
                try:
                    await self._send(peer_id, place, message)
                except HeaderWriteError:
                    # It was cut, and that shows only now: nothing of the message has gone out.
                    await self._send(peer_id, place, message)
        except trio.TooSlowError as exc:
            error = TransportError(f"it took no activation for {HAND_ON_TIMEOUT:g} s")
            raise self.unreachable(peer_id, error) from exc
        except NeuroGridError as exc:
            raise self.unreachable(peer_id, exc) from exc

    async def _send(self, peer_id: str, place: Place, message: TensorMessage) -> None:
        if not self._protocol.host.is_connected(peer_id):
            await self._open(peer_id, place.route.addresses_of(peer_id))
        await self._protocol.send(peer_id, message)

    def unreachable(self, peer_id: str, reason: NeuroGridError) -> RequestRefusedError:
        """Make the error that tells the coordinator."""
        return RequestRefusedError(
            f"cannot reach {peer_id}: {reason}", code=ErrorCode.PEER_UNREACHABLE
        )
