"""Processes in namespaces that print lines of JSON: read as they come, and waited for."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.namespaces.netns import Machine

__all__ = ["DEADLINE", "PeerProcess", "start_peer"]

ROOT = Path(__file__).parents[3]
# Seconds, for what takes a few on an idle machine.
DEADLINE = 120.0

Line = dict[str, Any]


class PeerProcess:
    """A process that prints lines of JSON, the first when it is ready; see `discovery_peer`.

    Attributes:
        process: the process.
        found: the addresses of the peers that it has now, by peer id, as far as its lines have been read.
        sources: who says so, by peer id.
        times: when the last line about a peer was printed, by peer id; of `time.monotonic`.
    """

    def __init__(self, machine: Machine, command: Sequence[str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = machine.popen(command, cwd=ROOT, **pipes)
        self.found: dict[str, list[str]] = {}
        self.sources: dict[str, list[str]] = {}
        self.times: dict[str, float] = {}
        self.ready_at = 0.0
        self._ready: Line = {}
        self._lines: queue.SimpleQueue[tuple[float, Line]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            for text in self.process.stdout:
                self._lines.put((time.monotonic(), json.loads(text)))
        except ValueError:
            pass  # the pipe was closed with the network
        self._lines.put((time.monotonic(), {"ended": True}))

    def wait_ready(self) -> Line:
        """Its first line."""
        if not self._ready:
            self.ready_at, self._ready = self.next_line()
        return self._ready

    @property
    def peer_id(self) -> str:
        """Its peer id; waits until it is ready."""
        return str(self.wait_ready()["peer"])

    @property
    def addresses(self) -> list[str]:
        """Its own addresses; waits until it is ready."""
        return list(self.wait_ready()["addresses"])

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Read lines until this is true of what they say."""
        self.wait_ready()
        while not is_reached():
            self._take(*self.next_line())

    def wait_found(self, *peers: PeerProcess) -> None:
        """Read until it has these peers."""
        self.wait_until(lambda: {peer.peer_id for peer in peers} <= self.found.keys())

    def wait_lost(self, peer: PeerProcess) -> None:
        """Read until it has lost a peer that it had once found."""
        assert peer.peer_id in self.times
        self.wait_until(lambda: peer.peer_id not in self.found)

    def ask(self, request: str) -> Line:
        """Write a line to it; returns the line that answers."""
        assert self.process.stdin is not None
        self.wait_ready()
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        while True:
            at, line = self.next_line()
            if not {"found", "lost"} & line.keys():
                return line
            self._take(at, line)

    def explain(self) -> str:
        """What it tried, as a table."""
        return str(self.ask("explain")["explain"])

    def leave(self) -> None:
        """Have it end in order, and wait for that."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(DEADLINE) == 0

    def kill(self) -> None:
        """Kill it without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE)

    def next_line(self) -> tuple[float, Line]:
        """The next line, and when it was printed."""
        try:
            at, line = self._lines.get(timeout=DEADLINE)
        except queue.Empty:
            raise AssertionError(f"nothing in {DEADLINE:g} s; it has {self.found}") from None
        assert "ended" not in line, "the process has ended"
        return at, line

    def _take(self, at: float, line: Line) -> None:
        if "found" in line:
            self.found[line["found"]] = line["addresses"]
            self.sources[line["found"]] = line.get("sources", [])
            self.times[line["found"]] = at
        elif "lost" in line:
            self.found.pop(line["lost"], None)
            self.times[line["lost"]] = at


def start_peer(machine: Machine, *listen: str, **options: Any) -> PeerProcess:
    """Start a `discovery_peer`; it listens on all addresses unless told otherwise."""
    content = json.dumps({"listen": listen or ["/ip4/0.0.0.0/tcp/0"], **options})
    module = "tests.e2e.namespaces.discovery_peer"
    return PeerProcess(machine, [sys.executable, "-m", module, content])
