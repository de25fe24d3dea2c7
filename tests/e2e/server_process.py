"""A `neurogrid-coordinator` that serves over HTTP, as a process of its own, and what the tests ask it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.preloaded import COORDINATOR, DEADLINE, Popen

__all__ = ["ServerProcess", "rss_bytes", "start_server"]


@dataclass
class ServerProcess:
    """A server that is ready."""

    process: Popen
    url: str
    log_file: Path
    is_killed: bool = False

    def kill(self) -> None:
        """End it as a power cut would."""
        self.is_killed = True
        self.process.kill()
        self.process.wait(DEADLINE)

    def status(self) -> dict[str, Any]:
        """The cluster as the server sees it at this moment."""
        answer = httpx.get(f"{self.url}/v1/cluster/info", timeout=DEADLINE)
        answer.raise_for_status()
        return answer.json()["status"]

    def wait_status(
        self, holds: Callable[[dict[str, Any]], bool], *, seconds: float = DEADLINE
    ) -> tuple[dict[str, Any], float]:
        """The first status that is so, and the seconds until then."""
        started = time.monotonic()
        while not holds(status := self.status()):
            assert time.monotonic() < started + seconds, status
            time.sleep(0.01)
        return status, time.monotonic() - started


@contextmanager
def start_server(directory: Path, *args: str) -> Iterator[ServerProcess]:
    """Run a coordinator that serves on a free port until the block is left; it gets SIGTERM then."""
    log_file = directory / "coordinator.log"
    with log_file.open("w") as log:
        process = Popen(
            [*COORDINATOR, "--http-port", "0", "--listen", "/ip4/127.0.0.1/tcp/0", *args],
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url, f"the server did not start: {log_file.read_text()}"
        server = ServerProcess(process, url, log_file)
        yield server
        if not server.is_killed:
            process.terminate()
            assert process.wait(DEADLINE) == 0, log_file.read_text()
    finally:
        process.kill()
        process.wait(DEADLINE)
        process.stdout.close()


def rss_bytes(*pids: int) -> int:
    """Memory that the processes hold, all together."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1]) * 1024
    return total
