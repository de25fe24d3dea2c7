"""A LAN without sockets: engines of multicast DNS on a switch, under a clock that a test turns."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from ipaddress import IPv4Interface
from itertools import count
from random import Random

from neurogrid.p2p.discovery.mdns.engine import Engine
from neurogrid.p2p.discovery.mdns.interfaces import Interface
from neurogrid.p2p.discovery.mdns.limits import DEFAULT_EXPIRY
from neurogrid.p2p.discovery.sighting import Attempt, Sighting
from neurogrid.p2p.hosts.identity import Identity

__all__ = ["Lan", "Node", "INDEX", "interface"]

INDEX = 2
DELAY = 0.001  # seconds, for a packet to get to everybody


def interface(host: int) -> Interface:
    return Interface("eth0", INDEX, (IPv4Interface(f"10.0.0.{host}/24"),))


@dataclass
class Node:
    """A host: its engine, and what that reported.

    Attributes:
        known: the addresses of whom it has now.
        outcomes: the last outcome of each attempt.
    """

    peer_id: str
    engine: Engine
    interface: Interface
    addresses: tuple[str, ...]
    known: dict[str, tuple[str, ...]] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    sightings: list[Sighting] = field(default_factory=list)
    is_plugged: bool = True

    @property
    def ip(self) -> str:
        return str(self.interface.addresses[0].ip)


class Lan:
    """Nodes that hear each other, themselves among them, as on Linux.

    Attributes:
        now: seconds.
        sent: each packet that was sent, with its time and sender.
    """

    def __init__(self, *, seed: int = 0, loss: float = 0.0) -> None:
        self.now = 1000.0
        self.nodes: list[Node] = []
        self.sent: list[tuple[float, Node, bytes]] = []
        self._random = Random(seed)
        self._loss = loss
        self._on_the_way: list[tuple[float, int, Node, str, bytes]] = []
        self._numbers = count()

    def add(
        self, *, peer_id: str = "", expiry: float = DEFAULT_EXPIRY, host: int = 0, port: int = 4001
    ) -> Node:
        """Start a host; its IP address ends in `host`."""
        peer_id = peer_id or Identity.generate().peer_id
        place = interface(host or len(self.nodes) + 1)
        addresses = (f"/ip4/{place.addresses[0].ip}/tcp/{port}/p2p/{peer_id}",)
        known: dict[str, tuple[str, ...]] = {}
        outcomes: dict[str, str] = {}
        sightings: list[Sighting] = []

        def on_sighting(sighting: Sighting) -> None:
            sightings.append(sighting)
            if sighting.is_lost:
                del known[sighting.peer_id]
            else:
                known[sighting.peer_id] = sighting.addresses

        def on_attempt(attempt: Attempt) -> None:
            outcomes[attempt.what] = attempt.outcome

        name = "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz", k=32))
        engine = Engine(
            peer_id,
            peer_name=name,
            expiry=expiry,
            random=self._random,
            on_sighting=on_sighting,
            on_attempt=on_attempt,
        )
        engine.set_link(place, addresses, self.now)
        self.nodes.append(Node(peer_id, engine, place, addresses, known, outcomes, sightings))
        return self.nodes[-1]

    def remove(self, node: Node, *, says_goodbye: bool = False) -> None:
        """Kill a host, or let it leave in order."""
        if says_goodbye:
            for packet in node.engine.goodbye():
                self.send(node, packet.data)
        self.nodes.remove(node)

    def send(self, sender: Node, data: bytes) -> None:
        self.sent.append((self.now, sender, data))
        for node in self.nodes:
            is_there = sender is node or (sender.is_plugged and node.is_plugged)
            if is_there and self._random.random() >= self._loss:
                self.inject(node, sender.ip, data)

    def inject(self, node: Node, source: str, data: bytes) -> None:
        """Have a packet arrive at one node, from anywhere."""
        item = (self.now + DELAY, next(self._numbers), node, source, data)
        heapq.heappush(self._on_the_way, item)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while True:
            deadlines = [node.engine.next_deadline(self.now) for node in self.nodes]
            arrival = self._on_the_way[0][0] if self._on_the_way else end
            self.now = max(self.now, min([end, arrival, *deadlines]))
            if self.now >= end:
                return
            while self._on_the_way and self._on_the_way[0][0] <= self.now:
                _, _, node, source, data = heapq.heappop(self._on_the_way)
                if node in self.nodes:
                    node.engine.receive(data, source, INDEX, self.now)
            for node in list(self.nodes):
                for packet in node.engine.advance(self.now):
                    self.send(node, packet.data)
