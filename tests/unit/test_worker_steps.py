"""Sessions are dropped, cancelled and rebuilt at every step of a running batch, and nobody else notices.

Real stages; the torch thread is a gate that lets one call through when the test says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise, permutations
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import trio
import trio.testing
from stage_families import held_model

from neurogrid.errors import RequestRefusedError
from neurogrid.inference.sessions.passes import forward
from neurogrid.inference.sessions.step_queue import EARLY_TIMEOUT, WorkerSteps
from neurogrid.inference.sessions.table import Session, SessionTable
from neurogrid.model.caches.cache import StageCache
from neurogrid.p2p.wire import ErrorCode
from neurogrid.worker.held_model import HeldModel
from neurogrid.worker.settings import WorkerSettings
from neurogrid.worker.state import WorkerState

NUM_TOKENS, PROMPT, CHUNK = 32, 20, 8
NUM_LAYERS = 2
# Relative to the largest element: sums of other shapes have another order.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def model(request: pytest.FixtureRequest) -> HeldModel:
    return held_model(request.param, NUM_LAYERS)


class Worker:
    """The steps of a worker, and sessions that extend themselves."""

    def __init__(
        self, model: HeldModel, nursery: trio.Nursery, clock: trio.testing.MockClock
    ) -> None:
        self.clock = clock
        self.model = model
        self.nursery = nursery
        self.may_run = trio.Semaphore(0)
        self.calls: list[list[StageCache]] = []
        self.is_running = False
        settings = WorkerSettings(prefill_chunk=CHUNK)
        thread = SimpleNamespace(run=self._run_torch, run_briefly=self._run_torch)
        state = SimpleNamespace(settings=settings, torch_thread=thread)
        self.steps = WorkerSteps(cast(WorkerState, state))
        self.table = SessionTable(on_drop=self.steps.withdraw)
        self.guests: list[Guest] = []
        self.batch: tuple[int, ...] = ()  # with which they come
        self.may_go = trio.Event()
        self.may_go.set()
        nursery.start_soon(self.steps.run)

    async def _run_torch(self, call: partial[Any]) -> Any:
        steps = call.args[0] if call.args else None
        if isinstance(steps, list):
            self.calls.append([step.cache for step in steps])
            with trio.CancelScope(shield=True):  # as torch, which cannot be interrupted
                self.is_running = True
                await self.may_run.acquire()
                self.is_running = False
        return call()

    async def next_call(self) -> None:
        """Let the call that is under way end, and the next one begin."""
        self.may_run.release()
        await self.settle()

    async def settle(self) -> None:
        """Let everything happen that can."""
        await trio.testing.wait_all_tasks_blocked()

    async def gather(self) -> None:
        """Let everybody come as one batch."""
        self.may_go = trio.Event()
        while self.is_running:
            await self.next_call()
        self.batch = (1, sum(not guest.has_ended for guest in self.guests))
        self.may_go.set()
        await self.settle()
        self.batch = ()

    async def open(self, seed: int, prompt: int) -> Guest:
        guest = Guest(self, seed, prompt)
        self.guests.append(guest)
        self.nursery.start_soon(guest.go_on)
        await self.settle()
        return guest


class Guest:
    """One session: a prompt, then one token after the other, each compared with one go over all of them."""

    def __init__(self, worker: Worker, seed: int, prompt: int) -> None:
        self.worker, self.prompt = worker, prompt
        model = worker.model
        generator = torch.Generator().manual_seed(seed)
        self.hidden_BTD = torch.randn(1, NUM_TOKENS, model.hidden_size, generator=generator)
        with torch.inference_mode():
            self.expected_BTD = self._run(model.stage.new_cache())
        self.scope = trio.CancelScope()
        self.error: RequestRefusedError | None = None
        self.has_ended = False
        self.restart()

    def _run(self, cache: StageCache) -> torch.Tensor:
        model = self.worker.model
        return forward(model, self.hidden_BTD, start=0, stop=NUM_LAYERS, position=0, cache=cache)

    def restart(self) -> None:
        """Another session for the same tokens, as after a failure."""
        model = self.worker.model
        self.session = Session(
            session_id=id(self),
            owner="coordinator",
            model=model,
            start=0,
            stop=NUM_LAYERS,
            max_length=NUM_TOKENS,
            cache=model.stage.new_cache(),
        )
        self.worker.table.add(self.session)

    async def go_on(self) -> None:
        with self.scope:
            try:
                # An activation of a session that is over is refused before it gets to the steps.
                while self.session in self.worker.table and self.session.length < NUM_TOKENS:
                    position = self.session.length
                    stop = position + 1 if position else self.prompt
                    hidden_BTD = self.hidden_BTD[:, position:stop]
                    await self.worker.may_go.wait()
                    extended = await self.worker.steps.extend(
                        self.session, position, hidden_BTD, self.worker.batch
                    )
                    expected = self.expected_BTD[:, position:stop]
                    off = (extended.hidden - expected).abs().max()
                    assert off <= TOLERANCE * self.expected_BTD.abs().max()
                    self.prompt = max(self.prompt, stop)
            except RequestRefusedError as exc:
                self.error = exc
        self.has_ended = True


@pytest.fixture
def clock() -> trio.testing.MockClock:
    return trio.testing.MockClock()


@pytest.fixture
@asynccontextmanager
async def worker(model: HeldModel, clock: trio.testing.MockClock) -> AsyncIterator[Worker]:
    async with trio.open_nursery() as nursery:
        worker = Worker(model, nursery, clock)
        try:
            yield worker
        finally:
            for _ in range(100):  # nobody is left behind the gate
                worker.may_run.release()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("way", ["dropped", "cancelled"])
@pytest.mark.parametrize("moment", range(9))
async def test_a_session_goes_at_any_moment_and_is_rebuilt_into_the_batch(
    worker: Worker, way: str, moment: int
) -> None:
    """Its prompt waits, runs in three chunks between the others' steps, or it decodes with them."""
    others = [await worker.open(1, 5), await worker.open(2, 9)]
    for _ in range(4):
        await worker.next_call()
    victim = await worker.open(3, PROMPT)
    for _ in range(moment):
        await worker.next_call()
    if moment > 6:  # it decodes: with the others
        await worker.gather()
        assert len(worker.calls[-1]) == 3
    gone = victim.session.cache
    num_calls = len(worker.calls)
    if way == "dropped":
        worker.table.drop(victim.session)
    else:
        victim.scope.cancel()
        worker.table.drop(victim.session)
    await worker.next_call()
    await worker.next_call()
    # What runs at that moment ends; nothing is begun for it any more.
    assert not any(gone in caches for caches in worker.calls[num_calls:])
    assert victim.has_ended
    if victim.error is not None:
        assert victim.error.code in (ErrorCode.SESSION_UNKNOWN, ErrorCode.POSITION_MISMATCH)
    assert [s for s in worker.table if s is victim.session] == []

    # All that it had goes through in one prefill, while the others decode; then it joins them again.
    victim.scope = trio.CancelScope()
    victim.restart()
    worker.nursery.start_soon(victim.go_on)
    for _ in range(3):
        await worker.next_call()
    together = 0
    while not all(guest.has_ended for guest in worker.guests):
        await worker.gather()
        together += len(worker.calls[-1]) == 3
    assert together > 3
    assert [guest.session.length for guest in (*others, victim)] == [NUM_TOKENS] * 3


