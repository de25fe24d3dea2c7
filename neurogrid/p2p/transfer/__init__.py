"""Blobs between peers: known by their content, sent in chunks, verified as they come, resumed where they stopped.

    sent = await send_blob(protocol, peer_id, data)
    fetched = await Transfers(protocol).fetch_blob(peer_id, blob_id)

Source: protocol_spec/transfers.md.
"""

from neurogrid.p2p.transfer.cache import BlobCache
from neurogrid.p2p.transfer.chunks import BlobInfo
from neurogrid.p2p.transfer.directory_store import DirectoryStore
from neurogrid.p2p.transfer.fetcher import BlobUnavailableError, FetchedBlob
from neurogrid.p2p.transfer.limits import DEFAULT_TRANSFER_LIMITS, TransferLimits
from neurogrid.p2p.transfer.memory_store import MemoryStore
from neurogrid.p2p.transfer.outgoing import SentBlob, send_blob
from neurogrid.p2p.transfer.plain import PlainBlob
from neurogrid.p2p.transfer.policy import Held, OfferedBlob, TransferPolicy, Wanted
from neurogrid.p2p.transfer.source import BlobSource, BytesSource
from neurogrid.p2p.transfer.store import BlobStore, StoredBlob
from neurogrid.p2p.transfer.transfers import Transfers

__all__ = [
    "DEFAULT_TRANSFER_LIMITS",
    "BlobCache",
    "BlobInfo",
    "BlobSource",
    "BlobStore",
    "BlobUnavailableError",
    "BytesSource",
    "DirectoryStore",
    "FetchedBlob",
    "Held",
    "MemoryStore",
    "OfferedBlob",
    "PlainBlob",
    "SentBlob",
    "StoredBlob",
    "TransferLimits",
    "TransferPolicy",
    "Transfers",
    "Wanted",
    "send_blob",
]
