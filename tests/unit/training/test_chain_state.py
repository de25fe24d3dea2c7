"""The state of a chain, as its leader keeps it: whole or not at all, and found by whoever leads next."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from neurogrid.errors import ConfigurationError, PeerRefusedError, TransportError
from neurogrid.p2p import Protocol
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.transfer import Transfers
from neurogrid.training.data.blob_files import OfferedFiles, fetch_file
from neurogrid.training.data.blobs import Providers
from neurogrid.training.leading.chains.state import ChainState
from tests.unit.full_disk import full_disk
from tests.unit.training.scripted_chain import state_piece

TIMEOUT = 60.0
# One has several chunks.
SIZES = {"first": 300, "layer.0": 2 * 2**20 + 7, "layer.1": 40, "last": 2000}


class Node:
    """A host, and the files that it gives."""

    def __init__(self, protocol: Protocol, folder: Path) -> None:
        self.peer_id = protocol.host.peer_id
        self.folder = folder
        self.offered = OfferedFiles()
        self.providers = Providers(self.offered)
        self.transfers = Transfers(protocol, self.providers)

    async def saves(self, contents: Mapping[str, bytes]) -> dict[str, tuple[str, bytes]]:
        """What a stage does that keeps its state: who has each piece, and which blob it is."""
        found = {}
        for name, data in contents.items():
            path = self.folder / f"{self.peer_id}-{name}"
            path.write_bytes(data)
            found[name] = self.peer_id, await self.offered.offer(path)
        return found

    async def gets(self, blob_id: bytes, peer_id: str) -> bytes:
        """A blob that another one has."""
        path = self.folder / "got" / blob_id.hex()
        await fetch_file(self.transfers, blob_id, [peer_id], path, timeout=TIMEOUT)
        return path.read_bytes()


@asynccontextmanager
async def nodes(number: int, folder: Path) -> AsyncIterator[list[Node]]:
    """Hosts in memory, each connected with all others."""
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_memory_network())
        hosts = [await stack.enter_async_context(network.open_host()) for _ in range(number)]
        for index, host in enumerate(hosts):
            for other in hosts[:index]:
                await host.connect(other.addresses[0])
        with trio.fail_after(TIMEOUT):
            yield [Node(Protocol(host), folder) for host in hosts]


def contents(step: int) -> dict[str, bytes]:
    """Pieces of the state after a step."""
    return {
        name: state_piece((f"{name} after {step}, " * size)[:size]) for name, size in SIZES.items()
    }


def on_disk(state: ChainState) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in state.files.items()}


async def kept_by(leader: Node, stages: list[Node], folder: Path, step: int) -> ChainState:
    """A state after a step, of which each stage had some pieces."""
    state = await ChainState.open(folder, leader.offered)
    await keep(state, leader, stages, step)
    return state


async def keep(state: ChainState, leader: Node, stages: list[Node], step: int) -> None:
    pieces: dict[str, tuple[str, bytes]] = {}
    for index, (name, data) in enumerate(contents(step).items()):
        pieces |= await stages[index % len(stages)].saves({name: data})
    await state.keep(step, pieces, leader.transfers)


async def test_at_the_beginning_there_is_none(tmp_path: Path) -> None:
    state = await ChainState.open(tmp_path / "run" / "stages", OfferedFiles())
    assert (state.step, state.blobs, state.files) == (0, {}, {})
    assert (tmp_path / "run" / "stages").is_dir()


async def test_pieces_of_several_stages_become_a_state(tmp_path: Path) -> None:
    folder = tmp_path / "stages"
    async with nodes(3, tmp_path) as (leader, *stages):
        state = await kept_by(leader, stages, folder, 5)
        assert state.step == 5
        assert on_disk(state) == contents(5)
        assert sorted(path.name for path in folder.iterdir()) == ["step-5"]
        assert sorted(path.name for path in (folder / "step-5").iterdir()) == sorted(
            f"{name}.safetensors" for name in SIZES
        )


async def test_members_get_the_pieces_from_the_leader(tmp_path: Path) -> None:
    """Those of the newest state: of the one before none is given, nor is it on the disk."""
    async with nodes(3, tmp_path) as (leader, stage, other):
        state = await kept_by(leader, [stage], tmp_path / "stages", 5)
        before = dict(state.blobs)
        await keep(state, leader, [stage], 10)
        for name, data in contents(10).items():
            assert await other.gets(state.blobs[name], leader.peer_id) == data
        # As large as before, and something else.
        assert not set(before.values()) & set(state.blobs.values())
        with pytest.raises(PeerRefusedError):
            await other.gets(before["layer.0"], leader.peer_id)
        assert [path.name for path in (tmp_path / "stages").iterdir()] == ["step-10"]


async def test_a_piece_that_stays_as_it_is_is_given_on(tmp_path: Path) -> None:
    """Its blob is that of the state before, which is withdrawn."""
    async with nodes(3, tmp_path) as (leader, stage, other):
        state = await ChainState.open(tmp_path / "stages", leader.offered)
        for step in (1, 2):
            await state.keep(
                step, await stage.saves({"layer.0": state_piece("the same")}), leader.transfers
            )
        assert await other.gets(state.blobs["layer.0"], leader.peer_id) == state_piece("the same")


async def require_untouched(state: ChainState, leader: Node, other: Node, folder: Path) -> None:
    """The state after step 5 is what there is, here, for members, and for the next leader."""
    assert state.step == 5
    assert on_disk(state) == contents(5)
    for name, data in contents(5).items():
        assert await other.gets(state.blobs[name], leader.peer_id) == data
    again = await ChainState.open(folder, OfferedFiles())
    assert (again.step, again.blobs) == (5, state.blobs)
    assert on_disk(again) == contents(5)
    assert [path.name for path in folder.iterdir()] == ["step-5"]


async def test_where_a_piece_is_not_to_be_had_the_state_before_stays(tmp_path: Path) -> None:
    folder = tmp_path / "stages"
    async with nodes(3, tmp_path) as (leader, stage, other):
        state = await kept_by(leader, [stage], folder, 5)
        pieces = await stage.saves(contents(10))
        stage.offered.withdraw(tmp_path / f"{stage.peer_id}-last")
        with pytest.raises(TransportError, match="last"):
            await state.keep(10, pieces, leader.transfers)
        # What came of it is gone at once: the next one is of another step, and has the room.
        assert [path.name for path in folder.iterdir()] == ["step-5"]
        await require_untouched(state, leader, other, folder)


async def test_a_piece_that_is_not_what_it_is_called_is_no_piece(tmp_path: Path) -> None:
    """A stage's disk has something else by now; the first chunk is as it was."""
    folder = tmp_path / "stages"
    async with nodes(3, tmp_path) as (leader, stage, other):
        state = await kept_by(leader, [stage], folder, 5)
        pieces = await stage.saves(contents(10))
        with (tmp_path / f"{stage.peer_id}-layer.0").open("r+b") as file:
            file.seek(2**20)
            file.write(b"x")
        with pytest.raises(TransportError, match=r"layer\.0"):
            await state.keep(10, pieces, leader.transfers)
        await require_untouched(state, leader, other, folder)


