"""What a member fetches while it trains on something else."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import trio

from neurogrid.errors import CapacityError
from neurogrid.p2p import Protocol
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.transfer import Transfers
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.data.blobs import Providers, SliceCache, SliceStore
from neurogrid.training.data.manifest import SliceInfo
from neurogrid.training.data.preparing import prepare
from neurogrid.training.members.slices_ahead import fetch_ahead

TIMEOUT = 60.0


async def test_slices_come_before_they_are_asked_for(tmp_path: Path) -> None:
    """Also those that are told of later, and those that nobody had at first."""
    ids = np.random.default_rng(1).integers(0, 60_000, 80_000)
    ids.astype("<u2").tofile(tmp_path / "ids.bin")
    manifest = prepare(
        tmp_path / "ids.bin", tmp_path / "data", vocab_size=60_000, slice_samples=50, seed=1
    )
    one, two, three, *_ = manifest.slices
    needed: list[SliceInfo] = [one]
    told = RenewedEvent()
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_memory_network())
        host, other = [await stack.enter_async_context(network.open_host()) for _ in range(2)]
        await host.connect(other.addresses[0])
        given = Providers()
        Transfers(Protocol(other), given)
        transfers = Transfers(Protocol(host), Providers())
        cache = SliceCache(transfers, tmp_path / "cache", max_bytes=2**30)
        asked = RenewedEvent()

        async def sources() -> Sequence[str]:
            asked.set()
            return [other.peer_id]

        async def wait_held(info: SliceInfo) -> None:
            while not cache.holds(info.blob_id):
                told.set()
                await trio.sleep(0.01)

        nursery = await stack.enter_async_context(trio.open_nursery())
        with trio.fail_after(TIMEOUT):
            was_asked = asked.next
            nursery.start_soon(fetch_ahead, cache, lambda: needed, sources, told)
            await was_asked.wait()  # nobody has it
            given.providers.append(SliceStore(tmp_path / "data", manifest))
            await wait_held(one)
            needed.append(two)
            await wait_held(two)
            assert not cache.holds(three.blob_id)
        nursery.cancel_scope.cancel()


async def test_what_was_fetched_ahead_gives_way_to_what_is_needed_now(tmp_path: Path) -> None:
    """A directory with room for two has those of the work at hand, from an earlier time, when the next one is fetched
    beside the first of them."""
    ids = np.random.default_rng(1).integers(0, 60_000, 80_000)
    ids.astype("<u2").tofile(tmp_path / "ids.bin")
    manifest = prepare(
        tmp_path / "ids.bin", tmp_path / "data", vocab_size=60_000, slice_samples=50, seed=1
    )
    one, two, ahead, *_ = manifest.slices
    room = one.num_bytes + max(two.num_bytes, ahead.num_bytes)
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_memory_network())
        host, other = [await stack.enter_async_context(network.open_host()) for _ in range(2)]
        await host.connect(other.addresses[0])
        Transfers(Protocol(other), Providers(SliceStore(tmp_path / "data", manifest)))
        transfers = Transfers(Protocol(host), Providers())
        with trio.fail_after(TIMEOUT):
            before = SliceCache(transfers, tmp_path / "cache", max_bytes=room)
            for info in (two, one):
                await before.fetch(info, [other.peer_id], TIMEOUT)
            before.close()
            cache = SliceCache(transfers, tmp_path / "cache", max_bytes=room)
            cache.need_only([one.blob_id, two.blob_id])
            await cache.fetch(one, [other.peer_id], TIMEOUT)
            await cache.fetch(ahead, [other.peer_id], TIMEOUT)
            assert not cache.holds(two.blob_id)
            await cache.fetch(two, [other.peer_id], TIMEOUT)
            assert cache.holds(one.blob_id)
            # It does not take the room back.
            with pytest.raises(CapacityError, match="those that are needed are not dropped"):
                await cache.fetch(ahead, [other.peer_id], TIMEOUT)
