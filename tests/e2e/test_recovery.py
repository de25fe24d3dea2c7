"""Workers die, leave and come back while a model writes: what is written is what an undisturbed run writes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from neurogrid import CoordinatorSettings, SamplingParams, open_coordinator
from neurogrid.errors import NoRouteError
from neurogrid.inference.board.progress import Progress
from neurogrid.inference.generation.coordinator import Coordinator
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.wire import MessageType
from tests.e2e.support import DEADLINE, WorkerProcess, start_worker

PROMPT = "A function definition"
NUM_TOKENS = 40
# After so many tokens something happens.
MIDDLE = 12
# Between two tokens of a run that is disturbed: what is done about it has time to happen before the last. Seconds.
PAUSE = 0.05

Event = Callable[[Coordinator], Awaitable[None]]


async def holders(coordinator: Coordinator, count: int) -> None:
    """Wait until so many workers hold layers."""
    with trio.fail_after(DEADLINE):
        while len(coordinator.fleet.holdings) < count:
            await trio.sleep(0.02)


async def generate(
    coordinator: Coordinator,
    disturb: Event | None = None,
    sampling: SamplingParams | None = None,
) -> list[int]:
    prompt = coordinator.model.tokenizer.encode(PROMPT)
    tokens: list[int] = []
    async for token in coordinator.generate(prompt, max_tokens=NUM_TOKENS, sampling=sampling):
        tokens.append(token)
        if disturb is not None:
            await trio.sleep(PAUSE)
            if len(tokens) == MIDDLE:
                await disturb(coordinator)
    return tokens


def settings(workers: Sequence[WorkerProcess], **more: object) -> CoordinatorSettings:
    return CoordinatorSettings(
        peers=tuple(worker.address for worker in workers),
        **{"stages": 2, "dtype": "float32", "max_seq_len": 256, **more},  # type: ignore[arg-type]
    )


def by_stage(coordinator: Coordinator, workers: Sequence[WorkerProcess]) -> list[WorkerProcess]:
    """The workers of the plan, in the order of their stages."""
    by_peer = {worker.peer_id: worker for worker in workers}
    return [by_peer[stage.peer_id] for stage in coordinator.stages]


@pytest.mark.parametrize(
    ("dtype", "quantize", "number"),
    [("float32", None, 0), ("bfloat16", None, 1), ("bfloat16", "int8", 0), ("bfloat16", None, 0)],
)
def test_a_replica_takes_over(
    tmp_path: Path,
    dtype: str,
    quantize: str | None,
    number: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whichever stage dies: another worker holds it, too, no weights are sent, and one prefill makes what was lost."""

    async def main() -> None:
        wanted = settings(workers, dtype=dtype, quantize=quantize)
        async with open_coordinator(wanted) as coordinator:
            expected = await generate(coordinator)
            await holders(coordinator, 3)
            sent_before = weight_bytes(coordinator)

            async def kill(_: Coordinator) -> None:
                by_stage(coordinator, workers)[number].kill()

            assert await generate(coordinator, kill) == expected
            assert weight_bytes(coordinator) == sent_before
            assert len(coordinator.fleet.holdings) == 2
            assert recomputed(caplog) == ["by one prefill"]

    caplog.set_level(logging.DEBUG, "neurogrid.inference.generation.token_session")
    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path, "--no-cache")) for _ in range(3)]
        trio.run(main)


def test_steps_are_repeated_where_a_worker_does_not_say_that_bits_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In bfloat16, with torch's products."""

    async def main() -> None:
        async with open_coordinator(settings(workers, dtype="bfloat16")) as coordinator:
            expected = await generate(coordinator)
            await holders(coordinator, 3)

            async def kill(_: Coordinator) -> None:
                by_stage(coordinator, workers)[0].kill()

            assert await generate(coordinator, kill) == expected
            assert recomputed(caplog) == ["in the calls that they had"]

    caplog.set_level(logging.DEBUG, "neurogrid.inference.generation.token_session")
    with ExitStack() as stack:
        variables = {"NEUROGRID_KERNELS": "none"}
        workers = [
            stack.enter_context(start_worker(tmp_path, "--no-cache", variables=variables))
            for _ in range(3)
        ]
        trio.run(main)


def recomputed(caplog: pytest.LogCaptureFixture) -> list[str]:
    """How lost caches were made anew, each time."""
    texts = [record.getMessage() for record in caplog.records]
    return [text.partition("again, ")[2] for text in texts if "are computed again, " in text]


