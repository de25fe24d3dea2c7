"""Data that the leader of a run does not have itself: with data nodes, or behind a web server."""

from __future__ import annotations

import functools
import http.server
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from neurogrid.training.data.manifest import SliceInfo
from neurogrid.training.data.slices import read_manifest, slice_path
from neurogrid.training.runs.audit import audit
from neurogrid.training.runs.entries import DealtEntry, JoinedEntry
from neurogrid.training.runs.journal import read_journal
from neurogrid.training.runs.run_directory import RunDirectory
from tests.e2e.training.data_processes import (
    LOOPBACK,
    TRAIN,
    prepared_text,
    start,
    start_data_node,
    start_leader,
    start_run_worker,
    write_run_file,
)

TRAINS = ("--train", "--threads", "1")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_text(tmp_path_factory.mktemp("prepared") / "data")


def damage(data: Path, infos: Sequence[SliceInfo]) -> None:
    """Another byte in each of these slices, and the same length."""
    for info in infos:
        path = slice_path(data, info)
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)


def evaluations(directory: Path) -> list[float]:
    figures = RunDirectory(directory / "run").figures()
    return [line["eval_loss"] for line in figures if "eval_loss" in line]


@contextmanager
def web_server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A plain web server: its address, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            asked.append(self.path)

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_leader_without_slices_waits_for_nodes_and_one_of_them_is_killed(
    prepared: Path, tmp_path: Path
) -> None:
    """The first has damaged slices, which it does not serve; the second has whole ones, and is enough by itself."""
    (tmp_path / "lone").mkdir()
    shutil.copy(prepared / "manifest.json", tmp_path / "lone")
    shutil.copytree(prepared, tmp_path / "damaged")
    damage(tmp_path / "damaged", read_manifest(prepared).slices)
    write_run_file(tmp_path, "lone", rounds=20)
    with start_leader(tmp_path, "--local-workers", "2") as leader:
        leader.wait_line("no node here has them: waiting for one")
        with start_data_node(tmp_path, tmp_path / "damaged", "node-1") as first:
            first.wait_line("is not what its name says: it is not served")
            with start_data_node(tmp_path, prepared, "node-2"):
                leader.wait_line("round 1, ")
                first.kill()
                leader.wait_line("a data node is gone")
                checkpoint = leader.finish()
    assert checkpoint == "run/checkpoints/step-80"
    assert len(evaluations(tmp_path)) == 10


def test_a_member_waits_until_there_is_a_node_again(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "lone").mkdir()
    shutil.copy(prepared / "manifest.json", tmp_path / "lone")
    write_run_file(tmp_path, "lone", rounds=60)
    with start_leader(tmp_path, "--local-workers", "2") as leader:
        with start_data_node(tmp_path, prepared, "node-1") as first:
            leader.wait_line("round 2, ")
            first.kill()
        leader.wait_line("members wait until one comes")
        with start_data_node(tmp_path, prepared, "node-2"):
            checkpoint = leader.finish()
    assert checkpoint == "run/checkpoints/step-240"
    assert " has failed: " not in leader.log


def test_data_behind_a_web_server(prepared: Path, tmp_path: Path) -> None:
    """Slices that are damaged there are refused by what is in them, and come from a data node."""
    served = tmp_path / "served"
    shutil.copytree(prepared, served / "data")
    damage(served / "data", read_manifest(prepared).slices[::4])
    with web_server(served) as (url, asked):
        write_run_file(tmp_path, f"{url}/data", rounds=6, every=8)
        with (
            start_leader(tmp_path, "--local-workers", "2") as leader,
            start_data_node(tmp_path, prepared, "node") as node,
        ):
            checkpoint = leader.finish()
    assert checkpoint == "run/checkpoints/step-48"
    assert len(evaluations(tmp_path)) == 3
    # Once each, whoever trains on it and however often.
    slices = [path for path in asked if path.endswith(".safetensors")]
    assert slices
    manifest = read_manifest(prepared)
    damaged = {slice_path(Path("/data"), info).as_posix() for info in manifest.slices[::4]}
    assert all(slices.count(path) == 1 for path in slices if path not in damaged)
    assert "slices to run" in node.log
    tokenizer = Path("tokenizer.json")
    at_checkpoint = (tmp_path / checkpoint / tokenizer).read_bytes()
    assert at_checkpoint == (prepared / "tokenizer" / tokenizer).read_bytes()