async def extend(worker: Worker, guest: Guest, start: int, stop: int, done: list[int]) -> None:
    """Extend a session by some of its tokens, and note that it was."""
    hidden_BTD = guest.hidden_BTD[:, start:stop]
    try:
        got = (await worker.steps.extend(guest.session, start, hidden_BTD)).hidden
    except RequestRefusedError as exc:
        guest.error = exc
        return
    off = (got - guest.expected_BTD[:, start:stop]).abs().max()
    assert off <= TOLERANCE * guest.expected_BTD.abs().max()
    done.append(start)


@pytest.mark.parametrize("order", list(permutations(range(0, NUM_TOKENS, CHUNK))))
async def test_what_came_at_once_is_computed_in_the_order_of_its_tokens(
    worker: Worker, order: tuple[int, ...]
) -> None:
    """Tasks that are started together begin in any order."""
    guest = Guest(worker, 1, PROMPT)
    done: list[int] = []
    for start in order:
        worker.nursery.start_soon(extend, worker, guest, start, start + CHUNK, done)
        await trio.testing.wait_all_tasks_blocked()
    for _ in order:
        await worker.next_call()
    assert done == sorted(order)
    assert guest.session.length == NUM_TOKENS


async def test_what_does_not_follow_is_refused_in_the_end(worker: Worker) -> None:
    guest = Guest(worker, 1, PROMPT)
    done: list[int] = []
    worker.nursery.start_soon(extend, worker, guest, 20, 30, done)
    await trio.testing.wait_all_tasks_blocked()
    worker.clock.jump(EARLY_TIMEOUT / 2)
    await trio.testing.wait_all_tasks_blocked()
    assert guest.error is None
    worker.clock.jump(EARLY_TIMEOUT)
    await trio.testing.wait_all_tasks_blocked()
    assert guest.error is not None
    assert guest.error.code == ErrorCode.POSITION_MISMATCH
    # The session goes on as if nothing had been.
    worker.nursery.start_soon(extend, worker, guest, 0, 20, done)
    await worker.settle()
    await worker.next_call()
    assert done == [0]


