"""Workers of the coordinator's own machine that end by themselves come back as who they were, but not for ever."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from neurogrid import CoordinatorSettings, open_coordinator
from neurogrid.fleet import local_workers
from neurogrid.fleet.local_workers import MAX_RESTARTS, start_local_workers
from neurogrid.inference.board.progress import Progress
from tests.e2e.preloaded import DEADLINE, fork_child

PROMPT = [5, 6, 7, 8]


class Told(Progress):
    def __init__(self) -> None:
        self.ends: list[tuple[int, str, float | None]] = []

    def local_worker_ended(self, number: int, how: str, restart_in: float | None) -> None:
        self.ends.append((number, how, restart_in))


def children() -> list[int]:
    """Local workers that this process has started; a test's other workers are its children, too."""
    # trio starts processes in threads, and each has its own list until it ends.
    lists = Path("/proc/self/task").glob("*/children")
    own = [pid for each in lists for pid in each.read_text().split()]
    return [int(pid) for pid in own if b"--stop-on-stdin-eof" in cmdline(pid)]


def cmdline(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_one_that_is_killed_comes_back_and_generation_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(subprocess.Popen, "_execute_child", fork_child)
    told = Told()

    async def main() -> None:
        settings = CoordinatorSettings(local_workers=1, max_seq_len=64)
        async with open_coordinator(settings, progress=told) as coordinator:
            expected = [token async for token in coordinator.generate(PROMPT, max_tokens=8)]
            members, (pid,) = set(coordinator.fleet.infos), children()
            os.kill(pid, signal.SIGKILL)
            with trio.fail_after(DEADLINE):
                while coordinator.why_not_ready is None:
                    await trio.sleep(0.05)
            assert [t async for t in coordinator.generate(PROMPT, max_tokens=8)] == expected
            assert set(coordinator.fleet.infos) == members
            assert children() != [pid]
            words = [event.text for event in coordinator.status().events]
            assert any("Local worker 1 was ended by signal 9" in text for text in words)

    trio.run(main)
    assert told.ends == [(1, "was ended by signal 9", local_workers.RESTART_BACKOFF)]
    assert children() == []


def test_one_that_ends_again_and_again_stays_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing but a process that says an address and ends, in the place of the worker."""
    script = tmp_path / "python"
    address = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWSPLSpRUhJY58KpwPJLnctbeYrcXKMcEtbYzcvzsLsV8j"
    script.write_text(f"#!/bin/sh\necho {address}\nexit 7\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(local_workers, "RESTART_BACKOFF", 0.001)
    told = Told()

    async def main() -> None:
        with ExitStack() as stack:
            stack.enter_context(trio.fail_after(DEADLINE))
            async with start_local_workers(
                1, memory_bytes=1, max_seq_len=64, credentials=[()], progress=told
            ) as addresses:
                assert addresses == [address]
                while not told.ends or told.ends[-1][2] is not None:
                    await trio.sleep(0.01)

    with caplog.at_level(logging.ERROR, "neurogrid.fleet.local_workers"):
        trio.run(main)
    assert [how for _, how, _ in told.ends] == ["ended with status 7"] * (MAX_RESTARTS + 1)
    delays = [delay for _, _, delay in told.ends if delay is not None]
    assert delays == sorted(delays)
    assert len(set(delays)) == MAX_RESTARTS
    assert "it stays away" in caplog.text
