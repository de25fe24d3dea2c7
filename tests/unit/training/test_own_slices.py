"""Slices on a member's own disk: not fetched, given to others, and not believed before they are hashed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.transfer import BlobUnavailableError
from neurogrid.training.data.blobs import SliceCache, SliceStore
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.data.own_slices import OwnSlices
from neurogrid.training.data.preparing import prepare
from neurogrid.training.data.slices import read_manifest, slice_path
from neurogrid.training.leading.progress import QuietProgress
from neurogrid.training.leading.sources import Holder, Sources
from neurogrid.training.wire.runs import run_table
from tests.unit.training.test_slice_blobs import TIMEOUT, chunks_sent, damage, nodes


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """16 slices, and one that is held out."""
    ids = np.random.default_rng(1).integers(0, 900, 64 * 330)
    ids.astype("<u2").tofile(tmp_path / "ids.bin")
    prepare(
        tmp_path / "ids.bin", tmp_path / "data", vocab_size=900, sequence_length=64, held_out=0.06
    )
    return tmp_path / "data"


def part_of(data: Path, place: Path, numbers: tuple[int, ...], *, is_flat: bool = False) -> Path:
    """A directory with some slices of a data directory, and nothing else."""
    manifest = read_manifest(data)
    for number in numbers:
        path = slice_path(data, manifest.slices[number])
        copy = place / path.name if is_flat else slice_path(place, manifest.slices[number])
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return place


async def test_what_is_here_is_used_where_it_lies(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = chunks_sent(monkeypatch)
    manifest = read_manifest(data)
    first = part_of(data, tmp_path / "first", (0, 1, 7))
    second = part_of(data, tmp_path / "second", (3, 7), is_flat=True)
    own = OwnSlices([first, second])
    assert not own.holds(manifest.slices[0].blob_id)
    assert await own.look_for(manifest) == (0, 1, 3, 7)
    async with nodes(2) as (server, member):
        server.providers.providers.append(SliceStore(data, manifest))
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30, own=own)
        for number in (0, 3, 7, 2):
            info = manifest.slices[number]
            assert cache.holds(info.blob_id) == (number != 2)
            path = await cache.fetch(info, [server.peer_id], TIMEOUT)
            assert path.read_bytes() == slice_path(data, info).read_bytes()
            assert path.is_relative_to(tmp_path / ("cache" if number == 2 else "")) or number != 2
        assert asked == [manifest.slices[2].blob_id.hex()]
        assert cache.num_bytes == manifest.slices[2].num_bytes
        cache.need_only(())
        assert len(list(first.glob("slices/*"))) == 3
        # And others have them from here.
        member.providers.providers.append(own)
        other = SliceCache(server.transfers, tmp_path / "other", 2**30)
        path = await other.fetch(manifest.slices[1], [member.peer_id], TIMEOUT)
        assert path.read_bytes() == slice_path(data, manifest.slices[1]).read_bytes()
        with pytest.raises(BlobUnavailableError):
            await other.fetch(manifest.slices[5], [member.peer_id], TIMEOUT)


async def test_what_is_damaged_is_said_and_fetched(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another byte, another length, and a file that goes or changes while it is used."""
    manifest = read_manifest(data)
    place = part_of(data, tmp_path / "mine", (0, 1, 2, 3))
    files = [slice_path(place, info) for info in manifest.slices[:4]]
    damage(files[0])
    files[1].write_bytes(files[1].read_bytes() + b"x")
    own = OwnSlices([place])
    assert await own.look_for(manifest) == (0, 2, 3)
    assert f"{files[1]} and 0 other slices have not the length" in caplog.text
    assert await own.find(manifest.slices[2].blob_id) == files[2]
    damage(files[2])
    files[3].unlink()
    async with nodes(2) as (server, member):
        server.providers.providers.append(SliceStore(data, manifest))
        member.providers.providers.append(own)
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30, own=own)
        for info in manifest.slices[:4]:
            path = await cache.fetch(info, [server.peer_id], TIMEOUT)
            assert path.is_relative_to(tmp_path / "cache")
            assert path.read_bytes() == slice_path(data, info).read_bytes()
            assert await own.provide("somebody", info.blob_id) is None
    assert f"{files[0]} is not what its name says: it is fetched instead" in caplog.text
    assert f"{files[2]} is not what its name says: it is fetched instead" in caplog.text
    assert f"{files[3]} cannot be read (No such file or directory): it is fetched" in caplog.text
    # A file is looked at once, and then left alone until the data are looked for again.
    shutil.copy(slice_path(data, manifest.slices[0]), files[0])
    assert not own.holds(manifest.slices[0].blob_id)
    assert await own.look_for(manifest) == (0, 2)


