"""A worker that lends itself to a run and cannot take part: it says so, is nobody's any more, and goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from neurogrid.errors import CheckpointError, PeerRefusedError
from neurogrid.p2p import TensorMessage, new_request_id
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.wire import MessageCode
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.members import chain_part, service
from neurogrid.training.members.chain_part import ChainPart
from neurogrid.training.members.service import MemberService
from neurogrid.training.members.settings import MemberSettings
from neurogrid.training.stages.stage_process import StageProcess
from neurogrid.training.trainer.child import ChildEnded
from neurogrid.training.wire.runs import Ask, Offer, Renew, Report, RunMessage, Start, run_table

RUN = bytes(range(16))
CHAIN = """
[model]
config = "model.json"
[data]
path = "text.txt"
[layout]
stages = 2
[stop]
steps = 4
"""


@dataclass
class Leader:
    """Whoever asks a worker, and what that has reported."""

    exchange: Exchange
    worker: str
    service: MemberService
    reports: list[Report] = field(default_factory=list)
    heard: RenewedEvent = field(default_factory=RenewedEvent)

    async def request(self, code: MessageCode, data: bytes, answer: MessageCode) -> bytes:
        message = TensorMessage(code, request_id=new_request_id(), data=data)
        found = await self.exchange.request(self.worker, message, answer, timeout=10)
        return bytes(found.data)

    async def start(self, run_file: str = CHAIN) -> int:
        """Have it begin; the number of the lease."""
        offer = await self.request(RunMessage.ASK, Ask(RUN).encode(), RunMessage.OFFER)
        lease = Offer.decode(offer).lease
        start = Start(
            run=RUN,
            lease=lease,
            seat=3,
            run_file=run_file,
            config="{}",
            kind="causal-lm",
            manifest=bytes(32),
            num_parameters=1,
            total_steps=4,
        )
        await self.request(RunMessage.START, start.encode(), RunMessage.STARTED)
        return lease

    def note(self, message: TensorMessage) -> None:
        self.reports.append(Report.decode(message.data))
        self.heard.set()

    async def hears_failed(self) -> Report:
        """The report that it has failed."""
        while not self.reports or self.reports[-1].state != "failed":
            await self.heard.next.wait()
        return self.reports[-1]


@asynccontextmanager
async def leader_of_a_worker(folder: Path) -> AsyncIterator[Leader]:
    with trio.fail_after(60):
        async with (
            open_memory_network() as network,
            network.open_host() as first,
            network.open_host() as host,
            trio.open_nursery() as nursery,
        ):
            member = MemberService(host, MemberSettings(name="worker"), folder)
            nursery.start_soon(member.run)
            leader = Leader(Exchange(first, run_table(), role="coordinator"), host.peer_id, member)
            leader.exchange.on_message(RunMessage.REPORT, leader.note)
            await host.connect(first.addresses[0])
            await leader.exchange.open(host.peer_id)
            yield leader
            nursery.cancel_scope.cancel()


async def failing(leader: Leader, run_file: str = CHAIN) -> str:
    """What the worker says that cannot take part; its lease is no more, and it may be asked again."""
    leader.reports.clear()
    lease = await leader.start(run_file)
    report = await leader.hears_failed()
    assert (report.run, report.seat) == (RUN, 3)
    while True:
        try:
            await leader.request(RunMessage.RENEW, Renew(RUN, lease).encode(), RunMessage.RENEWED)
        except PeerRefusedError:
            return report.reason


async def test_a_stage_whose_process_ends_at_once_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin(process: StageProcess) -> None:
        raise ChildEnded("the stage's process ended with status 1")

    monkeypatch.setattr(StageProcess, "begin", begin)
    async with leader_of_a_worker(tmp_path) as leader:
        for _ in range(2):
            assert await failing(leader) == "the stage's process ended with status 1"


async def test_a_report_that_says_nothing_new_waits_for_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageProcess, "begin", lambda process: trio.sleep_forever())
    monkeypatch.setattr(service, "_HEARTBEAT", 1000.0)
    async with leader_of_a_worker(tmp_path) as leader:
        await leader.start()
        while not leader.reports:
            await leader.heard.next.wait()
        for _ in range(10):
            leader.service._report_changed.set()
            await trio.sleep(2 * service._SMALLEST_PAUSE)
        assert len(leader.reports) == 1
        # A leader that opens the exchange anew may be another process, which has heard of nothing.
        heard = leader.heard.next
        leader.service._tell_anew()
        await heard.wait()


async def test_a_heartbeat_says_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageProcess, "begin", lambda process: trio.sleep_forever())
    async with leader_of_a_worker(tmp_path) as leader:
        await leader.start()
        while len(leader.reports) < 3:
            await leader.heard.next.wait()
        assert leader.reports[-1] == leader.reports[-2]


async def test_files_of_one_part_are_given_until_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader may fetch them for its last checkpoint; and what is given keeps its room on the disk for good."""
    given: list[bytes] = []
    found: list[bool] = []

    async def run(part: ChainPart) -> None:
        offered = part._blobs.offered
        found.append(any([await offered.provide("leader", each) is not None for each in given]))
        path = tmp_path / f"state-{len(given)}"
        path.write_bytes(bytes([len(given)]) * 9)
        given.append(await offered.offer(path))
        path.unlink()
        found.append(await offered.provide("leader", given[-1]) is not None)
        raise CheckpointError("no more")

    monkeypatch.setattr(ChainPart, "_run", run)
    async with leader_of_a_worker(tmp_path / "worker") as leader:
        for _ in range(3):
            assert await failing(leader) == "no more"
    assert found == [False, True] * 3


@pytest.mark.parametrize("where", ["directory", "process"])
async def test_a_machine_without_room_takes_no_part_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """No room for its files, or for a process more."""

    def temporary_directory(prefix: str) -> None:
        raise OSError(28, "No space left on device")

    async def begin(process: StageProcess) -> None:
        raise OSError(28, "No space left on device")

    if where == "directory":
        monkeypatch.setattr(chain_part, "temporary_directory", temporary_directory)
    else:
        monkeypatch.setattr(StageProcess, "begin", begin)
    async with leader_of_a_worker(tmp_path) as leader:
        for _ in range(2):
            reason = await failing(leader)
            assert "cannot keep what the run needs" in reason
            assert "No space left on device" in reason
