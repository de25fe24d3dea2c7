"""The processes of a testnet: a leader, and workers that join it by its ticket, all on this machine.

Only what was started here is ever ended, by the process itself and not by a number that somebody else may have by then.
All of them end when their standard input does: none is left when the process that started them is killed.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from neurogrid.errors import TransportError
from neurogrid.training.testnet.network import Lines, Network
from neurogrid.training.testnet.plan import LEADER

__all__ = ["STOP_TIMEOUT", "Processes", "ProcessSettings"]

# Below those that Linux gives to whoever asks for any: nobody takes it while the leader is away.
_PORTS: Final = range(20_000, 32_000)
_MAX_TRIES: Final = 1000
_POLL: Final = 0.05  # seconds
# For a worker that is asked to end; it has a trainer to end.
STOP_TIMEOUT: Final = 10.0
# A process that has SIGKILL is gone as soon as the kernel comes to it.
_KILL_TIMEOUT: Final = 30.0


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """A testnet, but for what happens to it.

    Attributes:
        run_file: of the run, for the leader.
        directory: where the run is kept; what the processes say is in `testnet/` below it.
        num_threads: that each process computes with.
        wait: seconds without a round after which the run is given up.
        lines: between the processes, which are in namespaces of the network then; None for loopback.
        has_seats: whether each worker has a seat of its own in the run, as those have that hold the whole model.
    """

    run_file: Path
    directory: Path
    num_threads: int = 1
    wait: float = 300.0
    lines: Lines | None = None
    has_seats: bool = True

    @property
    def logs(self) -> Path:
        """The directory for what the processes say, and for what workers keep."""
        return self.directory / "testnet"

    @property
    def ticket(self) -> Path:
        """The ticket of the run, once the leader has written it."""
        return self.directory / "cluster" / "ticket"


class Processes:
    """A leader and workers, each of which runs, or does not.

    Args:
        settings: of the testnet.
        workers: names of those that may be started.
        network: that they are in; None for loopback.
    """

    def __init__(
        self, settings: ProcessSettings, workers: Sequence[str], network: Network | None = None
    ) -> None:
        self._settings, self._network = settings, network
        self._port = _free_port()
        self.workers = tuple(workers)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._num_before: dict[str, int] = {}

    def start(self, name: str) -> None:
        """Start the leader or a worker: the same as before, if it was there.

        Raises:
            TransportError: it cannot be started.
        """
        assert name not in self._running
        command = self._leader() if name == LEADER else self._worker(name)
        before = [] if self._network is None else self._network.command(name)
        try:
            with self.log(name).open("ab") as log:
                self._running[name] = subprocess.Popen(
                    [*before, sys.executable, "-m", *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": str(self._settings.num_threads)},
                    # Ctrl-C is for the testnet, which ends them when it ends.
                    start_new_session=True,
                )
        except OSError as exc:
            raise TransportError(f"the {name} cannot be started: {exc.strerror or exc}") from exc

    def begin_anew(self, name: str) -> None:
        """Have a worker that does not run be another one from here on, which has only the ticket."""
        self._num_before[name] = self._num_before.get(name, 0) + 1

    def is_running(self, name: str) -> bool:
        """Whether a process was started, and has not ended."""
        process = self._running.get(name)
        return process is not None and process.poll() is None

    def pid(self, name: str) -> int:
        """The number of a process that was started, and whose end nobody was told of."""
        return self._running[name].pid

    def ended(self, name: str) -> int | None:
        """The status of a process that has ended by itself, once; None if it runs, or does not."""
        process = self._running.get(name)
        if process is None or (status := process.poll()) is None:
            return None
        self._forget(name)
        return status

    async def kill(self, name: str) -> None:
        """Kill a process that runs with SIGKILL, and wait until it is gone."""
        self._running[name].kill()
        await self._wait([name], _KILL_TIMEOUT)
        self._forget(name)

    async def stop(self) -> None:
        """End all that run: leniently at first."""
        for process in self._running.values():
            process.terminate()
        await self._wait(self._running, STOP_TIMEOUT)
        await self.kill_all()

    async def kill_all(self) -> None:
        """Kill all that run."""
        for process in self._running.values():
            process.kill()
        await self._wait(self._running, _KILL_TIMEOUT)
        for name in tuple(self._running):
            self._forget(name)

    def log(self, name: str) -> Path:
        """The file of what a process says."""
        return self._settings.logs / f"{name}.log"

    def last_words(self, name: str) -> str:
        """The last line that a process said; empty if there is none."""
        try:
            lines = self.log(name).read_bytes().splitlines()
        except FileNotFoundError:
            return ""
        return lines[-1].decode(errors="replace") if lines else ""

    async def _wait(
        self, names: Sequence[str] | dict[str, subprocess.Popen[bytes]], seconds: float
    ) -> None:
        """Wait until these have ended, but no longer than so many seconds."""
        with trio.move_on_after(seconds):
            while any(self._running[name].poll() is None for name in names):
                await trio.sleep(_POLL)

    def _forget(self, name: str) -> None:
        process = self._running.pop(name)
        assert process.stdin is not None
        process.stdin.close()

    def _listen(self, name: str, port: int) -> str:
        host = "127.0.0.1" if self._network is None else self._network.address(name)
        return f"/ip4/{host}/tcp/{port}"

    def _leader(self) -> list[str]:
        settings = self._settings
        is_there = (settings.directory / "journal").exists()
        return [
            *("neurogrid.cli.commands.main", "train", str(settings.run_file)),
            *("--dir", str(settings.directory), *(["--resume"] if is_there else [])),
            *("--listen", self._listen(LEADER, self._port)),
            *("--name", LEADER, "--wait", str(settings.wait)),
            *("--threads", str(settings.num_threads), "--no-http", "--stop-on-stdin-eof"),
        ]

    def _worker(self, name: str) -> list[str]:
        settings, num_before = self._settings, self._num_before.get(name, 0)
        cluster = settings.logs / (f"{name}.{num_before}" if num_before else name)
        return [
            *("neurogrid.cli.commands.worker", "--train", "--no-cache", "--disable-mdns"),
            *("--join", f"@{settings.ticket}", "--cluster", str(cluster)),
            *("--listen", self._listen(name, 0), "--name", name),
            *("--threads", str(settings.num_threads), "--stop-on-stdin-eof"),
        ]


def _free_port() -> int:
    """A port of 127.0.0.1 that nobody has, and that nobody gets who does not ask for it by number.

    Raises:
        TransportError: there is none.
    """
    draw = random.SystemRandom()
    for _ in range(_MAX_TRIES):
        port = draw.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise TransportError(
        f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free on 127.0.0.1: end programs that have them"
    )
