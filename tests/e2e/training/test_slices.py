"""Data nodes in processes of their own, over TCP: a member gets its slices although one of them is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import trio

from neurogrid.p2p import Protocol, open_host
from neurogrid.p2p.transfer import Transfers
from neurogrid.training.data.blobs import SliceCache, fetch_manifest
from neurogrid.training.data.preparing import prepare
from neurogrid.training.data.slices import open_slice, slice_path
from tests.e2e.preloaded import ENVIRONMENT

SERVER = Path(__file__).with_name("slice_server.py")
TIMEOUT = 60.0


@contextmanager
def serving(directory: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_data_node_is_killed(tmp_path: Path) -> None:
    source, data = tmp_path / "ids.bin", tmp_path / "data"
    ids = np.random.default_rng(0).integers(0, 50_000, 3_000_000)
    ids.astype("<u2").tofile(source)
    made = prepare(source, data, vocab_size=50_000, slice_samples=1_500)
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(data)) for _ in range(2)]
        told = [server.stdout.readline().split() for server in servers if server.stdout]
        assert len({manifest for _, _, manifest in told}) == 1

        async def main() -> None:
            async with open_host() as host:
                for address, _, _ in told:
                    await host.connect(address)
                transfers = Transfers(Protocol(host))
                peers = [peer_id for _, peer_id, _ in told]
                manifest = await fetch_manifest(
                    transfers, bytes.fromhex(told[0][2]), peers, TIMEOUT
                )
                assert manifest == made
                cache = SliceCache(transfers, tmp_path / "cache", 2**30)

                async def fetch(number: int) -> None:
                    info = manifest.slices[number]
                    path = await cache.fetch(info, peers, TIMEOUT)
                    assert path.read_bytes() == slice_path(data, info).read_bytes()
                    assert open_slice(path, manifest, info)["input_ids"].shape[1] == 256
                    if number == 0:
                        servers[0].kill()

                async with trio.open_nursery() as nursery:
                    for number in range(len(manifest.slices)):
                        nursery.start_soon(fetch, number)
                assert servers[0].wait() == -9
                assert all(cache.holds(info.blob_id) for info in manifest.slices)

        trio.run(main)
