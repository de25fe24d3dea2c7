"""How far does one group reach? Messages, bytes and seconds of a round for 4 to 4,096 members.

    python benchmarks/scale.py
    python benchmarks/scale.py --way grid        in rows whose means meet

The machines are those that run in a group; the network between them is simulated: messages wait for their sender's link
and take their time, members are slow and die. The vector is not computed: a reduction takes as long as its bytes do.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import itertools
import time
from collections.abc import Callable
from functools import partial
from random import Random
from statistics import median
from typing import Any

from report import table, write_report

from neurogrid.training.averaging.plan import ReductionPlan
from neurogrid.training.averaging.rounds import (
    Decided,
    Fetch,
    GroupMachine,
    Message,
    Reduce,
    Send,
    Shape,
    leader,
    machine,
)
from neurogrid.training.wire import (
    Decision,
    DecisionPayload,
    GroupSettings,
    Lead,
    Member,
    Plan,
    Proposal,
    group,
)

SIZES = (4, 16, 64, 256, 1024, 2048, 4096)
ELEMENTS = 25_000_000
VECTOR_BYTES = ELEMENTS * 0.516  # int4 with its scales
HEADER_BYTES = 25
# Of a message, and of a proposal in it.
MAX_MESSAGE_BYTES, MAX_PROPOSAL_BYTES = 1024 * 1024, 768 * 1024
KEPT = 256  # payloads that were written, and are read by all

# Seconds from a member to a backbone: two of them are one way. Round trips have a median of 76 ms and a long tail, like
# those that King measured between 1,740 name servers (Gummadi et al., 2002: a median of about 80 ms, a mean of 180).
LATENCY, LATENCY_SIGMA = 0.018, 0.7
# Bytes a second: a median of 100 Mbit/s, a tenth of the members below 40; like fixed lines in public speed tests.
BANDWIDTH, BANDWIDTH_SIGMA = 12.5e6, 0.7
# Of messages: they come one retransmission later, as after RFC 6298 with a least timeout of 0.2 s.
LOSS, RETRANSMISSION = 0.005, 0.2
SLOW, SLOWER = 0.05, 10.0  # members that compute and send at a tenth
DYING, PERIOD = 0.01, 60.0  # members that die within so many seconds
COMPUTE, COMPUTE_SIGMA = 1.0, 0.2  # seconds until a member has its vector


class Node:
    """A member: its machine, its link, and what waits for it."""

    def __init__(self, me: Member, random: Random) -> None:
        self.me = me
        self.is_slow = random.random() < SLOW
        self.latency = random.lognormvariate(0, LATENCY_SIGMA) * LATENCY
        bandwidth = random.lognormvariate(0, BANDWIDTH_SIGMA) * BANDWIDTH
        self.bandwidth = max(bandwidth / (SLOWER if self.is_slow else 1), 125e3)
        self.waiting: dict[tuple[str, type[Message]], Message] = {}
        self.is_sending, self.is_alive = False, True
        self.decided_at: float | None = None
        self.running: set[int] = set()
        self.machine: GroupMachine


class Network:
    """A group of so many members, and the counts of what it sends."""

    def __init__(self, num_members: int, random: Random, settings: GroupSettings) -> None:
        self.random, self.now = random, 0.0
        self.messages = self.bytes = self.largest = self.attempts = 0
        self.cpu = 0.0  # of the leader
        self.contributors = 0
        self.partners, self.handed_on = (
            0,
            0.0,
        )  # of a member: it sends chunks to so many; bytes that a row hands on
        self.is_over_limit = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._plans: dict[int, tuple[ReductionPlan, set[str]]] = {}
        names = [f"12D3KooW{number:044d}" for number in range(num_members)]
        members = [Member(name, random.getrandbits(63)) for name in names]
        self.nodes = {me.peer: Node(me, random) for me in members}
        leader = self.nodes[names[0]]
        leader.is_slow, leader.bandwidth = False, BANDWIDTH
        self.leader = leader
        first = Decision(1, 0, tuple(names), tuple(m.incarnation for m in members))
        for node in self.nodes.values():
            node.machine = GroupMachine(
                node.me,
                settings,
                Shape(ELEMENTS, 256),
                [first],
                term=1,
                leader=names[0],
                now=0.0,
                draw=lambda: next(self._numbers),
                bandwidth=node.bandwidth,
            )
            self._begin(node)
        for node in random.sample(list(self.nodes.values())[1:], round(DYING * num_members)):
            self.at(random.uniform(0, PERIOD), partial(self._die, node))

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def run(self, seconds: float, patience: float) -> bool:
        """Run until all that live have decided on the first round; False if they have not within either time."""
        until = time.perf_counter() + patience
        while self._events and self.now < seconds and time.perf_counter() < until:
            self.now, _, what = heapq.heappop(self._events)
            what()
            if self.leader.decided_at is not None and all(
                node.decided_at is not None for node in self.nodes.values() if node.is_alive
            ):
                return True
        return False

    def _begin(self, node: Node) -> None:
        seconds = self.random.lognormvariate(0, COMPUTE_SIGMA) * COMPUTE
        seconds *= SLOWER * 2 if node.is_slow else 1
        self.at(seconds, lambda: self._do(node, lambda m: m.contribute(1.0, self.now)))
        pause = node.machine.settings.heartbeat / 4
        self.at(self.random.uniform(0, pause), lambda: self._tick(node, pause))

    def _tick(self, node: Node, pause: float) -> None:
        if node.is_alive:
            self._do(node, lambda m: m.tick(self.now))
            self.at(self.now + pause, lambda: self._tick(node, pause))

    def _do(self, node: Node, what: Callable[[GroupMachine], Any]) -> None:
        if not node.is_alive:
            return
        begun = time.perf_counter()
        what(node.machine)
        actions = node.machine.drain()
        if node is self.leader:
            self.cpu += time.perf_counter() - begun
        for action in actions:
            if isinstance(action, Send):
                node.waiting[action.to, type(action.message)] = action.message
            elif isinstance(action, Reduce):
                self._reduce(node, action.plan)
            elif isinstance(action, Fetch):
                seconds = VECTOR_BYTES / node.bandwidth
                digest = action.decision.digest
                self._later(
                    node, seconds, lambda m, a=action, d=digest: m.reduced(a.token, d, self.now)
                )
            elif isinstance(action, Decided) and action.decision.is_round:
                node.decided_at = node.decided_at or self.now
                self.contributors = len(action.decision.contributors)
        self._send_next(node)

    def _later(self, node: Node, seconds: float, what: Callable[[GroupMachine], Any]) -> None:
        self.at(self.now + seconds, lambda: self._do(node, what))

    def _send_next(self, node: Node) -> None:
        if node.is_sending or not node.waiting:
            return
        node.is_sending = True
        key = next(iter(node.waiting))
        message = node.waiting.pop(key)
        size = HEADER_BYTES + num_bytes(message)
        self.messages, self.bytes = self.messages + 1, self.bytes + size
        self.largest = max(self.largest, size)
        if isinstance(message, Lead) and len(message.proposal) > MAX_PROPOSAL_BYTES:
            self.is_over_limit = True
        to = self.nodes[key[0]]
        seconds = size / node.bandwidth
        lost = RETRANSMISSION if self.random.random() < LOSS else 0.0
        arrives = self.now + seconds + node.latency + to.latency + lost
        self.at(self.now + seconds, lambda: self._sent(node))
        self.at(arrives, lambda: self._do(to, lambda m: m.receive(node.me.peer, message, self.now)))

    def _sent(self, node: Node) -> None:
        node.is_sending = False
        if node.is_alive:
            self._send_next(node)

    def _die(self, node: Node) -> None:
        node.is_alive = False
        peer = node.me.peer
        for other in self.nodes.values():
            away = node.latency + other.latency
            self._later(other, away, lambda m: m.peer_lost(peer, self.now))
        for number, (plan, _) in self._plans.items():
            if peer in plan.members:
                for name in plan.members:
                    other = self.nodes[name]
                    self._later(
                        other,
                        node.latency + other.latency,
                        lambda m, n=number: m.failed(n, {peer: "it is gone"}, self.now),
                    )

    def _reduce(self, node: Node, plan: ReductionPlan) -> None:
        if plan.reduction not in self._plans:
            self.attempts += 1
            self._plans[plan.reduction] = (plan, set())
        _, begun = self._plans[plan.reduction]
        begun.add(node.me.peer)
        dead = [name for name in plan.members if not self.nodes[name].is_alive]
        if dead:
            self._later(
                node, 0.1, lambda m: m.failed(plan.reduction, {dead[0]: "it is gone"}, self.now)
            )
        if len(begun) < len(plan.members):
            return
        digest = hashlib.sha256(str(plan.reduction).encode()).digest()
        nodes = [self.nodes[name] for name in plan.members]
        mean = sum(n.bandwidth for n in nodes) / len(nodes)
        slowest = max(VECTOR_BYTES / n.bandwidth + 4 * n.latency for n in nodes)
        self.partners = max(len(plan.sends_to(name)) for name in plan.members)
        self.handed_on = handed_on_bytes(plan)
        for other in nodes:
            # Its own vector goes out as its part of the others' comes in; then what rows hand on; then the means.
            seconds = slowest + (self.handed_on + VECTOR_BYTES) / mean
            self._later(other, seconds, lambda m: m.reduced(plan.reduction, digest, self.now))


def handed_on_bytes(plan: ReductionPlan) -> float:
    """Bytes that a member sends of what its row gave, in float32, or receives; the mean of all."""
    num_rows = len(plan.row_plans)
    return 4.0 * plan.num_elements * max(num_rows - 1, 0) / len(plan.members)


def num_bytes(message: Message) -> int:
    """Bytes of a message; of a Lead, which most are, without writing it."""
    if isinstance(message, Lead):
        told = sum(map(len, message.decisions)) + len(message.proposal)
        return told + 54 * len(message.waits_for) + 60
    return len(message.encode())


def remember(kind: Any) -> None:
    """Let all members of the simulation read the same bytes once; so bytes above a limit are read, too."""
    known: dict[bytes, Any] = {}
    decode = kind.decode

    def write(self: Any) -> bytes:
        data: bytes = self._map.encode([getattr(self, name) for name in self.__match_args__])
        known[data] = self
        while len(known) > KEPT:
            del known[next(iter(known))]
        return data

    kind.encode = write
    kind.decode = lambda data: known[data] if data in known else decode(data)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let all members of the simulation compute once what each does by itself; by which objects it is given."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def computed(*args: Any) -> Any:
        key = tuple(map(id, args))
        if key not in known:
            known[key] = args, function(*args)
            while len(known) > KEPT:
                del known[next(iter(known))]
        return known[key][1]

    return computed


def share(num_members: int) -> None:
    """Let members share what they read, and a group have so many."""
    for kind in (DecisionPayload, Plan, Proposal):
        remember(kind)
    # Replaced for the whole process, which does nothing else: a member of its own would read the same.
    DecisionPayload.after = once(DecisionPayload.after)  # type: ignore[method-assign]
    Decision.members = property(once(Decision.members.fget))  # type: ignore[assignment, attr-defined]
    for name in ("table_of", "read_plan", "peers_at"):
        setattr(machine, name, once(getattr(machine, name)))
    for room in (group, leader):
        room.MAX_GROUP_MEMBERS = max(num_members, room.MAX_GROUP_MEMBERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--patience", type=float, default=100.0, help="seconds for each size (100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--way", choices=("butterfly", "grid"), default="butterfly")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds (10)")
    args = parser.parse_args()
    share(max(args.sizes))
    rows = [row(size, args.way, args.seed, args.patience, args.grace) for size in args.sizes]
    header = (
        "members",
        "decided",
        "contributors",
        "attempts",
        "s, round",
        "s, of it vectors",
        "messages",
        "MB, control",
        "largest, KiB",
        "leader's CPU, s",
        "MB of vectors, a member",
        "a member sends to",
    )
    body = (
        f"A vector of {ELEMENTS:,} elements in int4 ({VECTOR_BYTES / 1e6:.1f} MB), {args.way}, grace {args.grace:g} s, "
        "one round from when members begin to compute (1 s) to the last decision. "
        f"{SLOW:.0%} of the members are {SLOWER:g} times slower, {DYING:.0%} die within {PERIOD:g} s. Simulated: "
        f"median one way {2000 * LATENCY:g} ms, "
        f"{BANDWIDTH * 8 / 1e6:g} Mbit/s (log-normal), {LOSS:.1%} of messages a retransmission late; the leader's link "
        f'is the median one. Its CPU is measured, and not part of the simulated seconds. A "+" was given up.\n\n'
        f"{table(header, rows)}"
    )
    write_report(
        "scale" + ("-grid" if args.way == "grid" else ""),
        "What does a round cost in a group of so many members?",
        body,
    )


def row(size: int, way: str, seed: int, patience: float, grace: float) -> list[str]:
    settings = GroupSettings(
        min_members=max(1, size // 2),  # one in a hundred dies, some of them before the first round
        quorum=max(1, size // 2),
        grace=grace,
        codec="int4",
        result_codec="int4",
        attempt_timeout=300.0,
        way=way,
    )
    network = Network(size, Random(seed), settings)
    is_done = network.run(1200.0, patience)
    nodes = [node for node in network.nodes.values() if node.is_alive]
    vectors = max(VECTOR_BYTES / n.bandwidth for n in nodes if not n.is_slow)
    vectors += VECTOR_BYTES / median(n.bandwidth for n in nodes)
    decided = sum(node.decided_at is not None for node in nodes)
    is_too_large = network.is_over_limit or network.largest > MAX_MESSAGE_BYTES
    shown = [
        f"{size:,}",
        f"{decided:,} of {len(nodes):,}",
        f"{network.contributors:,}",
        f"{network.attempts}",
        f"{network.now:.1f}" + ("" if is_done else " +"),
        f"{vectors:.1f}",
        f"{network.messages:,}",
        f"{network.bytes / 1e6:,.2f}",
        f"{network.largest / 1024:,.1f}" + (" (too large)" if is_too_large else ""),
        f"{network.cpu:.2f}",
        f"{2 * (VECTOR_BYTES + network.handed_on) / 1e6:.0f}",
        f"{network.partners}",
    ]
    print("  ".join(shown), flush=True)
    return shown


if __name__ == "__main__":
    main()
