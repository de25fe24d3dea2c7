"""Get a blob by its content's id, from whoever has it: the next peer goes on where the one before failed.

python examples/fetch.py give FILE                          # prints an address, then the blob's id
python examples/fetch.py get BLOB_ID ADDRESS [ADDRESS...]
"""

import sys
from pathlib import Path

import trio

from neurogrid.p2p import Protocol, open_host
from neurogrid.p2p.transfer import BlobInfo, BlobSource, BytesSource, TransferPolicy, Transfers


class Give(TransferPolicy):
    """Give one blob to whoever asks for it."""

    def __init__(self, data: bytes) -> None:
        self._source = BytesSource(data)
        self.blob_id = BlobInfo.of_digests(self._source.digests(), len(data)).blob_id

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        return self._source if blob_id == self.blob_id else None


async def give(file: str) -> None:
    policy = Give(Path(file).read_bytes())
    async with open_host() as host:
        Transfers(Protocol(host), policy)
        print(host.addresses[0], flush=True)
        print(policy.blob_id.hex(), flush=True)
        await trio.sleep_forever()


async def get(blob_id: str, *addresses: str) -> None:
    async with open_host() as host:
        transfers = Transfers(Protocol(host))
        peers = [await host.connect(address) for address in addresses]
        fetched = await transfers.fetch_blob(peers, bytes.fromhex(blob_id))
        for peer_id, error in fetched.failures.items():
            print(f"{peer_id} failed: {error}")
        print(f"{fetched.blob.num_bytes} B from {fetched.peer_id}")


if __name__ == "__main__":
    trio.run({"give": give, "get": get}[sys.argv[1]], *sys.argv[2:])
