"""Slices that members hand on: asked of those that took them; what one does not give comes from the next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import trio

from neurogrid.errors import PeerRefusedError, RemoteProtocolError, RequestRefusedError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.transfer import BlobSource, BlobUnavailableError
from neurogrid.p2p.transfer.passed_over import MAX_REMEMBERED, PassedOver
from neurogrid.p2p.wire import CHUNK_BYTES, ErrorCode
from neurogrid.training.data import blobs, handing_on
from neurogrid.training.data.blobs import SliceCache, SliceStore
from neurogrid.training.data.handing_on import MAX_HANDED_ON, HandingOn
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.data.preparing import prepare
from neurogrid.training.data.slices import read_manifest
from neurogrid.training.data.takers import SliceTakers
from neurogrid.training.leading.progress import QuietProgress
from neurogrid.training.leading.sources import Holder, Sources
from neurogrid.training.members.sources import reach_sources
from neurogrid.training.wire.runs import run_table
from tests.unit.training.test_slice_blobs import TIMEOUT, Node, nodes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory of 3 slices of 1.9 MiB, two chunks each."""
    folder = tmp_path_factory.mktemp("data")
    ids = np.random.default_rng(1).integers(0, 60_000, 4 * 1900 * 256)
    ids.astype("<u2").tofile(folder / "ids.bin")
    prepare(
        folder / "ids.bin", folder / "data", vocab_size=60_000, slice_samples=1900, held_out=0.25
    )
    return folder / "data"


class Member:
    """Has all slices, and gives chunks as it likes.

    Attributes:
        chunks: that were read to be sent.
    """

    def __init__(
        self, store: SliceStore, *, wrong: int = -1, seconds: float = 0.0, is_silent: bool = False
    ) -> None:
        self._store, self._wrong, self._seconds = store, wrong, seconds
        self._is_silent = is_silent
        self.asked: list[bytes] = []
        self.chunks: list[int] = []

    def holds(self, blob_id: bytes) -> bool:
        return True

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        self.asked.append(blob_id)
        if self._is_silent:
            await trio.sleep_forever()
        source = await self._store.provide(peer_id, blob_id)
        assert source is not None
        return _Source(self, source)


class _Source:
    def __init__(self, member: Member, source: BlobSource) -> None:
        self._member, self._source = member, source
        self.num_bytes = source.num_bytes

    def digests(self) -> bytes:
        return bytes(self._source.digests())

    def chunk(self, index: int) -> bytes:
        time.sleep(self._member._seconds)
        self._member.chunks.append(index)
        chunk = bytes(self._source.chunk(index))
        return bytes(len(chunk)) if index == self._member._wrong else chunk


def served(node: Node, member: Member) -> Member:
    """Have a peer give what a member has."""
    node.providers.providers.append(member)
    return member


async def test_one_that_sends_something_else_costs_a_chunk_and_is_not_asked_again(
    data: Path, tmp_path: Path
) -> None:
    manifest = read_manifest(data)
    store = SliceStore(data, manifest)
    async with nodes(3) as (bad, leading, member):
        liar, leader = served(bad, Member(store, wrong=1)), served(leading, Member(store))
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        peers = [bad.peer_id, leading.peer_id]
        path = await cache.fetch(manifest.slices[0], peers, TIMEOUT)
        assert path.stat().st_size == manifest.slices[0].num_bytes
        assert (0 in liar.chunks, leader.chunks) == (True, [1])
        assert cache.passed_over.has_lied(bad.peer_id)
        await cache.fetch(manifest.slices[1], peers, TIMEOUT)
        assert len(liar.asked) == 1
        # The last resort is asked whatever it did.
        with pytest.raises(BlobUnavailableError):
            await cache.fetch(manifest.slices[2], [bad.peer_id], TIMEOUT)
        assert len(liar.asked) == 2