async def test_what_does_not_follow_is_refused_at_once_where_there_are_no_sessions(
    worker: Worker,
) -> None:
    guest = Guest(worker, 1, PROMPT)
    guest.session.session_id = 0  # as of a peer of 1.0.0
    worker.nursery.start_soon(extend, worker, guest, 20, 30, [])
    await trio.testing.wait_all_tasks_blocked()
    assert guest.error is not None
    assert guest.error.code == ErrorCode.POSITION_MISMATCH


async def test_what_waits_for_its_turn_is_not_computed_for_a_session_that_is_over(
    worker: Worker,
) -> None:
    guest = Guest(worker, 1, PROMPT)
    done: list[int] = []
    for start in (0, 10):
        worker.nursery.start_soon(extend, worker, guest, start, start + 10, done)
        await worker.settle()
    worker.table.drop(guest.session)
    await worker.next_call()
    assert guest.error is not None
    assert guest.error.code == ErrorCode.SESSION_UNKNOWN
    assert len(worker.calls) == 1


async def test_one_session_without_an_id_is_withdrawn_and_the_others_are_not(
    worker: Worker,
) -> None:
    guests = [Guest(worker, seed, CHUNK) for seed in range(3)]
    done: list[list[int]] = [[] for _ in guests]
    for guest, starts in zip(guests, done, strict=True):
        guest.session.session_id = 0  # as of a peer of 1.0.0
        worker.nursery.start_soon(extend, worker, guest, 0, CHUNK, starts)
        await worker.settle()
    worker.steps.withdraw(guests[1].session)
    for _ in guests:
        await worker.next_call()
    assert done == [[0], [], [0]]
    assert worker.calls == [[guests[0].session.cache], [guests[2].session.cache]]


async def test_nobody_waits_for_more_than_a_chunk(worker: Worker) -> None:
    """While a long prompt runs, those that decode have every second call."""
    for seed in (1, 2):
        await worker.open(seed, 3)
    for _ in range(4):
        await worker.next_call()
    begun = len(worker.calls)
    long = await worker.open(3, NUM_TOKENS)
    while not long.has_ended:
        await worker.next_call()
    is_long = [long.session.cache in caches for caches in worker.calls[begun:]]
    assert sum(is_long) == NUM_TOKENS // CHUNK
    assert not any(one and other for one, other in pairwise(is_long))


async def test_who_was_quiet_for_long_is_nobody_to_wait_for(worker: Worker) -> None:
    """A prompt runs in one go beside sessions that are open and do nothing, as those do that are kept."""
    quiet = await worker.open(1, NUM_TOKENS)
    await worker.next_call()
    assert quiet.has_ended
    worker.clock.jump(60.0)
    long = await worker.open(2, NUM_TOKENS)
    await worker.next_call()
    assert long.has_ended
    assert len(worker.calls) == 2
