"""A worker that becomes slower for good gets fewer layers, or none until it is quick, and no session is disturbed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from functools import partial
from pathlib import Path

import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

from neurogrid import open_coordinator
from neurogrid.fleet.speeds.drift import MIN_DRIFT, NUM_LOOKS
from neurogrid.inference.board.progress import Progress
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.model.embedded import embedded_model_path
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.wire import MessageType
from tests.e2e.support import DEADLINE, WorkerProcess, reference_tokens, start_worker
from tests.e2e.test_recovery import by_stage, settings, weight_bytes

PROMPT = "A function definition"
# A process that gets an eighth of the time, in turns that are as short as a step: one that computes between two stops
# is as quick as ever. Where the machine is busy a turn is longer, and so is the stop after it. Seconds, and a factor.
RUNS, STOPS_PER_RUN = 0.001, 7
# A worker that has room for two layers of eight is of more use than one that is eight times slower.
ROOM_FOR_TWO = "6MiB"
# A worker that is not throttled any more is quick again within this factor: here other tests have the same cores.
USUAL = 2.5
# Tokens of the session that runs, after the new plan is in place.
NUM_MORE = 8
MAX_LENGTH = 1024


class Told(Progress):
    """What a coordinator says of drift, in order."""

    def __init__(self) -> None:
        self.drifts: list[tuple[str, float]] = []
        self.num_improved = 0

    def drifted(self, peer_id: str, slowness: float) -> None:
        self.drifts.append((peer_id, slowness))

    def improved(self, plan: object) -> None:
        self.num_improved += 1


async def throttle(worker: WorkerProcess) -> None:
    """Give a worker an eighth of the time until cancelled."""
    try:
        while True:
            since = trio.current_time()
            await trio.sleep(RUNS)
            ran = trio.current_time() - since
            worker.process.send_signal(signal.SIGSTOP)
            await trio.sleep(ran * STOPS_PER_RUN)
            worker.process.send_signal(signal.SIGCONT)
    finally:
        worker.process.send_signal(signal.SIGCONT)


async def write(coordinator: Coordinator, is_over: Callable[[], bool]) -> list[list[int]]:
    """The tokens of sessions one after the other until something has happened, and a few more."""
    prompt = coordinator.model.tokenizer.encode(PROMPT)
    sessions: list[list[int]] = []
    while not is_over():
        sessions.append([])
        num_more = 0
        max_tokens = MAX_LENGTH - len(prompt)
        generating = coordinator.generate_tokens(prompt, max_tokens=max_tokens, ignore_eos=True)
        async with aclosing(generating) as tokens:
            async for token in tokens:
                sessions[-1].append(token.token_id)
                num_more += is_over()
                if num_more == NUM_MORE:
                    break
    return sessions


def num_opened(coordinator: Coordinator) -> int:
    opened = coordinator.counters.total(Direction.SENT, msg_type=MessageType.SESSION_OPEN)
    return opened.num_messages


def num_layers(coordinator: Coordinator, peer_id: str) -> int:
    """Layers that the plan for new sessions has of a worker."""
    return sum(s.stop - s.start for s in coordinator.stages if s.peer_id == peer_id)


def test_a_worker_that_is_throttled_gets_fewer_layers_and_gets_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neurogrid.fleet.speeds.speed_watch.DRIFT_INTERVAL", 1.0)
    monkeypatch.setattr("neurogrid.fleet.speeds.drift.MAX_USUAL", USUAL)

    async def main() -> tuple[list[int], list[list[int]]]:
        told = Told()
        chosen = settings(workers, max_seq_len=MAX_LENGTH, prefix_reuse=False)
        async with open_coordinator(chosen, progress=told) as coordinator:
            slow = by_stage(coordinator, workers)[-1]
            before = num_layers(coordinator, slow.peer_id)
            with trio.fail_after(DEADLINE):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(throttle, slow)
                    sessions = await write(coordinator, lambda: told.num_improved > 0)
                    nursery.cancel_scope.cancel()
            ((peer_id, slowness), *_) = told.drifts
            assert peer_id == slow.peer_id
            assert slowness > USUAL
            assert 0 < num_layers(coordinator, slow.peer_id) < before
            # None was opened anew: each on two workers.
            assert num_opened(coordinator) == 2 * len(sessions)
            # A new one goes by the new plan.
            with await coordinator.selector.select(timeout=DEADLINE) as selection:
                hops = {m.peer_id: len(layers) for m, layers in selection.hops}
            assert hops[slow.peer_id] == num_layers(coordinator, slow.peer_id)
            sent = weight_bytes(coordinator)
            with trio.fail_after(DEADLINE):
                sessions += await write(coordinator, lambda: told.num_improved > 1)
            assert (slow.peer_id, 1.0) in told.drifts
            assert num_layers(coordinator, slow.peer_id) == before
            assert weight_bytes(coordinator) == sent
            return coordinator.model.tokenizer.encode(PROMPT), sessions

    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path)) for _ in range(2)]
        prompt, sessions = trio.run(main)
    whole = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
    whole.generation_config.eos_token_id = None
    expected = reference_tokens(whole, prompt, max(map(len, sessions)))
    assert all(tokens == expected[: len(tokens)] for tokens in sessions)


def test_a_worker_that_was_left_out_for_its_slowness_is_looked_at_again_and_used_when_it_is_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neurogrid.fleet.speeds.speed_watch.DRIFT_INTERVAL", 1.0)
    monkeypatch.setattr("neurogrid.fleet.speeds.trials.FIRST_DELAY", 0.5)
    monkeypatch.setattr("neurogrid.fleet.speeds.trials.MAX_DELAY", 2.0)

    async def main() -> list[list[int]]:
        told = Told()
        chosen = settings(workers, max_seq_len=MAX_LENGTH, prefix_reuse=False)
        async with open_coordinator(chosen, progress=told) as coordinator:
            assert num_layers(coordinator, workers[-1].peer_id) == 0
            slow = by_stage(coordinator, workers)[-1]
            with trio.fail_after(DEADLINE):
                # As three looks at a worker that is throttled would find it (the test before this one).
                for _ in range(NUM_LOOKS):
                    coordinator.fleet._speeds._take_in({slow.peer_id: 8.0})
                is_used = partial(num_layers, coordinator, slow.peer_id)
                sessions = await write(coordinator, lambda: not is_used())
                sessions += await write(coordinator, lambda: is_used() > 0)
            found = [slowness for peer_id, slowness in told.drifts if peer_id == slow.peer_id]
            assert max(found) > MIN_DRIFT > found[-1]
            return sessions

    with ExitStack() as stack:
        limits = [(), (), ("--memory-limit", ROOM_FOR_TWO)]
        workers = [stack.enter_context(start_worker(tmp_path, *limit)) for limit in limits]
        sessions = trio.run(main)
    longest = max(sessions, key=len)
    assert all(tokens == longest[: len(tokens)] for tokens in sessions)
