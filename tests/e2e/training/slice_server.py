"""Serves the slices of a data directory over TCP until it is killed; prints its address and id first."""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from neurogrid.p2p import Protocol, open_host
from neurogrid.p2p.transfer import Transfers
from neurogrid.training.data.blobs import Providers, SliceStore
from neurogrid.training.data.slices import read_manifest


async def main(directory: Path) -> None:
    async with open_host() as host:
        store = SliceStore(directory, read_manifest(directory))
        Transfers(Protocol(host), Providers(store))
        print(host.addresses[0], host.peer_id, store.manifest_info.blob_id.hex(), flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]))
