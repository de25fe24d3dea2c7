"""`libp2p.kad_dht` of py-libp2p 0.8.1 as we use it: its routing table and its server, mended by subclasses.

What is mended, each with a test in tests/unit/test_dht_kademlia.py or tests/e2e/test_dht_kademlia.py that shows the
stock behaviour too:

- the protocol id is fixed, whatever prefix is asked for: `KademliaNetwork` maps it.
- twelve streams that are kept open, as go-libp2p keeps its own, shut out everybody else for ever, and there is no
  deadline: here peers have a share each, and a stream ends that has been idle for a minute, or whose answers nobody
  takes.
- each peer that sends a question enters the routing table, clients too: here a peer enters once it has answered one.
- a peer in the table keeps the addresses that it came with: here the newest count.
- of a thousand peers with addresses the ones known longest give way to any that an answer names: here hearsay has room
  of its own, and changes nothing that is known.
- at most two peers of an IPv4 /24 enter a bucket, so a data centre's worth of members hardly know each other. Our
  bootstrap peers are named by hand, so that bound is off.
- at most twenty providers are kept under a key, the first for 48 hours, and any number of keys: here the oldest give
  way, and there is a bound on all.
- to become a client empties the routing table, without which no client finds anything.
- values of up to 1 MiB are stored for anybody, 50,000 of them: here none is, since we use none.
- the key to refresh a bucket with is hashed once more on the way, and so lies in any bucket.

Not used are its walks (`dht_lookup`), its questions (`dht_requests`) and its periodic work (`dht`): to find providers
returns at once with those known locally, which is ourselves as soon as we are one; and it opens streams by dialling
any peer that was ever heard of.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import trio
from libp2p.abc import IHost, INetStream, IPeerStore
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.provider_store import ProviderRecord, ProviderStore
from libp2p.kad_dht.routing_table import KBucket
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStore, PeerStoreError
from libp2p.records.validator import NamespacedValidator
from multiaddr import Multiaddr

__all__ = ["Kademlia", "KademliaNetwork", "ProviderTable", "key_in_bucket"]

logger = logging.getLogger(__name__)

MAX_PROVIDERS_PER_KEY: Final = 256
"""Providers kept under one key: the members of a large cluster."""

MAX_PROVIDER_RECORDS: Final = 16 * 1024
"""Provider records kept in all, each of about 2 KB with its addresses."""

MAX_PEER_ADDRESSES: Final = 16
"""Addresses kept of a peer."""

MAX_HEARSAY: Final = 512
"""Peers whose addresses are kept because another named them: one answer may name as many, honest ones name 20."""

STREAM_IDLE_TIMEOUT: Final = 60.0
"""Seconds that a stream of questions may be silent: what go-libp2p gives."""

MAX_SERVED_STREAMS: Final = 256
"""Streams of questions at once; go-libp2p keeps one open to each server that it asked."""

MAX_SERVED_STREAMS_PER_PEER: Final = 8
"""Streams of one peer among these: walks overlap, and a peer has one question for us in each."""


class AddressBook(PeerStore):
    """Addresses of servers, for the DHT alone: what strangers say of others stays out of the host's own book.

    Hearsay of a peer takes the place neither of what is known of that peer, nor of other peers that are known: the
    stock book drops those that it has had longest, which are the bootstrap peers.

    Args:
        identified: the host's own, which has what peers say of themselves by the identify protocol.
    """

    def __init__(self, identified: IPeerStore) -> None:
        super().__init__()
        self._identified = identified
        # Known by hearsay alone, the latest last.
        self._heard: OrderedDict[ID, None] = OrderedDict()

    def hear(self, peer_id: ID, addrs: Sequence[Multiaddr]) -> None:
        """Keep what another peer says of this one, behind what is known of it."""
        known = self.peer_data_map.get(peer_id)
        if known is not None and peer_id not in self._heard:
            self.add_addrs(peer_id, [*known.get_addrs(), *addrs])
            return
        self.add_addrs(peer_id, addrs)
        self._heard[peer_id] = None
        while len(self._heard) > MAX_HEARSAY:
            oldest, _ = self._heard.popitem(last=False)
            if oldest in self.peer_data_map:
                self.clear_peerdata(oldest)

    def believe(self, peer_id: ID) -> None:
        """Note that a peer is there: what is known of it is more than hearsay."""
        self._heard.pop(peer_id, None)

    def add_addrs(self, peer_id: ID, addrs: Sequence[Multiaddr], ttl: int = 0) -> None:
        self.believe(peer_id)
        known = self.peer_data_map.get(peer_id)
        newest = list(dict.fromkeys([*addrs, *(known.get_addrs() if known else ())]))
        if known is not None:
            known.clear_addrs()
        super().add_addrs(peer_id, newest[:MAX_PEER_ADDRESSES], ttl)

    def get_peer_record(self, peer_id: ID) -> None:
        """None: signed addresses would double every answer, and no implementation reads them in one."""

    def addrs(self, peer_id: ID) -> list[Multiaddr]:
        """Return the addresses that others, or failing that the peer itself, said; empty, and no error, if none did."""
        for said in (super().addrs, self._identified.addrs):
            with suppress(PeerStoreError):  # so it tells that it knows none
                if addresses := said(peer_id):
                    return addresses[:MAX_PEER_ADDRESSES]
        return []


class KademliaNetwork:
    """The host as the stock classes see it: an `IHost` as far as they use one.

    Args:
        libp2p: the host.
        protocol_id: what the DHT is spoken under here.
        addresses: where we can be dialled; the stock host would say 0.0.0.0.
    """

    def __init__(
        self, libp2p: IHost, *, protocol_id: str, addresses: Callable[[], Sequence[str]]
    ) -> None:
        self._libp2p = libp2p
        self._protocol_id = TProtocol(protocol_id)
        self._addresses = addresses
        self._book = AddressBook(libp2p.get_peerstore())

    def get_id(self) -> ID:
        """Return our peer id."""
        return self._libp2p.get_id()

    def get_private_key(self) -> Any:
        """Signs what the stock server says of our addresses."""
        return self._libp2p.get_private_key()

    def get_addrs(self) -> list[Multiaddr]:
        """Return the addresses at which we can be dialled."""
        return [Multiaddr(address) for address in self._addresses()]

    def get_peerstore(self) -> AddressBook:
        """The addresses of other servers."""
        return self._book

    def protocols_of(self, peer_id: ID) -> list[str]:
        """Return the protocols that a peer says it speaks; empty while it has not said."""
        try:
            return list(self._libp2p.get_peerstore().get_protocols(peer_id))
        except PeerStoreError:
            return []

    def get_connected_peers(self) -> list[ID]:
        """Return the peers that the server calls connected in its answers."""
        return self._libp2p.get_connected_peers()

    def set_stream_handler(
        self, protocol_id: TProtocol, handler: Callable[[INetStream], Awaitable[None]]
    ) -> None:
        """Serve the DHT, under our protocol id; what leaves the handler resets the stream and is logged."""

        async def serve(stream: INetStream) -> None:
            try:
                await handler(stream)
            except Exception:  # as py-libp2p's server has it; this question alone ends
                logger.exception("a question to the DHT failed")
                await stream.reset()

        self._libp2p.set_stream_handler(self._protocol_id, serve)

    def remove_stream_handler(self, protocol_id: TProtocol) -> None:
        """Serve it no more."""
        cast(Any, self._libp2p).get_mux().remove_handler(self._protocol_id)

    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[TProtocol]) -> INetStream:
        """Refused: all questions go out by `dht_requests`."""
        raise BaseLibp2pError("the routing table opens no streams")


class ProviderTable(ProviderStore):
    """Provider records, of which the oldest give way.

    Args:
        network: the host, as the stock classes see it.
        on_announced: called with each record that is kept: its key, and the peer with its addresses.
    """

    def __init__(
        self,
        network: KademliaNetwork,
        on_announced: Callable[[bytes, PeerInfo], None] = lambda key, provider: None,
    ) -> None:
        super().__init__(cast(IHost, network))
        self._on_announced = on_announced
        self._book = network.get_peerstore()
        self._oldest_first: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        """Keep a record, as the newest of its key and of all."""
        under_key = self.providers.setdefault(key, {})
        peer = str(provider.peer_id)
        # Each key's records stand in the order of their age, as all of them do.
        if under_key.pop(peer, None) is None and len(under_key) >= MAX_PROVIDERS_PER_KEY:
            self._drop(key, next(iter(under_key)))
        under_key[peer] = ProviderRecord(
            PeerInfo(provider.peer_id, provider.addrs[:MAX_PEER_ADDRESSES])
        )
        # Where it can be asked, should it be a server.
        self._book.hear(provider.peer_id, provider.addrs)
        self._oldest_first[key, peer] = None
        self._oldest_first.move_to_end((key, peer))
        while len(self._oldest_first) > MAX_PROVIDER_RECORDS:
            self._drop(*next(iter(self._oldest_first)))
        self._on_announced(key, provider)

    def _drop(self, key: bytes, peer: str) -> None:
        self._oldest_first.pop((key, peer), None)
        under_key = self.providers.get(key)
        if under_key is not None:
            under_key.pop(peer, None)
            if not under_key:
                del self.providers[key]


class Kademlia(KadDHT):
    """Routing table and server of a DHT; it runs nothing by itself.

    Args:
        network: the host, as the stock classes see it.
        on_asked: called with each peer that opens a stream of questions: it may be a server, or not.
        on_announced: as that of `ProviderTable`.
    """

    def __init__(
        self,
        network: KademliaNetwork,
        *,
        on_asked: Callable[[ID], None],
        on_announced: Callable[[bytes, PeerInfo], None] = lambda key, provider: None,
    ) -> None:
        super().__init__(
            cast(IHost, network),
            DHTMode.CLIENT,
            # No namespace has a validator, so no value is ever stored.
            validator=NamespacedValidator({}, strict_validation=True),
            validator_changed=True,
            strict_validation=True,
            max_peers_per_subnet=0,
        )
        self._network = network
        self._on_asked = on_asked
        self._serving: Counter[ID] = Counter()
        self.provider_store = ProviderTable(network, on_announced)

    async def switch_mode(self, new_mode: DHTMode) -> DHTMode:
        """Serve the DHT, or do so no more; the routing table stays."""
        if new_mode is not self.mode:
            self.mode = new_mode
            if new_mode is DHTMode.SERVER:
                self._network.set_stream_handler(self.protocol_prefix, self.handle_stream)
            else:
                self._network.remove_stream_handler(self.protocol_prefix)
        return self.mode

    async def add_peer(self, peer_id: ID, *, skip_server_mode_check: bool = False) -> bool:
        """Called by the stock server for each peer that asks: `on_asked` finds out whether it is a server too."""
        self._on_asked(peer_id)
        return False

    async def add_server(self, peer_id: ID, addresses: Sequence[str]) -> None:
        """Put a peer that has answered a question into the table, as the one seen last."""
        multiaddrs = [Multiaddr(address) for address in addresses]
        book = self._network.get_peerstore()
        book.believe(peer_id)
        if multiaddrs:
            book.add_addrs(peer_id, multiaddrs)
        newest = book.addrs(peer_id)
        self.routing_table.remove_peer(peer_id)
        await self.routing_table.add_peer(PeerInfo(peer_id, newest), skip_server_mode_check=True)

    def remove_server(self, peer_id: ID) -> None:
        """Take a peer out that cannot be reached, or answers no more."""
        self.routing_table.remove_peer(peer_id)

    def provide_here(self, key: bytes, addresses: Sequence[str]) -> None:
        """Keep our own announcement with the others', in case that we are asked for them."""
        multiaddrs = [Multiaddr(address) for address in addresses]
        self.provider_store.add_provider(key, PeerInfo(self._network.get_id(), multiaddrs))

    async def handle_stream(self, stream: INetStream) -> None:
        """Serve one peer's questions, for as long as it has any."""
        peer_id = stream.muxed_conn.peer_id
        is_greedy = self._serving[peer_id] >= MAX_SERVED_STREAMS_PER_PEER
        if is_greedy or self._serving.total() >= MAX_SERVED_STREAMS:
            await stream.reset()
            return
        self._serving[peer_id] += 1
        try:
            await self._do_handle_stream(cast(INetStream, _QuestionStream(stream)))
        finally:
            self._serving[peer_id] -= 1
            if not self._serving[peer_id]:
                del self._serving[peer_id]


