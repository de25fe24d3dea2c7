"""A group in a simulated network: messages are late, lost and doubled, members die, stop, and are cut off."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from neurogrid.training.averaging.plan import ReductionPlan
from neurogrid.training.averaging.rounds import (
    Action,
    Decided,
    Fetch,
    GroupMachine,
    Message,
    Reduce,
    Removed,
    Send,
    Shape,
    Stop,
    read_decisions,
)
from neurogrid.training.wire import Decision, GroupSettings, Member

SHAPE = Shape(10_000)
# Of messages: the codec has tests of its own, and takes half of the time.
ENCODED = 0.05


@dataclass(frozen=True)
class Faults:
    """How bad it gets: probabilities for each message or reduction, and numbers of what happens in `seconds`."""

    seconds: float = 8.0
    loss: float = 0.0
    doubling: float = 0.0
    delay: float = 0.05
    kills: int = 0
    stops: int = 0
    cuts: int = 0
    joins: int = 0
    leaves: int = 0
    wrong_bits: float = 0.0
    restarts: int = 0
    # A leader dies when it has decided, and before it has told more than one, or any.
    untold: float = 0.0


@dataclass
class Node:
    """A process: a machine, and what runs it."""

    machine: GroupMachine
    is_alive: bool = True
    stopped_until: float = 0.0
    decided: list[Decision] = field(default_factory=list)
    holds: dict[bytes, int] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    contributed: dict[int, int] = field(default_factory=dict)  # what of which round
    removed: str | None = None
    observes: bool = False

    @property
    def counts(self) -> bool:
        return self.is_alive and self.removed is None


class SimulatedGroup:
    """Machines, a clock, and a network between them.

    Args:
        num_members: of the group, before anything goes wrong.
        random: decides everything that is left open.
    """

    def __init__(
        self,
        num_members: int,
        random: Random,
        faults: Faults,
        settings: GroupSettings | None = None,
        machine: Callable[..., GroupMachine] = GroupMachine,
    ) -> None:
        self.random, self.faults = random, faults
        self.settings = settings or GroupSettings(
            min_members=num_members, grace=1.0, attempt_timeout=3.0
        )
        self.make_machine = machine
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.everybody: list[Node] = []
        self.by_index: dict[int, Decision] = {}
        self.cuts: set[frozenset[str]] = set()
        self.are_faulty = True
        self._plans: dict[int, tuple[ReductionPlan, int, set[str]]] = {}
        self._values: dict[tuple[str, int], int] = {}
        self._without: dict[int, set[str]] = {}  # of reductions: who has died since they began
        self._said: dict[bytes, tuple[object, ...]] = {}  # of digests: of what they are
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._names = itertools.count()
        self._joining: dict[Member, str] = {}
        self._found()
        for _ in range(num_members - 1):
            self._ask_to_join()
        self._plan_faults()

    # The clock

    def at(self, time: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), what))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = until

    # Members

    def _found(self) -> None:
        me = self._member()
        first = Decision(1, 0, (me.peer,), (me.incarnation,))
        self.by_index[1] = first
        self._start(me, [first], 1, me.peer)

    def _member(self) -> Member:
        return Member(f"peer-{next(self._names)}", self.random.getrandbits(32))

    def _start(
        self,
        me: Member,
        history: list[Decision],
        term: int,
        leader: str,
        before: tuple[Member, ...] = (),
    ) -> None:
        machine = self.make_machine(
            me,
            self.settings,
            SHAPE,
            history,
            term=term,
            leader=leader,
            now=self.now,
            before=before,
            draw=lambda: self.random.getrandbits(63) + 1,
            bandwidth=float(self.random.choice((0, 1, 1, 10))),
        )
        node = Node(machine)
        self.nodes[me.peer] = node
        self.everybody.append(node)
        self._tick(node)
        self._compute(node)

    def _ask_to_join(self) -> None:
        member = self._member()
        self._try_to_join(member)

    def _try_to_join(self, member: Member) -> None:
        """As a peer does that was told an address: it asks until a leader has it."""
        if self._has_started(member):
            return
        self._joining[member] = member.peer
        for node in list(self.nodes.values()):
            if node.counts and node.machine.is_leading and self._runs(node):
                node.machine.admit(member, self.now)
                self._do(node)
        if not self._has_started(member):
            self.at(self.now + 0.3, lambda: self._try_to_join(member))

    def _has_started(self, member: Member) -> bool:
        node = self.nodes.get(member.peer)
        return node is not None and node.machine.me == member

    def _runs(self, node: Node) -> bool:
        return node.is_alive and self.now >= node.stopped_until

    def _when_it_runs(self, node: Node, what: Callable[[], None]) -> None:
        """Do it now, or when the process goes on; never if it is dead."""
        if self._runs(node):
            if node.removed is None:
                what()
                self._do(node)
        elif node.is_alive:
            self.at(node.stopped_until + 1e-6, lambda: self._when_it_runs(node, what))

    def _tick(self, node: Node) -> None:
        if not node.counts:
            return
        self._when_it_runs(node, lambda: node.machine.tick(self.now))
        pause = self.settings.heartbeat / 2 * self.random.uniform(0.8, 1.2)
        self.at(max(self.now, node.stopped_until) + pause, lambda: self._tick(node))

    def _compute(self, node: Node) -> None:
        """Compute for a while, and contribute to the next round."""

        def contribute() -> None:
            if node.observes:
                return
            peer, round_ = node.machine.me.peer, node.machine.round + 1
            node.contributed[round_] = self._values[peer, round_] = self.random.getrandbits(30)
            node.machine.contribute(float(self.random.choice((1, 1, 2))), self.now)

        self.at(
            self.now + self.random.uniform(0.0, 0.4), lambda: self._when_it_runs(node, contribute)
        )

    # What machines want done

    def _do(self, node: Node) -> None:
        actions = node.machine.drain()
        if (
            self.are_faulty
            and node.machine.is_leading
            and any(isinstance(action, Decided) for action in actions)
            and self.random.random() < self.faults.untold
        ):
            told = [action for action in actions if isinstance(action, Send)]
            kept = self.random.sample(told, min(len(told), self.random.randrange(2)))
            actions = [a for a in actions if not isinstance(a, Send) or a in kept]
            self._end(node)
        self._check_proposal(node)
        for action in actions:
            self._do_one(node, action)

    def _check_proposal(self, node: Node) -> None:
        lead = node.machine._lead
        if lead is not None and lead.proposed is not None and lead.to_adopt is None:
            gone = {*lead.proposed.acceptors} - {*lead.proposed.decision.peers}
            assert gone <= {node.machine.me.peer}, "an acceptor is no member by what it accepts"

    def _do_one(self, node: Node, action: Action) -> None:
        if isinstance(action, Send):
            self._deliver(node.machine.me.peer, action.to, action.message)
        elif isinstance(action, Reduce):
            self._reduce(node, action.plan)
        elif isinstance(action, Fetch):
            self._fetch(node, action)
        elif isinstance(action, Stop):
            node.running.discard(action.token)
        elif isinstance(action, Decided):
            self._learn(node, action)
        elif isinstance(action, Removed):
            node.removed = action.reason

    def _learn(self, node: Node, action: Decided) -> None:
        decision = action.decision
        first = self.by_index.setdefault(decision.index, decision)
        assert _without_holders(decision) == _without_holders(first), (
            "two members were told different things"
        )
        before = node.decided[-1].index if node.decided else None
        assert before is None or decision.index == before + 1
        node.decided.append(decision)
        if decision.is_round:
            said = (decision.round, decision.contributors, decision.weights)
            assert self._said.get(decision.digest) == said, "the digest is of something else"
            assert action.has_contributed == (node.machine.me.peer in decision.contributors)
            if action.has_contributed:
                assert decision.round in node.contributed
            self._compute(node)
        for member in list(self._joining):
            if member in decision.members and not self._has_started(member):
                del self._joining[member]
                before, told = node.machine.told_to_joiner()
                self._start(
                    member,
                    read_decisions(told, before),
                    node.machine.term,
                    node.machine.me.peer,
                    before,
                )

    def _is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.cuts

    def _deliver(self, sender: str, to: str, message: Message) -> None:
        if self._is_cut(sender, to) or to not in self.nodes:
            return
        faults = self.faults
        times = 1
        if self.are_faulty:
            times = 0 if self.random.random() < faults.loss else 1
            times += self.random.random() < faults.doubling
        if self.random.random() < ENCODED:
            message = type(message).decode(message.encode())
        for _ in range(times):
            delay = self.random.uniform(0.001, faults.delay)
            self.at(self.now + delay, lambda: self._arrive(sender, to, message))

    def _arrive(self, sender: str, to: str, message: Message) -> None:
        node = self.nodes[to]
        self._when_it_runs(node, lambda: node.machine.receive(sender, message, self.now))

    # Reductions

    def _reduce(self, node: Node, plan: ReductionPlan) -> None:
        peer = node.machine.me.peer
        _, _, begun = self._plans.setdefault(plan.reduction, (plan, node.machine.round + 1, set()))
        begun.add(peer)
        node.running.add(plan.reduction)
        self.at(
            self.now + self.random.uniform(0.01, 0.2),
            lambda: self._look_at_reduction(node, plan.reduction, self.now),
        )

    def _look_at_reduction(self, node: Node, reduction: int, since: float) -> None:
        if reduction not in node.running or not node.is_alive:
            return
        plan, round_, begun = self._plans[reduction]
        peers = {*plan.members, *plan.reducers}
        me = node.machine.me.peer
        lost = {
            peer: "it is lost"
            for peer in peers - {me}
            if not self.nodes[peer].is_alive
            or self._is_cut(me, peer)
            or peer in self._without.get(reduction, ())
        }
        late = {
            peer: "it is late"
            for peer in peers - begun
            if self.now - since > self.settings.attempt_timeout
        }
        if lost or late:
            self._when_it_runs(node, lambda: node.machine.failed(reduction, lost or late, self.now))
        elif begun >= peers and all(self._runs(self.nodes[peer]) for peer in peers):
            digest = self._digest(plan, round_)
            if self.are_faulty and self.random.random() < self.faults.wrong_bits:
                digest = hashlib.sha256(digest + me.encode()).digest()
            self._said[digest] = (round_, plan.members, plan.weights)
            node.holds[digest] = node.machine.index + 1
            self._when_it_runs(node, lambda: node.machine.reduced(reduction, digest, self.now))
        else:
            self.at(self.now + 0.05, lambda: self._look_at_reduction(node, reduction, since))

    def _digest(self, plan: ReductionPlan, round_: int) -> bytes:
        said = [
            (peer, weight, self._values[peer, round_])
            for peer, weight in zip(plan.members, plan.weights, strict=True)
        ]
        return hashlib.sha256(repr(said).encode()).digest()

    def _fetch(self, node: Node, action: Fetch) -> None:
        node.running.add(action.token)

        def end() -> None:
            if action.token not in node.running:
                return
            me = node.machine.me.peer
            if any(
                self.nodes[peer].is_alive
                and self._runs(self.nodes[peer])
                and not self._is_cut(me, peer)
                and action.decision.digest in self.nodes[peer].holds
                for peer in action.holders
            ):
                node.holds[action.decision.digest] = action.decision.index
                node.machine.reduced(action.token, action.decision.digest, self.now)
            else:
                lost = dict.fromkeys(action.holders, "it does not have it")
                node.machine.failed(action.token, lost, self.now)

        self.at(self.now + self.random.uniform(0.01, 0.2), lambda: self._when_it_runs(node, end))

    # What goes wrong

    def _plan_faults(self) -> None:
        faults = self.faults

        def some_time() -> float:
            return self.random.uniform(0.0, faults.seconds)

        for _ in range(faults.kills):
            self.at(some_time(), self._kill)
        for _ in range(faults.stops):
            self.at(some_time(), self._stop_one)
        for _ in range(faults.cuts):
            self.at(some_time(), self._cut)
        for _ in range(faults.joins):
            self.at(some_time(), self._ask_to_join)
        for _ in range(faults.leaves):
            self.at(some_time(), self._leave)
        for _ in range(faults.restarts):
            self.at(some_time(), self._restart)

    def _some_node(self) -> Node | None:
        nodes = [node for node in self.nodes.values() if node.counts]
        if not nodes:
            return None
        leaders = [node for node in nodes if node.machine.is_leading]
        return self.random.choice(leaders if leaders and self.random.random() < 0.4 else nodes)

    def _kill(self) -> None:
        if (node := self._some_node()) is not None:
            self._end(node)

    def _end(self, node: Node) -> None:
        peer = node.machine.me.peer
        node.is_alive = False
        for plan, _, begun in self._plans.values():
            if peer in {*plan.members, *plan.reducers}:
                self._without.setdefault(plan.reduction, set()).add(peer)
            begun.discard(peer)
        self._tell_lost(peer)

    def _restart(self) -> None:
        """A process dies, and is another member of the same name when it asks to join."""
        if (node := self._some_node()) is not None:
            self._end(node)
            again = Member(node.machine.me.peer, self.random.getrandbits(32))
            pause = self.random.uniform(0.05, 1.0)
            self.at(self.now + pause, lambda: self._try_to_join(again))

    def _tell_lost(self, peer: str) -> None:
        for other in list(self.nodes.values()):
            if other.is_alive and other.machine.me.peer != peer:
                self.at(
                    self.now + self.random.uniform(0.0, 0.1),
                    lambda other=other: self._when_it_runs(  # type: ignore[misc]
                        other, lambda: other.machine.peer_lost(peer, self.now)
                    ),
                )

    def _stop_one(self) -> None:
        if (node := self._some_node()) is not None:
            node.stopped_until = self.now + self.random.uniform(0.1, 4.0)

    def _cut(self) -> None:
        if len(self.nodes) < 2:
            return
        pair = frozenset(self.random.sample(sorted(self.nodes), 2))
        self.cuts.add(pair)
        if self.random.random() < 0.5:
            one, other = sorted(pair)
            for node, peer in ((self.nodes[one], other), (self.nodes[other], one)):
                self._when_it_runs(
                    node,
                    lambda node=node, peer=peer: node.machine.peer_lost(peer, self.now),  # type: ignore[misc]
                )
        self.at(self.now + self.random.uniform(0.2, 5.0), lambda: self.cuts.discard(pair))

    def _leave(self) -> None:
        if (node := self._some_node()) is not None:
            self._when_it_runs(node, lambda: node.machine.leave(self.now))

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self.are_faulty = False
        self.cuts.clear()
        for node in self.nodes.values():
            node.stopped_until = min(node.stopped_until, self.now)

    @property
    def last(self) -> Decision:
        """The last thing that was decided."""
        return self.by_index[max(self.by_index)]


def _without_holders(decision: Decision) -> tuple[object, ...]:
    return (
        decision.index,
        decision.round,
        decision.members,
        decision.contributors,
        decision.weights,
        decision.digest,
    )
