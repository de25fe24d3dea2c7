"""The workers of a leader that has no group: of a chain of stages, or of a witnessed run. They are asked, started, and
listened to; what each of them does there is not known here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from neurogrid.errors import NeuroGridError, RequestRefusedError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host, own_addresses
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import ErrorCode, Hello, TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.leading.chains.chain import Chain, ChainBroken
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.hiring import HEARTBEAT, Hiring, LackingError
from neurogrid.training.leading.look import PeerLook
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.runs.resources import Need
from neurogrid.training.wire.runs import Report, RunMessage, StageReport, Start

__all__ = ["ChainMembers", "ChainWorker"]

logger = logging.getLogger(__name__)

_RETRY: Final = 1.0
_GOODBYE: Final = 5.0
# Times that a member may fail before it is not asked again.
_MAX_FAILURES: Final = 5
# Workers that are not here, and are known all the same.
_MAX_AWAY: Final = 1000
_NO_MEMORY: Final = "no memory left"


@dataclass
class ChainWorker:
    """A worker, as the leader has it.

    Attributes:
        number: of it in the run, from 1; 0 before it was started.
        is_started: whether it has a lease, and was told to begin.
        memory: bytes that it offers.
        report, stage: the last that it told.
        heard_at: when it said something last.
        num_failures: so often it could not do what it was told, since it last did.
        is_slow: it has become slow as a stage: others come first.
        pace: seconds that a micro-batch takes it; None while that is not known.
        is_apart: it was said that its weights are not those of its stage.
        waited: the share of its last step in which it waited for others; None while it is not known.
        refusal: why it takes no part, for people; empty where nothing is known.
    """

    name: str = ""
    number: int = 0
    is_started: bool = False
    memory: int = 0
    report: Report | None = None
    stage: StageReport | None = None
    heard_at: float = 0.0
    num_failures: int = 0
    is_slow: bool = False
    waited: float | None = None
    pace: float | None = None
    is_apart: bool = False
    refusal: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether it has said that it cannot take part, since it was started."""
        return self.report is not None and self.report.state == "failed"


