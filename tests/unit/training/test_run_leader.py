"""The leader of a run, on a network in memory: whom it starts with what, and what it has kept when the run is over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import trio

from neurogrid.errors import ConfigurationError, RequestRefusedError
from neurogrid.p2p import TensorMessage
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.memory import MemoryHost, MemoryNetwork, open_memory_network
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.averaging.groups import Group, open_group
from neurogrid.training.averaging.groups import group as groups
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.leading import leader as leading
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.leader import GroupLostError, Leader
from neurogrid.training.leading.progress import QuietProgress
from neurogrid.training.runs.audit import audit
from neurogrid.training.runs.entries import Entry, ResumedEntry, RunEntry
from neurogrid.training.runs.machine import Rules, RunMachine
from neurogrid.training.runs.outer_state import OuterState
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.runs.state import Occupant, Phase, RunState
from neurogrid.training.wire.runs import (
    Ask,
    Dismiss,
    Offer,
    Order,
    Renew,
    Renewed,
    Report,
    RunMessage,
    Start,
    Started,
    run_table,
)

RUN_ID = bytes(range(16))
SIZES = (40, 40)
LAYOUT = Layout(("a",), ((40,),))
DEADLINE = 60
GRACE = 0.3


class Progress(QuietProgress):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class Figures:
    """Of rounds: nobody looks at them here."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Kept:
    """In the place of a keeper.

    Attributes:
        applied_rounds: what it was told of: the round that is in the weights, and what the run did.
        weights: those that it was to make a checkpoint of, as the group was lost.
    """

    def __init__(self) -> None:
        self.figures, self.seconds = Figures(), 0.0
        self.entries: list[Entry] = [RunEntry(RUN_ID, "leader", bytes(32), bytes(32), SIZES, 1)]
        self.applied_rounds: list[tuple[int, Phase]] = []
        self.weights: list[int] = []

    def write(self, entries: list[Entry]) -> None:
        self.entries += entries

    async def wait_room(self) -> None: ...

    def applied(self, outer: OuterState, state: RunState, *args: Any, **kwargs: Any) -> None:
        self.applied_rounds.append((outer.round, state.phase))

    async def keep_state(self, outer: OuterState, state: RunState) -> None:
        self.weights.append(outer.round)


class Copying:
    """A leader without a deputy."""

    term = 0

    def tell_all(self, started: Any) -> None: ...

    async def run(self) -> None:
        await trio.sleep_forever()

    async def settle(self) -> None: ...

    async def wait_open(self) -> None: ...

    async def wait_heard(self) -> None: ...


class Sources:
    """The leader has all data."""

    def is_complete(self) -> bool:
        return True

    async def wait(self, timeout: float) -> None: ...

    def look(self) -> None: ...

    def takes(self, peer_id: str, numbers: Any) -> None: ...

    def addresses_for(self, peer_id: str, numbers: Any) -> tuple[str, ...]:
        return ()

    def end(self) -> None: ...


class Changes:
    def take(self) -> bool:
        return False


