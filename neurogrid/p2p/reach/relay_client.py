"""The other side of a relay: to be reached through it, and to reach others.

To be reached: a task for each relay keeps a connection to it and a reservation on it, and dials and reserves again
when either is lost. It dials the relay from our own listening port where that can be had: then the address that the
relay sees is the one at which a NAT would let a peer in, which hole punching needs. A peer that comes through the
relay arrives as a STOP stream; to reach one, we ask the relay with a HOP stream. Either stream becomes a connection
of the swarm, with Noise and Yamux of ours in it: the relay can read nothing.

Source: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Status, StopMessage
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from neurogrid.errors import (
    ConfigurationError,
    PeerRefusedError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.p2p.hosts.detached_call import DetachedCall
from neurogrid.p2p.hosts.host import parse_peer_address
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.reach.backoff import Backoff
from neurogrid.p2p.reach.circuit import (
    circuit_address,
    is_loopback_address,
    is_relayed_address,
    split_circuit,
)
from neurogrid.p2p.reach.observed import observed_address
from neurogrid.p2p.reach.own_port import dial_from_own_port
from neurogrid.p2p.reach.protobuf_frames import receive_message, send_message
from neurogrid.p2p.reach.relay_service import HOP_PROTOCOL, STOP_PROTOCOL
from neurogrid.p2p.reach.relayed import RelayedConnection
from neurogrid.p2p.streams.stream import Stream
from neurogrid.renewed_event import RenewedEvent

__all__ = ["RelayClient", "RelayState"]

logger = logging.getLogger(__name__)

# Both in seconds.
CIRCUIT_TIMEOUT: Final = 25.0  # the relay asks the peer, then Noise and Yamux over both ways
REQUEST_TIMEOUT: Final = 15.0  # for a relay to answer
# Connections through relays that peers make to us, at a time.
MAX_INBOUND: Final = 128
# A relay that reserves for a shorter time is asked again no sooner; one that gives years, no later.
MIN_RENEWAL: Final = 10.0
MAX_RENEWAL: Final = 3600.0
# A slot that lasted so long counts as a success. Seconds.
SETTLED_AFTER: Final = 10.0
MAX_RELAY_ADDRESSES: Final = 8
MAX_OBSERVED: Final = 64  # relays of which it is remembered how they see us


@dataclass
class RelayState:
    """State of a relay that we want to be reached through.

    Attributes:
        address: the full multiaddr by which we know it.
        is_reserved: whether we have a slot now.
        addresses: where we can be reached through it; none without a slot.
        last_error: why there is no slot; empty while there is one.
        was_asked: whether there was an answer, or none in time.
    """

    address: str
    is_reserved: bool = False
    addresses: tuple[str, ...] = ()
    last_error: str = "not asked yet"
    was_asked: bool = False


@dataclass
class _Wanted:
    state: RelayState
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class RelayClient:
    """Circuit v2 for one host, from its making on until the host ends.

    Args:
        host: the libp2p host.
        on_relayed: called with the id of each peer that has connected to us through a relay; quick.
    """

    def __init__(
        self, host: Libp2pHost, *, on_relayed: Callable[[str], None] | None = None
    ) -> None:
        self._host = host
        self._on_relayed = on_relayed or (lambda peer_id: None)
        self._wanted: dict[str, _Wanted] = {}
        self._dials: dict[str, DetachedCall[None]] = {}
        self._joining: dict[str, trio.Lock] = {}
        self._relayed: dict[str, RelayedConnection] = {}  # the newest to each peer
        self._circuits: dict[str, str] = {}  # the address that led to each peer
        self._observed: dict[str, str] = {}  # our address, by the relay that sees it
        self._num_inbound = 0
        self._changed = RenewedEvent()
        host.set_stream_handler(STOP_PROTOCOL, self._accept)
        host.on_disconnected(self._lost)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which we can be reached through relays."""
        return tuple(a for wanted in self._wanted.values() for a in wanted.state.addresses)

    @property
    def observed_addresses(self) -> tuple[str, ...]:
        """Our own addresses as relays see them that were dialled from our listening port; without `/p2p/`."""
        connected = self._host.linked_peers
        observed = [seen for relay, seen in self._observed.items() if relay in connected]
        return tuple(dict.fromkeys(observed))

    def last_used(self, peer_id: str) -> float:
        """Return when data last crossed a peer's newest relayed connection (`trio.current_time`); -inf without one."""
        raw = self._relayed.get(peer_id)
        return -math.inf if raw is None else raw.used_at

    def circuits_to(self, peer_id: str) -> tuple[str, ...]:
        """The address through a relay at which we have reached a peer, while it is connected."""
        return tuple(filter(None, [self._circuits.get(peer_id)]))

    def states(self) -> tuple[RelayState, ...]:
        """Return the state of each relay that was named to `use`."""
        return tuple(wanted.state for wanted in self._wanted.values())

    async def wait_changed(self) -> None:
        """Wait until a slot was won or lost."""
        await self._changed.wait()

    # ------------------------------------------------------------------ to be reached

    def use(self, relay_address: str) -> None:
        """Be reachable through a relay from now on, as soon as it lets us.

        Raises:
            ConfigurationError: `relay_address` is not the full multiaddr of another peer.
        """
        _, relay_id = parse_peer_address(relay_address)
        if relay_id == self._host.peer_id:
            raise ConfigurationError(f"{relay_address} is this host: it cannot be its own relay")
        if relay_id not in self._wanted:
            wanted = self._wanted[relay_id] = _Wanted(RelayState(relay_address))
            self._host.start_soon(self._keep_reserved, wanted, relay_id)

    def leave(self, relay_id: str) -> None:
        """Reserve nothing at a relay any more; the slot ends with its time or the connection."""
        wanted = self._wanted.pop(relay_id, None)
        if wanted is not None:
            wanted.scope.cancel()

    async def _keep_reserved(self, wanted: _Wanted, relay_id: str) -> None:
        backoff, draw, num_failures = Backoff(), random.SystemRandom(), 0
        state = wanted.state
        with wanted.scope:
            while True:
                try:
                    renew_in = await self._reserve(state, relay_id)
                except (TransportError, RemoteProtocolError, PeerRefusedError) as exc:
                    num_failures += 1
                    self._note_lost(state, str(exc))
                    await trio.sleep(backoff.delay(num_failures, draw))
                    continue
                reserved_at = trio.current_time()
                with trio.move_on_after(renew_in) as lasting:
                    await self._host.wait_disconnected(relay_id)
                    self._note_lost(state, "the connection to the relay ended")
                lasted = trio.current_time() - reserved_at
                if lasting.cancelled_caught or lasted >= SETTLED_AFTER:
                    num_failures = 0
                else:  # a relay that gives slots and closes is not dialled in a tight loop
                    num_failures += 1
                    await trio.sleep(backoff.delay(num_failures, draw))

    async def _reserve(self, state: RelayState, relay_id: str) -> float:
        """Have a slot; returns the seconds after which to renew it."""
        await self._dial_relay(state.address, relay_id)
        async with aclosing(await self._host.open_stream(relay_id, [HOP_PROTOCOL])) as stream:
            answer = await self._ask(stream, HopMessage(type=HopMessage.RESERVE))
        relays = dict.fromkeys([state.address, *_addresses(answer, relay_id, state.address)])
        state.addresses = tuple(
            circuit_address(address, self._host.peer_id)
            for address in list(relays)[:MAX_RELAY_ADDRESSES]
        )
        if not state.is_reserved:
            logger.info("reachable through the relay %s", state.address)
        state.is_reserved, state.last_error, state.was_asked = True, "", True
        self._changed.set()
        remaining = answer.reservation.expire - time.time()
        return min(MAX_RENEWAL, max(MIN_RENEWAL, remaining / 2))

    async def _dial_relay(self, address: str, relay_id: str) -> None:
        """Connect to a relay, from our own port since hole punching may follow."""
        if self._host.is_linked(relay_id):
            return
        self._host.tolerate(relay_id, [HOP_PROTOCOL, STOP_PROTOCOL])
        self._observed.pop(relay_id, None)
        is_own_port = await dial_from_own_port(self._host, address)
        if self._host.gate is not None:
            # A relay that belongs to the cluster serves us once it has admitted us.
            await self._host.gate.wait_admitted(relay_id)
        if is_own_port:
            seen = await observed_address(self._host, relay_id)
            if seen is not None and len(self._observed) < MAX_OBSERVED:
                self._observed[relay_id] = seen

    def _note_lost(self, state: RelayState, reason: str) -> None:
        if state.is_reserved or state.last_error != reason:
            logger.warning("not reachable through the relay %s: %s", state.address, reason)
        state.is_reserved, state.addresses, state.last_error = False, (), reason
        state.was_asked = True
        self._changed.set()

    async def _accept(self, stream: Stream) -> None:
        """A STOP stream: a relay brings a peer."""
        with ExitStack() as place:
            raw = await self._answer(stream, place)
            if raw is None:
                await stream.aclose()
                return
            self._relayed[raw.peer_id] = raw
            try:
                await self._run_inbound(raw)
            finally:
                self._forget(raw)
                await stream.aclose()

    async def _answer(self, stream: Stream, place: ExitStack) -> RelayedConnection | None:
        """Say whether the peer may come; its connection, which has its place until `place` is closed."""
        with trio.move_on_after(REQUEST_TIMEOUT):
            request = await receive_message(stream, StopMessage)
            status: Any = Status.OK
            if request.type != StopMessage.CONNECT or not request.peer.id:
                status = Status.UNEXPECTED_MESSAGE
            elif stream.peer_id not in self._wanted:
                status = Status.PERMISSION_DENIED  # we asked for no slot there
            elif self._num_inbound >= MAX_INBOUND:
                status = Status.RESOURCE_LIMIT_EXCEEDED
            else:
                place.enter_context(self._inbound())
            await send_message(stream, StopMessage(type=StopMessage.STATUS, status=status))
            if status == Status.OK:
                peer_id = ID(bytes(request.peer.id)).to_base58()
                return RelayedConnection(stream, peer_id, is_initiator=False)
        return None

    @contextmanager
    def _inbound(self) -> Iterator[None]:
        """One of the peers that relays may bring, counted before it is let in: many may come at once."""
        self._num_inbound += 1
        try:
            yield
        finally:
            self._num_inbound -= 1

    async def _run_inbound(self, raw: RelayedConnection) -> None:
        """Make it a connection of the swarm, and stay until that is over."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_when_connected, raw.peer_id)
            try:
                # Returns, or rather raises, when the connection is over: `end_inbound_tasks` sees to that.
                await self._host.swarm.upgrade_inbound_raw_conn(raw, raw.address)
            except (BaseLibp2pError, OSError, ValueError) as exc:
                await trio.lowlevel.checkpoint_if_cancelled()
                logger.debug("a relayed connection of %s is over: %s", raw.peer_id, exc)
            nursery.cancel_scope.cancel()

    async def _tell_when_connected(self, peer_id: str) -> None:
        while not self._host.is_connected(peer_id):
            await trio.sleep(0.02)
        self._on_relayed(peer_id)

    def _forget(self, raw: RelayedConnection) -> None:
        if self._relayed.get(raw.peer_id) is raw:
            del self._relayed[raw.peer_id]

    def _lost(self, peer_id: str) -> None:
        self._relayed.pop(peer_id, None)
        self._circuits.pop(peer_id, None)
        self._observed.pop(peer_id, None)

    # ------------------------------------------------------------------ to reach

    async def connect(self, address: str) -> str:
        """Connect to a peer through a relay: `RELAY_ADDRESS/p2p-circuit/p2p/PEER_ID`. Returns the peer id.

        Raises:
            ConfigurationError: `address` is no such address, or leads to this host.
            PeerUnreachableError: the relay cannot be reached or refuses, or the peer does not answer.
            PeerRefusedError: the relay or the peer does not admit us.

        After cancellation as `Host.connect`.
        """
        relay_address, peer_id = split_circuit(address)
        if peer_id == self._host.peer_id:
            raise ConfigurationError(f"{address} is this peer's own address")
        if not self._host.is_linked(peer_id):
            dial = self._dials.get(address)
            if dial is None:
                dial = DetachedCall(partial(self._dial, address, relay_address, peer_id))
                self._dials[address] = dial
                self._host.start_soon(dial.run)
            await dial.wait()
        if self._host.gate is not None:
            await self._host.gate.wait_admitted(peer_id)
        return peer_id

    async def _dial(self, address: str, relay_address: str, peer_id: str) -> None:
        try:
            with trio.fail_after(CIRCUIT_TIMEOUT):
                relay_id = parse_peer_address(relay_address)[1]
                await self._dial_relay(relay_address, relay_id)
                await self._join(relay_id, peer_id)
                if peer_id in self._relayed:
                    self._circuits[peer_id] = address
        except trio.TooSlowError as exc:
            raise PeerUnreachableError(
                f"no answer from {address} in {CIRCUIT_TIMEOUT:g} s"
            ) from exc
        except (BaseLibp2pError, OSError, ValueError, RemoteProtocolError) as exc:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise PeerUnreachableError(f"cannot connect to {address}: {exc}") from exc
        finally:
            del self._dials[address]

    async def _join(self, relay_id: str, peer_id: str) -> None:
        """One at a time: a relay has several addresses, and a peer wants one connection through it."""
        lock = self._joining.setdefault(peer_id, trio.Lock())
        async with lock:
            try:
                if not self._host.is_linked(peer_id):
                    stream = await self._host.open_stream(relay_id, [HOP_PROTOCOL])
                    await self._upgrade(stream, peer_id)
            finally:
                if not lock.statistics().tasks_waiting:
                    del self._joining[peer_id]

    async def _upgrade(self, stream: Stream, peer_id: str) -> None:
        target = ID.from_base58(peer_id)
        try:
            request = HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=target.to_bytes()))
            await self._ask(stream, request)
            raw = RelayedConnection(stream, peer_id, is_initiator=True)
            connection = await self._host.swarm.upgrade_outbound_raw_conn(raw, target)
            await connection.event_started.wait()
            self._relayed[peer_id] = raw
        except BaseException:  # also cancelled: nobody else has the stream
            await stream.reset()
            raise

    async def _ask(self, stream: Stream, request: HopMessage) -> HopMessage:
        with trio.move_on_after(REQUEST_TIMEOUT):
            await send_message(stream, request)
            answer = await receive_message(stream, HopMessage)
            if answer.type != HopMessage.STATUS or answer.status != Status.OK:
                raise PeerUnreachableError(
                    f"the relay {stream.peer_id} refuses: {_REFUSALS.get(answer.status, f'status {answer.status}')}"
                )
            return answer
        raise PeerUnreachableError(f"the relay {stream.peer_id} does not answer")


_REFUSALS: Final[dict[int, str]] = {
    Status.RESERVATION_REFUSED: "it has no slot left",
    Status.RESOURCE_LIMIT_EXCEEDED: "too many connections through it",
    Status.PERMISSION_DENIED: "it does not serve this peer",
    Status.CONNECTION_FAILED: "it cannot reach the peer",
    Status.NO_RESERVATION: "the peer has no slot there",
}


def _addresses(answer: HopMessage, relay_id: str, known: str) -> list[str]:
    """The addresses that a relay says it has, those that are what they should be.

    Not its loopback, unless that is where we know it: elsewhere it is somebody else's.
    """
    addresses = []
    for raw in answer.reservation.addrs[:MAX_RELAY_ADDRESSES]:
        try:
            address = str(Multiaddr(bytes(raw)))
            if parse_peer_address(address)[1] != relay_id or is_relayed_address(address):
                continue
            if is_loopback_address(known) or not is_loopback_address(address):
                addresses.append(address)
        except (ConfigurationError, MultiaddrError, ValueError) as exc:
            logger.debug("the relay %s names a strange address: %s", relay_id, exc)
    return addresses