class ChainMembers:
    """Workers that are or were here. Keep `run` running.

    Args:
        host: this peer's.
        exchange: of runs, on it.
        facts: what members are told.
        progress: is told what people may want to see.
        total_steps: of the schedule.
        most: workers that are started at most, those that stand by among them; None for all that come.
        on_no_memory: is called with a worker whose memory was full in a step; whether less is asked of it from here
            on, so that this was no failure.

    Attributes:
        changed: is set whenever one has said something, came, or was lost.
        grace: seconds that one may say nothing.
    """

    def __init__(
        self,
        host: Host,
        exchange: Exchange,
        facts: RunFacts,
        progress: LeaderProgress,
        *,
        total_steps: int,
        most: int | None,
        on_no_memory: Callable[[ChainWorker], bool],
    ) -> None:
        self._on_no_memory = on_no_memory
        self._host, self._facts, self._progress = host, facts, progress
        self._total_steps, self._most = total_steps, most
        self.grace = facts.run_file.outer.grace
        self._hiring = Hiring(exchange, facts.run_id)
        self._workers: dict[str, ChainWorker] = {}
        self._num_workers = 0
        # Of whom one has told that it lost the other.
        self._apart: set[frozenset[str]] = set()
        self.changed = RenewedEvent()
        self.tell = self._hiring.tell
        exchange.on_message(RunMessage.REPORT, self._on_report)
        exchange.on_message(RunMessage.STAGE_REPORT, self._on_stage_report)
        exchange.on_message(RunMessage.FOLLOW, _refuse_deputy)
        exchange.on_peer_opened(self._on_opened)
        exchange.on_peer_lost(self._on_lost)
        # Where a leader is started again, workers may be back before it leads.
        for peer_id, hello in exchange.opened_peers().items():
            self._on_opened(peer_id, hello)

    def get(self, peer_id: str) -> ChainWorker:
        """A worker; one of which nothing is known, where it has never been here."""
        return self._workers.get(peer_id, ChainWorker())

    def usable(self) -> list[str]:
        """Peer ids of workers that can be stages now; those that have become slow come last."""
        found = [p for p, worker in self._workers.items() if self._is_usable(p, worker)]
        return sorted(found, key=lambda peer: self._workers[peer].is_slow)

    def refusals(self) -> list[str]:
        """Reasons why connected workers take no part, for people: a line for each worker."""
        return [
            f"{self.called(peer_id)}: {worker.refusal}"
            for peer_id, worker in self._workers.items()
            if worker.refusal and self._host.is_connected(peer_id)
        ]

    def give_up(self, peer_id: str, reason: str) -> None:
        """Ask a worker no more."""
        worker = self.get(peer_id)
        worker.num_failures, worker.refusal = max(worker.num_failures, _MAX_FAILURES), reason

    def take_again(self, peer_id: str) -> None:
        """Ask a worker again, that was given up."""
        worker = self.get(peer_id)
        worker.num_failures, worker.refusal = 0, ""
        self.changed.set()

    async def dismiss(self, peer_id: str, reason: str) -> None:
        """Tell a worker that it is needed no more, and why."""
        worker = self.get(peer_id)
        worker.is_started = False
        self._hiring.book.drop(peer_id)
        await self._hiring.dismiss(peer_id, reason)

    def looks(self) -> list[PeerLook]:
        """All of them, for whoever shows them."""
        now = trio.current_time()
        return [
            PeerLook(
                peer_id=peer_id,
                name=worker.name,
                seat=None,
                is_connected=self._host.is_connected(peer_id),
                report=worker.report,
                versions=worker.versions,
                lease_seconds=self._hiring.book.left(peer_id, now),
            )
            for peer_id, worker in self._workers.items()
        ]

    async def run(self) -> None:
        """Ask and start workers, and keep them."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._enlist_all)
            nursery.start_soon(self._hiring.renew, self._lease_lost)

    async def dismiss_all(self, reason: str) -> None:
        """Tell all that they are needed no more."""
        with trio.move_on_after(_GOODBYE):
            async with trio.open_nursery() as nursery:
                for peer_id, worker in self._workers.items():
                    if worker.is_started and self._host.is_connected(peer_id):
                        nursery.start_soon(self._hiring.dismiss, peer_id, reason)

    def called(self, peer_id: str) -> str:
        """A worker, for people."""
        worker = self._workers.get(peer_id)
        return worker.name if worker is not None and worker.name else peer_id

    def address_of(self, peer_id: str) -> str:
        """Multiaddr at which a worker can be dialled; empty where it has told none."""
        report = self.get(peer_id).report
        return report.group_addresses[0] if report is not None and report.group_addresses else ""

    # How they stand in a chain

    def has_heard(self, peer_id: str, chain: int) -> bool:
        """Whether it knows of an arrangement."""
        return self._told(peer_id, chain) is not None

    def is_ready(self, peer_id: str, chain: int) -> bool:
        """Whether it has its layers and their state."""
        told = self._told(peer_id, chain)
        return told is not None and told.state != "loading"

    def holds(self, peer_id: str, chain: int, step: int, *, is_holder: bool = False) -> bool:
        """Whether it can go on from the state after `step`.

        Args:
            is_holder: it was asked to keep that state in this arrangement: until it tells of this one, it holds what it
                told of the one before.
        """
        told = self.get(peer_id).stage
        if told is None or (told.chain != chain and not (is_holder and told.chain < chain)):
            return False
        return told.holds and told.step == step

    def is_out(self, peer_id: str, chain: int) -> bool:
        """Whether it is not here any more, or has failed."""
        told = self._told(peer_id, chain)
        is_here = self._is_usable(peer_id, self.get(peer_id))
        return not is_here or told is None or told.state == "failed"

    def note_failed(self, peer_id: str, chain: int) -> str:
        """Count it where it has failed in an arrangement; why, else nothing."""
        worker, told = self.get(peer_id), self._told(peer_id, chain)
        if told is None or told.state != "failed":
            return ""
        if self._told(told.lost, chain) is not None and not self._host.is_connected(told.lost):
            return told.reason  # whose neighbour has gone has not failed
        if not (_NO_MEMORY in told.reason and self._on_no_memory(worker)):
            self.count_failure(peer_id, told.reason)
        return told.reason

    def count_failure(self, peer_id: str, reason: str) -> None:
        """Note that a worker could not do what it was told; one that often cannot is asked no more."""
        worker = self.get(peer_id)
        worker.num_failures += 1
        if worker.num_failures == _MAX_FAILURES:
            worker.refusal = reason
            self._progress.warn(
                f"{self.called(peer_id)} has failed {_MAX_FAILURES} times, and is not asked again: {reason}"
            )

    def are_apart(self, peer_id: str, other: str) -> bool:
        """Whether one of two has told that it cannot reach the other, since either was here anew."""
        return frozenset((peer_id, other)) in self._apart

    def note_done(self, peers: Iterable[str]) -> None:
        """Note that workers have done what they were told: what went wrong before counts no more."""
        for peer_id in peers:
            self.get(peer_id).num_failures = 0

    async def wait(self, chain: Chain, is_so: Callable[[], bool]) -> None:
        """Wait until something is so.

        Raises:
            ChainBroken: a member of the chain is lost meanwhile, or has failed.
        """
        while True:
            self.check(chain)
            if is_so():
                return
            changed = self.changed.next
            with trio.move_on_after(HEARTBEAT):
                await changed.wait()

    def operations_done(self, chain: Chain, step: int) -> dict[str, int]:
        """Operations of a step that members of a chain have told of: forwards and backwards of a micro-batch."""
        told = {peer_id: self._told(peer_id, chain.number) for peer_id in chain.peers}
        return {
            peer_id: 2 * each.done + each.under_way
            for peer_id, each in told.items()
            if each is not None and each.state == "working" and each.step == step
        }

    def check(self, chain: Chain) -> None:
        """Raises ChainBroken where a member of a chain is lost, or has failed."""
        for peer_id in chain.peers:
            self._check(chain, peer_id)

    def _check(self, chain: Chain, peer_id: str) -> None:
        worker, called = self.get(peer_id), self.called(peer_id)
        if not self._host.is_connected(peer_id):
            raise ChainBroken(f"{called} is lost")
        if self.is_silent(worker):
            raise ChainBroken(f"{called} says nothing any more")
        if not worker.is_started:
            raise ChainBroken(f"{called} takes part no more")
        if reason := self.note_failed(peer_id, chain.number):
            raise ChainBroken(f"{called} has failed: {reason}")

    def _told(self, peer_id: str, chain: int) -> StageReport | None:
        stage = self.get(peer_id).stage
        return stage if stage is not None and stage.chain == chain else None

    def is_silent(self, worker: ChainWorker) -> bool:
        """Whether it has said nothing for the grace of the run."""
        grace = max(self.grace, 3 * HEARTBEAT)
        return trio.current_time() - worker.heard_at > grace

    def _is_usable(self, peer_id: str, worker: ChainWorker) -> bool:
        return (
            worker.is_started
            and worker.report is not None
            and worker.num_failures < _MAX_FAILURES
            and self._host.is_connected(peer_id)
            and not self.is_silent(worker)
        )

    # What they tell

    def _on_opened(self, peer_id: str, hello: Hello) -> None:
        if hello.role == "worker":
            worker = self._workers.setdefault(peer_id, ChainWorker())
            worker.name = hello.name or worker.name
            # It may be another process, or at another place: others dial what it tells.
            worker.is_started, worker.report, worker.stage = False, None, None
            self._apart = {pair for pair in self._apart if peer_id not in pair}
            self.changed.set()

    def _on_lost(self, peer_id: str, reason: NeuroGridError) -> None:
        if (worker := self._workers.get(peer_id)) is not None:
            logger.debug("lost %s: %s", peer_id, reason)
            self._hiring.book.drop(peer_id)
            worker.is_started = False
            self._forget_away()
            self.changed.set()

    def _forget_away(self) -> None:
        """Forget workers that are not here, where they are too many: those that have been away for longest."""
        away = [peer for peer in self._workers if not self._host.is_connected(peer)]
        away.sort(key=lambda peer: self._workers[peer].heard_at)
        for peer_id in away[: max(len(away) - _MAX_AWAY, 0)]:
            del self._workers[peer_id]
            self._apart = {pair for pair in self._apart if peer_id not in pair}

    def _lease_lost(self, peer_id: str) -> None:
        if (worker := self._workers.get(peer_id)) is not None:
            worker.is_started = False
            self.changed.set()

    def heard(self, message: TensorMessage) -> ChainWorker | None:
        """A worker has said something; which, if it is known."""
        worker = self._workers.get(sender_of(message))
        if worker is not None:
            worker.heard_at = trio.current_time()
            self.changed.set()
        return worker

    def _on_report(self, message: TensorMessage) -> None:
        report, worker = Report.decode(message.data), self.heard(message)
        if worker is not None and report.run == self._facts.run_id:
            has_failed = report.state == "failed" and not worker.has_failed  # it says so again
            # Others dial what it tells.
            own = own_addresses(report.group_addresses, sender_of(message))
            worker.report = replace(report, group_addresses=own)
            if has_failed:
                worker.refusal, worker.is_started = report.reason, False
                self._hiring.book.drop(sender_of(message))
                self.count_failure(sender_of(message), report.reason)

    def _on_stage_report(self, message: TensorMessage) -> None:
        report, worker = StageReport.decode(message.data), self.heard(message)
        if worker is not None and report.run == self._facts.run_id:
            worker.stage = report
            if report.lost in self._workers and report.lost != sender_of(message):
                self._apart.add(frozenset((report.lost, sender_of(message))))

    # Asking

    async def _enlist_all(self) -> None:
        """Ask workers that are here and have nothing to do, as many as there is room for."""
        run = self._facts.run_file.members
        memory = max(run.memory, self._facts.member_memory)
        need = Need(memory, run.storage, run.cores, run.gpu, run.price)
        while True:
            changed = self.changed.next
            free = [
                peer_id
                for peer_id, worker in self._workers.items()
                if not worker.is_started
                and worker.num_failures < _MAX_FAILURES
                and self._host.is_connected(peer_id)
            ]
            await self._fill(free, min(self._room, run.max), need)
            with trio.move_on_after(_RETRY if free else math.inf):
                await changed.wait()
            await trio.sleep(0.05)

    @property
    def _room(self) -> int:
        """Workers more that may be started."""
        if self._most is None:
            return len(self._workers)
        taken = sum(
            worker.is_started and worker.num_failures < _MAX_FAILURES
            for worker in self._workers.values()
        )
        return self._most - taken

    async def _fill(self, free: Sequence[str], room: int, need: Need) -> None:
        """Have so many workers started, or fewer where others do not do: for each of whom the next one is asked."""
        waiting = iter(free)

        async def fill_one() -> None:
            for peer_id in waiting:
                if await self._enlist(peer_id, need):
                    return

        async with trio.open_nursery() as nursery:
            for _ in range(min(room, len(free))):
                nursery.start_soon(fill_one)

    async def _enlist(self, peer_id: str, need: Need) -> bool:
        """Ask a worker, and start it; whether it was started."""
        worker = self._workers.get(peer_id)
        if worker is None:  # it went, and was forgotten
            return False
        try:
            offer, asked_at = await self._hiring.ask(peer_id, need)
            facts = self._facts
            if not worker.number:
                self._num_workers += 1
                worker.number = self._num_workers
            start = Start(
                run=facts.run_id,
                lease=offer.lease,
                seat=worker.number,
                run_file=facts.text,
                config=facts.config,
                kind=facts.run_file.model.kind,
                manifest=facts.manifest,
                num_parameters=facts.num_parameters,
                total_steps=self._total_steps,
            )
            if worker.has_failed:
                worker.report = None
            await self._hiring.start(peer_id, start, asked_at=asked_at)
        except LackingError as exc:
            if worker.refusal != str(exc):
                worker.refusal = str(exc)
                self._progress.warn(f"{self.called(peer_id)} takes no part yet: {exc}")
            return False
        except NeuroGridError as exc:
            logger.info("%s does not begin: %s", peer_id, exc)
            return False
        if worker.has_failed:  # it was quicker than this
            return False
        worker.name, worker.memory = offer.name or worker.name, offer.memory
        worker.versions, worker.refusal = dict(offer.versions), ""
        worker.heard_at, worker.is_started = trio.current_time(), True
        worker.stage = None
        self.changed.set()
        return True


def _refuse_deputy(message: TensorMessage) -> None:
    raise RequestRefusedError(
        "a run in stages has no deputy, nor has a witnessed one: after a failure its leader is started again, with "
        "--resume",
        code=ErrorCode.NOT_SUPPORTED,
        is_expected=True,
    )
