"""Sessions that go around through the ends and the stages of a chain: who runs with whom, and when.

The queues are those of the package; what is computed sleeps on a clock that jumps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
import trio
import trio.testing

from neurogrid.inference.generation.ends_queue import Chosen, EndsQueue
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.sessions.steps import Step, next_steps, seconds_until_next
from neurogrid.model.embedded import embedded_model_path
from neurogrid.node.batcher import Batcher
from neurogrid.node.torch_thread import TorchThread

PASS, ROW, HOP, PAUSE = 0.005, 0.0005, 0.0002, 0.1
NUM_STEPS = 60


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.load(embedded_model_path(), name=None, max_seq_len=64, dtype="float32")


class Stage:
    """A worker's queue: sessions that came, and those of each pass."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.busy = 0.0
        self._steps: Batcher[Step, int] = Batcher(
            lambda waiting: next_steps(waiting, after_prefill=False, now=trio.current_time()),
            lambda steps: [step.session for step in steps],
            self._run,
            max_waiting=64,
            linger=lambda waiting: seconds_until_next(waiting, now=trio.current_time()),
        )

    async def run(self) -> None:
        await self._steps.run()

    async def step(self, session: int, batch: tuple[int, ...]) -> None:
        await trio.sleep(HOP * (1 + session / 8))  # one after the other
        nothing = cast(Any, None)
        hidden_B1D, now = torch.zeros(1, 1, 1), trio.current_time()
        step = Step(session, nothing, 0, 1, 1, hidden_B1D, nothing, now, batch)
        assert await self._steps.submit(step) == session

    async def _run(self, compute: Callable[..., Any], steps: Sequence[Step]) -> Any:
        seconds = PASS + ROW * len(steps)
        await trio.sleep(seconds)
        self.busy += seconds
        self.passes.append(sorted(step.session for step in steps))
        return compute(steps)


class NoThread:
    """Calls what `TorchThread` would, after a while."""

    async def run(self, call: Callable[[], Any]) -> Any:
        await trio.sleep(PASS / 5)
        return call()

    run_briefly = run


def go_around(
    model: LoadedModel, stages: Sequence[Stage], starts: Sequence[float], slow: Sequence[int] = ()
) -> float:
    """Let each session take its steps, those of `slow` with a pause after each; returns the seconds."""
    hidden_BTD = model.ends.embed([5], position=1)
    ends = EndsQueue(model.ends, cast(TorchThread, NoThread()), shares_forward=True)
    peer_ids = [f"peer {i}" for i in range(len(stages))]

    def choose(logits_V: torch.Tensor) -> Chosen[int]:
        return Chosen(0, int(logits_V.argmax()))

    async def session(number: int) -> None:
        await trio.sleep(starts[number])
        for _ in range(NUM_STEPS):
            batch = await ends.leave(number, peer_ids)
            for stage in stages:
                await stage.step(number, batch)
            await ends.choose(hidden_BTD, position=1, choose=choose, session=number)
            if number in slow:
                await trio.sleep(PAUSE)
        ends.forget(number)

    async def main() -> float:
        async with trio.open_nursery() as nursery:
            for queue in (ends, *stages):
                nursery.start_soon(queue.run)
            started = trio.current_time()
            async with trio.open_nursery() as sessions:
                for number in range(len(starts)):
                    sessions.start_soon(session, number)
            nursery.cancel_scope.cancel()
        return trio.current_time() - started

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("spread", [0.0, 0.003, 0.011])
def test_each_stage_has_a_micro_batch(model: LoadedModel, num_stages: int, spread: float) -> None:
    stages = [Stage() for _ in range(num_stages)]
    num_sessions = 4 * num_stages
    go_around(model, stages, [spread * i for i in range(num_sessions)])
    for stage in stages:
        # In the middle, when all have begun and none has ended.
        middle = stage.passes[len(stage.passes) // 2 :][: 4 * num_stages]
        assert {len(each) for each in middle} == {4}
        assert len({tuple(each) for each in middle}) == num_stages
        assert middle[:num_stages] == middle[num_stages : 2 * num_stages]


def test_stages_compute_at_the_same_time(model: LoadedModel) -> None:
    stages = [Stage(), Stage()]
    seconds = go_around(model, stages, [0.0] * 8)
    assert all(stage.busy > 0.65 * seconds for stage in stages)


def test_few_sessions_stay_together(model: LoadedModel) -> None:
    stages = [Stage(), Stage()]
    go_around(model, stages, [0.004 * i for i in range(5)])
    assert stages[0].passes[40:50] == [[0, 1, 2, 3, 4]] * 10


def test_a_slow_reader_holds_nobody_up(model: LoadedModel) -> None:
    alone, beside = [Stage(), Stage()], [Stage(), Stage()]
    seconds = go_around(model, alone, [0.0] * 3)
    go_around(model, beside, [0.0] * 4, slow=[3])
    # The three have ended when the slow one has taken a part of its steps.
    done = [i for i, each in enumerate(beside[0].passes) if 0 in each][-1]
    num_of_slow = sum(3 in each for each in beside[0].passes[:done])
    assert (num_of_slow - 1) * PAUSE < 1.3 * seconds


def test_those_that_are_quick_hold_up_nobody_who_is_slow(model: LoadedModel) -> None:
    alone, beside = [Stage(), Stage()], [Stage(), Stage()]
    seconds = go_around(model, alone, [0.0] * 4)
    # The last that came are those that make a batch of their own.
    go_around(model, beside, [0.02 * i for i in range(8)], slow=range(4, 8))
    done = [i for i, each in enumerate(beside[0].passes) if 0 in each][-1]
    num_of_slow = sum(7 in each for each in beside[0].passes[:done])
    assert num_of_slow * (PAUSE + 0.03) > 0.8 * seconds
