"""The protocol of multicast DNS without sockets and clocks: packets and times in, packets and reports out.

On each interface it announces the host twice, asks for peers, less and less often, and answers questions. An answer
that it hears it keeps until that expires, and asks again before. A peer that the asker knows need not answer, and one
that hears another ask the same waits: so in a network at rest one peer asks once a minute, and all hear the answers.

No name is defended against others (RFC 6762, section 8): a peer's name is random. Questions by unicast, of programs
that are no responders, are not answered. Times are seconds of any clock that does not go back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from random import Random

from neurogrid.p2p.discovery.mdns.addresses import read_addresses
from neurogrid.p2p.discovery.mdns.interfaces import Interface
from neurogrid.p2p.discovery.mdns.limits import (
    ANSWER_DELAY,
    FIRST_QUERY_INTERVAL,
    MAX_QUERY_INTERVAL,
    MIN_GAP,
    NUM_ANNOUNCEMENTS,
    REFRESH_JITTER,
)
from neurogrid.p2p.discovery.mdns.packets import (
    SERVICES,
    Announcement,
    Query,
    decode_packet,
    encode_announcement,
    encode_directory,
    encode_goodbye,
    encode_query,
    host_name,
    instance_name,
)
from neurogrid.p2p.discovery.mdns.seen import Entry, Key, SeenPeers
from neurogrid.p2p.discovery.sighting import Attempt, OnAttempt, OnSighting, Sighting

__all__ = ["SOURCE", "Engine", "Packet"]

SOURCE = "mdns"
_DIRECTORY = "directory"  # among what is announced, beside the service types


@dataclass(frozen=True, slots=True)
class Packet:
    """Bytes to multicast on the interface with this index."""

    index: int
    data: bytes


@dataclass(slots=True)
class _Link:
    """One interface, and when what is due there.

    Attributes:
        addresses: what is announced on it.
        answers: when what is to be announced.
        announced: when what was last announced.
    """

    interface: Interface
    addresses: tuple[str, ...]
    next_query: float
    query_interval: float = FIRST_QUERY_INTERVAL
    last_query: float = -math.inf
    last_query_data: bytes = b""
    num_announcements: int = NUM_ANNOUNCEMENTS
    answers: dict[str, float] = field(default_factory=dict)
    announced: dict[str, float] = field(default_factory=dict)
    num_heard: int = -1


class Engine:
    """One host's part in multicast DNS.

    Args:
        peer_id: of the host.
        peer_name: its name on the network: random, at most 63 lower-case letters and digits.
        expiry: seconds that what we say holds for, and at most how long what others say does.
    """

    def __init__(
        self,
        peer_id: str,
        *,
        peer_name: str,
        expiry: float,
        random: Random,
        on_sighting: OnSighting,
        on_attempt: OnAttempt,
    ) -> None:
        self._peer_id = peer_id
        self._peer_name = peer_name
        self._expiry = expiry
        self._random = random
        self._on_sighting = on_sighting
        self._on_attempt = on_attempt
        self._own_names = {host_name(peer_name)} | {
            instance_name(peer_name, service) for service in SERVICES
        }
        self._links: dict[int, _Link] = {}
        self._seen = SeenPeers()

    # What the driver knows of the machine

    @property
    def indexes(self) -> frozenset[int]:
        """Indexes of the interfaces in use."""
        return frozenset(self._links)

    def set_link(self, interface: Interface, addresses: Sequence[str], now: float) -> None:
        """Use an interface and announce these full multiaddrs on it; nothing happens if that is so already."""
        link = self._links.get(interface.index)
        if link is not None and (link.interface, link.addresses) == (interface, tuple(addresses)):
            return
        delay = self._random.uniform(*ANSWER_DELAY)
        self._links[interface.index] = _Link(interface, tuple(addresses), next_query=now + delay)
        for service in SERVICES:
            self._links[interface.index].answers[service] = now
        self._report_link(self._links[interface.index])

    def drop_link(self, index: int) -> None:
        """Stop using an interface, because it is gone; the peers heard there are lost."""
        link = self._links.pop(index, None)
        if link is None:
            return
        for key, _ in self._seen.on_interface(index):
            self._forget(key, f"the interface {link.interface.name} is gone")

    # Packets and time

    def receive(self, data: bytes, source: str, index: int, now: float) -> None:
        """Take a packet that came in on an interface from the IP address `source`."""
        link = self._links.get(index)
        if link is None:
            return
        packet = decode_packet(data)
        if packet is None:
            return
        if not link.interface.is_on_link(ip_address(source.partition("%")[0])):
            self._refuse(link, source, f"it is not on {link.interface}")
        elif isinstance(packet, Query):
            self._take_query(link, packet, now)
            if data != link.last_query_data:
                self._leave_to_others(link, packet, now)
        else:
            for name, announcement in packet.items():
                if name not in self._own_names:
                    key = Key(index, source, name)
                    self._take_announcement(link, key, announcement, now)
        self._report_link(link)

    def advance(self, now: float) -> list[Packet]:
        """Do what is due: returns what is to be sent, and reports the peers whose time is over."""
        for key in self._seen.expired(now):
            self._forget(key, "expired: it was not heard again in time")
        packets = []
        for index, link in self._links.items():
            packets += [Packet(index, data) for data in self._due_answers(link, now)]
            if self._query_at(link, now) <= now:
                packets.append(Packet(index, self._query(link, now)))
            self._report_link(link)
        return packets

    def next_deadline(self, now: float) -> float:
        """Return the time at which to call `advance` again; infinity if never."""
        deadlines = [self._seen.next_expiry()]
        for link in self._links.values():
            deadlines += [self._query_at(link, now), *link.answers.values()]
        return min(deadlines)

    def goodbye(self) -> list[Packet]:
        """Return the packets to send before the host ends."""
        return [
            Packet(index, encode_goodbye(service, self._peer_name))
            for index in self._links
            for service in SERVICES
        ]

    # Others ask

    def _take_query(self, link: _Link, query: Query, now: float) -> None:
        for service in SERVICES:
            name = instance_name(self._peer_name, service)
            # RFC 6762, section 7.1
            is_known = query.known.get(name, 0) >= self._expiry / 2
            if (service in query.services and not is_known) or name in query.names:
                self._answer(link, service, now)
        if host_name(self._peer_name) in query.names:
            self._answer(link, SERVICES[0], now)
        if query.is_for_directory:
            self._answer(link, _DIRECTORY, now)

    def _leave_to_others(self, link: _Link, query: Query, now: float) -> None:
        """RFC 6762, section 7.3: a question is asked for us too, unless its asker knows whom we do not."""
        mine = {key.name for key, _ in self._seen.on_interface(link.interface.index)}
        if query.services.issuperset(SERVICES) and query.known.keys() <= mine | self._own_names:
            link.next_query = max(link.next_query, now + self._interval(link))

    def _answer(self, link: _Link, what: str, now: float) -> None:
        # RFC 6762, section 6
        at = now + self._random.uniform(*ANSWER_DELAY)
        at = max(at, link.announced.get(what, -math.inf) + MIN_GAP)
        link.answers.setdefault(what, at)

    def _due_answers(self, link: _Link, now: float) -> list[bytes]:
        due = [what for what, at in link.answers.items() if at <= now]
        packets = []
        for what in due:
            del link.answers[what]
            link.announced[what] = now
            if what == _DIRECTORY:
                packets.append(encode_directory(self._lifetime))
                continue
            ips = [item.ip for item in link.interface.addresses if not item.ip.is_link_local]
            packets.append(
                encode_announcement(what, self._peer_name, link.addresses, ips, self._lifetime)
            )
        if link.num_announcements and not link.answers:
            link.num_announcements -= 1
            if link.num_announcements:
                link.answers.update(dict.fromkeys(SERVICES, now + MIN_GAP))
        return packets

    @property
    def _lifetime(self) -> int:
        return math.ceil(self._expiry)

    # We ask

    def _query_at(self, link: _Link, now: float) -> float:
        refresh_at = self._seen.next_refresh(link.interface.index, now)
        return max(min(link.next_query, refresh_at), link.last_query + MIN_GAP)

    def _query(self, link: _Link, now: float) -> bytes:
        known = []
        for key, entry in self._seen.on_interface(link.interface.index):
            while entry.refresh_at <= now:
                entry.num_refreshes += 1
            remaining = entry.expires_at - now
            if remaining > self._expiry / 2:
                known.append((entry.service, key.name, int(remaining)))
        if link.next_query <= now:
            interval = self._interval(link)
            link.next_query = now + interval * self._random.uniform(1.0, 1.1)
            link.query_interval = interval * 2
        link.last_query = now
        # Where they do not all find room, those that were heard last answer last.
        link.last_query_data = encode_query(SERVICES, sorted(known, key=lambda item: -item[2]))
        return link.last_query_data

    def _interval(self, link: _Link) -> float:
        return min(link.query_interval, self._expiry / 2, MAX_QUERY_INTERVAL)

    # Others say where they are

    def _take_announcement(
        self, link: _Link, key: Key, announcement: Announcement, now: float
    ) -> None:
        entry = self._seen.get(key)
        if announcement.lifetime == 0:
            if entry is not None:
                self._forget(key, "said goodbye")
            return
        lifetime = min(float(announcement.lifetime), self._expiry)
        jitter = self._random.uniform(0.0, REFRESH_JITTER)
        if announcement.addresses is None:
            if entry is not None:
                self._seen.renew(key, now, lifetime, jitter)
            return
        announced = read_addresses(announcement.addresses, link.interface)
        if announced.peer_id == self._peer_id:
            return
        if not announced.peer_id:
            self._refuse(link, key.source, announced.reason)
            return
        if not announced.addresses:
            if entry is not None:
                self._forget(key, announced.reason)
            else:
                self._report(f"peer {announced.peer_id} at {key.source}", announced.reason)
            return
        if entry is None and not self._seen.has_room(key):
            self._refuse(link, key.source, "too many peers are announced")
            return
        before = self._seen.addresses(announced.peer_id)
        if entry is not None and entry.peer_id != announced.peer_id:
            self._forget(key, f"its name is now that of {announced.peer_id}")
        self._seen.put(
            key,
            Entry(
                announcement.service,
                announced.peer_id,
                announced.addresses,
                heard_at=now,
                lifetime=lifetime,
                jitter=jitter,
            ),
        )
        self._report_peer(announced.peer_id, before, key)

    def _report_peer(self, peer_id: str, before: tuple[str, ...], key: Key) -> None:
        after = self._seen.addresses(peer_id)
        if set(after) == set(before):
            return
        self._on_sighting(Sighting(peer_id, after, SOURCE))
        places = ", ".join(address.partition("/p2p/")[0] for address in after)
        self._report(f"peer {peer_id} at {key.source}", f"found: {places}", is_good=True)

    def _forget(self, key: Key, why: str) -> None:
        entry = self._seen.remove(key)
        addresses = self._seen.addresses(entry.peer_id)
        if addresses:
            if not set(entry.addresses) <= set(addresses):
                self._on_sighting(Sighting(entry.peer_id, addresses, SOURCE))
            return
        self._on_sighting(Sighting(entry.peer_id, (), SOURCE, is_lost=True))
        self._report(f"peer {entry.peer_id} at {key.source}", why)

    # Reports

    def _report_link(self, link: _Link) -> None:
        """Say how many answered, when that has changed."""
        num_heard = self._seen.num_peers(link.interface.index)
        if num_heard == link.num_heard:
            return
        link.num_heard = num_heard
        outcome = f"{num_heard} peer{'s' * (num_heard != 1)} there" if num_heard else "nobody there"
        self._report(f"ask on {link.interface}", outcome, is_good=bool(num_heard))

    def _refuse(self, link: _Link, source: str, why: str) -> None:
        # One line for all: anybody could have us write any number.
        self._report(f"packets on {link.interface.name}", f"ignored one from {source}: {why}")

    def _report(self, what: str, outcome: str, *, is_good: bool = False) -> None:
        self._on_attempt(Attempt(SOURCE, what, outcome, is_good))