def test_members_have_the_data_themselves(tmp_path: Path) -> None:
    """The leader has the manifest, and each of two workers a half: they train on what they have. One slice of the first
    is damaged, and comes from the second. What they need of each other does not go by way of the leader."""
    data = prepared_text(tmp_path / "data", slice_samples=8)
    manifest = read_manifest(data)
    (tmp_path / "lone").mkdir()
    shutil.copy(data / "manifest.json", tmp_path / "lone")
    numbers = range(len(manifest.slices))
    damaged = 2
    for half in (0, 1):
        own = tmp_path / f"own-{half}" / "slices"
        own.mkdir(parents=True)
        mine = [manifest.slices[n] for n in numbers if n % 2 == half or n == damaged]
        for info in (*mine, *manifest.held_out):
            shutil.copy(slice_path(data, info), own)
    path = slice_path(tmp_path / "own-0", manifest.slices[damaged])
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    # Two epochs, by two members that take four slices each in a round.
    write_run_file(tmp_path, "lone", rounds=2 * len(numbers) // 8 + 1)
    with (
        start_leader(tmp_path, "--wait", "120") as leader,
        start_run_worker(tmp_path, "one", *TRAINS, "--data", "own-0") as one,
        start_run_worker(tmp_path, "two", *TRAINS, "--data", "own-1"),
    ):
        leader.finish()
        assert f"{path.name} is not what its name says: it is fetched instead" in one.log
    assert "no node here has them: waiting for one" in leader.log
    assert evaluations(tmp_path)
    entries = [each.entry for each in read_journal(RunDirectory(tmp_path / "run").journal)]
    assert audit(entries).is_sound
    held = {
        number
        for entry in entries
        if isinstance(entry, JoinedEntry)
        for start, stop in entry.held
        for number in range(start, stop)
    }
    assert held == set(numbers)
    # It has fetched what it evaluates with; but for a member that could not be dialled for a moment, nothing else.
    fetched = {file.stem for file in (tmp_path / "run" / ".slices").glob("*.blob")}
    held_out = {info.blob_id.hex() for info in manifest.held_out}
    assert fetched & held_out
    assert len(fetched - held_out) < len(numbers) // 4


def test_members_hand_slices_on(tmp_path: Path) -> None:
    """Of three epochs, in which members train on other slices each time: the leader has sent each about once."""
    data = prepared_text(tmp_path / "data", slice_samples=16)
    slices = read_manifest(data).slices
    num_epochs, members = 3, ("one", "two", "three")
    write_run_file(tmp_path, "data", rounds=10_000)
    run_file = tmp_path / "run.toml"
    text = run_file.read_text().replace("rounds = 10000", f"epochs = {num_epochs}")
    run_file.write_text(text.replace("min = 2", f"min = {len(members)}"))
    leader_program = Path(__file__).with_name("counting_leader.py")
    command = (sys.executable, str(leader_program), "run.toml", "--dir", "run", *LOOPBACK)
    with start(tmp_path, "leader", *command) as leader, ExitStack() as stack:
        leader.wait_line("the ticket by which workers join")
        for name in members:
            stack.enter_context(start_run_worker(tmp_path, name, *TRAINS))
        leader.finish()
    entries = [each.entry for each in read_journal(RunDirectory(tmp_path / "run").journal)]
    assert audit(entries).is_sound
    trained: dict[str, set[int]] = defaultdict(set)
    for entry in entries:
        if isinstance(entry, DealtEntry):
            for seat, work in entry.works:
                trained[str(seat)] |= {each.slice for each in work.ranges}
    wanted = sum(map(len, trained.values()))
    ids = {info.blob_id.hex() for info in slices}
    sent = [line.split()[0] for line in (tmp_path / "asked.txt").read_text().splitlines()]
    sent = [each for each in sent if each in ids]
    print(f"{len(slices)} slices; members needed {wanted}, and the leader sent {len(sent)}")
    assert set(sent) == ids
    assert wanted > 1.5 * len(slices)
    # What two take at the same moment, nobody has yet.
    assert len(sent) <= 1.15 * len(slices)


def test_data_that_are_not_there(tmp_path: Path) -> None:
    with web_server(tmp_path) as (url, _):
        write_run_file(tmp_path, f"{url}/nothing", rounds=2)
        command = (*TRAIN, "run.toml", "--dir", "run", *LOOPBACK)
        with start(tmp_path, "leader", *command) as leader:
            assert leader.process.wait(60) == 2
    assert "/nothing/ is no data directory that can be read: " in leader.log
    assert "/nothing/manifest.json is not there (404)" in leader.log