async def test_slices_of_other_data_are_no_slices(data: Path, tmp_path: Path) -> None:
    manifest = read_manifest(data)
    other = prepare(
        tmp_path / "ids.bin",
        tmp_path / "other",
        vocab_size=900,
        sequence_length=64,
        held_out=0.06,
        seed=9,
    )
    own = OwnSlices([tmp_path / "other", data])
    assert await own.look_for(other) == tuple(range(len(other.slices)))
    assert await own.look_for(manifest) == tuple(range(len(manifest.slices)))
    own = OwnSlices([tmp_path / "other"])
    assert await own.look_for(manifest) == ()
    # Whoever has the same files makes the same slices, and need not copy any.
    options: dict[str, Any] = {"vocab_size": 900, "sequence_length": 64, "held_out": 0.06}
    prepare(tmp_path / "ids.bin", tmp_path / "same", **options)
    own = OwnSlices([tmp_path / "same"])
    assert await own.look_for(manifest) == tuple(range(len(manifest.slices)))
    with pytest.raises(ConfigurationError, match="nowhere: there is no such directory with data"):
        OwnSlices([tmp_path / "nowhere"])


async def test_a_leader_knows_when_members_have_what_it_lacks(data: Path) -> None:
    manifest: Manifest = read_manifest(data)
    lacking = (*manifest.slices[3:6], *manifest.held_out)
    said: list[str] = []
    progress = QuietProgress()
    progress.say = said.append  # type: ignore[method-assign]

    def sources(exchange: Exchange, *missing: int) -> Sources:
        infos = tuple(manifest.slices[number] for number in missing)
        return Sources(exchange, bytes(16), manifest, bytes(32), infos, "data", QuietProgress())

    with trio.fail_after(TIMEOUT):
        async with open_memory_network() as network, network.open_host() as host:
            found = sources(Exchange(host, run_table()), 3, 4, 5)
            assert not found.is_complete()
            found.holders = lambda: {"a": Holder((3, 9)), "b": Holder(frozenset({5}))}
            assert not found.is_complete()
            found.holders = lambda: {
                "a": Holder((3, 4, 9), ("at a", "also a")),
                "b": Holder(frozenset({5}), ("at b",)),
            }
            assert found.is_complete()
            # Who has it comes first; who has others may have what is held out.
            assert found.peers_with(manifest.slices[5].blob_id) == ("b", "a")
            assert found.peers_with(manifest.slices[4].blob_id) == ("a", "b")
            assert set(found.peers_with(manifest.held_out[0].blob_id)) == {"a", "b"}
            # Members are told of those that have what they need, and the leader has not.
            assert found.addresses_for("c", {1, 9}) == ()
            assert found.addresses_for("c", {1, 4}) == ("at a", "also a")
            assert found.addresses_for("c", {4, 5}) == ("at a", "at b", "also a")
            assert found.addresses_for("a", {4, 5}) == ("at b",)
        async with open_memory_network() as network, network.open_host() as host:
            whole = Sources(
                Exchange(host, run_table()),
                *(bytes(16), manifest, bytes(32), lacking, "data", progress),
            )
            whole.holders = lambda: {"a": Holder(range(3, 6))}
            assert not whole.is_complete()
            whole.holders = lambda: {"a": Holder(range(len(manifest.slices)))}
            assert whole.is_complete()
            whole.look()
            assert not said
            whole.holders = dict
            whole.look()
            whole.look()
            assert len(said) == 1
            assert said[0].startswith("a member that had slices of its own is gone; 4 of 17 slices")
