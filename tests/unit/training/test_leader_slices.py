"""Slices that a leader fetches for itself: kept while they are needed, within the room that there is."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import trio

from neurogrid.p2p import Protocol
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.transfer import Transfers
from neurogrid.training.data.blobs import Providers, SliceStore
from neurogrid.training.data.preparing import prepare
from neurogrid.training.leading.data import LeaderSlices, RunData

TIMEOUT = 60.0


async def test_what_is_needed_no_more_makes_room_and_what_is_held_out_stays(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(0, 60_000, 80_000)
    ids.astype("<u2").tofile(tmp_path / "ids.bin")
    manifest = prepare(
        tmp_path / "ids.bin",
        tmp_path / "data",
        vocab_size=60_000,
        slice_samples=20,
        held_out=0.2,
        seed=1,
    )
    (held_out, *_), (one, two, three, *_) = manifest.held_out, manifest.slices
    (tmp_path / "none").mkdir()
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_memory_network())
        host, other = [await stack.enter_async_context(network.open_host()) for _ in range(2)]
        await host.connect(other.addresses[0])
        Transfers(Protocol(other), Providers(SliceStore(tmp_path / "data", manifest)))
        slices = LeaderSlices(
            RunData(tmp_path / "none", manifest),
            SliceStore(tmp_path / "none", manifest),
            Transfers(Protocol(host), Providers()),
            tmp_path / "slices",
            lambda blob_id: [other.peer_id],
        )
        slices._cache._cache.max_bytes = held_out.num_bytes + one.num_bytes + two.num_bytes
        with trio.fail_after(TIMEOUT):
            await slices.fetch(held_out, TIMEOUT)
            for infos in ([one, two], [two], [three, two], [one]):
                slices.need_only(infos)
                for info in infos:
                    await slices.fetch(info, TIMEOUT)
                needed = {each.blob_id for each in infos}
                assert slices._cache._cache.in_use == needed | {held_out.blob_id}
