"""A testnet from its beginning to its end: processes are started, killed and started again, until their run is over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

import trio

from neurogrid.errors import ConfigurationError, NeuroGridError
from neurogrid.training.runs.audit import Audit, audit
from neurogrid.training.runs.journal import Recorded, read_journal
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.testnet.network import Network, open_network
from neurogrid.training.testnet.plan import LEADER, Chaos, PlannedKill, planned_kills, worker_name
from neurogrid.training.testnet.processes import Processes, ProcessSettings
from neurogrid.training.testnet.report import ChaosReport, Ended, Killed, report_of
from neurogrid.training.testnet.seats import Seats

__all__ = ["run_testnet"]

_TICK: Final = 0.1  # seconds
# The leader imports torch, and may have a text to prepare.
_TICKET_TIMEOUT: Final = 300.0
# A worker that ended by itself is started again after so many seconds, unless that has been too often by then.
_RESTART_SECONDS: Final = 1.0
_MAX_FAILURES: Final = 100


async def run_testnet(
    settings: ProcessSettings, chaos: Chaos, say: Callable[[str], object]
) -> ChaosReport:
    """Lead a run with workers on this machine to its end, kill some on the way, and return what came of it.

    When it is cancelled, all that was started is killed.

    Args:
        say: is told what happens, in lines.

    Raises:
        ConfigurationError: the directory has a run already, or there can be no namespaces here.
        TransportError: a process cannot be started.
    """
    directory = RunDirectory(settings.directory)
    if directory.has_run:
        raise ConfigurationError(
            f"{directory.path} has a run already: --dir DIR begins another one elsewhere"
        )
    settings.logs.mkdir(parents=True, exist_ok=True)
    workers = [worker_name(number) for number in range(1, chaos.num_workers + 1)]
    async with AsyncExitStack() as stack:
        network = None
        if settings.lines is not None:
            log = settings.logs / "network.log"
            network = await stack.enter_async_context(
                open_network([LEADER, *workers], settings.lines, log)
            )
        processes = Processes(settings, workers, network)
        seats = Seats(directory.journal) if settings.has_seats else None
        testnet = _Testnet(settings, chaos, processes, network, directory, say, seats)
        try:
            problem = await testnet.run()
            await processes.stop()
        finally:
            with trio.CancelScope(shield=True):
                await processes.kill_all()
    return testnet.report(problem)


@dataclass
class _Testnet:
    """A testnet under way, and what has happened to it so far.

    Attributes:
        starts: when processes that are away are started, by name, in trio's time.
        figures_before: bytes of the figures when the leader was killed last.
        started: when processes were started last, by name, in seconds since 1970.
        seats: of the workers, where the run's journal says who takes part.
    """

    settings: ProcessSettings
    chaos: Chaos
    processes: Processes
    network: Network | None
    directory: RunDirectory
    say: Callable[[str], object]
    seats: Seats | None
    began: float = field(default_factory=time.time)
    plan: deque[PlannedKill] = field(default_factory=deque)
    next_kill: float | None = None
    starts: dict[str, float] = field(default_factory=dict)
    figures_before: int = 0
    started: dict[str, float] = field(default_factory=dict)
    killed: list[Killed] = field(default_factory=list)
    failed: list[Ended] = field(default_factory=list)

    async def run(self) -> str:
        """Go on until the run is over; why it did not end, or nothing if it did."""
        self.plan.extend(planned_kills(self.chaos))
        self.processes.start(LEADER)
        if problem := await self._wait_ticket():
            return problem
        for name in self.processes.workers:
            self._start(name)
        num_bytes, moved = 0, trio.current_time()
        while True:
            now = trio.current_time()
            if (status := self.processes.ended(LEADER)) is not None:
                return self._leader_ended(status)
            if (found := self._metrics_bytes()) != num_bytes:
                num_bytes, moved = found, now
            elif now - moved > self.settings.wait:
                return f"no round within {self.settings.wait:g} s; the leader said: {self._words}"
            if self.network is not None and (status := self.network.status) is not None:
                return f"the network ended with status {status}: see {self.settings.logs / 'network.log'}"
            if num_bytes and self.next_kill is None:
                self.say("the first round is there")
                self._plan_next(now)
            if problem := self._start_again(now):
                return problem
            if self.next_kill is not None and now >= self.next_kill:
                await self._kill()
            await trio.sleep(_TICK)

    def report(self, problem: str) -> ChaosReport:
        """Make the report of the testnet."""
        over, recorded, found = time.time(), tuple[Recorded, ...](), None
        has_ended = not problem
        try:
            recorded = read_journal(self.directory.journal)
            found = audit([each.entry for each in recorded])
        except NeuroGridError as exc:
            problem = problem or str(exc)
        return report_of(
            self.chaos,
            self.settings.lines,
            recorded,
            tuple(self.directory.all_figures()),
            audit=found,
            began=self.began,
            over=over,
            killed=self.killed,
            failed=self.failed,
            has_ended=has_ended and _says_end(found),
            problem=problem or ("" if _says_end(found) else "the journal does not say its end"),
        )

    @property
    def _words(self) -> str:
        return self.processes.last_words(LEADER) or "nothing"

    async def _wait_ticket(self) -> str:
        until = trio.current_time() + _TICKET_TIMEOUT
        while not self.settings.ticket.exists():
            if (status := self.processes.ended(LEADER)) is not None:
                return self._leader_ended(status) or "the leader ended before it had members"
            if trio.current_time() > until:
                return f"the leader wrote no ticket within {_TICKET_TIMEOUT:g} s; it said: {self._words}"
            await trio.sleep(_TICK)
        return ""

    def _leader_ended(self, status: int) -> str:
        if status == 0:
            return ""
        self.failed.append(Ended(LEADER, time.time(), status))
        return f"the leader ended with status {status}: {self._words}"

    def _metrics_bytes(self) -> int:
        try:
            return self.directory.metrics.stat().st_size
        except FileNotFoundError:
            return 0

    def _plan_next(self, now: float) -> None:
        self.next_kill = now + self.plan[0].after if self.plan else float("inf")

    def _start_again(self, now: float) -> str:
        """Start what is due, and note what has ended by itself; why there is no going on, or nothing."""
        for name in self.processes.workers:
            if (status := self.processes.ended(name)) is None:
                continue
            self.failed.append(Ended(name, time.time(), status))
            words = self.processes.last_words(name) or "nothing"
            self.say(f"{name} ended by itself with status {status}; it said: {words}")
            if len(self.failed) >= _MAX_FAILURES:
                return f"workers ended by themselves {_MAX_FAILURES} times; {name} said: {words}"
            self.starts[name] = now + _RESTART_SECONDS
        for name in [name for name, at in self.starts.items() if now >= at]:
            del self.starts[name]
            self._start(name)
            self.say(f"{name} is started again")
        return ""

    async def _kill(self) -> None:
        """The next kill of the plan; it waits where its process is away, or has yet to lead or to take part again."""
        planned = self.plan[0]
        if not self.processes.is_running(planned.name) or not self._takes_part(planned.name):
            return
        if planned.name == LEADER:
            if self._metrics_bytes() == self.figures_before:
                return
            self.figures_before = self._metrics_bytes()
        self.plan.popleft()
        figures = self.directory.figures()
        number = next((each["round"] for each in reversed(figures) if "round" in each), 0)
        self.killed.append(Killed(planned.name, time.time(), planned.is_new))
        await self.processes.kill(planned.name)
        if planned.is_new:
            self.processes.begin_anew(planned.name)
        now = trio.current_time()
        self.starts[planned.name] = now + planned.down
        self._plan_next(now)
        self.say(
            f"{planned.name} is killed after round {number:g}, and comes back in {planned.down:.1f} s"
            f"{', as a worker that was never there' if planned.is_new else ''}"
        )

    def _start(self, name: str) -> None:
        self.started[name] = time.time()
        self.processes.start(name)

    def _takes_part(self, name: str) -> bool:
        """Whether a worker that runs takes part; of others than whole models' no journal says who does."""
        if name == LEADER or self.seats is None:
            return True
        self.seats.look()
        joined = self.seats.joined_at(name)
        return joined is not None and joined > self.started[name]


def _says_end(found: Audit | None) -> bool:
    return found is not None and found.has_ended
