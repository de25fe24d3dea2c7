"""A member that was found slow and computes nothing is tried after a growing delay, and gives way to sessions."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
import trio
import trio.testing

from neurogrid.errors import PeerRefusedError
from neurogrid.fleet.member import Member
from neurogrid.fleet.speeds.drift import MIN_STEPS, NUM_LOOKS
from neurogrid.fleet.speeds.speed_watch import DRIFT_INTERVAL, SpeedWatch
from neurogrid.fleet.speeds.trials import FIRST_DELAY, MAX_DELAY, Trials, TrialTimes
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.inference.board.progress import Progress
from neurogrid.inference.pipeline import session_trials
from neurogrid.inference.pipeline.chain import AskedAlone
from neurogrid.inference.pipeline.session_trials import TRIAL_TIMEOUT, SessionTrials
from neurogrid.inference.pipeline.session_worker import Opened
from neurogrid.p2p.wire import SessionOpen
from neurogrid.planner import LayerSize, ModelSize, PeerSpeed

SIZE = ModelSize(tuple(LayerSize(100) for _ in range(8)))
LAYER = 0.001  # seconds at the speed that members say they have
SPEED = PeerSpeed(100 / LAYER)
WIDTH = 16


def mocked(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run a test by a clock that jumps to whatever is waited for."""

    @functools.wraps(test)
    def run() -> None:
        trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))

    return run


def test_each_time_it_is_found_slow_the_delay_doubles_up_to_a_bound() -> None:
    times, now, delays = TrialTimes(), 0.0, []
    assert not times.is_due("a", 1e9)
    for _ in range(8):
        times.found_slow("a", now)
        begun = now
        while not times.is_due("a", now):
            now += FIRST_DELAY / 2
        delays.append(now - begun)
    assert delays == [min(FIRST_DELAY * 2**i, MAX_DELAY) for i in range(8)]
    assert not times.is_due("b", now)
    times.forget("a")
    assert not times.is_due("a", 1e9)
    times.found_slow("a", now)
    assert times.is_due("a", now + FIRST_DELAY)


def test_who_is_slow_again_soon_is_tried_later_and_who_was_fast_for_long_begins_anew() -> None:
    times = TrialTimes()
    times.found_slow("a", 0)
    times.found_fast("a", 100)
    assert not times.is_due("a", 1e9)
    times.found_slow("a", 200)
    assert not times.is_due("a", 200 + 1.9 * FIRST_DELAY)
    assert times.is_due("a", 200 + 2 * FIRST_DELAY)
    times.found_fast("a", 1000)
    times.found_slow("a", 1001 + MAX_DELAY)
    assert times.is_due("a", 1001 + MAX_DELAY + FIRST_DELAY)


class FakeWorker(AskedAlone):
    """A worker whose tokens take `factor` times what they should, by the mocked clock."""

    takes_chunks = True

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self.protocol = SimpleNamespace(host=None)
        self.timeouts = SimpleNamespace(step=60.0)
        self.factor = 1.0
        self.refuses = False
        self.num_opened = self.num_open = 0

    async def open_session(self, wanted: SessionOpen) -> Opened:
        if self.refuses:
            raise PeerRefusedError("refused", code=12, text="full")
        self.num_opened += 1
        self.num_open += 1
        return Opened()

    async def close_session(self, session_id: int) -> None:
        await trio.sleep(0)
        self.num_open -= 1

    async def forward(
        self, session_id: int, hidden_BTD: torch.Tensor, *, start: int, stop: int, **others: object
    ) -> tuple[torch.Tensor, int]:
        assert hidden_BTD.shape == (1, 1, WIDTH)
        seconds = self.factor * LAYER * (stop - start)
        await trio.sleep(seconds)
        return hidden_BTD, int(seconds * 1e9)


def member(peer_id: str, layers: range) -> tuple[Member, FakeWorker]:
    worker = FakeWorker(peer_id)
    info = WorkerInfo(peer_id, peer_id, 10_000, "", memory_known=True, held_layers=(), speed=SPEED)
    return Member(cast(Any, worker), info, layers=layers), worker


def new_trials() -> Trials:
    return SessionTrials(WIDTH, torch.float32, 1024)


class Told(Progress):
    def __init__(self) -> None:
        self.drifts: list[tuple[str, float]] = []

    def drifted(self, peer_id: str, slowness: float) -> None:
        self.drifts.append((peer_id, round(slowness, 1)))


