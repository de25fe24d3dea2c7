"""Files between peers: what is not here in time, and what was saved for a seat that somebody takes over."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
from safetensors import SafetensorError
from safetensors.torch import save_file
from trio.testing import MockClock

from neurogrid.errors import (
    CheckpointError,
    ConfigurationError,
    PeerRefusedError,
    PeerUnreachableError,
    RemoteProtocolError,
    ResponseTimeout,
)
from neurogrid.p2p.transfer.passed_over import PassedOver
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.data.blob_files import fetch_file, fetch_file_patiently
from neurogrid.training.members import participation, saved_state
from neurogrid.training.members.participation import Participation
from neurogrid.training.members.saved_state import add_weights, take_weights
from neurogrid.training.members.settings import MemberSettings
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.trainer import TrainerError
from neurogrid.training.wire.runs import Order, Start

TRAINING = Path(participation.__file__).parents[1]
RUN = parse_run_file('[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\nrounds = 1\n')
BLOB = b"\x07" * 32
NUM = 2**20


class Line:
    """In the place of `Transfers`: a blob comes, however long that takes.

    Attributes:
        asked: for which blobs.
    """

    def __init__(self, data: bytes, seconds: float, *, refuses: int = 0) -> None:
        self._data, self._seconds, self._refuses = data, seconds, refuses
        self.asked: list[bytes] = []

    async def fetch_blob(self, peers: list[str], blob_id: bytes, **options: Any) -> Any:
        self.asked.append(blob_id)
        if self._refuses:
            self._refuses -= 1
            raise PeerRefusedError("", code=ErrorCode.BUSY, text="busy")
        await trio.sleep(self._seconds)
        return SimpleNamespace(blob=SimpleNamespace(path=None, data=self._data), peer_id=peers[0])


class Trainer:
    """Takes an optimiser, or does not."""

    layout = SimpleNamespace(num_elements=NUM)

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.taken = 0

    async def load_optimizer(self, path: Path) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.taken += 1


def part(line: Line) -> Participation:
    start = Start(
        run=bytes(16),
        lease=1,
        seat=0,
        run_file=RUN.text(),
        config="{}",
        kind="causal-lm",
        manifest=bytes(32),
        num_parameters=NUM,
        state=BLOB,
    )
    blobs: Any = SimpleNamespace(transfers=line)
    host: Any = None
    return Participation(host, "leader", start, blobs, MemberSettings(), lambda: None)


def saved(path: Path, num_weights: int = NUM) -> bytes:
    file = path / "file.safetensors"
    save_file({"state/exp_avg/a": torch.ones(4)}, file)
    add_weights(file, torch.ones(num_weights))
    return file.read_bytes()


@pytest.mark.parametrize("fetch", [fetch_file, fetch_file_patiently])
async def test_a_file_that_is_not_here_in_time_was_no_answer(
    tmp_path: Path, autojump_clock: MockClock, fetch: Any
) -> None:
    line: Any = Line(b"", 100.0)
    with pytest.raises(ResponseTimeout, match="file was not here within"):
        await fetch(line, BLOB, ["peer"], tmp_path / "file", timeout=50.0)
    assert trio.current_time() < 60


async def test_who_was_busy_is_asked_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    line: Any = Line(b"it", 1.0, refuses=3)
    await fetch_file_patiently(line, BLOB, ["peer"], tmp_path / "file", timeout=50.0)
    assert (tmp_path / "file").read_bytes() == b"it"


class Silent(Line):
    """The same, where one peer takes each request and gives nothing."""

    def __init__(self, data: bytes, seconds: float) -> None:
        super().__init__(data, seconds)
        self.peers: list[str] = []

    async def fetch_blob(self, peers: list[str], blob_id: bytes, **options: Any) -> Any:
        for peer in peers:
            self.peers.append(peer)
            if peer == "silent":
                await trio.sleep(180)
            else:
                return await super().fetch_blob([peer], blob_id, **options)
        raise PeerUnreachableError("nobody is left")


async def test_one_that_is_silent_takes_a_share_of_the_time(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """And it takes none of the files that follow: whoever says that it has weights holds up nobody who wants them."""
    line: Any = Silent(b"it", 1.0)
    passed_over = PassedOver()
    for number in range(6):
        peers = ["silent", "good"] if number % 2 else ["good", "silent"]
        path = tmp_path / str(number)
        who = await fetch_file_patiently(
            line, BLOB, peers, path, timeout=80.0, passed_over=passed_over
        )
        assert (who, path.read_bytes()) == ("good", b"it")
    assert line.peers.count("silent") == 1
    assert trio.current_time() < 17


async def test_one_that_lies_is_no_end_where_others_have_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    class Lied(Line):
        async def fetch_blob(self, peers: list[str], blob_id: bytes, **options: Any) -> Any:
            if peers == ["liar"]:
                raise RemoteProtocolError("another blob", code=ErrorCode.TRANSFER_INVALID)
            return await super().fetch_blob(peers, blob_id, **options)

    line: Any = Lied(b"it", 1.0, refuses=2)
    path = tmp_path / "file"
    who = await fetch_file_patiently(line, BLOB, ["liar", "good"], path, timeout=50.0)
    assert who == "good"
    with pytest.raises(RemoteProtocolError, match="another blob"):
        await fetch_file_patiently(line, BLOB, ["liar"], path, timeout=50.0)
    with pytest.raises(RemoteProtocolError, match="another blob"):
        await fetch_file_patiently(line, BLOB, ["liar", "liar"], path, timeout=50.0)


async def test_what_was_saved_has_the_time_that_its_size_takes(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """And is taken over again by a member that begins anew before it sits; not after that."""
    line = Line(saved(tmp_path), 620.0)
    member, trainer = part(line), Trainer(TrainerError("it ended"))
    with pytest.raises(TrainerError):
        await member._take_saved(trainer, tmp_path)  # type: ignore[arg-type]
    weights = await member._take_saved(trainer, tmp_path)  # type: ignore[arg-type]
    assert weights is not None
    assert torch.equal(weights, torch.ones(NUM))
    member._note(incarnation=5)
    member.take(Order(bytes(16), 1, 4))
    assert member._start.state == BLOB
    member.take(Order(bytes(16), 2, 5))
    assert await member._take_saved(trainer, tmp_path) is None  # type: ignore[arg-type]
    assert (line.asked, trainer.taken) == ([BLOB] * 2, 1)


def test_a_member_waits_for_those_that_its_order_names() -> None:
    """And not for those that orders for another incarnation of it name."""
    told: list[tuple[str, ...]] = []
    group: Any = SimpleNamespace(expect=told.append)
    member = part(Line(b"", 1.0))
    member._group = group
    member._note(incarnation=5)
    member.take(Order(bytes(16), 1, 5, expects=("a", "b")))
    member.take(Order(bytes(16), 2, 4, expects=("c",)))
    member.take(Order(bytes(16), 3, 5))
    assert told == [("a", "b"), ()]


async def test_what_does_not_come_at_all_is_said(tmp_path: Path, autojump_clock: MockClock) -> None:
    with pytest.raises(ResponseTimeout, match=r"saved\.safetensors was not here within"):
        await part(Line(b"", 1e6))._take_saved(Trainer(), tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_trainers", [True, False])
async def test_what_was_saved_and_is_none_is_left(
    tmp_path: Path, autojump_clock: MockClock, is_trainers: bool
) -> None:
    """Whoever takes the seat has a new optimiser then, and does not fail for what another member saved."""
    data = saved(tmp_path) if is_trainers else b"no safetensors"
    trainer: Any = Trainer(CheckpointError("of another model"))
    assert await part(Line(data, 1.0))._take_saved(trainer, tmp_path) is None


def test_weights_of_another_model_are_none(tmp_path: Path) -> None:
    path = tmp_path / "it.safetensors"
    path.write_bytes(saved(tmp_path, 3))
    with pytest.raises(CheckpointError, match="another model"):
        take_weights(path, 4)
    assert take_weights(path, 3) is not None
    assert take_weights(path, 3) is None


def test_who_takes_files_has_room_for_files_of_training() -> None:
    """The limits of transfers are those of serving, if nothing else is said: less than the optimiser of a large model.

    A module that fetches files, or opens what others fetch with, says so.
    """
    lacking = []
    for path in sorted(TRAINING.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        takes = "blob_files import" in text
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Transfers" and takes:
                limits = [ast.unparse(each.value) for each in node.keywords if each.arg == "limits"]
                if limits != ["PIECE_LIMITS"]:
                    lacking.append(path.relative_to(TRAINING).as_posix())
    assert lacking == []


@pytest.mark.parametrize("has_folder", [True, False])
async def test_a_file_that_cannot_be_written_is_said(tmp_path: Path, has_folder: bool) -> None:
    """As on a full disk: in one sentence, and by an error that whoever fetches knows."""
    path = tmp_path / "pieces" / "it"
    if has_folder:
        path.mkdir(parents=True)
    else:
        path.parent.write_text("no directory")
    transfers: Any = Line(b"data", 0.0)
    for fetch in (fetch_file, fetch_file_patiently):
        with pytest.raises(ConfigurationError, match=r"it: cannot be written: .*; make room there"):
            await fetch(transfers, BLOB, ["a"], path, timeout=9.0)


@pytest.mark.parametrize(
    "change", [lambda path: add_weights(path, torch.ones(3)), lambda path: take_weights(path, 3)]
)
def test_a_full_disk_is_said_as_where_the_optimiser_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    path = tmp_path / "it.safetensors"
    path.write_bytes(saved(tmp_path, 3))

    def full(*told: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(saved_state, "save_file", full)
    with pytest.raises(
        TrainerError, match=r"it\.safetensors: cannot be written: .*; make room there"
    ):
        change(path)
