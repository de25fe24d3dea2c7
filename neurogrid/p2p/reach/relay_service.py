"""A relay for others: circuit v2's HOP protocol, bounded in reservations, circuits, time and bytes.

A peer behind a NAT reserves a slot over the connection that it made to us; a peer that asks for it is joined to it:
a stream from the one, a stream to the other, and what comes from each goes to the other. What passes is sealed
between the two. A reservation ends with its time, or with the connection to its peer.

Source: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import (
    HopMessage,
    Limit,
    PeerId,
    Reservation,
    Status,
    StopMessage,
)
from multiaddr import Multiaddr

from neurogrid.errors import (
    PeerUnreachableError,
    RemoteProtocolError,
    StreamBrokenError,
    TransportError,
)
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.reach.circuit import is_relayed_address
from neurogrid.p2p.reach.protobuf_frames import receive_message, send_message
from neurogrid.p2p.reach.vouchers import make_voucher
from neurogrid.p2p.shares import client_address, share_of
from neurogrid.p2p.streams.stream import Stream

__all__ = [
    "HOP_PROTOCOL",
    "STOP_PROTOCOL",
    "MayUseRelay",
    "RelayLimits",
    "RelayService",
    "RelayServiceState",
]

logger = logging.getLogger(__name__)

HOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/stop"

MayUseRelay: TypeAlias = Callable[[str], bool]
"""Whether a peer, by its id, may reserve a slot here or be joined to a peer that has one."""

MIB: Final = 2**20
_CHUNK_BYTES: Final = 64 * 1024
# A message that names our addresses stays below the bound of a message with so many.
_MAX_ADDRESSES: Final = 16


@dataclass(frozen=True)
class RelayLimits:
    """The limits of the relay. Times in seconds.

    Attributes:
        max_reservations: peers with a slot: a cluster is some dozens. Those of one address have three quarters.
        reservation_time: of one reservation; its peer renews it before.
        max_circuits: at a time in all. Each holds at most two windows of its streams.
        max_circuits_per_peer: at a time, to or from one peer.
        max_circuits_per_pair: of these, between the same two: one is enough, and a few are lost without our knowing.
            So no peer takes all the circuits of another.
        circuit_time: after which a circuit is cut. Peers whose NATs let nothing else through work over it, so hours.
        circuit_bytes: in each direction, after which it is cut: a model's weights pass several times.
        request_timeout: for a peer to say what it wants, and for the other to accept.
        max_requests: that are being read or answered at a time.
        max_requests_per_peer: of these, one peer's: a coordinator dials all of its workers at once.
    """

    max_reservations: int = 128
    reservation_time: int = 3600
    max_circuits: int = 256
    max_circuits_per_peer: int = 16
    max_circuits_per_pair: int = 4
    circuit_time: int = 6 * 3600
    circuit_bytes: int = 64 * 1024 * MIB
    request_timeout: float = 15.0
    max_requests: int = 64
    max_requests_per_peer: int = 16


@dataclass(frozen=True)
class RelayServiceState:
    """The state of a relay at one moment.

    Attributes:
        reservations: peers with a slot.
        circuits: pairs that are joined: the peer that asked, and the one it asked for.
        relayed_bytes: in all, both directions.
    """

    reservations: tuple[str, ...]
    circuits: tuple[tuple[str, str], ...]
    relayed_bytes: int


class _Refused(Exception):
    def __init__(self, status: Any, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class RelayService:
    """The relay of a host, from its making on until the host ends.

    Args:
        host: a libp2p host that others can reach.
        limits: how much is given to peers.
        may_use: which peers are served; None is all.
    """

    def __init__(
        self,
        host: Host,
        *,
        limits: RelayLimits | None = None,
        may_use: MayUseRelay | None = None,
    ) -> None:
        self._host = host
        self._limits = limits or RelayLimits()
        self._may_use = may_use or (lambda peer_id: True)
        self._reservations: dict[str, float] = {}  # until when, by `trio.current_time`
        self._circuits: list[tuple[str, str]] = []
        # Of circuits, and of those that are being asked for.
        self._places: list[tuple[str, str]] = []
        self._requests: Counter[str] = Counter()  # by the peer that asks
        self._relayed_bytes = 0
        host.set_stream_handler(HOP_PROTOCOL, self._serve)
        host.on_disconnected(self._lost)

    @property
    def state(self) -> RelayServiceState:
        """The state of the relay now."""
        self._drop_expired()
        return RelayServiceState(
            tuple(self._reservations), tuple(self._circuits), self._relayed_bytes
        )

    async def _serve(self, stream: Stream) -> None:
        """One request: a reservation, or a circuit, which stays until it ends."""
        limits, num_asked = self._limits, self._requests[stream.peer_id]
        if (
            self._requests.total() >= limits.max_requests
            or num_asked >= limits.max_requests_per_peer
        ):
            await stream.reset()
            return
        with ExitStack() as place:
            try:
                target = await self._take_request(stream, place)
            except (RemoteProtocolError, StreamBrokenError, trio.TooSlowError) as exc:
                logger.info("relay: a request of %s failed: %s", stream.peer_id, exc)
                await stream.reset()
                return
            if target is not None:
                await self._relay(stream, target)
        await stream.aclose()

    async def _take_request(self, stream: Stream, place: ExitStack) -> Stream | None:
        """Read a request and answer it, in time; returns the other end of a circuit."""
        self._requests[stream.peer_id] += 1
        try:
            with trio.fail_after(self._limits.request_timeout):
                request = await receive_message(stream, HopMessage)
                try:
                    return await self._answer(stream, request, place)
                except _Refused as exc:
                    place.close()
                    logger.info("relay: %s is refused: %s", stream.peer_id, exc)
                    answer = HopMessage(type=HopMessage.STATUS, status=exc.status)
                    await send_message(stream, answer)
                    return None
        finally:
            self._requests[stream.peer_id] -= 1
            if not self._requests[stream.peer_id]:
                del self._requests[stream.peer_id]

    async def _answer(self, stream: Stream, request: HopMessage, place: ExitStack) -> Stream | None:
        """Do what was asked for, and say so; returns the other end of a circuit, which has its place until `place`
        is closed."""
        if stream.is_relayed:
            raise _Refused(Status.PERMISSION_DENIED, "it comes through a relay itself")
        if not self._may_use(stream.peer_id):
            raise _Refused(Status.PERMISSION_DENIED, "it may not use this relay")
        if request.type == HopMessage.RESERVE:
            await send_message(stream, self._reserve(stream.peer_id))
            return None
        if request.type != HopMessage.CONNECT:
            raise _Refused(Status.UNEXPECTED_MESSAGE, "it sends what is no request")
        target_id = self._wanted(request)
        place.enter_context(self._place(stream.peer_id, target_id))
        target = await self._call(stream.peer_id, target_id)
        try:
            await send_message(
                stream, HopMessage(type=HopMessage.STATUS, status=Status.OK, limit=self._limit)
            )
        except BaseException:  # also cancelled: nobody else has the stream
            await target.reset()
            raise
        return target

    def _reserve(self, peer_id: str) -> HopMessage:
        self._drop_expired()
        limits = self._limits
        if peer_id not in self._reservations:
            if len(self._reservations) >= limits.max_reservations:
                raise _Refused(Status.RESERVATION_REFUSED, "all slots are reserved")
            if self._num_slots_beside(peer_id) >= share_of(limits.max_reservations):
                raise _Refused(
                    Status.RESERVATION_REFUSED, "all slots that its address may have are reserved"
                )
            logger.info("relay: %s has a slot", peer_id)
        self._reservations[peer_id] = trio.current_time() + limits.reservation_time
        expires = int(time.time()) + limits.reservation_time
        return HopMessage(
            type=HopMessage.STATUS,
            status=Status.OK,
            limit=self._limit,
            reservation=Reservation(
                expire=expires,
                addrs=[Multiaddr(a).to_bytes() for a in self._own_addresses()],
                voucher=make_voucher(self._host.identity, peer_id, expires),
            ),
        )

    def _num_slots_beside(self, peer_id: str) -> int:
        """Slots of peers at the same address as this one."""
        address = client_address(self._host.remote_ip(peer_id))
        others = (client_address(self._host.remote_ip(other)) for other in self._reservations)
        return sum(address == other for other in others)

    def _own_addresses(self) -> list[str]:
        """Addresses at which others reach us, none of them through a relay: a way leads through one relay only."""
        direct = [a for a in self._host.addresses if not is_relayed_address(a)]
        return direct[:_MAX_ADDRESSES]

    @property
    def _limit(self) -> Limit:
        return Limit(duration=self._limits.circuit_time, data=self._limits.circuit_bytes)

    def _wanted(self, request: HopMessage) -> str:
        """Return the id of the peer that a circuit is asked for."""
        try:
            target_id = ID(bytes(request.peer.id)).to_base58()
        except ValueError as exc:
            raise _Refused(Status.MALFORMED_MESSAGE, "it names no peer") from exc
        self._drop_expired()
        if target_id not in self._reservations:
            raise _Refused(Status.NO_RESERVATION, f"{target_id} has no slot here")
        return target_id

    @contextmanager
    def _place(self, source_id: str, target_id: str) -> Iterator[None]:
        """One of the circuits that there may be, taken before the other peer is asked: many may ask at once."""
        limits = self._limits
        pair = (source_id, target_id)
        if sum(set(pair) == set(other) for other in self._places) >= limits.max_circuits_per_pair:
            raise _Refused(
                Status.RESOURCE_LIMIT_EXCEEDED, f"it has too many circuits to {target_id}"
            )
        for peer_id in pair:
            if sum(peer_id in pair for pair in self._places) >= limits.max_circuits_per_peer:
                raise _Refused(Status.RESOURCE_LIMIT_EXCEEDED, f"{peer_id} has too many circuits")
        if len(self._places) >= limits.max_circuits:
            raise _Refused(Status.RESOURCE_LIMIT_EXCEEDED, "there are too many circuits")
        self._places.append(pair)
        try:
            yield
        finally:
            self._places.remove(pair)

    async def _call(self, source_id: str, target_id: str) -> Stream:
        """Ask the peer that is wanted to accept the circuit."""
        try:
            target = await self._host.open_stream(target_id, [STOP_PROTOCOL])
        except PeerUnreachableError as exc:
            raise _Refused(Status.CONNECTION_FAILED, f"{target_id}: {exc}") from exc
        source = PeerId(id=ID.from_base58(source_id).to_bytes())
        try:
            await send_message(
                target, StopMessage(type=StopMessage.CONNECT, peer=source, limit=self._limit)
            )
            answer = await receive_message(target, StopMessage)
            if answer.status != Status.OK:
                raise _Refused(
                    Status.CONNECTION_FAILED, f"{target_id} refuses with status {answer.status}"
                )
        except (TransportError, RemoteProtocolError) as exc:
            await target.reset()
            raise _Refused(Status.CONNECTION_FAILED, f"{target_id}: {exc}") from exc
        except BaseException:  # also cancelled: nobody else has the stream
            await target.reset()
            raise
        return target

    async def _relay(self, source: Stream, target: Stream) -> None:
        """Join two streams until both have ended, or one breaks, or the bounds are reached."""
        pair = (source.peer_id, target.peer_id)
        self._circuits.append(pair)
        logger.info("relay: %s is joined to %s", *pair)
        is_whole = False
        try:
            with trio.move_on_after(self._limits.circuit_time):
                async with trio.open_nursery() as nursery:
                    scope = nursery.cancel_scope
                    nursery.start_soon(self._pump, source, target, scope)
                    nursery.start_soon(self._pump, target, source, scope)
                is_whole = not scope.cancelled_caught
        finally:
            self._circuits.remove(pair)
            if is_whole:
                await target.aclose()
            else:
                await target.reset()
                await source.reset()
            logger.info("relay: %s is joined to %s no more", *pair)

    async def _pump(self, source: Stream, target: Stream, scope: trio.CancelScope) -> None:
        num_bytes = 0
        try:
            while data := await source.receive_some(_CHUNK_BYTES):
                num_bytes += len(data)
                if num_bytes > self._limits.circuit_bytes:
                    logger.info("relay: a circuit of %s has used up its bytes", source.peer_id)
                    scope.cancel()
                    return
                await target.send_all(data)
                self._relayed_bytes += len(data)
            await target.send_eof()
        except StreamBrokenError as exc:
            logger.debug("relay: a circuit of %s broke: %s", source.peer_id, exc)
            scope.cancel()

    def _lost(self, peer_id: str) -> None:
        self._reservations.pop(peer_id, None)

    def _drop_expired(self) -> None:
        now = trio.current_time()
        connected = self._host.linked_peers
        for peer_id, until in list(self._reservations.items()):
            if until <= now or peer_id not in connected:
                del self._reservations[peer_id]
