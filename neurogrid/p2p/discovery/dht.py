"""Peers beyond the local network, by Kademlia: a cluster is a key, under which its members announce themselves.

Strategy: the bootstrap peers that are named, and no others, lead to the servers of a DHT. Members tell the servers
closest to the cluster's key that they belong to it, and ask them which others do (provider records, which every
implementation of libp2p keeps for others). A peer named in this way is asked directly what it says of itself: a
signed record that expires (`records_exchange`). Only such a record makes a peer a sighting.

At first look-ups come in quick succession, then further and further apart; since an exchange of records introduces
both sides, newcomers find the others, and the others need not look for them. Each part has a file of its own; here
they are put together and driven.

Source: `protocol_spec/discovery.md`; the Kademlia specification of libp2p.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio
from libp2p.kad_dht.kad_dht import DHTMode
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo

from neurogrid.errors import ConfigurationError, NeuroGridError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.discovery.dht_bootstrap import by_peer, parse_bootstrap
from neurogrid.p2p.discovery.dht_kademlia import Kademlia, KademliaNetwork
from neurogrid.p2p.discovery.dht_key import cluster_key
from neurogrid.p2p.discovery.dht_lookup import Lookup
from neurogrid.p2p.discovery.dht_members import Members
from neurogrid.p2p.discovery.dht_mode import Mode, elsewhere, serves
from neurogrid.p2p.discovery.dht_reach import ask_anybody
from neurogrid.p2p.discovery.dht_requests import add_provider, dialable, find_node, get_providers
from neurogrid.p2p.discovery.dht_servers import Servers
from neurogrid.p2p.discovery.explanation import dial_outcome
from neurogrid.p2p.discovery.records import MAX_ADDRESSES, MemberRecord, names_peer, sign_record
from neurogrid.p2p.discovery.records_book import CLOCK_SKEW, MAX_LIFETIME, RecordBook, Verify
from neurogrid.p2p.discovery.records_exchange import RECORD_PROTOCOL, RecordExchange
from neurogrid.p2p.discovery.sighting import Attempt, OnAttempt, OnSighting
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost

__all__ = ["Announcement", "Dht", "DhtTiming", "open_dht"]

logger = logging.getLogger(__name__)

# Seconds that the first look-up waits for a bootstrap peer to answer.
_START_WAIT: Final = 3.0
# Servers, those closest to the cluster's key, that keep our announcement and are asked for those of others. Kademlia's
# twenty are meant for a day without a word; ours speak every ten minutes.
_NUM_KEEPERS: Final = 8
# Servers asked once no new member turns up: as many as have to fail before a member is missed.
_NUM_ASKED_AT_REST: Final = 4


@dataclass(frozen=True, slots=True)
class Announcement:
    """A member's facts about itself; its peer id, and until when they hold, are added.

    Attributes:
        role: "worker", "coordinator" or "peer".
        addresses: full multiaddrs of ours, the most useful first; those of the host when empty.
        model: the id of the model that it serves or holds; empty when there is none.
        free_memory: bytes that it has left for layers.
        layers: the layers that it holds (`records.layer_ranges`).
        certificate: proof that it belongs to the cluster; opaque here.
    """

    role: str
    addresses: tuple[str, ...] = ()
    model: str = ""
    free_memory: int = 0
    layers: tuple[tuple[int, int], ...] = ()
    certificate: bytes = b""


@dataclass(frozen=True, slots=True)
class DhtTiming:
    """Pauses and lifetimes, in seconds. A pause is a tenth longer or shorter at random, lest hosts move in step."""

    # Look-ups of the cluster: the first pause, doubled after each that found nobody new, up to the last.
    first_look: float = 1.0
    last_look: float = 300.0
    # Walks that fill the routing table: less than go-libp2p's ten minutes, for small networks change faster.
    refresh: float = 300.0
    # Announcements to servers, which keep them for a day or two, or until they are restarted: that is what counts.
    first_announce: float = 5.0
    last_announce: float = 600.0
    # How long our record is good for: so long, and the clocks' difference, is a dead member listed.
    record_lifetime: float = 600.0
    # Dials of a bootstrap peer that does not answer.
    first_redial: float = 1.0
    last_redial: float = 30.0
    # By how much members' clocks may differ.
    clock_skew: float = CLOCK_SKEW


class Dht:
    """Discovery by Kademlia on one host. Made by `open_dht`, never by hand."""

    def __init__(
        self,
        host: Libp2pHost,
        *,
        namespace: str | None,
        record: Callable[[], Announcement] | None,
        mode: Mode,
        bootstrap: Sequence[str],
        on_sighting: OnSighting,
        on_attempt: OnAttempt,
        verify: Verify | None,
        may_know: Callable[[str], bool],
        is_reachable: Callable[[], bool | None],
        protocol_prefix: str,
        timing: DhtTiming,
    ) -> None:
        addresses, errors = parse_bootstrap(("bootstrap", text) for text in bootstrap)
        if errors:
            raise ConfigurationError("\n".join(errors))
        if record is not None and namespace is None:
            raise ConfigurationError("a member belongs to a cluster: a record needs a namespace")
        if not 0 < timing.record_lifetime <= MAX_LIFETIME:
            raise ConfigurationError(f"a record is good for at most {MAX_LIFETIME} s")
        self._host = host
        self._namespace = namespace
        self._bootstrap = by_peer(addresses)
        self._bootstrap.pop(host.peer_id, None)
        self._bootstrap_addresses = addresses
        self._wanted_mode = mode
        self._is_reachable = is_reachable
        self._on_attempt = on_attempt
        self._timing = timing
        self._is_closed = False
        self._is_due = trio.Event()  # to look and announce, whatever the time
        protocol_id = f"{protocol_prefix}/kad/1.0.0"
        # Records are shown to strangers too: they are checked by themselves, and members of one role may admit no
        # other member of it.
        self._for_strangers = (protocol_id, RECORD_PROTOCOL)
        self._network = KademliaNetwork(
            host.libp2p, protocol_id=protocol_id, addresses=self._own_addresses
        )
        self._kademlia = Kademlia(
            self._network,
            on_asked=lambda peer: servers.note_asked_by(peer),
            on_announced=self._note_announced,
        )
        self._servers = servers = Servers(
            host, self._network, self._kademlia, protocol_id=protocol_id, on_attempt=on_attempt
        )
        self._record = record
        self._signed: tuple[Announcement, float, bytes] | None = None
        self._sequence = 0
        self._key = b"" if namespace is None else cluster_key(namespace)
        self._book = RecordBook(
            self._key, host.peer_id, verify=verify, clock_skew=timing.clock_skew
        )
        self._members = Members(
            host,
            self._book,
            on_sighting=on_sighting,
            on_attempt=on_attempt,
            may_know=may_know,
        )
        self._exchange = (
            RecordExchange(
                host,
                self._key,
                self._book,
                own_record=self._own_record,
                members_only=verify is not None,
                on_accepted=self._members.note_accepted,
            )
            if namespace is not None
            else None
        )

    @property
    def mode(self) -> str:
        """ "server" if it serves the DHT now, "client" if it only asks."""
        return "server" if self._kademlia.mode is DHTMode.SERVER else "client"

    @property
    def num_servers(self) -> int:
        """Servers in the routing table."""
        return self._servers.num_known

    @property
    def members(self) -> Mapping[str, MemberRecord]:
        """The records of the members that count, by peer id; ours is not among them."""
        return self._book.members

    def hurry(self) -> None:
        """Announce, look and ask again at once, as when something has changed, or somebody is missing."""
        self._members.hurry()
        self._is_due.set()

    def tell(self) -> None:
        """Tell the members what we say of ourselves, at once, since it has changed."""
        self._members.tell_all()

    # What `open_dht` starts

    async def run(self, nursery: trio.Nursery) -> None:
        """Start everything in `nursery`; returns when the mode is set."""
        self._own_record()  # what cannot be signed is found out now
        self._host.serve_strangers(self._for_strangers)
        await self._set_mode()
        self._host.on_connected(self._note_connected)
        for peer_id, addresses in self._bootstrap.items():
            self._servers.note_bootstrap(peer_id, addresses)
            nursery.start_soon(self._keep_bootstrapped, peer_id, addresses)
        nursery.start_soon(self._servers.verify_askers)
        nursery.start_soon(self._refresh)
        if self._exchange is not None:
            nursery.start_soon(self._members.run, self._exchange)
            nursery.start_soon(self._look_and_announce)

    async def close(self) -> None:
        """Serve nobody any more."""
        self._is_closed = True
        if self._exchange is not None:
            self._exchange.close()
        await self._kademlia.switch_mode(DHTMode.CLIENT)
        self._host.refuse_strangers(self._for_strangers)

    async def _set_mode(self) -> None:
        is_server = serves(
            self._wanted_mode,
            is_reachable=self._is_reachable(),
            own=self._own_addresses(),
            bootstrap=self._bootstrap_addresses,
        )
        await self._kademlia.switch_mode(DHTMode.SERVER if is_server else DHTMode.CLIENT)

    def _note_connected(self, peer_id: str) -> None:
        if not self._is_closed:
            self._servers.note_connected(peer_id)
            self._members.note_connected(peer_id)

    def _note_announced(self, key: bytes, provider: PeerInfo) -> None:
        """Note a peer that announces itself to this server, which then need not look for it."""
        if self._namespace is not None and key == self._key:
            peer_id = provider.peer_id.to_base58()
            self._members.note_named(peer_id, dialable(list(map(str, provider.addrs)), peer_id))

    async def _keep_bootstrapped(self, peer_id: str, addresses: list[str]) -> None:
        what = f"connect to {peer_id} at {', '.join(a.rsplit('/p2p/', 1)[0] for a in addresses)}"
        pause = self._timing.first_redial
        while True:
            self._on_attempt(Attempt("bootstrap", what, "", is_good=False))
            try:
                await ask_anybody(self._host, peer_id, addresses, partial(self._begin_at, peer_id))
            except NeuroGridError as exc:
                self._on_attempt(Attempt("bootstrap", what, dial_outcome(exc), is_good=False))
            else:
                self._on_attempt(Attempt("bootstrap", what, "serves the DHT", is_good=True))
                pause = self._timing.first_redial
                self.hurry()
                await self._host.wait_disconnected(peer_id)
            await trio.sleep(_jittered(pause))
            pause = min(2 * pause, self._timing.last_redial)

    async def _begin_at(self, peer_id: str) -> None:
        """Ask a bootstrap peer for the peers near us, which fills the routing table."""
        own_id = self._network.get_id().to_bytes()
        await self._servers.ask(ID.from_base58(peer_id), find_node(own_id))

    async def _refresh(self) -> None:
        while True:
            await trio.sleep(_jittered(self._timing.refresh))
            await self._set_mode()
            num_servers = await self._servers.refresh()
            text = f"{num_servers} servers are known"
            self._on_attempt(Attempt("dht", "refresh the routing table", text, num_servers > 0))

    async def _look_and_announce(self) -> None:
        """Look for members; when it is time, look further, and tell all that were met that we are one."""
        pause = self._timing.first_look
        announce_pause, announce_at = self._timing.first_announce, trio.current_time()
        await _wait(self._is_due, _START_WAIT)
        while True:
            self._is_due = trio.Event()
            is_announcing = self._record is not None and trio.current_time() >= announce_at
            is_settled = pause >= self._timing.last_look and not is_announcing
            if is_announcing:
                told = await self._tell(self._servers.closest(self._key, _NUM_KEEPERS))
            lookup, num_new = await self._look(_NUM_ASKED_AT_REST if is_settled else _NUM_KEEPERS)
            if is_announcing and await self._announce(lookup, told):
                announce_at = trio.current_time() + _jittered(announce_pause)
                announce_pause = min(2 * announce_pause, self._timing.last_announce)
            if await _wait(self._is_due, _jittered(pause)):
                pause = self._timing.first_look
                announce_pause, announce_at = self._timing.first_announce, trio.current_time()
            else:
                pause = (
                    self._timing.first_look if num_new else min(2 * pause, self._timing.last_look)
                )

    async def _look(self, enough: int) -> tuple[Lookup, int]:
        """Ask for the members, and follow each that is named; how many of them are news."""
        named: set[ID] = set()
        num_new = 0

        def follow(providers: Mapping[ID, tuple[str, ...]]) -> None:
            nonlocal num_new
            for peer, addresses in providers.items():
                named.add(peer)
                num_new += self._members.note_named(peer.to_base58(), addresses)

        follow(self._named_here())
        question = get_providers(self._key)
        lookup = await self._servers.walk(
            self._key, question, enough=enough, on_answer=lambda answer: follow(answer.providers)
        )
        named.discard(self._network.get_id())
        what = f"look for members of {self._namespace!r}"
        text = f"{len(lookup.closest)} of {lookup.num_asked} servers answered, and named"
        outcome = f"{text} {len(named)}" if lookup.closest else _no_server(lookup)
        self._on_attempt(Attempt("dht", what, outcome, is_good=bool(named)))
        return lookup, num_new

    async def _announce(self, lookup: Lookup, told: set[ID]) -> int:
        """Tell the servers that a walk led to, but for those told before, that we are a member; how many know."""
        told = told | await self._tell(peer for peer in lookup.closest if peer not in told)
        num_told = len(told.intersection(lookup.closest))
        what = f"announce ourselves as a member of {self._namespace!r}"
        text = f"{num_told} of {len(lookup.closest)} servers took it"
        outcome = text if lookup.closest else _no_server(lookup)
        self._on_attempt(Attempt("dht", what, outcome, is_good=num_told > 0))
        return num_told

    async def _tell(self, servers: Iterable[ID]) -> set[ID]:
        addresses = self._own_addresses()
        self._kademlia.provide_here(self._key, addresses)
        message = add_provider(self._key, self._network.get_id(), addresses)
        return await self._servers.tell(servers, message)

    def _named_here(self) -> dict[ID, tuple[str, ...]]:
        """Return the members that we know as a server of the DHT ourselves, with their addresses."""
        return {
            provider.peer_id: dialable(list(map(str, provider.addrs)), provider.peer_id.to_base58())
            for provider in self._kademlia.provider_store.get_providers(self._key)
        }

    def _own_addresses(self) -> tuple[str, ...]:
        """Addresses that this host tells as its own."""
        announced = self._record().addresses if self._record is not None else ()
        return elsewhere(announced or self._host.addresses)[:MAX_ADDRESSES]

    def _own_record(self) -> bytes:
        """Our signed record: a new one when something has changed, or half its time is over."""
        if self._record is None:
            return b""
        announcement = self._record()
        now = time.time()
        if self._signed is not None:
            said, fresh_until, signed = self._signed
            if said == announcement and now < fresh_until:
                return signed
        # Larger than those before, also if this host had the same key in another process.
        self._sequence = max(self._sequence + 1, int(now * 1000))
        lifetime = self._timing.record_lifetime
        record = MemberRecord(
            cluster=self._key,
            peer_id=self._host.peer_id,
            sequence=self._sequence,
            expires=int(now + lifetime) + 1,
            role=announcement.role,
            addresses=tuple(a for a in self._own_addresses() if names_peer(a, self._host.peer_id)),
            model=announcement.model,
            free_memory=announcement.free_memory,
            layers=announcement.layers,
            certificate=announcement.certificate,
        )
        signed = sign_record(record, self._host.identity)
        self._signed = announcement, now + lifetime / 2, signed
        return signed


@asynccontextmanager
async def open_dht(
    host: Libp2pHost,
    *,
    namespace: str | None,
    record: Callable[[], Announcement] | None,
    mode: Mode = "auto",
    bootstrap: Sequence[str] = (),
    on_sighting: OnSighting,
    on_attempt: OnAttempt,
    verify: Verify | None = None,
    may_know: Callable[[str], bool] = lambda peer_id: True,
    is_reachable: Callable[[], bool | None] = lambda: None,
    protocol_prefix: str = "/ipfs",
    timing: DhtTiming = DhtTiming(),
) -> AsyncIterator[Dht]:
    """Find the members of a cluster, and be found, until the block is left.

    Args:
        host: a libp2p host; one of these on it at a time.
        namespace: the cluster; None serves the DHT for others, and finds nobody.
        record: what we say of ourselves, asked for whenever it is told; None looks and says nothing.
        mode: whether to serve the DHT; "auto" decides by `is_reachable`, now and at each refresh.
        bootstrap: full multiaddrs of the peers to begin with (`read_bootstrap`); kept connected. No others are known.
        on_sighting: told of members found, moved and lost (source "dht").
        on_attempt: told of what was tried and what came of it (source "bootstrap" or "dht").
        verify: looks at the certificate in each record; None believes every signed record.
        may_know: whether a peer id could be a member's; others are asked nothing.
        is_reachable: whether others can dial us; None while that is not known.
        protocol_prefix: the DHT is spoken under this and `/kad/1.0.0`.
        timing: how often things are done.

    Raises:
        ConfigurationError: an address is no full multiaddr (a line of text for each), or the arguments contradict
            each other.
        LocalProtocolError: the host has one of these already; or what `record` says is out of its range.
    """
    dht = Dht(
        host,
        namespace=namespace,
        record=record,
        mode=mode,
        bootstrap=bootstrap,
        on_sighting=on_sighting,
        on_attempt=on_attempt,
        verify=verify,
        may_know=may_know,
        is_reachable=is_reachable,
        protocol_prefix=protocol_prefix,
        timing=timing,
    )
    try:
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                await dht.run(nursery)
                try:
                    yield dht
                finally:
                    nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await dht.close()


def _no_server(lookup: Lookup) -> str:
    if lookup.num_asked:
        return f"none of {lookup.num_asked} servers of the DHT answered"
    return "no server of the DHT is known: no bootstrap peer has answered"


async def _wait(event: trio.Event, seconds: float) -> bool:
    """Wait for an event, so long at most; whether it came."""
    with trio.move_on_after(seconds):
        await event.wait()
    return event.is_set()


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.9, 1.1)
