"""The servers of the DHT as we know them: reached, asked, kept in the routing table or taken out of it.

Strategy: a peer enters the table when it has answered a question, or asked one and says by the identify protocol that
it serves the DHT; it leaves the table when it fails to answer, and is then left alone for a while, or until it has
connected again. So nothing stands in the table by hearsay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from neurogrid.errors import NeuroGridError
from neurogrid.p2p.discovery.dht_kademlia import (
    Kademlia,
    KademliaNetwork,
    key_in_bucket,
)
from neurogrid.p2p.discovery.dht_lookup import Lookup
from neurogrid.p2p.discovery.dht_reach import ask_anybody
from neurogrid.p2p.discovery.dht_requests import Answer, ask, dialable, find_node
from neurogrid.p2p.discovery.explanation import dial_outcome
from neurogrid.p2p.discovery.sighting import Attempt, OnAttempt
from neurogrid.p2p.hosts.host import Host

__all__ = ["NUM_CLOSEST", "Servers"]

NUM_CLOSEST: Final = 20
"""k of Kademlia: how many servers, those closest to a key, keep what stands under it."""

# Questions under way at once in one walk: alpha of Kademlia, as go-libp2p has it.
_NUM_PARALLEL: Final = 10
# Seconds that a walk may take; what it has found by then counts.
_WALK_TIMEOUT: Final = 60.0
# Seconds that a server which failed is left alone.
_AVOID_TIME: Final = 30.0
_MAX_AVOIDED: Final = 1024
# Peers that asked us something and are asked in turn, waiting; more are asked when they ask again.
_MAX_UNVERIFIED: Final = 64
# Buckets that one refresh walks into; a table of a thousand servers has six or so.
_MAX_REFRESHED_BUCKETS: Final = 16


class Servers:
    """The servers of one DHT, as one host sees them.

    Args:
        host: where we ask from.
        network: the same for py-libp2p, with the address book.
        kademlia: has the routing table.
        protocol_id: what the DHT is spoken under.
        on_attempt: told of each server that did not answer, and why.
    """

    def __init__(
        self,
        host: Host,
        network: KademliaNetwork,
        kademlia: Kademlia,
        *,
        protocol_id: str,
        on_attempt: OnAttempt,
    ) -> None:
        self._host = host
        self._network = network
        self._book = network.get_peerstore()
        self._table = kademlia.routing_table
        self._kademlia = kademlia
        self._protocol_id = protocol_id
        self._on_attempt = on_attempt
        self._own_id = network.get_id()
        self._bootstrap: list[ID] = []
        self._avoided: dict[ID, float] = {}
        self._to_verify, self._unverified = trio.open_memory_channel[ID](_MAX_UNVERIFIED)

    @property
    def num_known(self) -> int:
        """Number of servers in the routing table."""
        return self._table.size()

    def note_asked_by(self, peer: ID) -> None:
        """The peer asked us something: it may be a server itself; `verify_askers` finds out."""
        if self._table.peer_in_table(peer) or self._is_avoided(peer):
            return
        protocols = self._network.protocols_of(peer)
        if protocols and self._protocol_id not in protocols:
            return  # a client, as it says itself
        try:
            self._to_verify.send_nowait(peer)
        except trio.WouldBlock:
            return

    def note_bootstrap(self, peer_id: str, addresses: Sequence[str]) -> None:
        """The peer is one to begin with, at these addresses, whatever else is known."""
        server = ID.from_base58(peer_id)
        self._bootstrap.append(server)
        if addresses and server != self._own_id:
            self._book.add_addrs(server, [Multiaddr(address) for address in addresses])

    def note_connected(self, peer_id: str) -> None:
        """The peer is here again, so whatever made it fail may be over."""
        self._avoided.pop(ID.from_base58(peer_id), None)

    async def verify_askers(self) -> None:
        """Ask the peers that asked us; the ones that answer enter the table. Runs until it is cancelled."""
        async for peer in self._unverified:
            if not self._table.peer_in_table(peer) and not self._is_avoided(peer):
                if self._protocol_id in self._network.protocols_of(peer):
                    await self._kademlia.add_server(peer, ())
                    continue
                with suppress(NeuroGridError):  # a client, or gone
                    await self.ask(peer, find_node(self._own_id.to_bytes()))

    async def ask(self, peer: ID, question: Message) -> Answer:
        """Put a question to a server, connecting to it first where need be.

        Raises:
            NeuroGridError: it did not answer; the text says why.
        """
        peer_id = peer.to_base58()
        addresses = dialable([str(a) for a in self._book.addrs(peer)], peer_id)
        try:
            answer = await ask_anybody(
                self._host,
                peer_id,
                addresses,
                lambda: ask(self._host, peer_id, self._protocol_id, question),
            )
        except NeuroGridError:
            self._kademlia.remove_server(peer)
            self._avoid(peer)
            raise
        await self._kademlia.add_server(peer, addresses)
        for closer, where in answer.closer.items():
            self._remember(closer, where)
        return answer

    async def walk(
        self,
        key: bytes,
        question: Message,
        *,
        enough: int = NUM_CLOSEST,
        on_answer: Callable[[Answer], None] = lambda answer: None,
    ) -> Lookup:
        """Ask on the way to a key, until its `enough` closest servers have answered, or the time is up."""
        # Those that we keep a connection to are worth another question, even if they failed before.
        seeds = [*self.closest(key, NUM_CLOSEST), *self._bootstrap]
        lookup = Lookup(key, self._own_id, seeds, enough=enough)
        num_running = 0
        one_ended = trio.Event()

        async def ask_one(server: ID) -> None:
            nonlocal num_running
            answer = await self.try_ask(server, question, "look up")
            if answer is None:
                lookup.failed(server)
            else:
                on_answer(answer)
                lookup.answered(server, answer.closer)
            num_running -= 1
            one_ended.set()

        with trio.move_on_after(_WALK_TIMEOUT):
            async with trio.open_nursery() as nursery:
                while True:
                    while num_running < _NUM_PARALLEL and (server := lookup.next_peer()):
                        num_running += 1
                        nursery.start_soon(ask_one, server)
                    if not num_running:
                        break
                    one_ended = trio.Event()
                    await one_ended.wait()
        return lookup

    def closest(self, key: bytes, num_servers: int) -> list[ID]:
        """Return the servers in the table that are closest to a key."""
        return list(self._table.find_local_closest_peers(key, num_servers))

    async def tell(self, servers: Iterable[ID], announcement: Message) -> set[ID]:
        """Send an announcement to servers; returns those that took it."""
        told: set[ID] = set()
        limiter = trio.CapacityLimiter(_NUM_PARALLEL)

        async def tell_one(server: ID) -> None:
            async with limiter:
                if await self.try_ask(server, announcement, "announce") is not None:
                    told.add(server)

        async with trio.open_nursery() as nursery:
            for server in servers:
                nursery.start_soon(tell_one, server)
        return told

    async def refresh(self) -> int:
        """Look ourselves up, and a random key in each bucket; returns how many servers are known then."""
        own_key = self._own_id.to_bytes()
        await self.walk(own_key, find_node(own_key))
        filled = [bucket for bucket in self._table.buckets if bucket.size()]
        for bucket in filled[:_MAX_REFRESHED_BUCKETS]:
            if self.num_known > NUM_CLOSEST:  # the first walk has met all of a smaller DHT
                key = key_in_bucket(bucket)
                await self.walk(key, find_node(key))
        return self.num_known

    async def try_ask(self, server: ID, question: Message, what: str) -> Answer | None:
        """As `ask`; None, and an attempt that says why, when there is no answer."""
        if self._is_avoided(server):
            return None
        try:
            return await self.ask(server, question)
        except NeuroGridError as exc:
            text = f"{what}: server {server.to_base58()}"
            self._on_attempt(Attempt("dht", text, dial_outcome(exc), is_good=False))
            return None

    def _remember(self, server: ID, addresses: Sequence[str]) -> None:
        """Keep what another server says of this one."""
        if addresses and server != self._own_id and not self._table.peer_in_table(server):
            self._book.hear(server, [Multiaddr(address) for address in addresses])

    def _avoid(self, peer: ID) -> None:
        self._avoided.pop(peer, None)
        if len(self._avoided) >= _MAX_AVOIDED:
            del self._avoided[next(iter(self._avoided))]
        self._avoided[peer] = trio.current_time() + _AVOID_TIME

    def _is_avoided(self, peer: ID) -> bool:
        return self._avoided.get(peer, -math.inf) > trio.current_time()
