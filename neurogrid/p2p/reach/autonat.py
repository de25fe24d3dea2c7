"""AutoNAT, both sides: peers are asked to dial this host, so that it knows whether others can.

The client names its addresses to a connected peer, and the peer dials one of them. The server dials nothing but the
address that it sees the asker at, on a connection of its own that ends with the handshake, and only so often: an
asker cannot make it knock elsewhere. (The stock server dials by way of its swarm, which has a connection to the asker
already and takes that for the answer: everybody is told to be public.)

Source: https://github.com/libp2p/specs/blob/master/autonat/autonat-v1.md
"""

from __future__ import annotations

import ipaddress
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from neurogrid.errors import RemoteProtocolError, TransportError
from neurogrid.p2p.hosts.host import ip_place, is_loopback_address
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.reach.observed import observed_address
from neurogrid.p2p.reach.protobuf_frames import receive_message, send_message
from neurogrid.p2p.reach.relayed import connection_of
from neurogrid.p2p.streams.stream import Stream

__all__ = ["AUTONAT_PROTOCOL", "AutoNat", "Reachability", "ReachabilityState"]

logger = logging.getLogger(__name__)

AUTONAT_PROTOCOL: Final = "/libp2p/autonat/1.0.0"
MAX_ADDRESSES: Final = 16
MAX_ASKED: Final = 8  # peers that are asked for one check
# All in seconds.
ASK_TIMEOUT: Final = 30.0  # a server may try several addresses
DIAL_TIMEOUT: Final = 8.0  # for one of them
REQUEST_TIMEOUT: Final = 15.0
CLOSE_TIMEOUT: Final = 1.0
CHECK_INTERVAL: Final = 900.0
FIRST_CHECKS: Final = (1.0, 10.0, 60.0)  # pauses at the beginning, when little is known
# Bounds of what the server does for others, within a minute.
PERIOD: Final = 60.0
MAX_DIALS: Final = 30
MAX_DIALS_PER_PEER: Final = 3


class Reachability(Enum):
    """Whether a host can be dialled from outside."""

    UNKNOWN = "unknown"
    PUBLIC = "public"
    PRIVATE = "private"


@dataclass(frozen=True)
class ReachabilityState:
    """The findings of the peers that were asked.

    Attributes:
        reachability: public once a peer got through; private when all that tried did not.
        address: at which one got through; None if none did.
        num_asked: how many gave an answer.
        reason: one line.
    """

    reachability: Reachability
    address: str | None
    num_asked: int
    reason: str


