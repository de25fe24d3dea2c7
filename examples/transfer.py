"""Send a file: it is verified as it comes, and a transfer that broke goes on where it stopped.

    python examples/transfer.py DIRECTORY               # takes files, and prints its address
    python examples/transfer.py ADDRESS FILE [STOP]     # sends one; with STOP, gives up after so many MiB

Try it with STOP first, then without. Either side may have been ended and started again in between.
"""

import mmap
import sys
from pathlib import Path

import trio

from neurogrid.p2p import Protocol, open_host
from neurogrid.p2p.transfer import (
    DirectoryStore,
    Held,
    OfferedBlob,
    StoredBlob,
    TransferPolicy,
    Transfers,
    Wanted,
    send_blob,
)

MIB = 1024 * 1024


class Keep(TransferPolicy):
    """Take every blob that is offered, and keep it in a directory under its content's id."""

    def __init__(self, directory: Path) -> None:
        self._store = DirectoryStore(directory)

    async def decide(self, offered: OfferedBlob) -> Held | Wanted:
        there = await trio.to_thread.run_sync(self._store.load, offered.info.blob_id)
        return Held() if there else Wanted(self._store, self._use)

    async def _use(self, blob: StoredBlob) -> None:
        print(f"{blob.path.name}: {blob.num_bytes} B, verified", flush=True)


async def take(directory: Path) -> None:
    async with open_host() as host:
        Transfers(Protocol(host), Keep(directory))
        print(host.addresses[0], flush=True)
        await trio.sleep_forever()


async def send(address: str, file: Path, stop: float) -> None:
    with file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    sent = 0

    def on_sent(num_bytes: int) -> None:
        nonlocal sent
        sent += num_bytes
        if sent >= stop:
            scope.cancel()

    async with open_host() as host:
        protocol = Protocol(host)
        peer_id = await host.connect(address)
        with trio.CancelScope() as scope:
            result = await send_blob(protocol, peer_id, data, on_sent=on_sent)
            print(f"{result.held_bytes // MIB} MiB were there, {result.sent_bytes // MIB} MiB went")
    if scope.cancelled_caught:
        print(f"gave up after {sent // MIB} MiB")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        trio.run(take, Path(sys.argv[1]))
    else:
        stop = float(sys.argv[3]) * MIB if len(sys.argv) > 3 else float("inf")
        trio.run(send, sys.argv[1], Path(sys.argv[2]), stop)
