"""Slices between peers: served by content, fetched from whoever has them, kept within a limit, verified at each use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio

from neurogrid.errors import (
    CapacityError,
    PeerRefusedError,
    RemoteProtocolError,
    ResponseTimeout,
)
from neurogrid.p2p import Protocol
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.transfer import BlobUnavailableError, BytesSource, Transfers
from neurogrid.p2p.wire import blob_id
from neurogrid.training.data.blobs import Providers, SliceCache, SliceStore, fetch_manifest
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.data.preparing import prepare
from neurogrid.training.data.slices import open_slice, slice_path

TIMEOUT = 60.0


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory of 8 slices of 1.9 MiB, two chunks each."""
    folder = tmp_path_factory.mktemp("prepared")
    path = folder / "ids.bin"
    ids = np.random.default_rng(1).integers(0, 60_000, 4_000_000)
    ids.astype("<u2").tofile(path)
    prepare(path, folder / "data", vocab_size=60_000, slice_samples=1900, seed=1)
    return folder / "data"


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    for path in (*prepared.glob("*.json"), *prepared.glob("slices/*")):
        copy = tmp_path / "data" / path.relative_to(prepared)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return tmp_path / "data"


def manifest_of(directory: Path) -> Manifest:
    return Manifest.decode((directory / "manifest.json").read_bytes())


class Node:
    """A host with transfers, and what it gives."""

    def __init__(self, protocol: Protocol, providers: Providers) -> None:
        self.peer_id = protocol.host.peer_id
        self.providers = providers
        self.transfers = Transfers(protocol, self.providers)


@asynccontextmanager
async def nodes(
    number: int, policy: Callable[[], Providers] = Providers
) -> AsyncIterator[list[Node]]:
    """Hosts in memory, each connected with all others."""
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_memory_network())
        hosts = [await stack.enter_async_context(network.open_host()) for _ in range(number)]
        for index, host in enumerate(hosts):
            for other in hosts[:index]:
                await host.connect(other.addresses[0])
        with trio.fail_after(TIMEOUT):
            yield [Node(Protocol(host), policy()) for host in hosts]


def damage(path: Path) -> None:
    """Another byte in the second chunk, and the same length."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def chunks_sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the blobs that are asked for from now on, in order."""
    asked: list[str] = []
    provide = Providers.provide

    async def noted(self: Providers, peer_id: str, blob_id: bytes) -> object:
        asked.append(blob_id.hex())
        return await provide(self, peer_id, blob_id)

    monkeypatch.setattr(Providers, "provide", noted)
    return asked


async def test_a_member_fetches_what_it_trains_on(data: Path, tmp_path: Path) -> None:
    """It knows the id of the manifest, and nothing else."""
    async with nodes(2) as (server, member):
        store = SliceStore(data, manifest_of(data))
        assert store.missing() == ()
        server.providers.providers.append(store)
        peers = [server.peer_id]
        manifest = await fetch_manifest(
            member.transfers, store.manifest_info.blob_id, peers, TIMEOUT
        )
        assert manifest == manifest_of(data)
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        for info in (*manifest.slices, *manifest.held_out):
            assert not cache.holds(info.blob_id)
            path = await cache.fetch(info, peers, TIMEOUT)
            assert cache.holds(info.blob_id)
            assert path.read_bytes() == slice_path(data, info).read_bytes()
            assert open_slice(path, manifest, info)["input_ids"].shape == (info.num_samples, 256)


async def test_what_is_here_is_not_fetched_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = chunks_sent(monkeypatch)
    manifest = manifest_of(data)
    info = manifest.slices[0]
    async with nodes(2) as (server, member):
        server.providers.providers.append(SliceStore(data, manifest))
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        paths = [await cache.fetch(info, [server.peer_id], TIMEOUT) for _ in range(2)]
        cache.close()
        # And after a restart of the member, with nobody to ask.
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        paths.append(await cache.fetch(info, [], TIMEOUT))
        assert len(set(paths)) == 1
        assert asked == [info.blob_id.hex()]


async def test_two_that_need_a_slice_fetch_it_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = chunks_sent(monkeypatch)
    manifest = manifest_of(data)
    async with nodes(2) as (server, member):
        server.providers.providers.append(SliceStore(data, manifest))
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(cache.fetch, manifest.slices[0], [server.peer_id], TIMEOUT)
        assert len(asked) == 1


async def test_a_damaged_file_of_the_cache_is_fetched_again(data: Path, tmp_path: Path) -> None:
    manifest = manifest_of(data)
    info = manifest.slices[0]
    async with nodes(2) as (server, member):
        server.providers.providers.append(SliceStore(data, manifest))
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        path = await cache.fetch(info, [server.peer_id], TIMEOUT)
        damage(path)
        with pytest.raises(BlobUnavailableError, match="nobody was named"):
            await cache.fetch(info, [], TIMEOUT)
        path = await cache.fetch(info, [server.peer_id], TIMEOUT)
        assert path.read_bytes() == slice_path(data, info).read_bytes()


