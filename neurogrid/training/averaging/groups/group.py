"""A group of peers that averages, as one of its members has it: a machine that is fed, and what it wants done.

    async with open_host() as host, open_group(host, layout, join=[address]) as group:
        outcome = await group.average(vector, weight=samples, timeout=60)

What is decided, and when, is the matter of `rounds`; how vectors become one, of `reductions`. More than 600 lines,
since what a machine wants done and what it is told are one loop over the same state.

Source: protocol_spec/training/groups.md.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch
import trio
from torch import Tensor

from neurogrid.errors import (
    ConfigurationError,
    LocalProtocolError,
    NeuroGridError,
    PeerUnreachableError,
    RequestRefusedError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.exchange.counters import Direction, TrafficCounters
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.wire import ErrorCode, TensorMessage
from neurogrid.training.averaging.aggregators import DistanceAggregator, parse_aggregator
from neurogrid.training.averaging.codecs import parse_codec
from neurogrid.training.averaging.groups.bandwidth import BandwidthMeter
from neurogrid.training.averaging.groups.errors import (
    GroupError,
    NotAMemberError,
    RoundTimeout,
)
from neurogrid.training.averaging.groups.joining import join_group
from neurogrid.training.averaging.groups.messenger import KINDS, Messenger
from neurogrid.training.averaging.groups.states import State, States
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.averaging.plan import ReductionPlan
from neurogrid.training.averaging.reductions import (
    MembersLostError,
    Reductions,
    Result,
    ResultUnavailableError,
)
from neurogrid.training.averaging.rounds import (
    UNMEASURED,
    Action,
    Decided,
    Fetch,
    GroupMachine,
    Reduce,
    Removed,
    Send,
    Shape,
    Stop,
    read_decisions,
)
from neurogrid.training.wire import (
    MAX_WEIGHT,
    Decision,
    GroupSettings,
    Join,
    Joined,
    Member,
    TrainingMessage,
    training_table,
)

__all__ = ["Group", "Outcome", "open_group"]

logger = logging.getLogger(__name__)

# Outcomes that wait for their owner: a member that is further behind fetches the state instead. One that looks on may
# be as far behind as results are held.
_MAX_BACKLOG: Final = 4
# Results that are held: the last, and before it those that not all members have computed. Small ones are decided
# several times a second, and whoever gets no processor for a while is to find them still.
_MIN_HELD: Final = 3
_MAX_HELD: Final = 32
_HELD_BYTES: Final = 64 * 1024 * 1024
# Of a heartbeat: how often the machine is told what time it is.
_TICKS: Final = 4
# Seconds between two looks at what has gone by, while a round is under way.
_MOMENT: Final = 0.1
_GOODBYE_TIMEOUT: Final = 2.0
# Of an answer to who joins, for addresses; decisions take half of it, members 64 KiB. And what each takes beside its
# text.
_PLACES_BYTES: Final = 320 * 1024
_PLACE_OVERHEAD: Final = 6


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Outcome of a round: the aggregate, the same bits for all members, and which vectors are in it.

    Attributes:
        round: its number, from 1.
        values: float32 [num_elements], the aggregate. Not to be written to: peers may be given it.
        contributors: peer ids whose vectors are in it.
        weights: how they count.
        has_contributed: whether the vector of this member is in it. One that is late is not: what to do with it is its
            owner's to say.
        is_of_withdrawn: the vector in it is one of an earlier call, which had given up waiting.
        call: whose vector that is, of the calls of `average` (`Group.num_calls`); 0 for none.
    """

    round: int
    values: Tensor
    contributors: tuple[str, ...]
    weights: tuple[float, ...]
    has_contributed: bool
    is_of_withdrawn: bool = False
    call: int = 0


