"""A `neurogrid-coordinator` that runs while a test does something else, and prints a ticket."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.preloaded import COORDINATOR, DEADLINE, Popen

__all__ = [
    "COORDINATOR",
    "LOOPBACK",
    "PROMPT",
    "CoordinatorProcess",
    "start_coordinator",
    "ticket_of",
]

LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")
PROMPT = ("--prompt", "A function definition", "--max-tokens", "4")


class CoordinatorProcess:
    """A `neurogrid-coordinator` whose stderr can be waited for."""

    def __init__(self, process: Popen) -> None:
        self.process = process
        self.lines: list[str] = []
        self._coming: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                self._coming.put(line)
        self._coming.put("")

    def wait_line(self, part: str) -> str:
        """The first line from here on with `part` in it."""
        while line := self._coming.get(timeout=DEADLINE):
            self.lines.append(line)
            if part in line:
                return line
        raise AssertionError(f"it ended without {part!r}: {''.join(self.lines)}")

    def wait_end(self) -> tuple[int, str]:
        """Its status, and what it wrote to stdout."""
        while line := self._coming.get(timeout=DEADLINE):
            self.lines.append(line)
        assert self.process.stdout is not None
        return self.process.wait(DEADLINE), self.process.stdout.read()


@contextmanager
def start_coordinator(
    *args: str, command: Sequence[str] = COORDINATOR, where: Sequence[str] = LOOPBACK
) -> Iterator[CoordinatorProcess]:
    """Run a coordinator, with a prompt, until the block is left."""
    process = Popen(
        [*command, *PROMPT, *where, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    coordinator = CoordinatorProcess(process)
    try:
        yield coordinator
    finally:
        coordinator.end()


def ticket_of(coordinator: CoordinatorProcess) -> str:
    """As somebody would copy it: from the file that the coordinator names, where stderr is no terminal."""
    line = coordinator.wait_line("the ticket by which workers join is in ")
    file = Path(line.split(" is in ")[1].partition(": ")[0])
    assert file.stat().st_mode & 0o777 == 0o600
    return file.read_text().strip()
