"""A peer's policy for transfers: which it takes, where their bytes go, what they are good for, what it gives.

The mechanism asks; the program that uses it answers. The defaults take nothing and give nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.transfer.chunks import BlobInfo
from neurogrid.p2p.transfer.source import BlobSource
from neurogrid.p2p.transfer.store import BlobStore, StoredBlob
from neurogrid.p2p.wire import ErrorCode

__all__ = ["Held", "OfferedBlob", "TransferPolicy", "Wanted"]


@dataclass(frozen=True, slots=True)
class OfferedBlob:
    """A blob that a peer would send.

    Attributes:
        peer_id: whose offer it is (base58).
        layer_id: the number that the peer gave it, 0 to 65,535; of a model, the layer.
        request_id: the id of the transfer, never 0.
        info: its id, length and digests.
        sources: full multiaddrs of other peers that have it, as far as the giver knows.
    """

    peer_id: str
    layer_id: int
    request_id: int
    info: BlobInfo
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """The answer to an offer: this very blob is here, and was verified."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The answer to an offer: send it.

    Attributes:
        store: where its bytes go.
        use: awaited with the whole blob, verified, before the sender is told that it is usable. It may
            raise `RequestRefusedError`, which the sender gets in place of that.
    """

    store: BlobStore
    use: Callable[[StoredBlob], Awaitable[None]]


class TransferPolicy:
    """The policy that `Transfers` asks. Every method may raise `RequestRefusedError`, which the peer gets."""

    def authorize(self, peer_id: str) -> None:
        """Refuse a peer that may offer or send nothing now. Called for every message, but for what comes because
        we asked for it: quick."""

    def authorize_request(self, peer_id: str) -> None:
        """Refuse a peer that may ask for nothing now; unless told otherwise, one that `authorize` refuses. Quick."""
        self.authorize(peer_id)

    async def decide(self, offered: OfferedBlob) -> Held | Wanted:
        """Whether a blob is wanted, and where. Several are asked about at once."""
        raise RequestRefusedError("blobs are not taken here", code=ErrorCode.NOT_SUPPORTED)

    async def acknowledged(self, offered: OfferedBlob) -> None:
        """The sender was told that the blob is here, because it was held or because it came."""

    def gave_up(self, offered: OfferedBlob, reason: str) -> None:
        """The peer stopped sending, and is about to be told. Must not block."""

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """The blob with this id, for a peer that asked for it; None if it is not here."""
        return None

    def served(self, peer_id: str, blob_id: bytes) -> None:
        """Note that what `provide` gave a peer is read no more, sent or not. Called once for each; must be quick."""