async def test_members_serve_what_they_have(data: Path, tmp_path: Path) -> None:
    """After a restart, too; and a file that is damaged is not given."""
    manifest = manifest_of(data)
    info = manifest.slices[3]
    async with nodes(3) as (server, member, other):
        server.providers.providers.append(SliceStore(data, manifest))
        first = SliceCache(member.transfers, tmp_path / "first", 2**30)
        member.providers.providers.append(first)
        path = await first.fetch(info, [server.peer_id], TIMEOUT)
        second = SliceCache(other.transfers, tmp_path / "second", 2**30)
        await second.fetch(info, [member.peer_id], TIMEOUT)
        again = SliceCache(member.transfers, tmp_path / "first", 2**30)
        member.providers.providers[:] = [again]
        third = SliceCache(other.transfers, tmp_path / "third", 2**30)
        await third.fetch(info, [member.peer_id], TIMEOUT)
        damage(path)
        member.providers.providers[:] = [
            SliceCache(member.transfers, tmp_path / "first", 2**30),
        ]
        fourth = SliceCache(other.transfers, tmp_path / "fourth", 2**30)
        with pytest.raises(BlobUnavailableError, match="is not here"):
            await fourth.fetch(info, [member.peer_id], TIMEOUT)


async def test_a_damaged_file_of_a_data_node_is_not_served_and_the_next_peer_is_asked(
    data: Path, prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = manifest_of(data)
    info, gone = manifest.slices[:2]
    async with nodes(4) as (bad, empty, good, member):
        store = SliceStore(data, manifest)
        bad.providers.providers.append(store)
        good.providers.providers.append(SliceStore(prepared, manifest))
        damage(slice_path(data, info))
        slice_path(data, gone).unlink()
        assert store.missing() == (gone,)
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        peers = [bad.peer_id, empty.peer_id, good.peer_id]
        for each in (info, gone):
            with pytest.raises(BlobUnavailableError) as failed:
                await cache.fetch(each, peers[:2], TIMEOUT)
            assert [type(why) for why in failed.value.failures.values()] == [PeerRefusedError] * 2
            path = await cache.fetch(each, peers, TIMEOUT)
            assert path.read_bytes() == slice_path(prepared, each).read_bytes()
        assert "is not what its name says" in caplog.text


async def test_a_file_that_changes_while_it_is_served_is_noticed(
    data: Path, prepared: Path, tmp_path: Path
) -> None:
    """By the peer that gets it, and by the data node when it is asked the next time."""
    manifest = manifest_of(data)
    info = manifest.slices[0]
    store = SliceStore(data, manifest)
    source = await store.provide("somebody", info.blob_id)
    assert source is not None
    damage(slice_path(data, info))

    class Stale:
        async def provide(self, peer_id: str, blob_id: bytes) -> object:
            return source

    async with nodes(3) as (bad, good, member):
        bad.providers.providers.append(Stale())  # type: ignore[arg-type]
        good.providers.providers.append(SliceStore(prepared, manifest))
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        with pytest.raises(BlobUnavailableError) as failed:
            await cache.fetch(info, [bad.peer_id], TIMEOUT)
        assert isinstance(failed.value.failures[bad.peer_id], RemoteProtocolError)
        await cache.fetch(info, [bad.peer_id, good.peer_id], TIMEOUT)
    assert await store.provide("somebody", info.blob_id) is None


async def test_a_silent_peer_has_its_share_of_the_time_only(data: Path, tmp_path: Path) -> None:
    manifest = manifest_of(data)

    class Silent:
        async def provide(self, peer_id: str, blob_id: bytes) -> None:
            await trio.sleep_forever()

    async with nodes(3) as (silent, good, member):
        silent.providers.providers.append(Silent())
        good.providers.providers.append(SliceStore(data, manifest))
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        await cache.fetch(manifest.slices[0], [silent.peer_id, good.peer_id], 4.0)
        with pytest.raises(BlobUnavailableError, match="did not give all of it within") as failed:
            await cache.fetch(manifest.slices[1], [silent.peer_id], 0.2)
        assert isinstance(failed.value.failures[silent.peer_id], ResponseTimeout)


async def test_only_what_is_not_needed_makes_room(data: Path, tmp_path: Path) -> None:
    manifest = manifest_of(data)
    one, two, three = manifest.slices[:3]
    async with nodes(2) as (server, member):
        server.providers.providers.append(SliceStore(data, manifest))
        peers: Sequence[str] = [server.peer_id]
        cache = SliceCache(member.transfers, tmp_path / "cache", 2 * one.num_bytes)
        path = await cache.fetch(one, peers, TIMEOUT)
        await cache.fetch(two, peers, TIMEOUT)
        with pytest.raises(CapacityError, match="those that are needed are not dropped"):
            await cache.fetch(three, peers, TIMEOUT)
        assert path.exists()
        cache.need_only([two.blob_id])
        await cache.fetch(three, peers, TIMEOUT)
        assert not path.exists()
        assert (cache.holds(one.blob_id), cache.holds(two.blob_id)) == (False, True)
        assert cache.num_bytes <= 2 * one.num_bytes


async def test_a_manifest_that_lies_is_refused(data: Path) -> None:
    lie = BytesSource(manifest_of(data).encode().replace(b'"seed":1', b'"seed":-1'))

    class Liar:
        async def provide(self, peer_id: str, blob_id: bytes) -> BytesSource:
            return lie

    async with nodes(2) as (liar, member):
        liar.providers.providers.append(Liar())
        with pytest.raises(RemoteProtocolError, match="seed is -1"):
            await fetch_manifest(
                member.transfers, blob_id([lie.digests()]), [liar.peer_id], TIMEOUT
            )


async def test_a_slice_of_another_length_than_the_manifest_says_is_not_taken(
    data: Path, tmp_path: Path
) -> None:
    manifest = manifest_of(data)
    info = manifest.slices[0]
    async with nodes(2) as (server, member):
        server.providers.providers.append(SliceStore(data, manifest))
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        for change in (-1, 1):
            lie = type(info)(info.blob_id, info.num_samples, info.num_bytes + change)
            with pytest.raises(CapacityError):
                await cache.fetch(lie, [server.peer_id], TIMEOUT)
