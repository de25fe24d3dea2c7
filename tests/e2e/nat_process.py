"""Processes of `nat_peer` in network namespaces, as tests hold them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.namespaces.netns import Machine

__all__ = ["Peer"]

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0


class Peer:
    """A `nat_peer` process in a namespace."""

    def __init__(self, machine: Machine, log: Path, *args: str) -> None:
        self.log = log
        with log.open("w") as stderr:
            self._process = machine.popen(
                [sys.executable, "-m", "tests.e2e.nat_peer", *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
            )

    def hear(self, key: str) -> dict[str, Any]:
        """What it says next with this key; what it says else is skipped."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            if key in said:
                return said
        raise AssertionError(f"it ended before it said {key!r}: {self.log.read_text()[-3000:]}")

    def tell(self, line: str) -> None:
        """Give it a line to read."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Let it end by itself."""
        self.tell("")
        assert self._process.wait(DEADLINE) == 0, self.log.read_text()[-3000:]
