"""Who keeps a step waiting is found by asking, and gone around only if somebody else is ready."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from neurogrid.errors import NoRouteError, PeerRefusedError, StreamBrokenError
from neurogrid.fleet.step_times import StepTimes
from neurogrid.inference.board.progress import Progress
from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.session_worker import Reached
from neurogrid.inference.pipeline.slow_watch import (
    FACTOR_IF_THERE,
    FLOOR,
    INTERVAL,
    MAX_LATENCY,
    NUM_ROUND_TRIPS,
    SILENT_FLOOR,
    SlowWatch,
)
from neurogrid.planner import PlannedStage

USUAL = 0.1
POSITION = 10


class Worker:
    """Says how far it is: a length, an error, or nothing."""

    def __init__(self, answer: int | Exception | None) -> None:
        self.answer = answer

    async def session_reached(self, session_id: int) -> Reached:
        if self.answer is None:
            await trio.sleep_forever()
        if isinstance(self.answer, Exception):
            raise self.answer
        return Reached(cast(int, self.answer))


class Others:
    """Whether somebody else is ready."""

    def __init__(self, *, are_there: bool) -> None:
        self.are_there = are_there
        self.num_changes = 0

    def has_alternative(self, peer_id: str, layers: range) -> bool:
        return self.are_there

    def is_member(self, peer_id: str) -> bool:
        return True

    def changed(self) -> None:
        self.num_changes += 1


def stages(*answers: int | Exception | None, usual: float | None = USUAL) -> list[PipelineStage]:
    result = []
    for number, answer in enumerate(answers):
        stage = PlannedStage(str(number), 2 * number, 2 * number + 2, 10)
        worker: Any = SimpleNamespace(
            peer_id=str(number), session_reached=Worker(answer).session_reached
        )
        times = StepTimes()
        for _ in range(20):
            if usual is not None:
                times.observe(1, 2, usual)
        result.append(PipelineStage(stage, worker, times))
    return result


Scene = Callable[[SlowWatch], Awaitable[None]]


def watched(others: Others, scene: Scene, progress: Progress | None = None) -> float:
    """Run a scene under the watch; seconds that it took by the mocked clock."""

    async def main() -> float:
        watch = SlowWatch(others, progress)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            started = trio.current_time()
            await scene(watch)
            taken = trio.current_time() - started
            nursery.cancel_scope.cancel()
        return taken

    return trio.run(main, clock=MockClock(autojump_threshold=0))


def blamed(chain: list[PipelineStage], *, are_there: bool = True) -> tuple[NoRouteError, float]:
    errors: list[NoRouteError] = []

    async def scene(watch: SlowWatch) -> None:
        with pytest.raises(NoRouteError) as caught, watch.step(tuple(chain), 7, POSITION, 1):
            await trio.sleep(1000)
        errors.append(caught.value)

    taken = watched(Others(are_there=are_there), scene)
    return errors[0], taken


def test_who_says_nothing_is_gone_around_soon() -> None:
    chain = stages(POSITION + 1, None, POSITION, usual=0.01)
    error, taken = blamed(chain)
    assert error.peer_id == "1"
    assert error.layers == (2, 3)
    assert "does not answer" in str(error)
    assert [item.times.suspicion for item in chain] == ["", "does not answer", ""]
    assert taken == pytest.approx(2 * SILENT_FLOOR, abs=2 * INTERVAL)
    assert [item.times.is_slow for item in chain] == [False, True, False]


def test_who_is_far_away_may_answer_later() -> None:
    """A round trip of 0.6 s: silence says nothing before an answer can have come."""
    near, far = stages(POSITION + 1, None, usual=0.01)
    error, taken = blamed([near, replace(far, latency=0.3)])
    assert error.peer_id == "1"
    assert taken > 2 * NUM_ROUND_TRIPS * 0.3


def test_who_took_its_time_when_it_joined_does_not_make_silence_last() -> None:
    near, slow = stages(POSITION + 1, None, usual=0.01)
    error, taken = blamed([near, replace(slow, latency=4.0)])
    assert error.peer_id == "1"
    assert taken == pytest.approx(
        2 * SILENT_FLOOR + 2 * NUM_ROUND_TRIPS * MAX_LATENCY, abs=3 * INTERVAL
    )


def test_who_is_not_done_is_given_more_time() -> None:
    chain = stages(POSITION + 1, POSITION, POSITION)
    error, taken = blamed(chain)
    assert error.peer_id == "1"
    assert "computes" in str(error)
    assert taken >= FACTOR_IF_THERE * FLOOR


@pytest.mark.parametrize(
    "failure", [PeerRefusedError("no", code=11, text="no"), StreamBrokenError("gone")]
)
def test_who_refuses_to_say_is_not_done(failure: Exception) -> None:
    error, _ = blamed(stages(POSITION + 1, failure))
    assert error.peer_id == "1"


def test_nobody_is_blamed_when_all_are_done_or_nobody_else_is_ready_or_nothing_is_known() -> None:
    async def scene(watch: SlowWatch) -> None:
        with watch.step(tuple(chain), 7, POSITION, 1):
            await trio.sleep(100)

    for chain, are_there in (
        (stages(POSITION + 1, POSITION + 1), True),
        (stages(POSITION, None), False),
        (stages(None, None, usual=None), True),
    ):
        others = Others(are_there=are_there)
        assert watched(others, scene) == 100
        assert not any(item.times.is_slow for item in chain)
        assert others.num_changes == 0


def test_what_goes_through_the_same_worker_at_the_same_time_is_allowed_for() -> None:
    """A long prefill before a token is no reason to leave."""
    chain = tuple(stages(None))

    async def scene(watch: SlowWatch) -> None:
        async with trio.open_nursery() as nursery:

            async def prefill() -> None:
                with watch.step(chain, 8, 0, 500):
                    await trio.sleep(30)

            nursery.start_soon(prefill)
            with watch.step(chain, 7, POSITION, 1):
                await trio.sleep(29)

    watched(Others(are_there=True), scene)
    assert not chain[0].times.is_slow


class Told(Progress):
    def __init__(self) -> None:
        self.suspicions: list[tuple[str, str]] = []

    def suspected(self, peer_id: str, why: str) -> None:
        self.suspicions.append((peer_id, why))


def test_who_keeps_a_step_waiting_is_named_also_where_nobody_else_is_ready() -> None:
    chain, told = stages(POSITION + 1, None), Told()

    async def scene(watch: SlowWatch) -> None:
        with watch.step(tuple(chain), 7, POSITION, 1):
            await trio.sleep(30)
            assert chain[1].times.suspicion == "does not answer"
        chain[1].times.observe(1, 2, USUAL)  # as the answer does that comes at last
        assert not chain[1].times.suspicion

    watched(Others(are_there=False), scene, told)
    ((peer_id, why),) = told.suspicions  # once, however long it lasts
    assert peer_id == "1"
    assert "does not answer" in why
    assert "nobody else is ready" in why


def test_a_slow_worker_is_quick_again_when_it_answers() -> None:
    (item,) = chain = stages(None)
    worker = Worker(None)
    item.worker.session_reached = worker.session_reached  # type: ignore[method-assign]
    others = Others(are_there=True)

    async def scene(watch: SlowWatch) -> None:
        with pytest.raises(NoRouteError), watch.step(tuple(chain), 7, POSITION, 1):
            await trio.sleep(1000)
        await trio.sleep(60)
        assert item.times.is_slow
        worker.answer = PeerRefusedError("no", code=11, text="no")
        await trio.sleep(10)
        assert not item.times.is_slow
        assert others.num_changes == 2

    watched(others, scene)
