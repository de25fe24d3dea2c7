"""Two state machines of QUIC that hand each other their datagrams, without sockets and with a clock of their own."""

from __future__ import annotations

from collections.abc import Callable

from libp2p.peer.id import ID
from qh3.quic.events import QuicEvent

from neurogrid.p2p import Identity
from neurogrid.p2p.quic.core import Configurations, Core
from neurogrid.p2p.quic.limits import QuicLimits

LIMITS = QuicLimits()
CLIENT, SERVER = ("127.0.0.1", 1), ("127.0.0.1", 2)


class Pair:
    """A client and a server.

    Attributes:
        events: what has happened at either, in order.
        lose: tells of a datagram whether it is lost on its way.
        far_configurations: of the server's host.
    """

    def __init__(
        self, *, limits: QuicLimits = LIMITS, expected: ID | None = None, core: type[Core] = Core
    ) -> None:
        self.near, self.far = Identity.generate(), Identity.generate()
        self.over: dict[str, list[int]] = {"client": [], "server": []}
        self.client = core(
            Configurations(self.near.key_pair, limits).get(is_client=True, address="127.0.0.1"),
            limits,
            forget=self.over["client"].append,
            expected=expected or ID.from_base58(self.far.peer_id),
        )
        self.far_configurations = Configurations(self.far.key_pair, limits)
        self.server = Core(
            self.far_configurations.get(is_client=False, address="127.0.0.1"),
            limits,
            forget=self.over["server"].append,
            original_destination_connection_id=self.client.original_destination_connection_id,
        )
        self.events: dict[str, list[QuicEvent]] = {"client": [], "server": []}
        self.lose: Callable[[bytes], bool] = lambda datagram: False
        self.now = 0.0
        self.client.connect(SERVER, self.now)

    def run(self, steps: int = 200) -> None:
        """Let some time pass: a millisecond a step."""
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        """Move what is to be sent, then let a millisecond pass."""
        for datagram, _ in self.client.produce(self.now):
            if not self.lose(datagram):
                self.server.take([datagram], CLIENT, self.now)
        self.events["server"] += self.server.events()
        for datagram, _ in self.server.produce(self.now) if hasattr(self.server, "tls") else ():
            if not self.lose(datagram):
                self.client.take([datagram], SERVER, self.now)
        self.events["client"] += self.client.events()
        self.now += 0.001
        self.client.fire(self.now)
        self.server.fire(self.now)