@dataclass
class Worker:
    """A worker as far as its leader sees it: it offers, begins, joins the group, and contributes when it is told to.

    Attributes:
        said: what it was asked and told, in order.
        refusals: of the next Starts.
        ask_seconds: that it takes to answer an Ask.
        is_busy: another run trains there.
        joins: it takes part once it was started.
        before: the incarnation of a part that it has in a group of before; it reports that until it is dismissed.
        group: that it is a member of.
    """

    host: MemoryHost
    exchange: Exchange
    nursery: trio.Nursery
    scope: trio.CancelScope
    leader: str = ""
    said: list[Any] = field(default_factory=list)
    refusals: list[RequestRefusedError] = field(default_factory=list)
    ask_seconds: float = 0.0
    is_busy: bool = False
    joins: bool = True
    before: int = 0
    group: Group | None = None
    order: Order | None = None

    def listen(self) -> None:
        for code, handler in (
            (RunMessage.ASK, self._on_ask),
            (RunMessage.START, self._on_start),
            (RunMessage.RENEW, self._on_renew),
        ):
            self.exchange.on_message(code, handler)
        self.exchange.on_message(RunMessage.ORDER, self._on_order)
        self.exchange.on_message(RunMessage.DISMISS, self._on_dismiss)

    async def come(self, leader: MemoryHost) -> None:
        self.leader = leader.peer_id
        await self.host.connect(leader.addresses[0])
        await self.exchange.open(self.leader)

    def starts(self) -> list[Start]:
        return [each for each in self.said if isinstance(each, Start)]

    async def report(self, **changes: Any) -> None:
        report = Report(**{"run": RUN_ID, "seat": 0, "state": "ready", **changes})
        message = TensorMessage(RunMessage.REPORT, data=report.encode())
        await self.exchange.send(self.leader, message)

    async def contribute(self, *, weight: float | None = None) -> None:
        """Contribute the first work, by its weight or another."""
        while self.order is None or not self.order.works:
            await trio.sleep(0.01)
        assert self.group is not None
        work = self.order.works[0]
        self.group.observe(False)
        vector = torch.ones(LAYOUT.num_elements)
        weight = float(work.share) if weight is None else weight
        await self.group.average(vector, weight=weight, timeout=DEADLINE)
        while self.order is not None and self.order.works[:1] == (work,):
            await trio.sleep(0.01)

    async def _answer(self, message: TensorMessage, code: Any, payload: Any) -> None:
        answer = TensorMessage(code, request_id=message.request_id, data=payload.encode())
        await self.exchange.send(sender_of(message), answer)

    async def _on_ask(self, message: TensorMessage) -> None:
        self.said.append(Ask.decode(message.data))
        await trio.sleep(self.ask_seconds)
        if self.is_busy:
            raise RequestRefusedError("another run trains here", code=ErrorCode.BUSY)
        await self._answer(message, RunMessage.OFFER, Offer(1 + len(self.said), 0.5))

    async def _on_start(self, message: TensorMessage) -> None:
        start = Start.decode(message.data)
        self.said.append(start)
        if self.refusals:
            raise self.refusals.pop(0)
        await self._answer(message, RunMessage.STARTED, Started(10.0))
        if not self.before and self.joins:
            self.nursery.start_soon(self._take_part, start)

    async def _on_renew(self, message: TensorMessage) -> None:
        Renew.decode(message.data)
        await self._answer(message, RunMessage.RENEWED, Renewed(10.0))

    def _on_order(self, message: TensorMessage) -> None:
        self.order = Order.decode(message.data)

    def _on_dismiss(self, message: TensorMessage) -> None:
        self.said.append(Dismiss.decode(message.data))
        self.before = 0

    async def _take_part(self, start: Start) -> None:
        await self.report(state="starting")
        async with open_group(
            self.host, LAYOUT, join=start.group, observes=True, timeout=DEADLINE
        ) as group:
            self.group = group
            while True:
                await self.report(incarnation=group.incarnation, seat=start.seat)
                await trio.sleep(0.1)


@dataclass
class World:
    network: MemoryNetwork
    nursery: trio.Nursery
    host: MemoryHost
    leader: Leader
    kept: Kept
    progress: Progress

    async def worker(self, *, before: int = 0) -> Worker:
        worker: Worker = await self.nursery.start(self._run_worker, before)
        return worker

    async def _run_worker(self, before: int, task_status: trio.TaskStatus[Worker]) -> None:
        with trio.CancelScope() as scope:
            async with (
                self.network.open_host(identity=Identity.generate()) as host,
                trio.open_nursery() as nursery,
            ):
                exchange = Exchange(host, run_table(), role="worker")
                worker = Worker(host, exchange, nursery, scope, before=before)
                worker.listen()
                task_status.started(worker)
                await trio.sleep_forever()

    def problems(self) -> tuple[str, ...]:
        """What the audit of the journal says."""
        return audit(self.kept.entries).problems


