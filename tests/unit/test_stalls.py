"""Weights that stop coming: it is said once, and again when they go on; nothing is a stall when all have come."""

from __future__ import annotations

import pytest
import trio

from neurogrid.fleet.board.status import TransferStatus
from neurogrid.fleet.board.worker_records import WorkerRecords
from neurogrid.fleet.stalls import STALLED_AFTER, StallWatch
from neurogrid.inference.board.progress import Progress

pytestmark = pytest.mark.usefixtures("autojump_clock")


class Told(Progress):
    def __init__(self) -> None:
        self.words: list[tuple[str, float]] = []
        self.num_bytes = 0

    def transferred(self, peer_id: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def transfer_stalled(self, peer_id: str, seconds: float) -> None:
        self.words.append((f"{peer_id} stalled", seconds))

    def transfer_resumed(self, peer_id: str, seconds: float) -> None:
        self.words.append((f"{peer_id} resumed", seconds))


async def test_a_transfer_that_stops_says_so_and_that_it_goes_on() -> None:
    told = Told()
    watch = StallWatch(told, "a", 100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        reports = watch.reports
        await trio.sleep(10 * STALLED_AFTER)  # it is asked what it has, and thinks
        assert told.words == []
        reports.begun()
        for _ in range(5):
            await trio.sleep(STALLED_AFTER - 1)
            reports.sent(10)
        assert told.words == []
        await trio.sleep(STALLED_AFTER + 5)
        assert told.words == [("a stalled", STALLED_AFTER)]
        await trio.sleep(5)
        reports.sent(10)
        await trio.sleep(1)
        assert told.words[1:] == [("a resumed", STALLED_AFTER + 10)]
        reports.held(20)
        reports.passed_on(20)
        await trio.sleep(10 * STALLED_AFTER)  # it loads what it has
        assert len(told.words) == 2
        assert told.num_bytes == 60
        nursery.cancel_scope.cancel()


def transfer_at(records: WorkerRecords, now: float) -> TransferStatus:
    status = records.transfer("a", now)
    assert status is not None
    return status


def test_the_status_says_for_how_long_nothing_has_come() -> None:
    records = WorkerRecords()
    records.transfer_planned("a", 100)
    assert transfer_at(records, 1000.0).stalled_seconds is None  # nothing was to come yet
    records.transfer_begun("a", 1000.0)
    assert transfer_at(records, 1000.0 + STALLED_AFTER - 1).stalled_seconds is None
    assert transfer_at(records, 1000.0 + STALLED_AFTER + 1).stalled_seconds == STALLED_AFTER + 1
    records.came("a", 1020.0, sent=40)
    assert transfer_at(records, 1021.0).stalled_seconds is None
    records.came("a", 1021.0, sent=60)
    assert transfer_at(records, 2000.0).stalled_seconds is None