async def test_those_that_were_busy_are_asked_again_where_nobody_else_gave_it(
    data: Path, tmp_path: Path
) -> None:
    manifest = read_manifest(data)
    store = SliceStore(data, manifest)

    class Busy(Member):
        async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
            if not self.asked:
                self.asked.append(blob_id)
                raise RequestRefusedError("4 are being dealt with", code=ErrorCode.BUSY)
            return await super().provide(peer_id, blob_id)

    async with nodes(3) as (gone, busy, member):
        busy_one = served(busy, Busy(store))
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        peers = [gone.peer_id, busy.peer_id]  # the first has nothing
        path = await cache.fetch(manifest.slices[0], peers, TIMEOUT)
        assert path.stat().st_size == manifest.slices[0].num_bytes
        assert busy_one.asked == [manifest.slices[0].blob_id] * 2
        # No longer than there is time.
        busy_one.asked.clear()
        with pytest.raises(BlobUnavailableError, match="are being dealt with"):
            await cache.fetch(manifest.slices[1], peers, 0.2)


@pytest.mark.parametrize("way", ["silent", "slow"])
async def test_one_that_is_silent_or_slow_is_passed_over_within_its_time(
    way: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And asked after the leader for a while: the leader then comes first."""
    monkeypatch.setattr(blobs, "_ANSWER", 0.3)
    monkeypatch.setattr(blobs, "_SENT_PER_SECOND", 100 * CHUNK_BYTES)
    manifest = read_manifest(data)
    store = SliceStore(data, manifest)
    async with nodes(3) as (bad, leading, member):
        slow = served(bad, Member(store, seconds=0.6, is_silent=way == "silent"))
        leader = served(leading, Member(store))
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        peers = [bad.peer_id, leading.peer_id]
        began = trio.current_time()
        await cache.fetch(manifest.slices[0], peers, TIMEOUT)
        assert trio.current_time() - began < TIMEOUT / 4
        assert bad.peer_id in cache.passed_over
        assert not cache.passed_over.has_lied(bad.peer_id)
        await cache.fetch(manifest.slices[1], peers, TIMEOUT)
        assert (len(slow.asked), len(leader.asked)) == (1, 2)


async def test_one_that_has_it_no_more_is_asked_for_others(data: Path, tmp_path: Path) -> None:
    manifest = read_manifest(data)
    store = SliceStore(data, manifest)
    async with nodes(3) as (empty, leading, member):
        leader = served(leading, Member(store))
        cache = SliceCache(member.transfers, tmp_path / "cache", 2**30)
        peers = [empty.peer_id, leading.peer_id]
        await cache.fetch(manifest.slices[0], peers, TIMEOUT)
        assert empty.peer_id not in cache.passed_over
        other = served(empty, Member(store))
        await cache.fetch(manifest.slices[1], peers, TIMEOUT)
        assert (len(leader.asked), len(other.asked)) == (1, 1)


async def test_a_member_sends_a_few_at_a_time(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes then waits a moment for a turn, and asks another one."""
    monkeypatch.setattr(handing_on, "_TURN", 0.1)
    manifest = read_manifest(data)
    store = SliceStore(data, manifest)
    async with AsyncExitStack() as stack:
        handing, leading, *members = await stack.enter_async_context(
            nodes(2 + MAX_HANDED_ON + 1, HandingOn)
        )
        given = handing.providers
        assert isinstance(given, HandingOn)
        slow, leader = Member(store, seconds=0.15), served(leading, Member(store))
        given.slices.append(slow)
        caches = [
            SliceCache(each.transfers, tmp_path / str(number), 2**30)
            for number, each in enumerate(members)
        ]
        peers = [handing.peer_id, leading.peer_id]
        async with trio.open_nursery() as nursery:
            for cache in caches:
                nursery.start_soon(cache.fetch, manifest.slices[0], peers, TIMEOUT)
        assert (len(slow.asked), len(leader.asked)) == (MAX_HANDED_ON, 1)
        # Also where who asks has gone away in the middle, there is a turn afterwards.
        for number in range(2 * MAX_HANDED_ON):
            with trio.move_on_after(0.05):
                await caches[0].fetch(manifest.slices[1], [handing.peer_id], TIMEOUT)
            assert len(slow.asked) == MAX_HANDED_ON + number + 1
            while handing.transfers.num_served:
                await trio.sleep(0.01)
        await caches[0].fetch(manifest.slices[1], [handing.peer_id], TIMEOUT)


def test_the_last_that_took_a_slice() -> None:
    takers = SliceTakers()
    assert takers.of(3) == ()
    for peer in ("a", "b", "a", "c", "d", "e"):
        takers.note(peer, [3, 4])
    takers.note("f", [4])
    assert takers.of(3) == ("e", "d", "c", "a")
    assert takers.of(4) == ("f", "e", "d", "c")


async def test_members_that_took_a_slice_are_named(data: Path) -> None:
    """Those that are here, for others, and beside those that have slices of their own."""
    manifest = read_manifest(data)
    here = {name: (f"/ip4/127.0.0.1/tcp/1/p2p/{name}",) * 6 for name in "abc"}
    async with open_memory_network() as network, network.open_host() as host:
        exchange = Exchange(host, run_table(), role="coordinator", name="leader")
        sources = sources_of(exchange, manifest)
        sources.addresses_of = lambda peer: here.get(peer, ())
        assert sources.addresses_for("a", [0, 1]) == ()
        for peer in ("a", "b", "c", "gone"):
            sources.takes(peer, [0])
        sources.takes("a", [1])
        assert sources.addresses_for("a", [0]) == (here["c"][0], here["b"][0])
        assert sources.addresses_for("b", [0, 1]) == (here["c"][0], here["a"][0])
        assert sources.addresses_for("a", [1, 2]) == ()
        assert sources.peers_with(manifest.slices[0].blob_id) == ("c", "b", "a")
        sources.holders = lambda: {"b": Holder([2]), "z": Holder([0])}
        assert sources.peers_with(manifest.slices[0].blob_id) == ("c", "b", "a", "z")


def sources_of(exchange: Exchange, manifest: Manifest) -> Sources:
    return Sources(exchange, bytes(16), manifest, bytes(32), (), "data", QuietProgress())


async def test_one_that_cannot_be_reached_is_not_dialled_each_time() -> None:
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_memory_network())
        host, other = [await stack.enter_async_context(network.open_host()) for _ in range(2)]
        gone = await stack.enter_async_context(network.open_host())
        await host.connect(other.addresses[0])
        nowhere = f"/ip4/127.0.0.1/tcp/1/p2p/{gone.peer_id}"
        passed_over = PassedOver()
        dialled: list[str] = []
        connect = host.connect

        async def noted(address: str) -> object:
            dialled.append(address)
            return await connect(address)

        host.connect = noted  # type: ignore[method-assign, assignment]
        addresses: Sequence[str] = (nowhere, other.addresses[0], "no address")
        for _ in range(3):
            found = await reach_sources(host, addresses, "leader", 0, passed_over)
            assert found == (other.peer_id, "leader")
        assert dialled == [nowhere]


async def test_whom_to_pass_over() -> None:
    passed_over = PassedOver()
    lie = RemoteProtocolError("", code=ErrorCode.HASH_MISMATCH)
    unknown = PeerRefusedError("", code=ErrorCode.BLOB_UNKNOWN, text="")
    assert passed_over.blame("a", lie) == float("inf")
    assert passed_over.blame("b", unknown) == 0.0
    assert passed_over.blame("c", PeerRefusedError("", code=ErrorCode.BUSY, text=""), pause=3) == 3
    assert ["a" in passed_over, "b" in passed_over, "c" in passed_over] == [True, False, True]
    assert passed_over.has_lied("a")
    assert not passed_over.has_lied("c")
    for number in range(MAX_REMEMBERED):
        passed_over.blame(str(number), lie)
    assert "a" not in passed_over