class AutoNat:
    """Both sides of AutoNAT for one host, from its making on until the host ends.

    Args:
        host: the libp2p host.
        own_addresses: gives the addresses at which it might be dialled, without `/p2p/`.

    Attributes:
        state: the findings up to now.
    """

    def __init__(self, host: Libp2pHost, *, own_addresses: Callable[[], Sequence[str]]) -> None:
        self._host = host
        self._own_addresses = own_addresses
        self._draw = random.SystemRandom()
        self._dials: deque[tuple[float, str]] = deque()
        self.state = ReachabilityState(Reachability.UNKNOWN, None, 0, "nobody was asked yet")
        host.set_stream_handler(AUTONAT_PROTOCOL, self._serve)
        host.start_soon(self._run)

    # ------------------------------------------------------------------ to ask

    async def _run(self) -> None:
        pauses = iter(FIRST_CHECKS)
        while True:
            await trio.sleep(next(pauses, CHECK_INTERVAL))
            if all(map(is_loopback_address, self._own_addresses())):
                continue  # there is nothing to find out
            peers = sorted(self._host.linked_peers)
            await self.check(self._draw.sample(peers, min(MAX_ASKED, len(peers))))

    async def check(self, peers: Iterable[str]) -> ReachabilityState:
        """Ask connected peers one by one, until one gets through; those that cannot be asked do not count."""
        num_asked = 0
        reasons: list[str] = []
        for peer_id in peers:
            try:
                with trio.fail_after(ASK_TIMEOUT):
                    answer = await self._ask(peer_id)
            except (TransportError, RemoteProtocolError, trio.TooSlowError) as exc:
                logger.debug("%s does not say whether it can dial us: %s", peer_id, exc)
                continue
            if answer.status == Message.OK:
                self.state = ReachabilityState(
                    Reachability.PUBLIC,
                    _printed(answer.addr),
                    num_asked + 1,
                    f"{peer_id} got through",
                )
                return self.state
            reasons.append(f"{peer_id}: {_reason(answer)}")
            if answer.status == Message.E_DIAL_ERROR:
                num_asked += 1
        if num_asked:
            self.state = ReachabilityState(
                Reachability.PRIVATE, None, num_asked, "; ".join(reasons[:8])
            )
        elif self.state.reachability is Reachability.UNKNOWN:
            why = "; ".join(reasons[:8]) or "no connected peer could be asked"
            self.state = ReachabilityState(Reachability.UNKNOWN, None, 0, why)
        return self.state

    async def _ask(self, peer_id: str) -> Any:
        addresses = list(self._own_addresses())
        # A NAT may have been told by hand to let in what comes for the port that we listen on.
        seen = await observed_address(self._host, peer_id)
        addresses = list(dict.fromkeys([*addresses, *_moved_to(seen, addresses)]))
        stream = await self._host.open_stream(peer_id, [AUTONAT_PROTOCOL])
        try:
            request = Message(type=Message.DIAL)
            request.dial.peer.id = ID.from_base58(self._host.peer_id).to_bytes()
            for address in addresses[-MAX_ADDRESSES:]:
                request.dial.peer.addrs.append(Multiaddr(address).to_bytes())
            await send_message(stream, request)
            answer = await receive_message(stream, Message)
        finally:
            await stream.reset()
        if answer.type != Message.DIAL_RESPONSE:
            raise RemoteProtocolError(f"{peer_id} answers AutoNAT with something else")
        return answer.dialResponse

    # ------------------------------------------------------------------ to be asked

    async def _serve(self, stream: Stream) -> None:
        answer = Message(type=Message.DIAL_RESPONSE)
        try:
            with trio.fail_after(REQUEST_TIMEOUT):
                request = await receive_message(stream, Message)
            status, text, address = await self._try(stream, request)
            answer.dialResponse.status = status
            if address is None:
                answer.dialResponse.statusText = text
            else:
                answer.dialResponse.addr = address.to_bytes()
            with trio.fail_after(REQUEST_TIMEOUT):
                await send_message(stream, answer)
        except (TransportError, RemoteProtocolError, trio.TooSlowError) as exc:
            logger.debug("an AutoNAT request of %s failed: %s", stream.peer_id, exc)
            await stream.reset()
            return
        await stream.aclose()

    async def _try(self, stream: Stream, request: Message) -> tuple[Any, str, Multiaddr | None]:
        if request.type != Message.DIAL:
            return Message.E_BAD_REQUEST, "this is no request", None
        if bytes(request.dial.peer.id) != ID.from_base58(stream.peer_id).to_bytes():
            return Message.E_BAD_REQUEST, "it names another peer", None
        seen = None if stream.is_relayed else connection_of(stream).get_remote_address()
        if seen is None:
            return Message.E_DIAL_REFUSED, "your address cannot be seen from here", None
        if not self._may_dial(stream.peer_id):
            return Message.E_DIAL_REFUSED, "asked too often", None
        addresses = _at_ip(request.dial.peer.addrs[:MAX_ADDRESSES], str(seen[0]))
        if not addresses:
            return Message.E_DIAL_REFUSED, f"no address is at {seen[0]}, where you are seen", None
        for address in addresses:
            if await self._can_dial(address, stream.peer_id):
                return Message.OK, "", address
        return Message.E_DIAL_ERROR, "nobody answers there", None

    def _may_dial(self, peer_id: str) -> bool:
        now = trio.current_time()
        while self._dials and self._dials[0][0] < now - PERIOD:
            self._dials.popleft()
        num_of_peer = sum(asker == peer_id for _, asker in self._dials)
        if len(self._dials) >= MAX_DIALS or num_of_peer >= MAX_DIALS_PER_PEER:
            return False
        self._dials.append((now, peer_id))
        return True

    async def _can_dial(self, address: Multiaddr, peer_id: str) -> bool:
        """Whether that peer answers there, on a connection that the swarm does not know of."""
        transport = self._host.swarm.transport_manager.transport_for_dialing(address)
        if transport is None:
            return False
        is_there = False
        with trio.move_on_after(DIAL_TIMEOUT):
            try:
                raw = await transport.dial(Multiaddr(f"{address}/p2p/{peer_id}"))
                try:
                    if not getattr(transport, "provides_native_muxing", False):
                        target = ID.from_base58(peer_id)
                        await self._host.swarm.upgrader.upgrade_security(raw, True, target)
                    is_there = True
                finally:
                    with trio.move_on_after(CLOSE_TIMEOUT) as scope:
                        scope.shield = True
                        await raw.close()
            except (BaseLibp2pError, OSError, ValueError) as exc:
                await trio.lowlevel.checkpoint_if_cancelled()
                logger.debug("%s is not to be reached at %s: %s", peer_id, address, exc)
        return is_there


def _at_ip(addresses: Iterable[bytes], ip: str) -> list[Multiaddr]:
    """Return the addresses at this IP address, as multiaddrs without what follows the transport; once each."""
    wanted = ipaddress.ip_address(ip)
    found: dict[str, Multiaddr] = {}
    for raw in addresses:
        try:
            address = Multiaddr(str(Multiaddr(bytes(raw))).partition("/p2p/")[0])
            place = ip_place(address)
            if place is not None and place.ip == wanted:
                found[str(address)] = address
        except (MultiaddrError, ValueError) as exc:
            logger.debug("a strange address is to be dialled: %s", exc)
    return list(found.values())


def _moved_to(seen: str | None, addresses: Iterable[str]) -> list[str]:
    """Addresses, at the IP address at which a peer sees us."""
    if seen is None:
        return []
    _, family, ip, *_ = seen.split("/")
    parts = [address.split("/") for address in addresses]
    return ["/".join(["", family, ip, *part[3:]]) for part in parts if part[1] == family]


def _printed(address: bytes) -> str | None:
    try:
        return str(Multiaddr(bytes(address))) if address else None
    except (MultiaddrError, ValueError):
        return None


def _reason(answer: Any) -> str:
    text = "".join(c for c in str(answer.statusText)[:100] if c.isprintable())
    return text or f"status {answer.status}"
