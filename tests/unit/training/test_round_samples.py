"""Samples of a round on a member of a witnessed run: what is waited for, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.transfer import BlobUnavailableError
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.members.witnessed import samples as round_samples
from neurogrid.training.members.witnessed.samples import RoundSamples
from neurogrid.training.members.witnessed.witnessed_part import _Member
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.wire.runs import Epoch, EpochSeat, RoundWork, SampleRange

RUN = parse_run_file('[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\nrounds = 1\n')
SLICES = tuple(SliceInfo(bytes([number]) * 32, 2, 152) for number in (1, 2))
MANIFEST = Manifest("text", SLICES, (), sequence_length=8, vocab_size=500)
SEAT = EpochSeat(0, "own", 1)
WORK = RoundWork(0, 0, 1, (SampleRange(0, 0, 2),))
TOLD = Epoch(bytes(16), 1, "round_train", epoch=1, round=4, members=(SEAT,), works=(WORK,))


class Slices:
    """In the place of a cache: some slices are here, and others nobody gives."""

    passed_over = None

    def __init__(self, *here: SliceInfo) -> None:
        self.here = here
        self.needed: set[bytes] = set()

    def need_only(self, blob_ids: Sequence[bytes]) -> None:
        self.needed &= set(blob_ids)

    async def fetch(self, info: SliceInfo, peers: Sequence[str], timeout: float) -> Path:
        await trio.lowlevel.checkpoint()
        if info not in self.here:
            await trio.sleep(timeout)
            raise BlobUnavailableError("nobody has it", failures={})
        self.needed.add(info.blob_id)
        return Path("slice")


@pytest.fixture(autouse=True)
def without_data_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reach_sources(*told: Any) -> tuple[str, ...]:
        return ()

    monkeypatch.setattr(round_samples, "reach_sources", reach_sources)


def samples_of(slices: Slices) -> RoundSamples:
    blobs: Any = SimpleNamespace(slices=slices)
    nobody: Any = None
    return RoundSamples(nobody, "leader", blobs, MANIFEST, tuple, lambda number: ())


def member_of(slices: Slices) -> tuple[_Member, Any]:
    """A member that was told of a round, and its part."""
    part: Any = SimpleNamespace(
        _run_file=RUN,
        _start=SimpleNamespace(total_steps=9),
        _auditing=None,
        _changed=RenewedEvent(),
        _told=TOLD,
        _is_dismissed=False,
        _note=lambda state, **more: None,
    )
    nothing: Any = None
    return _Member(part, nothing, nothing, nothing, samples_of(slices)), part


@pytest.mark.parametrize(
    "then",
    [
        replace(TOLD, number=3, round=5),
        replace(TOLD, number=3, phase="cooldown"),
        replace(TOLD, number=3, phase="waiting_for_members", works=()),
    ],
)
async def test_a_slice_is_waited_for_no_longer_than_its_round_lasts(
    autojump_clock: MockClock, then: Epoch
) -> None:
    """The next round may be about another one."""
    member, part = member_of(Slices())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(member._train, TOLD, SEAT)
        for _ in range(20):
            part._changed.set()  # a heartbeat
            await trio.sleep(1)
        # It goes on in the same round.
        part._told = replace(TOLD, number=2, phase="paused")
        part._changed.set()
        await trio.sleep(1)
        assert nursery.child_tasks
        part._told = then
        part._changed.set()
    assert trio.current_time() < 30


async def test_a_slice_that_nobody_gives_within_a_long_round_is_told(
    autojump_clock: MockClock,
) -> None:
    member, _ = member_of(Slices())
    with pytest.raises(BlobUnavailableError):
        await member._train(TOLD, SEAT)
    assert 590 < trio.current_time() < 700


async def test_samples_to_be_looked_at_have_come_before(autojump_clock: MockClock) -> None:
    """Where they had to make room for others, they are not waited for while rounds go by."""
    member, _ = member_of(Slices())
    nothing: Any = None
    with pytest.raises(BlobUnavailableError):
        await member._gradient_at(TOLD, 0, nothing)
    assert trio.current_time() < RUN.epochs.train / 5
    with pytest.raises(RemoteProtocolError, match="no work"):
        await member._gradient_at(TOLD, 3, nothing)


async def test_what_is_gathered_for_later_takes_no_room_from_a_round() -> None:
    slices = Slices(*SLICES)
    samples = samples_of(slices)
    await samples.batches(WORK.ranges, 2, 0)
    await samples.gather((SampleRange(1, 0, 2),), 1)
    assert slices.needed == {SLICES[0].blob_id}
