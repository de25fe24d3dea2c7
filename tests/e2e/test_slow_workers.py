"""A worker that is there and far slower than before is gone around, and used again when it is quick."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from neurogrid import open_coordinator
from neurogrid.inference.generation.coordinator import Coordinator
from tests.e2e.support import DEADLINE, start_worker
from tests.e2e.test_recovery import by_stage, generate, holders, settings

# A step of a chain may take this long before it fails for good: nobody waits that long here. Seconds.
FLAT_DEADLINE = 120.0


def slow_peers(coordinator: Coordinator) -> set[str]:
    return {m.peer_id for m in coordinator.fleet.members if m.times.is_slow}


def test_a_worker_that_stops_is_gone_around_and_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last of the chain: the first has done its part, and is not blamed."""

    async def main() -> None:
        async with open_coordinator(settings(workers)) as coordinator:
            expected = await generate(coordinator)
            await holders(coordinator, 3)
            slow = by_stage(coordinator, workers)[-1]

            async def stop(_: Coordinator) -> None:
                slow.process.send_signal(signal.SIGSTOP)

            with trio.fail_after(FLAT_DEADLINE / 2):
                assert await generate(coordinator, stop) == expected
            assert slow_peers(coordinator) == {slow.peer_id}
            # A session that begins now does not go there.
            assert await generate(coordinator) == expected
            slow.process.send_signal(signal.SIGCONT)
            with trio.fail_after(DEADLINE):
                while slow_peers(coordinator):
                    await trio.sleep(0.1)
            # Nothing is left there of the session that went away, and the next one is there again.
            layers = next(s for s in coordinator.stages if s.peer_id == slow.peer_id)
            with await coordinator.selector.select(timeout=DEADLINE) as selection:
                assert layers.peer_id in {member.peer_id for member, _ in selection.hops}
            assert await generate(coordinator) == expected

    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(tmp_path)) for _ in range(3)]
        try:
            trio.run(main)
        finally:
            for worker in workers:
                worker.process.send_signal(signal.SIGCONT)
    said = [r.getMessage() for r in caplog.records if "its sessions go elsewhere" in r.getMessage()]
    assert len(said) == 1
    assert "does not answer" in said[0]