@asynccontextmanager
async def world(
    *,
    before: dict[int, Occupant] | None = None,
    min_members: int = 1,
    max_members: int = 8,
    **settings: Any,
) -> AsyncIterator[World]:
    """A leader that is not running yet.

    Args:
        before: who sits where by its journal, after no round.
        settings: of the leader.
    """
    text = (
        '[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\nhours = 9\n'
        f'[inner]\nschedule = "constant"\n[members]\nmin = {min_members}\n[outer]\nmethod = "diloco"\n'
        f"grace = {GRACE}\n"
    )
    run = parse_run_file(text)
    rules = Rules(min_members, max_members, batch_samples=2, steps=1, projected=False)
    machine = RunMachine(rules, RunState(SIZES, seed=1))
    kept, progress = Kept(), Progress()
    for seat, occupant in (before or {}).items():
        machine.reserve(occupant.peer)
        machine.joined(seat, occupant, "")
    kept.write(machine.drain())
    facts = RunFacts(RUN_ID, run, run.text(), "{}", bytes(32), LAYOUT.num_elements, 0)
    state = OuterState(LAYOUT, torch.zeros(LAYOUT.num_elements), lr=1.0, momentum=0.0)
    with trio.fail_after(DEADLINE):
        async with AsyncExitStack() as stack:
            network = await stack.enter_async_context(open_memory_network())
            host = await stack.enter_async_context(network.open_host())
            exchange = Exchange(host, run_table(), role="coordinator")
            leader = Leader(
                host,
                exchange,
                facts,
                machine,
                state,
                kept,  # type: ignore[arg-type]
                Sources(),  # type: ignore[arg-type]
                Changes(),  # type: ignore[arg-type]
                Copying(),  # type: ignore[arg-type]
                progress,
                total_steps=0,
                **{"wait": 30.0, **settings},
            )
            async with trio.open_nursery() as nursery:
                yield World(network, nursery, host, leader, kept, progress)
                nursery.cancel_scope.cancel()


async def until(condition: Any) -> None:
    while not condition():
        await trio.sleep(0.01)


async def test_the_last_round_is_kept_when_it_is_known_to_be_it() -> None:
    """A member that is gone leaves a work that no round has: only when it is no member any more is the run over."""
    async with world(min_members=2) as told:
        machine = told.leader.machine
        slow, other = await told.worker(), await told.worker()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(told.leader.run)
            await slow.come(told.host)
            await other.come(told.host)
            await until(lambda: machine.state.phase is Phase.TRAINING)
            machine.stop("its hours are over")
            # Its works are in no round: it says nothing more, and is lost after the last one.
            await other.contribute()
            await other.contribute()
            await until(lambda: (2, Phase.FINISHING) in told.kept.applied_rounds)
            slow.scope.cancel()
        assert machine.state.round == 2
        assert told.kept.applied_rounds[-2:] == [(2, Phase.FINISHING), (2, Phase.ENDED)]
        assert told.problems() == ()


async def test_a_member_that_leads_the_group_is_told_who_has_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever is first of them does not make a round alone because the other has not begun."""
    async with world(min_members=2) as told:
        workers = [await told.worker(), await told.worker()]
        ids = {worker.host.peer_id for worker in workers}
        told.nursery.start_soon(told.leader.run)
        for worker in workers:
            await worker.come(told.host)
        await until(lambda: all(worker.order and worker.order.works for worker in workers))
        assert not any(worker.order.expects for worker in workers if worker.order)

        leads = workers[1]
        # As it is once that one has taken over.
        monkeypatch.setattr(Group, "leader", property(lambda group: leads.host.peer_id))
        await until(lambda: leads.order is not None and set(leads.order.expects) == ids)
        assert workers[0].order is not None
        assert workers[0].order.expects == ()


async def test_an_optimiser_is_given_until_somebody_has_the_seat() -> None:
    """A Start that is refused, or a member that fails before it sits, does not make the run go on with a new one."""
    blob = b"\x07" * 32
    async with world(before={0: Occupant("gone", 5)}, saved={0: blob}, is_anew=True) as told:
        worker = await told.worker()
        worker.refusals = [
            RequestRefusedError("no such offer", code=ErrorCode.UNAUTHORIZED, is_expected=True)
        ]
        told.nursery.start_soon(told.leader.run)
        await worker.come(told.host)
        await until(lambda: told.leader.machine.state.occupied())
        assert [(each.seat, each.state) for each in worker.starts()] == [(0, blob)] * 2


@pytest.mark.parametrize(("seconds", "best"), [((0.45, 0.45), {0, 1}), ((0.0, 0.45), {0})])
async def test_a_seat_is_given_to_who_answers_late(
    seconds: tuple[float, float], best: set[int]
) -> None:
    """Where there are more workers than seats, those that answer soon come first; else none stays vacant."""
    async with world(max_members=1) as told:
        workers = [await told.worker(), await told.worker()]
        for worker, slow in zip(workers, seconds, strict=True):
            worker.ask_seconds = slow
            await worker.come(told.host)
        told.nursery.start_soon(told.leader.run)
        with trio.fail_after(10):
            await until(told.leader.machine.state.occupied)
        await trio.sleep(1.0)
        (started,) = [number for number, each in enumerate(workers) if each.starts()]
        assert started in best


async def test_a_seat_that_was_kept_for_who_trains_elsewhere_is_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was started, its lease ended before it took part, and another leader has it now; it is here all the same."""
    monkeypatch.setattr(leading, "_RETRY", 0.1)
    async with world(max_members=1) as told:
        gone, other = await told.worker(), await told.worker()
        gone.joins = False
        told.nursery.start_soon(told.leader.run)
        await gone.come(told.host)
        await until(lambda: told.leader._started_peers())
        gone.is_busy = True
        told.leader._lease_lost(gone.host.peer_id)
        await other.come(told.host)
        with trio.fail_after(10):
            await until(told.leader.machine.state.occupied)
        assert [len(each.starts()) for each in (gone, other)] == [1, 1]