class Fleet:
    """Three members: two compute all the time, one does not; who is looked at as often as a fleet would."""

    def __init__(self) -> None:
        self.told = Told()
        self.busy, self.idle, self.third = (
            member("busy", range(4)),
            member("idle", range(4, 8)),
            member("third", range(4, 8)),
        )
        self.num_news = 0
        self.watch = SpeedWatch(new_trials(), self.told, on_news=self.news)

    def news(self) -> None:
        self.num_news += 1

    @property
    def slowness(self) -> float:
        return self.watch.applied([self.idle[0].info])[0].slowness

    async def look(self, count: int, *, through_idle: float | None = None) -> None:
        """So many looks; between two, others computed, and the idle one where that says how slowly."""
        members = [self.busy[0], self.idle[0], self.third[0]]
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                for other in (members[0], members[2]):
                    for _ in range(MIN_STEPS):
                        other.times.observe(1, 4, 4 * LAYER, computed=4 * LAYER)
                for _ in range(MIN_STEPS if through_idle else 0):
                    seconds = 4 * LAYER * (through_idle or 0)
                    members[1].times.observe(1, 4, seconds, computed=seconds)
                self.watch.look(members, SIZE, nursery)
                await trio.sleep(DRIFT_INTERVAL)

    async def begin_slow(self) -> FakeWorker:
        await self.look(NUM_LOOKS, through_idle=5.0)
        assert self.told.drifts == [("idle", 5.0)]
        self.idle[1].factor = 5.0
        return self.idle[1]


@mocked
async def test_who_recovered_is_found_and_planned_with_again() -> None:
    fleet = Fleet()
    worker = await fleet.begin_slow()
    worker.factor = 1.1
    await fleet.look(int(FIRST_DELAY / DRIFT_INTERVAL) - 1)
    assert worker.num_opened == 0
    await fleet.look(NUM_LOOKS + 1)
    assert worker.num_opened == NUM_LOOKS
    assert fleet.told.drifts == [("idle", 5.0), ("idle", 1.0)]
    assert (fleet.slowness, fleet.num_news, worker.num_open) == (1.0, 2, 0)
    await fleet.look(10)
    assert worker.num_opened == NUM_LOOKS  # believed again, so not tried
    # Nobody else was asked for anything.
    assert fleet.busy[1].num_opened == fleet.third[1].num_opened == 0


@mocked
async def test_who_is_still_slow_is_tried_ever_more_seldom() -> None:
    fleet = Fleet()
    worker = await fleet.begin_slow()
    await fleet.look(int(40 * FIRST_DELAY / DRIFT_INTERVAL))
    assert worker.num_opened == 5  # after 1, 3, 7, 15 and 31 times the first delay
    assert fleet.told.drifts == [("idle", 5.0)]
    # One trial that finds it quick, and others that do not, are not enough.
    assert fleet.slowness == 5


@mocked
async def test_who_is_faster_than_it_said_in_a_trial_is_taken_for_as_fast_as_it_said() -> None:
    fleet = Fleet()
    (await fleet.begin_slow()).factor = 0.4
    await fleet.look(int(FIRST_DELAY / DRIFT_INTERVAL) + NUM_LOOKS)
    assert fleet.told.drifts[-1] == ("idle", 1.0)


@mocked
async def test_nobody_is_tried_who_is_busy_or_cannot_be_compared() -> None:
    fleet = Fleet()
    worker = await fleet.begin_slow()
    idle = fleet.idle[0]
    await trio.sleep(FIRST_DELAY)
    async with trio.open_nursery() as nursery:
        fleet.watch.look([fleet.busy[0], idle], SIZE, nursery)  # nobody computes
    idle.num_sessions = 1
    await fleet.look(2)
    idle.num_sessions, idle.layers = 0, range(0)
    await fleet.look(2)
    assert worker.num_opened == 0
    idle.layers, worker.refuses = range(4, 8), True
    await fleet.look(2)
    worker.refuses = False
    await fleet.look(1)
    assert worker.num_opened == 1  # that it refused does not put it off


@mocked
async def test_a_trial_gives_way_to_a_session() -> None:
    tried, worker = member("a", range(8))
    running = new_trials()
    results: list[object] = []

    async def run() -> None:
        results.append(await running.run(tried))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.sleep(2 * LAYER)
        assert running.is_running
        await running.give_way(["b"])
        assert running.is_running
        await running.give_way(["a", "b"])
        assert (running.is_running, worker.num_open) == (False, 0)
    assert results == [None]
    # A session that came before it began.
    tried.num_sessions = 1
    assert await running.run(tried) is None
    assert worker.num_opened == 1


@mocked
async def test_layers_that_change_end_a_trial_and_so_does_time() -> None:
    tried, worker = member("a", range(8))
    running = new_trials()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def change() -> None:
            await trio.sleep(3 * LAYER)
            tried.layers = range(0)

        assert await running.run(tried) is None
    tried.layers = range(8)
    taken = await running.run(tried)
    assert taken is not None
    assert MIN_STEPS < len(taken) <= session_trials.NUM_STEPS
    worker.factor = 2 * TRIAL_TIMEOUT / (MIN_STEPS * 8 * LAYER)
    assert await running.run(tried) == ()
    assert worker.num_open == 0