def test_a_spare_worker_gets_the_layers_that_were_lost_and_no_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_coordinator(settings(workers, with_replicas=False)) as coordinator:
            expected = await generate(coordinator)
            first, second = by_stage(coordinator, workers)
            sent_before = weight_bytes(coordinator)

            async def kill(_: Coordinator) -> None:
                first.kill()

            assert await generate(coordinator, kill) == expected
            assert coordinator.stages[1].peer_id == second.peer_id
            assert weight_bytes(coordinator) - sent_before < 0.6 * sent_before

    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path, "--no-cache")) for _ in range(3)]
        trio.run(main)


def test_the_workers_that_are_left_take_all_layers_and_one_that_comes_is_used(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with open_coordinator(settings(workers)) as coordinator:
            expected = await generate(coordinator)

            async def kill(_: Coordinator) -> None:
                by_stage(coordinator, workers)[1].kill()

            assert await generate(coordinator, kill) == expected
            assert len(coordinator.stages) == 1
            survivor = coordinator.stages[0].peer_id

            # Somebody new dials in, stands by, and is there when the last one goes, too.
            with start_worker(
                tmp_path, "--no-cache", "--bootstrap", own_address(coordinator)
            ) as late:
                await holders(coordinator, 2)

                async def kill_survivor(_: Coordinator) -> None:
                    next(worker for worker in workers if worker.peer_id == survivor).kill()

                assert await generate(coordinator, kill_survivor) == expected
                assert coordinator.fleet.holdings.keys() == {late.peer_id}

    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path, "--no-cache")) for _ in range(2)]
        trio.run(main)


def test_a_worker_that_comes_back_is_used_again_and_gets_nothing_sent(tmp_path: Path) -> None:
    """The same peer loses its connection: it keeps its layers, and its session is rebuilt.

    What was drawn before stays drawn, and counts where tokens are not to be repeated.
    """
    sampling = SamplingParams(
        temperature=0.9,
        seed=5,
        min_p=0.02,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        min_tokens=NUM_TOKENS,
    )

    async def main() -> None:
        async with open_coordinator(settings([worker], stages=1)) as coordinator:
            expected = await generate(coordinator, sampling=sampling)
            assert len(expected) == NUM_TOKENS
            sent_before = weight_bytes(coordinator)

            async def cut(_: Coordinator) -> None:
                await coordinator.host.disconnect(worker.peer_id)

            assert await generate(coordinator, cut, sampling) == expected
            assert weight_bytes(coordinator) == sent_before

    with start_worker(tmp_path, "--no-cache") as worker:
        trio.run(main)


@pytest.mark.parametrize("with_replicas", [True, False])
def test_a_worker_that_is_told_to_end_waits_until_its_sessions_are_elsewhere(
    tmp_path: Path, with_replicas: bool
) -> None:
    """No step fails: sessions move between two tokens, to a replica or to who is given the layers meanwhile."""

    class Watch(Progress):
        def lost(self, peer_id: str, layers: range, reason: str) -> None:
            in_use[peer_id] = sessions_of[peer_id]()

    in_use: dict[str, int] = {}
    sessions_of: dict[str, Callable[[], int]] = {}

    async def main() -> None:
        chosen = settings(workers, with_replicas=with_replicas)
        async with open_coordinator(chosen, progress=Watch()) as coordinator:
            expected = await generate(coordinator)
            await holders(coordinator, 3 if with_replicas else 2)
            first = by_stage(coordinator, workers)[0]
            fleet = coordinator.fleet
            sessions_of[first.peer_id] = lambda: fleet.num_sessions(first.peer_id)

            async def end(_: Coordinator) -> None:
                first.process.terminate()

            assert await generate(coordinator, end) == expected
            status = await trio.to_thread.run_sync(first.process.wait, DEADLINE)
            assert status == 0
            with trio.fail_after(DEADLINE):
                while first.peer_id not in in_use:
                    await trio.sleep(0.02)
            assert in_use[first.peer_id] == 0

    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path, "--no-cache")) for _ in range(3)]
        trio.run(main)


def test_without_any_worker_the_error_names_the_layers_after_the_agreed_time(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with open_coordinator(settings([worker], stages=1, patience=1.0)) as coordinator:

            async def kill(_: Coordinator) -> None:
                worker.kill()

            with pytest.raises(NoRouteError, match="layers 0 to 7") as caught:
                await generate(coordinator, kill)
            assert caught.value.layers == tuple(range(8))
            assert worker.peer_id in str(caught.value)

    with start_worker(tmp_path, "--no-cache") as worker:
        trio.run(main)


def weight_bytes(coordinator: Coordinator) -> int:
    total = coordinator.counters.total(Direction.SENT, msg_type=MessageType.WEIGHTS)
    return total.num_bytes


def own_address(coordinator: Coordinator) -> str:
    return coordinator.host.addresses[0]