async def test_a_piece_without_tensors_is_no_piece(tmp_path: Path) -> None:
    """It is the blob that its stage told of, and no leader could begin with it."""
    folder = tmp_path / "stages"
    async with nodes(3, tmp_path) as (leader, stage, other):
        state = await kept_by(leader, [stage], folder, 5)
        pieces = await stage.saves({**contents(10), "layer.1": b"something else"})
        with pytest.raises(TransportError, match=r"layer\.1: .* is damaged"):
            await state.keep(10, pieces, leader.transfers)
        await require_untouched(state, leader, other, folder)


@pytest.mark.parametrize("name", ["../../out", "{folder}/out", "layer.", "layer.1/x", "outer", ""])
async def test_what_is_called_otherwise_than_pieces_is_is_written_nowhere(
    tmp_path: Path, name: str
) -> None:
    """Files have the names of pieces: a stage would choose where the leader writes."""
    folder = tmp_path / "stages"
    async with nodes(3, tmp_path) as (leader, stage, other):
        state = await kept_by(leader, [stage], folder, 5)
        pieces = await stage.saves(contents(10))
        odd = name.format(folder=tmp_path)
        with pytest.raises(TransportError, match="is no piece of a state"):
            await state.keep(10, {**pieces, odd: pieces["last"]}, leader.transfers)
        await require_untouched(state, leader, other, folder)
        assert not list(tmp_path.parent.rglob("out.safetensors"))


async def test_a_stage_that_is_gone_gives_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "stages"
    async with nodes(3, tmp_path) as (leader, stage, other):
        state = await kept_by(leader, [stage], folder, 5)
        pieces = await stage.saves(contents(10))
        with pytest.raises(TransportError, match="first"):
            await state.keep(
                10, {**pieces, "first": ("12D3KooWNobody", pieces["first"][1])}, leader.transfers
            )
        await require_untouched(state, leader, other, folder)


async def test_a_disk_that_takes_nothing_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "stages"
    async with nodes(2, tmp_path) as (leader, stage):
        state = await kept_by(leader, [stage], folder, 5)
        pieces = await stage.saves(contents(10))
        # As on a full one, for whoever runs the tests, root too.
        (folder / "step-10.partial").write_text("no directory")
        with pytest.raises(ConfigurationError, match="cannot be written"):
            await state.keep(10, pieces, leader.transfers)
        assert (state.step, on_disk(state)) == (5, contents(5))


async def test_a_disk_that_is_full_is_said(tmp_path: Path) -> None:
    """The directory can be made there, and no file be written: with what is to be done, as the run ends by it."""
    folder = tmp_path / "stages"
    async with nodes(2, tmp_path) as (leader, stage):
        state = await kept_by(leader, [stage], folder, 5)
        pieces = await stage.saves(contents(10))
        said = r"step-10\.partial: cannot be written: .* Make room, and go on with --resume"
        with full_disk(), pytest.raises(ConfigurationError, match=said):
            await state.keep(10, pieces, leader.transfers)
        assert [path.name for path in folder.iterdir()] == ["step-5"]
        assert (state.step, on_disk(state)) == (5, contents(5))