async def test_who_knows_no_such_run_is_told_of_and_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leading, "_RETRY", 0.1)
    async with world() as told:
        worker = await told.worker()
        worker.refusals = 9 * [
            RequestRefusedError("[outer] has no key 'way'", code=ErrorCode.CONFIG_INVALID)
        ]
        told.nursery.start_soon(told.leader.run)
        await worker.come(told.host)
        await until(lambda: told.progress.warnings)
        await trio.sleep(1.0)
        assert len(worker.starts()) == 1
        [warning] = told.progress.warnings
        assert warning.endswith("takes no part yet: [outer] has no key 'way'")
        assert told.leader.machine.num_free == 8


@pytest.mark.parametrize("reports_first", [True, False])
async def test_who_is_in_a_group_of_before_leaves_it(
    monkeypatch: pytest.MonkeyPatch, reports_first: bool
) -> None:
    """By a Start alone it would stay there; and it need not have said that it is there."""
    monkeypatch.setattr(leading, "_SEARCH", 0.1)
    async with (
        world(before={0: Occupant("old", 5)}) as told,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(told.leader.run)
        await until(lambda: ResumedEntry(0) in told.kept.entries)
        worker = await told.worker(before=5)
        await worker.come(told.host)
        if reports_first:
            await worker.report(incarnation=5)
        await until(lambda: told.leader.machine.state.occupied())
        kinds = [type(each) for each in worker.said]
        assert kinds.index(Dismiss) < kinds.index(Start)
        assert kinds[kinds.index(Start) :] == [Start]
        nursery.cancel_scope.cancel()


async def test_a_round_of_no_works_is_gone_back_from() -> None:
    """A member that contributes with a weight of its own choice does not make the journal unsound."""
    async with world() as told:
        worker = await told.worker()
        async with trio.open_nursery() as nursery:

            async def lead() -> None:
                with pytest.raises(GroupLostError, match="round 2 is of no work"):
                    await told.leader.run()
                await told.leader.keep_state()
                nursery.cancel_scope.cancel()

            nursery.start_soon(lead)
            await worker.come(told.host)
            await worker.contribute()
            await worker.contribute(weight=0.5)
        assert told.leader.machine.state.round == 1
        assert told.leader.machine.state.ban_of(worker.host.peer_id, 2e9 - 3e8) is not None
        assert told.problems() == ()


async def test_a_report_of_which_nothing_can_be_written_down_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk is not the fault of whoever reports, and nobody is to act on what is in no journal."""
    monkeypatch.setattr(groups, "_GOODBYE_TIMEOUT", 0.2)
    async with world() as told:

        def full(entries: list[Entry]) -> None:
            raise ConfigurationError("cannot write the journal: No space left on device")

        monkeypatch.setattr(told.kept, "write", full)
        worker, ended = await told.worker(), trio.Event()

        async def lead() -> None:
            with pytest.raises(ConfigurationError, match="No space left"):
                await told.leader.run()
            ended.set()

        told.nursery.start_soon(lead)
        await worker.come(told.host)
        with trio.fail_after(20):
            await ended.wait()
        assert worker.order is None
        assert worker.exchange.hello_of(told.host.peer_id) is not None