class Group:
    """A group, in this member's process. Made by `open_group`.

    Attributes:
        settings: those of the group, as its first leader set them.
        layout: of the vector that it averages.
    """

    def __init__(
        self,
        exchange: Exchange,
        nursery: trio.Nursery,
        machine: GroupMachine,
        messenger: Messenger,
        layout: Layout,
    ) -> None:
        self.settings, self.layout = machine.settings, layout
        self._exchange, self._nursery = exchange, nursery
        self._machine, self._messenger = machine, messenger
        self._reductions = Reductions(
            exchange,
            admit=self._is_of_group,
        )
        self._num_held = max(_MIN_HELD, min(_MAX_HELD, _HELD_BYTES // (4 * layout.num_elements)))
        self._scopes: dict[int, trio.CancelScope] = {}
        self._vector: Tensor | None = None
        # Calls that had a vector, counted. By it: of reductions under way, by token; of what came of them in this
        # round, by digest; of the last that was begun in it.
        self._num_calls = 0
        self._lent_call = 0  # the last whose vector was in a reduction that was begun
        self._lent: dict[int, int] = {}
        self._computed: dict[bytes, int] = {}
        self._last_lent = 0
        # Of those that are held, None where it was delivered here: for others the encoded form is enough.
        self._results: dict[bytes, Result | None] = {}
        # Digests: of the last rounds, empty for one whose result no member has to fetch; of the last; and to deliver.
        self._wanted: deque[bytes] = deque(maxlen=self._num_held)
        self._last_digest = b""
        self._undelivered_digests: Counter[bytes] = Counter()
        self._last_members = machine.members
        self._led_by: str | None = None
        self._undelivered, self._undelivered_end = trio.open_memory_channel[tuple[Decided, int]](
            1024
        )
        self._outcomes: deque[tuple[Outcome, int]] = deque()  # with the call whose vector is in it
        self._changed = trio.Event()
        self._joining: dict[Member, TensorMessage] = {}
        self._failure: GroupError | None = None
        self._undecided_from = (
            machine.round
        )  # a state must have what was decided before this member was one
        self._skip_to = machine.round
        self._is_busy = False
        self._states = States(exchange, self._reductions, is_of_group=self._is_of_group)
        self._may_deliver = trio.Event()
        self._may_deliver.set()
        # Its tasks have ended, or are about to: what comes from now on is nobody's to answer.
        self._is_over = False
        exchange.on_message(TrainingMessage.JOIN, self._take_join)
        exchange.on_peer_lost(self._lose)

    # What its owner sees

    @property
    def peer_id(self) -> str:
        """The peer id of this member (base58)."""
        return self._exchange.host.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs that others can join at."""
        return self._exchange.host.addresses

    @property
    def members(self) -> tuple[str, ...]:
        """Peer ids of the members, this one included, in the order in which they are added."""
        return tuple(member.peer for member in self._machine.members)

    @property
    def counters(self) -> TrafficCounters:
        """Messages and bytes of the group's protocol at this member."""
        return self._exchange.counters

    @property
    def leader(self) -> str | None:
        """The peer id of the leader; None while this member knows none."""
        return self._machine.leader

    @property
    def is_leading(self) -> bool:
        """Whether this member leads."""
        return self._machine.is_leading

    @property
    def round(self) -> int:
        """Rounds that the group has decided, as far as this member knows."""
        return self._machine.round

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The last rounds that were decided, in order, with contributors and weights; also such before this one joined.

        They are among the last 8 decisions, of which some may be changes of members.
        """
        return tuple(decision for decision in self._machine.history if decision.is_round)

    @property
    def history(self) -> tuple[Decision, ...]:
        """The last decisions, in order: rounds, and changes of members; also such before this one joined."""
        return self._machine.history

    @property
    def incarnation(self) -> int:
        """The number that this process has as a member."""
        return self._machine.me.incarnation

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Peer ids of the members that the current round waits for, as its leader says."""
        return self._machine.waits_for

    def observe(self, is_observer: bool) -> None:
        """No round is to wait for this member until it averages, or rounds are to wait for it again."""
        self._machine.observe(is_observer, trio.current_time())
        self._act()

    def expect(self, peer_ids: Iterable[str]) -> None:
        """Make rounds that this member leads wait for these members as for others, even while they observe.

        The program that gives them work knows better than what they said last. They take the place of those of the
        call before.
        """
        self._machine.expect(frozenset(peer_ids), trio.current_time())
        self._act()

    def foresee(self, due: Mapping[str, float]) -> None:
        """Let rounds that this member leads go on at once without late members that are due only after the grace.

        The program that knows what they do knows better than the grace. A member that rounds have passed over for that
        is waited for longer, by a grace for each of them, up to four: else it would be too far behind.

        Args:
            due: by peer id, when they can have their next vectors at the earliest, in trio's time; none for those of
                which nothing is known.
        """
        self._machine.foresee(dict(due), trio.current_time())
        self._act()

    async def decision_after(self, index: int) -> Decision:
        """The first decision after that of this index which is still known, once there is one.

        Whoever follows decisions by it misses none that was made while it was busy with the one before.

        Raises:
            NotAMemberError: this peer is no member any more.
        """
        while True:
            for decision in self.history:
                if decision.index > index:
                    return decision
            await self._wait_change()

    async def wait_members(self, number: int, *, timeout: float) -> None:
        """Wait until there are so many members.

        Raises:
            GroupError: there are fewer after `timeout` seconds.
            NotAMemberError: this peer is none any more.
        """
        with trio.move_on_after(timeout):
            while len(self._machine.members) < number:
                await self._wait_change()
            return
        raise GroupError(
            f"{len(self._machine.members)} of {number} members are there after {timeout:g} s"
        )

    async def average(self, vector: Tensor, *, weight: float = 1.0, timeout: float) -> Outcome:
        """Contribute to the next round, and wait for its outcome.

        A member that comes too late for a round is given that round's outcome, as soon as it is here, without its
        vector in it.

        Args:
            vector: float32 [num_elements], contiguous, on the CPU. Not to be written to until the call has ended.
            weight: how much it counts, 0 to 1e30: samples, for a mean over samples.
            timeout: seconds.

        Raises:
            RoundTimeout: the round was not decided in time; says for whom it waits.
            NotAMemberError: this peer is no member any more.
            ConfigurationError: the vector is not as the layout says, or the weight is negative or above `MAX_WEIGHT`.
            LocalProtocolError: another call is under way.
        """
        self._check_vector(vector, weight)
        with self._one_call():
            if self._outcomes:
                return self._next_outcome()
            self._num_calls += 1
            until = trio.current_time() + timeout
            if self._is_awaiting_outcome:
                # It is what this call comes to: the round after it is not to have this vector, too.
                await self._wait_delivered(until, timeout)
                if self._outcomes:
                    return self._next_outcome()
            self._vector = vector
            try:
                self._machine.contribute(weight, trio.current_time())
                self._act()
                return await self._wait_outcome(until, timeout, self._num_calls)
            finally:
                if self._vector is not None:
                    self._withdraw()

    @property
    def num_calls(self) -> int:
        """Calls of `average` so far that had to wait: the number of the last one."""
        return self._num_calls

    @property
    def may_have_contributed(self) -> bool:
        """Whether a round may have the vector of the last call, although that gave up waiting."""
        return 0 < self._num_calls == self._lent_call

    async def next_outcome(self, *, timeout: float) -> Outcome:
        """Wait for the next outcome without a vector of this member; no round waits for one, until it averages again.

        Outcomes come one after another, and a few are kept: a member that observes calls this again and again.

        Args:
            timeout: seconds.

        Raises:
            RoundTimeout: no round was decided in time; says for whom it waits.
            NotAMemberError: this peer is no member any more.
            LocalProtocolError: another call is under way.
        """
        with self._one_call():
            if self._outcomes:
                return self._next_outcome()
            self._machine.observe(True, trio.current_time())
            self._act()
            return await self._wait_outcome(trio.current_time() + timeout, timeout)

    async def all_reduce(
        self, tensors: Mapping[str, Tensor], *, weight: float = 1.0, timeout: float
    ) -> Outcome:
        """Replace tensors by their aggregates over all members that contribute, in place.

        Args:
            tensors: floats on any device, by the names, in the order and the shapes of the layout.

        Raises: as `average`.
        """
        vector = torch.empty(self.layout.num_elements, dtype=torch.float32)
        self.layout.flatten(tensors, vector)
        outcome = await self.average(vector, weight=weight, timeout=timeout)
        # Tensors of inference mode may be written to in it alone; parameters may be in it, too.
        with torch.inference_mode():
            for name, aggregate in self.layout.views(outcome.values).items():
                tensors[name].copy_(aggregate)
        return outcome

    def show_state(self, state: State) -> None:
        """Give this state to those that join from now on, until `take_state_back`; the same for all members.

        Raises:
            ConfigurationError: it has too many vectors, or too long a note.
        """
        self._states.show(state)

    def take_state_back(self) -> None:
        """The buffers of the state are going to be written to."""
        self._states.take_back()

    async def fetch_state(self, sizes: Sequence[int], *, timeout: float) -> State | None:
        """The state of the other members, for one that has just joined; outcomes that are in it do not come again.

        Args:
            sizes: float32 elements of its vectors, as this program has them.
            timeout: seconds.

        Returns:
            The state; None where this member is alone, and the state is what it has.

        Raises:
            GroupError: nobody has given it in time.
            ConfigurationError: the others' state has other vectors.
            NotAMemberError: this peer is no member any more.
        """
        self._may_deliver = trio.Event()
        try:
            with trio.move_on_after(timeout):
                while others := [peer for peer in self.members if peer != self.peer_id]:
                    if self._failure is not None:
                        raise self._failure
                    oldest = self._undecided_from
                    state = await self._states.fetch(others, sizes, oldest=oldest, timeout=timeout)
                    if state is not None:
                        self._skip_to = state.round
                        return state
                    await trio.sleep(self.settings.heartbeat / _TICKS)
                return None
            raise GroupError(f"no member has given its state within {timeout:g} s")
        finally:
            self._may_deliver.set()

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        if self._is_busy:
            raise LocalProtocolError("this member averages already: one vector at a time")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _next_outcome(self, call: int = -1) -> Outcome:
        """An outcome for a call with a vector, or for one that has none in it."""
        outcome, with_vector_of = self._outcomes.popleft()
        if not outcome.has_contributed:
            return outcome
        return replace(outcome, is_of_withdrawn=with_vector_of != call, call=with_vector_of)

    @property
    def _is_awaiting_outcome(self) -> bool:
        """Whether a round was decided whose outcome is on its way to this member."""
        return bool(self._undelivered_digests)

    async def _wait_delivered(self, until: float, timeout: float) -> None:
        """Wait for the outcome that is on its way, be it one that a state has already."""
        with trio.CancelScope(deadline=until):
            while self._is_awaiting_outcome and not self._outcomes:
                await self._wait_change()
            return
        raise self._late(timeout)

    async def _wait_outcome(self, until: float, timeout: float, call: int = -1) -> Outcome:
        with trio.CancelScope(deadline=until):
            while not self._outcomes:
                await self._wait_change()
            return self._next_outcome(call)
        raise self._late(timeout)

    def _late(self, timeout: float) -> RoundTimeout:
        return RoundTimeout(self._machine.round + 1, timeout, self._who_is_missing())

    def _check_vector(self, vector: Tensor, weight: float) -> None:
        is_right = (
            vector.dtype == torch.float32
            and vector.shape == (self.layout.num_elements,)
            and vector.is_contiguous()
            and vector.device.type == "cpu"
        )
        if not is_right:
            raise ConfigurationError(
                f"a group averages float32 [{self.layout.num_elements}] on the CPU, not "
                f"{str(vector.dtype).removeprefix('torch.')} {list(vector.shape)} on {vector.device}"
            )
        if not 0 <= weight <= MAX_WEIGHT:
            raise ConfigurationError(
                f"the weight of a vector is from 0 to {MAX_WEIGHT:g}, not {weight}"
            )

    def _withdraw(self) -> None:
        """The caller may write to its vector from here on."""
        self._vector = None
        now = trio.current_time()
        # What does without it goes on: a fetch, and a reduction of others' vectors.
        for token in [token for token in self._lent if token in self._scopes]:
            self._scopes[token].cancel()
            self._machine.failed(token, {self.peer_id: "its vector was withdrawn"}, now)
        self._machine.withdraw(now)
        self._act()

    def _who_is_missing(self) -> tuple[str, ...]:
        if self._machine.waits_for:
            return self._machine.waits_for
        waiting: set[str] = set()
        for token in self._scopes:
            waiting |= self._reductions.waiting_for(token)
        return tuple(sorted(waiting))

    async def _wait_change(self) -> None:
        if self._failure is not None:
            raise self._failure
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # What the machine is told

    def _is_of_group(self, peer_id: str) -> bool:
        return any(member.peer == peer_id for member in self._machine.members)

    def take(self, message: TensorMessage) -> None:
        """A message of the group's protocol has come."""
        assert isinstance(message.msg_type, TrainingMessage)
        assert message.from_peer is not None
        payload = KINDS[message.msg_type].decode(message.data)
        if self._is_over:
            return
        self._machine.receive(message.from_peer, payload, trio.current_time())
        self._act()

    def _lose(self, peer_id: str, reason: NeuroGridError) -> None:
        if self._is_of_group(peer_id) and not self._is_over:
            logger.info("lost %s: %s", peer_id, reason)
            self._machine.peer_lost(peer_id, trio.current_time())
            self._act()
            if self.is_leading:
                self._nursery.start_soon(self._look_whether_ended, peer_id)

    async def _look_whether_ended(self, peer_id: str) -> None:
        """Dial a lost member where it listened: where nobody does any more, its process has ended."""
        member = next((m for m in self._machine.members if m.peer == peer_id), None)
        direct = [a for a in self._addresses_of(peer_id) if "/tcp/" in a and "p2p-circuit" not in a]
        if member is None or not direct:
            return
        for address in direct:
            try:
                await self._exchange.host.connect(address)
            except PeerUnreachableError as exc:
                if not exc.is_refused:
                    return
            except NeuroGridError:
                return
            else:
                return
        logger.info("%s has ended", peer_id)
        self._machine.ended(member, trio.current_time())
        self._act()

    async def meet(self, peer_id: str) -> None:
        """Connect to a member, if it can be dialled: it may not know where this one is."""
        try:
            await self._messenger.reach(peer_id, is_dialled_by=self._is_dialled_by(peer_id))
        except NeuroGridError as exc:
            logger.info("%s cannot be reached yet: %s", peer_id, exc)

    def _is_dialled_by(self, peer_id: str) -> bool:
        """Whether another is the one to dial: the later member, which was told of the other when it joined."""
        order = {peer: place for place, peer in enumerate(self.members)}
        return order.get(peer_id, -1) > order.get(self.peer_id, len(order))

    async def measure(self) -> None:
        """Measure the bandwidth of this member, and tell it with what it tells."""
        meter = BandwidthMeter()
        was_busy, round_ = False, self.round
        while True:
            await trio.sleep(_MOMENT)
            is_busy = bool(self._scopes)
            if is_busy or was_busy:
                sent, received = map(self._carried, (Direction.SENT, Direction.RECEIVED))
                num_peers = len(self._machine.members) - 1
                meter.look(trio.current_time(), sent, received, num_peers=num_peers)
            if self.round != round_:
                round_ = self.round
                meter.end_round()
                self._machine.measure(meter.bandwidth or UNMEASURED)
            was_busy = is_busy

    def _carried(self, direction: Direction) -> tuple[int, int]:
        """Chunks and means that have gone by in a direction since the beginning: messages, and bytes."""
        kinds = (TrainingMessage.CHUNK, TrainingMessage.MEAN)
        told = [self._exchange.counters.total(direction, msg_type=kind) for kind in kinds]
        return sum(each.num_messages for each in told), sum(each.num_bytes for each in told)

    async def run(self) -> None:
        """Tell the machine the time, and deliver what is decided, until the nursery ends."""
        self._nursery.start_soon(self._deliver_all)
        self._act()
        while True:
            await trio.sleep(self.settings.heartbeat / _TICKS)
            self._machine.tick(trio.current_time())
            self._act()

    # What the machine wants

    def _act(self) -> None:
        for action in self._machine.drain():
            self._do(action)
        leader = self._machine.leader
        if leader is not None and leader != self._led_by:
            self._led_by = leader
            is_own = leader == self.peer_id
            logger.info("averaging is led by %s", "this member" if is_own else leader)

    def _do(self, action: Action) -> None:
        if isinstance(action, Send):
            self._messenger.post(action.to, action.message)
        elif isinstance(action, Reduce):
            self._reduce(action.plan)
        elif isinstance(action, Fetch):
            decision, holders = action.decision, action.holders
            self._begin(action.token, lambda: self._fetch(decision, holders))
        elif isinstance(action, Stop):
            if (scope := self._scopes.pop(action.token, None)) is not None:
                scope.cancel()
        elif isinstance(action, Decided):
            self._note_decision(action)
        elif isinstance(action, Removed):
            self._fail(NotAMemberError(f"this peer is no member any more: {action.reason}"))

    def _fail(self, error: GroupError) -> None:
        self._failure = self._failure or error
        self._note_change()

    def _drop_out(self, error: GroupError) -> None:
        """This member cannot go on: its owner is told, and the others need not wait for it."""
        self._fail(error)
        self._machine.leave(trio.current_time(), str(error))
        self._act()

    def _reduce(self, plan: ReductionPlan) -> None:
        values = self._vector if self.peer_id in plan.members else None
        if values is not None:
            self._lent[plan.reduction] = self._last_lent = self._lent_call = self._num_calls
        self._begin(plan.reduction, lambda: self._carry_out(plan, values))

    def _begin(self, token: int, work: Callable[[], Awaitable[Result | None]]) -> None:
        """Have a task do what the machine has begun; it may be stopped before it has its first turn."""
        scope = self._scopes[token] = trio.CancelScope()
        self._nursery.start_soon(self._work, token, scope, work)

    async def _carry_out(self, plan: ReductionPlan, values: Tensor | None) -> Result | None:
        lost: dict[str, str] = {}

        async def reach(peer_id: str) -> None:
            try:
                await self._messenger.reach(
                    peer_id,
                    patience=self.settings.grace / 2,
                    is_dialled_by=self._is_dialled_by(peer_id),
                )
            except NeuroGridError as exc:
                lost[peer_id] = str(exc)

        async with trio.open_nursery() as nursery:
            for peer_id in plan.sends_to(self.peer_id):
                nursery.start_soon(reach, peer_id)
        if lost:
            raise MembersLostError(lost, {})
        return await self._reductions.reduce(plan, values, timeout=self.settings.attempt_timeout)

    async def _fetch(self, decision: Decision, holders: Sequence[str]) -> Result:
        others = [peer_id for peer_id in holders if peer_id != self.peer_id]
        for peer_id in others:
            try:
                await self._messenger.reach(peer_id)
            except NeuroGridError as exc:
                logger.debug("cannot fetch from %s: %s", peer_id, exc)
        return await self._reductions.fetch(
            decision.digest,
            others,
            decision.num_elements,
            decision.chunk_elements,
            decision.codec,
            timeout=self.settings.attempt_timeout,
        )

    async def _work(
        self, token: int, scope: trio.CancelScope, work: Callable[[], Awaitable[Result | None]]
    ) -> None:
        """Do what the machine has begun, and tell it what came of it."""
        lost: Mapping[str, str] | None = None
        result: Result | None = None
        try:
            with scope:
                # The vector may be another one by now.
                await trio.lowlevel.checkpoint_if_cancelled()
                result = await work()
        except MembersLostError as exc:
            logger.info("a round is tried anew: %s", exc)
            lost = exc.lost
        except ResultUnavailableError as exc:
            lost = exc.failures
        except NeuroGridError as exc:
            logger.warning("a round failed here: %s", exc)
            lost = {self.peer_id: str(exc)}
        call = self._lent.pop(token, None)
        if scope.cancelled_caught or self._scopes.get(token) is not scope:
            self._scopes.pop(token, None)
            return
        del self._scopes[token]
        now = trio.current_time()
        if result is not None:
            if call is not None:
                self._computed[result.digest] = call
            self._hold(result)
            self._machine.reduced(token, result.digest, now)
        else:
            if lost is None:
                lost = {self.peer_id: "it has only a part"}
            self._machine.failed(token, lost, now)
        self._act()

    def _hold(self, result: Result) -> None:
        """Keep a result for those that will ask for it, and not those before."""
        self._results[result.digest] = result
        self._reductions.hold(result)
        # What is to be delivered here stays besides: a newcomer that fetches the state is some rounds behind.
        spare = [held for held in self._results if not self._undelivered_digests[held]]
        for digest in spare[: max(0, len(self._results) - self._num_held)]:
            self._release(digest)
        while len(self._results) > self._num_held + self._max_backlog:
            self._release(next(iter(self._results)))

    @property
    def _max_backlog(self) -> int:
        return max(_MAX_BACKLOG, self._num_held) if self._machine.observes else _MAX_BACKLOG

    def _release(self, digest: bytes) -> None:
        del self._results[digest]
        self._reductions.release(digest)

    def _release_old(self) -> None:
        """Hold no longer what was not decided, and what all members had computed when it was."""
        kept = {*self._wanted, *self._undelivered_digests, self._last_digest}
        for digest in [digest for digest in self._results if digest not in kept]:
            self._release(digest)

    # What was decided

    def _note_decision(self, action: Decided) -> None:
        decision = action.decision
        stayed = {*self._last_members} & {*decision.members}
        self._last_members = decision.members
        if decision.is_round:
            self._vector = None
            have_all = {member.peer for member in stayed} <= {*decision.holders}
            self._wanted.append(b"" if have_all else decision.digest)
            self._last_digest = decision.digest
            call = self._computed.get(decision.digest, self._last_lent)
            self._computed.clear()
            self._last_lent = 0
            if self._failure is None:
                self._undelivered_digests[decision.digest] += 1
                self._undelivered.send_nowait((action, call))
            self._release_old()
        self._messenger.keep(member.peer for member in decision.members)
        for peer_id, address in zip(decision.newcomers, decision.addresses, strict=True):
            if peer_id != self.peer_id:
                self._messenger.note_addresses(peer_id, (address,))
        for member, message in list(self._joining.items()):
            if member in decision.members:
                del self._joining[member]
                self._nursery.start_soon(self._welcome, message)
        self._note_change()

    async def _deliver_all(self) -> None:
        async for action, call in self._undelivered_end:
            decision = action.decision
            await self._may_deliver.wait()
            if decision.round <= self._skip_to:
                self._note_delivered(decision)
                continue
            try:
                result = self._results.get(decision.digest) or await trio.to_thread.run_sync(
                    self._reductions.held, decision.digest
                )
                if result is None:
                    result = await self._fetch(decision, decision.holders)
                    self._hold(result)
                self._note_delivered(decision)
            except NeuroGridError as exc:
                self._drop_out(
                    NotAMemberError(f"the outcome of round {decision.round} is lost here: {exc}")
                )
                return
            if len(self._outcomes) >= self._max_backlog:
                self._drop_out(
                    NotAMemberError(
                        f"{self._max_backlog} rounds were decided since this member averaged last"
                    )
                )
                return
            outcome = Outcome(
                decision.round,
                result.values,
                decision.contributors,
                decision.weights,
                action.has_contributed,
            )
            self._outcomes.append((outcome, call))
            del result, outcome  # whose values are the caller's, and may be large
            self._note_change()

    def _note_delivered(self, decision: Decision) -> None:
        self._undelivered_digests[decision.digest] -= 1
        if not self._undelivered_digests[decision.digest]:
            del self._undelivered_digests[decision.digest]
            if decision.digest in self._results:
                self._results[decision.digest] = None
        self._release_old()
        self._note_change()

    # Joining

    async def _take_join(self, message: TensorMessage) -> None:
        assert message.from_peer is not None
        join = Join.decode(message.data)
        if join.layout != self.layout.digest:
            raise RequestRefusedError(
                f"the group averages other tensors: names, shapes or their order differ "
                f"({self.layout.num_elements} elements here, {join.num_elements} there)",
                code=ErrorCode.CONFIG_INVALID,
            )
        member = Member(message.from_peer, join.incarnation)
        if not self._machine.is_leading:
            self._machine.is_asked_by(member, trio.current_time())
            self._act()
            await self._redirect(message)
            return
        self._messenger.note_addresses(member.peer, join.addresses)
        if member in self._machine.members:
            await self._welcome(message)  # the first answer was lost
            return
        if not self._machine.admit(member, trio.current_time(), join.addresses):
            raise RequestRefusedError(
                "others are to join before",
                code=ErrorCode.BUSY,
                retry_after=1.0,
                is_expected=True,
            )
        for other in [other for other in self._joining if other.peer == member.peer]:
            del self._joining[other]  # it asks anew
        self._joining[member] = message
        self._act()

    async def _redirect(self, message: TensorMessage) -> None:
        leader = self._machine.leader
        if leader is None or leader == self.peer_id:
            raise RequestRefusedError(
                "the group has no leader at the moment",
                code=ErrorCode.BUSY,
                retry_after=1.0,
                is_expected=True,
            )
        await self._answer_join(message, (), (), (leader,))

    async def _welcome(self, message: TensorMessage) -> None:
        try:
            await self._answer_join(message, *self._machine.told_to_joiner(), self.members)
        except TransportError as exc:
            logger.debug("%s joined, and has gone: %s", message.from_peer, exc)

    async def _answer_join(
        self,
        message: TensorMessage,
        before: Sequence[Member],
        decisions: tuple[bytes, ...],
        peer_ids: Sequence[str],
    ) -> None:
        places = self._places_of(peer_ids)
        answer = Joined(
            term=self._machine.term,
            decisions=decisions,
            settings=self.settings.encode(),
            peers=tuple(peer_id for peer_id, _ in places),
            addresses=tuple(address for _, address in places),
            before=tuple(member.peer for member in before),
            incarnations=tuple(member.incarnation for member in before),
        )
        await self._exchange.send(
            message.from_peer or "",
            TensorMessage(
                TrainingMessage.JOINED, request_id=message.request_id, data=answer.encode()
            ),
        )

    def _places_of(self, peer_ids: Sequence[str]) -> list[tuple[str, str]]:
        """Peer ids and addresses, as many as one message holds: one address of each member before a second of any."""
        places: list[tuple[str, str]] = []
        room = _PLACES_BYTES
        known = [(peer_id, self._addresses_of(peer_id)) for peer_id in peer_ids]
        for number in range(max((len(addresses) for _, addresses in known), default=0)):
            for peer_id, addresses in known:
                if number < len(addresses):
                    room -= len(peer_id) + len(addresses[number]) + _PLACE_OVERHEAD
                    if room < 0:
                        return places
                    places.append((peer_id, addresses[number]))
        return places

    def _addresses_of(self, peer_id: str) -> tuple[str, ...]:
        host = self._exchange.host
        if peer_id == host.peer_id:
            return host.addresses
        return self._messenger.addresses_of(peer_id)

    # The end

    async def leave(self) -> None:
        """Go, and let the others know: what waits for this member goes on without it."""
        self._machine.leave(trio.current_time(), "it has left")
        self._act()
        with trio.move_on_after(_GOODBYE_TIMEOUT):
            while self._machine.removed is None:
                await self._changed.wait()
            await self._messenger.flush()

    def end(self) -> None:
        """Do nothing more, whatever comes: its streams end after its tasks do."""
        self._is_over = True

    def let_go(self) -> None:
        """Have nothing more of vectors: the host, which may go on for long, knows a group that has ended, too."""
        self._vector = None
        self._outcomes.clear()
        self._results.clear()
        self._states.let_go()
        self._reductions.let_go()


def _draw() -> int:
    return secrets.randbits(63) + 1


@asynccontextmanager
async def open_group(
    host: Host,
    layout: Layout,
    *,
    join: Sequence[str] = (),
    settings: GroupSettings | None = None,
    bandwidth: float | None = None,
    observes: bool = False,
    after_round: int = 0,
    timeout: float = 60.0,
) -> AsyncIterator[Group]:
    """Found a group, or join one, for as long as the block lasts.

    Args:
        host: a host has one group at a time.
        layout: the tensors that are averaged; the same for all members.
        join: full multiaddrs of members, any of them; empty to found a group.
        settings: of a group that is founded; those who join are told them.
        bandwidth: bytes a second that this member can send and receive; 0 to reduce nothing, as for a peer that nobody
            can dial. None to measure it in the rounds.
        observes: rounds need not wait for this member until it has contributed once.
        after_round: of a group that is founded, the round that has been before its first, for one that goes on.
        timeout: seconds for joining.

    Raises:
        GroupError: nobody at these addresses leads to the group, or it was not joined in time.
        PeerRefusedError: the group refuses this peer: it averages other tensors.
        ConfigurationError: the settings name a codec or an aggregator that there is not, or the tensors have no
            elements.
    """
    if not layout.num_elements:
        raise ConfigurationError("the tensors have no elements: there is nothing to average")
    is_measured = bandwidth is None and bool(host.addresses)
    exchange = Exchange(host, training_table())
    group: Group | None = None

    def take(message: TensorMessage) -> None:
        if group is not None:  # else it will be told again
            group.take(message)

    def put_off(message: TensorMessage) -> None:
        raise RequestRefusedError(
            "this peer is to join a group itself",
            code=ErrorCode.BUSY,
            retry_after=1.0,
            is_expected=True,
        )

    for code in KINDS:
        exchange.on_message(code, take)
    exchange.on_message(TrainingMessage.JOIN, put_off, when=lambda message: group is None)
    incarnation = _draw()
    me = Member(host.peer_id, incarnation)
    if bandwidth is None:
        bandwidth = UNMEASURED if host.addresses else 0.0
    with unwrap_errors(), ExitStack() as at_the_end:
        async with aclosing(exchange), trio.open_nursery() as nursery:
            if join:
                request = Join(
                    incarnation, layout.digest, layout.num_elements, host.addresses[:16], bandwidth
                )
                failures: dict[str, str] = {}
                with trio.move_on_after(timeout) as scope:
                    leader, joined = await join_group(exchange, join, request, failures)
                if scope.cancelled_caught:
                    why = "; ".join(dict.fromkeys(failures.values())) or "no answer"
                    raise GroupError(
                        f"no group was joined within {timeout:g} s at {', '.join(join)}: {why}"
                    )
                settings = GroupSettings.decode(joined.settings)
                before = tuple(map(Member, joined.before, joined.incarnations))
                history = read_decisions(joined.decisions, before)
                term = joined.term
                places = list(zip(joined.peers, joined.addresses, strict=True))
            else:
                settings = settings or GroupSettings()
                before, history = (), [Decision(1, after_round, (me.peer,), (me.incarnation,))]
                leader, term, places = me.peer, 1, []
            block = _block(settings)
            machine = GroupMachine(
                me,
                settings,
                Shape(layout.num_elements, block),
                history,
                term=term,
                leader=leader,
                now=trio.current_time(),
                draw=_draw,
                bandwidth=bandwidth,
                observes=observes,
                before=before,
            )
            messenger = Messenger(exchange, nursery, send_timeout=settings.grace)
            for peer_id, address in places:
                if peer_id != me.peer:
                    messenger.note_addresses(peer_id, (address,))
            group = Group(exchange, nursery, machine, messenger, layout)
            at_the_end.callback(group.let_go)
            nursery.start_soon(group.run)
            if is_measured:
                nursery.start_soon(group.measure)
            for peer_id in dict(places):
                if peer_id != me.peer:
                    nursery.start_soon(group.meet, peer_id)
            try:
                yield group
            except trio.Cancelled:
                raise  # the host ends, too: peers see that without a word
            except BaseException:
                await group.leave()
                raise
            else:
                await group.leave()
            finally:
                group.end()
                nursery.cancel_scope.cancel()


def _block(settings: GroupSettings) -> int:
    """Elements that chunks are cut at multiples of.

    Raises:
        ConfigurationError: a codec or an aggregator of the settings is not known here, or needs whole vectors.
    """
    if isinstance(parse_aggregator(settings.aggregator), DistanceAggregator):
        raise ConfigurationError(
            f"{settings.aggregator} needs the distances of whole vectors, and a group aggregates chunk by chunk: "
            "take mean, trimmed_mean or median"
        )
    blocks = [parse_codec(name).block for name in (settings.codec, settings.result_codec)]
    return max(blocks)