async def test_whoever_ends_it_on_the_way_has_the_state_before(tmp_path: Path) -> None:
    """And keeps another one later, of the same step, too."""
    folder = tmp_path / "stages"
    asked, over = trio.Event(), trio.Event()

    class Silent:
        async def provide(self, peer_id: str, blob_id: bytes) -> None:
            asked.set()
            await over.wait()

    async with nodes(2, tmp_path) as (leader, stage):
        state = await kept_by(leader, [stage], folder, 5)
        pieces = await stage.saves(contents(10))
        stage.offered.withdraw(tmp_path / f"{stage.peer_id}-last")
        stage.providers.providers.append(Silent())  # type: ignore[arg-type]
        draft = folder / "step-10.partial"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(state.keep, 10, pieces, leader.transfers)
            await asked.wait()
            nursery.cancel_scope.cancel()
        assert draft.is_dir()
        assert (state.step, on_disk(state)) == (5, contents(5))
        stage.providers.providers.pop()
        over.set()
        while stage.transfers.num_served:
            await trio.lowlevel.checkpoint()  # one peer is served few at a time
        await keep(state, leader, [stage], 10)
        assert (state.step, on_disk(state)) == (10, contents(10))
        draft.mkdir()
        (draft / "layer.0.safetensors").write_bytes(b"some of it")
        again = await ChainState.open(folder, OfferedFiles())
        assert (again.step, again.blobs) == (10, state.blobs)
        assert [path.name for path in folder.iterdir()] == ["step-10"]


async def test_the_next_leader_gives_what_the_one_before_has_kept(tmp_path: Path) -> None:
    folder = tmp_path / "stages"
    async with nodes(3, tmp_path) as (leader, stage, after):
        state = await kept_by(leader, [stage], folder, 40)
        found = await ChainState.open(folder, after.offered)
        assert (found.step, found.blobs) == (40, state.blobs)
        for name, data in contents(40).items():
            assert await stage.gets(found.blobs[name], after.peer_id) == data


async def test_of_two_states_the_one_after_more_steps_is_taken(tmp_path: Path) -> None:
    """As they are where a leader dies before it has removed the older. What is no state is left alone."""
    folder = tmp_path / "stages"
    for name in ("step-9", "step-10", "initial", "step-x"):
        (folder / name).mkdir(parents=True)
        (folder / name / "layer.0.safetensors").write_bytes(state_piece(name))
    state = await ChainState.open(folder, OfferedFiles())
    assert (state.step, on_disk(state)) == (10, {"layer.0": state_piece("step-10")})
    assert sorted(path.name for path in folder.iterdir()) == ["initial", "step-10", "step-x"]


async def test_a_directory_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "stages"
    folder.write_text("a file")
    with pytest.raises(ConfigurationError, match=f"{folder}: cannot be used"):
        await ChainState.open(folder, OfferedFiles())


async def test_a_state_is_on_the_disk_before_the_one_before_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power between any two of these has one of them whole."""
    folder = tmp_path / "stages"
    done: list[tuple[str, str]] = []
    names: dict[int, str] = {}
    open_, sync, replace, remove = os.open, os.fsync, os.replace, shutil.rmtree

    def note_open(path: Any, flags: int, *more: Any, **named: Any) -> int:
        descriptor = open_(path, flags, *more, **named)
        names[descriptor] = Path(os.fsdecode(path)).name
        return descriptor

    def note_sync(descriptor: int) -> None:
        done.append(("sync", names[descriptor]))
        sync(descriptor)

    def note_replace(source: Any, target: Any) -> None:
        if Path(target).parent == folder:
            done.append(("replace", Path(source).name))
        replace(source, target)

    def note_remove(path: Any, *more: Any, **named: Any) -> None:
        if Path(path).exists():
            done.append(("remove", Path(path).name))
        remove(path, *more, **named)

    async with nodes(2, tmp_path) as (leader, stage):
        state = await kept_by(leader, [stage], folder, 5)
        monkeypatch.setattr(os, "open", note_open)
        monkeypatch.setattr(os, "fsync", note_sync)
        monkeypatch.setattr(os, "replace", note_replace)
        monkeypatch.setattr(shutil, "rmtree", note_remove)
        await keep(state, leader, [stage], 10)
        monkeypatch.undo()
    *synced, renamed, entered, removed = done
    assert sorted(synced) == sorted(
        [*(("sync", f"{name}.safetensors") for name in SIZES), ("sync", "step-10.partial")]
    )
    assert renamed == ("replace", "step-10.partial")
    assert entered == ("sync", "stages")
    assert removed == ("remove", "step-5")


@pytest.mark.parametrize("size", [0, 5, 20])
async def test_a_file_that_is_cut_short_is_said(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "stages"
    async with nodes(2, tmp_path) as (leader, stage):
        await kept_by(leader, [stage], folder, 5)
    path = folder / "step-5" / "layer.1.safetensors"
    os.truncate(path, size)
    with pytest.raises(ConfigurationError, match=f"{path}: is damaged"):
        await ChainState.open(folder, OfferedFiles())