class _QuestionStream:
    """A stream as the stock server wants it: any end is an empty read, and silence is an end.

    So is a peer that asks and takes no answer: it would have its place for ever, as the stock server waits for it.
    """

    metric_send_channel = None

    def __init__(self, stream: INetStream) -> None:
        self._stream = stream
        self.muxed_conn = stream.muxed_conn

    async def write(self, data: bytes) -> None:
        try:
            with trio.fail_after(STREAM_IDLE_TIMEOUT):
                await self._stream.write(data)
        except trio.TooSlowError as exc:
            raise StreamError(f"the peer took no answer within {STREAM_IDLE_TIMEOUT:g} s") from exc

    async def read(self, n: int | None = None) -> bytes:
        data = b""
        with trio.move_on_after(STREAM_IDLE_TIMEOUT), suppress(BaseLibp2pError):
            data = await self._stream.read(n)
        return data

    async def close(self) -> None:
        with suppress(BaseLibp2pError):
            await self._stream.close()

    async def reset(self) -> None:
        with suppress(BaseLibp2pError):
            await self._stream.reset()


def key_in_bucket(bucket: KBucket, *, max_tries: int = 4096) -> bytes:
    """A random key whose place in the DHT is in the bucket, or, where such are rarer than one in `max_tries`, near."""
    middle = (bucket.min_range + bucket.max_range) // 2
    nearest, nearest_distance = b"", 2**256
    for _ in range(max_tries):
        key = secrets.token_bytes(32)
        place = int.from_bytes(hashlib.sha256(key).digest(), "big")
        if bucket.min_range <= place < bucket.max_range:
            return key
        if place ^ middle < nearest_distance:
            nearest, nearest_distance = key, place ^ middle
    return nearest
