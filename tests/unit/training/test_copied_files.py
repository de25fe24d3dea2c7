"""What a deputy has beside the journal: a checkpoint comes as a whole, however slow the way to it is."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from neurogrid.errors import PeerRefusedError, ResponseTimeout
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.transfer import Transfers
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.checkpoints import CheckpointDraft, latest_checkpoint
from neurogrid.training.data.blob_files import OfferedFiles
from neurogrid.training.leading.deputies import copied_files
from neurogrid.training.leading.deputies import deputy as deputies
from neurogrid.training.leading.deputies.copied_files import OfferedCopies, fetch_copies
from neurogrid.training.leading.progress import QuietProgress
from neurogrid.training.leading.settings import DeputySettings
from neurogrid.training.runs.run_directory import RunDirectory

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def checkpoint(folder: Path, step: int) -> Path:
    """One with weights of its own, and a config that all have."""
    draft = CheckpointDraft.begin(folder, step)
    (draft.path / CONFIG).write_text("{}")
    (draft.path / WEIGHTS).write_text(f"weights after {step}")
    return draft.commit()


class Leads:
    """A leader's files, and whoever asks for them."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path)
        self.offered = OfferedFiles()
        self.copies = OfferedCopies(self.directory, path / "data", self.offered)

    async def makes(self, step: int) -> dict[str, bytes]:
        """A checkpoint more; what the deputy is told of it."""
        checkpoint(self.directory.checkpoints, step)
        await self.copies.refresh()
        return dict(zip(self.copies.names, self.copies.blobs, strict=True))

    async def gives(self, files: dict[str, bytes], step: int) -> bool:
        """Ask for the weights of a step: whether they are given."""
        blob = files[f"checkpoints/step-{step}/{WEIGHTS}"]
        return await self.offered.provide("deputy", blob) is not None

    @property
    def num_given(self) -> int:
        return len(self.offered._sources)


async def test_a_checkpoint_is_given_until_the_deputy_begins_with_a_newer_one(
    tmp_path: Path,
) -> None:
    leader = Leads(tmp_path)
    told = {step: await leader.makes(step) for step in (1, 2)}
    assert await leader.gives(told[2], 2)
    for step in (3, 4, 5):
        told[step] = await leader.makes(step)
        assert await leader.gives(told[2], 2)
    assert not await leader.gives(told[1], 1)
    assert not await leader.gives(told[4], 4)
    assert leader.num_given == 3  # two weights, and the config of both
    assert await leader.gives(told[5], 5)
    await leader.copies.refresh()
    assert not await leader.gives(told[2], 2)
    assert leader.num_given == 2


async def test_of_checkpoints_that_nobody_asks_for_the_newest_is_given(tmp_path: Path) -> None:
    leader = Leads(tmp_path)
    for step in (1, 2, 3):
        told = await leader.makes(step)
        assert leader.num_given == 2
    assert await leader.gives(told, 3)


async def test_of_a_checkpoint_that_is_removed_meanwhile_nothing_stays_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given keeps its room on the disk."""
    leader = Leads(tmp_path)
    offer = leader.offered.offer

    async def gone(path: Path) -> bytes:
        if path.name == WEIGHTS:
            raise FileNotFoundError(path)
        return await offer(path)

    monkeypatch.setattr(leader.offered, "offer", gone)
    assert not await leader.makes(1)
    assert not leader.num_given


class Slow:
    """In the place of `Transfers`: a leader's files come, some of them only when they are asked for again.

    Attributes:
        came: how often something of each was sent.
    """

    def __init__(self, leader: Leads, *failing: Exception) -> None:
        self._leader, self._failing = leader, list(failing)
        self.came: list[bytes] = []

    async def fetch_blob(self, peers: list[str], blob_id: bytes, **options: Any) -> Any:
        source = await self._leader.offered.provide("deputy", blob_id)
        if source is None:
            raise PeerRefusedError("", code=ErrorCode.BLOB_UNKNOWN, text="no such blob")
        self.came.append(blob_id)
        if len(self.came) > 1 and self._failing:
            raise self._failing.pop(0)
        data = bytes(source.chunk(0))
        return SimpleNamespace(blob=SimpleNamespace(path=None, data=data), peer_id=peers[0])


@pytest.mark.parametrize("num_failures", [0, 1, 2])
async def test_files_that_have_come_are_not_fetched_again(
    tmp_path: Path, num_failures: int
) -> None:
    leader, own = Leads(tmp_path / "leader"), RunDirectory(tmp_path / "deputy")
    files = await leader.makes(4)
    transfers = Slow(leader, *[ResponseTimeout("too slow")] * num_failures)
    for _ in range(num_failures):
        with pytest.raises(ResponseTimeout):
            await fetch_copies(files, own, cast(Transfers, transfers), ["leader"], keep=2)
        assert latest_checkpoint(own.checkpoints) is None
    await fetch_copies(files, own, cast(Transfers, transfers), ["leader"], keep=2)
    found = latest_checkpoint(own.checkpoints)
    assert found is not None
    assert (found / WEIGHTS).read_text() == "weights after 4"
    assert len(transfers.came) == 2 + num_failures
    assert not (own.path / copied_files._UNFINISHED).exists()


async def test_of_a_checkpoint_that_is_not_fetched_any_more_nothing_stays(tmp_path: Path) -> None:
    leader, own = Leads(tmp_path / "leader"), RunDirectory(tmp_path / "deputy")
    transfers: Any = Slow(leader, ResponseTimeout("too slow"), ResponseTimeout("too slow"))
    for step in (4, 5):
        files = await leader.makes(step)
        with pytest.raises(ResponseTimeout):
            await fetch_copies(files, own, transfers, ["leader"], keep=2)
    here = {path.name for path in (own.path / copied_files._UNFINISHED).iterdir()}
    assert here <= {blob.hex() for blob in files.values()}


async def test_a_deputy_slower_than_the_interval_of_checkpoints_has_one_all_the_same(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """While one is on its way the run makes others."""
    leader = Leads(tmp_path / "leader")
    nobody: Any = None
    settings = DeputySettings(tmp_path / "deputy", nobody, tmp_path / "identity")
    settings.directory.mkdir()
    own = RunDirectory(settings.directory)
    deputy = deputies._Deputy(settings, own, Identity.generate(), QuietProgress())
    deputy._leader = "leader"
    transfers = Slow(leader, *[ResponseTimeout("too slow")] * 3)
    steps = itertools.count(1)

    async def fetch_blob(peers: list[str], blob_id: bytes, **options: Any) -> Any:
        try:
            return await Slow.fetch_blob(transfers, peers, blob_id, **options)
        finally:
            for _ in range(2):
                deputy._files = await leader.makes(next(steps))

    slow: Any = SimpleNamespace(fetch_blob=fetch_blob)
    deputy._exchange = cast(Any, SimpleNamespace(host=SimpleNamespace(is_connected=bool)))
    deputy._files = await leader.makes(next(steps))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(deputy._keep_files, slow, 2)
        while latest_checkpoint(own.checkpoints) is None and len(transfers.came) < 20:
            await trio.sleep(1)
        nursery.cancel_scope.cancel()
    deputy.copy.close()
    found = latest_checkpoint(own.checkpoints)
    assert found is not None
    assert (found / WEIGHTS).read_text() == f"weights after {found.name.removeprefix('step-')}"
    assert not (own.path / copied_files._UNFINISHED).exists()
