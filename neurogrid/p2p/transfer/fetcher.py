"""Get a blob from peers that have it: from one after the other, each for what is still missing.

Every chunk is verified when it comes, so a peer that lies is known by the chunk, and costs that chunk.

Source: protocol_spec/transfers.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import trio

from neurogrid.errors import (
    CapacityError,
    LocalProtocolError,
    NeuroGridError,
    PeerRefusedError,
    RemoteProtocolError,
    RequestRefusedError,
    ResponseTimeout,
    StreamBrokenError,
    TransportError,
)
from neurogrid.p2p.exchange.exchange import Exchange, new_request_id
from neurogrid.p2p.exchange.pending import Waiter
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.transfer.incoming import IncomingTransfers, decode_offer
from neurogrid.p2p.transfer.memory_store import MemoryStore
from neurogrid.p2p.transfer.outgoing import require_stream, tell_stopped
from neurogrid.p2p.transfer.store import BlobStore, StoredBlob
from neurogrid.p2p.wire import (
    ErrorCode,
    MessageType,
    TensorMessage,
    TransferAccept,
    TransferRequest,
)

__all__ = ["BlobUnavailableError", "FetchedBlob", "Fetcher"]

logger = logging.getLogger(__name__)


# Requests whose offers may still come although nobody waits for them.
MAX_GIVEN_UP = 256


class BlobUnavailableError(TransportError):
    """None of several peers gave the whole blob. `failures` says why not, by peer id."""

    def __init__(self, message: str, *, failures: Mapping[str, NeuroGridError]) -> None:
        super().__init__(message)
        self.failures = dict(failures)


@dataclass(frozen=True, slots=True)
class FetchedBlob:
    """A blob that came.

    Attributes:
        blob: the whole of it, verified.
        peer_id: who sent the last of it.
        failures: what went wrong with those that were asked before; a lie names its chunk.
    """

    blob: StoredBlob
    peer_id: str
    failures: Mapping[str, NeuroGridError] = field(default_factory=dict)


class Fetcher:
    """The fetches of one host."""

    def __init__(self, protocol: Exchange, incoming: IncomingTransfers) -> None:
        self._protocol = protocol
        self._incoming = incoming
        # By peer and request id: what the offer of a fetch under way is waited for by.
        self._under_way: dict[tuple[str, int], Waiter] = {}
        # Requests that nobody waits for any more; keys only, a dict keeps their order.
        self._given_up: dict[tuple[str, int], None] = {}

    def is_awaited(self, peer_id: str, request_id: int) -> bool:
        """Whether what comes under this id comes because we asked for it."""
        return (peer_id, request_id) in self._under_way

    async def take_offer(self, message: TensorMessage) -> bool:
        """Whether an offer answers a request of ours; the task that asked gets it, if it still waits."""
        key = (sender_of(message), message.request_id)
        asked = self._under_way.get(key)
        if asked is not None and not asked.is_done:
            asked.resolve(message)
        elif key in self._given_up:
            accept = TransferAccept(layer_id=message.layer_id, needed=False)
            await self._incoming.answer(message, MessageType.TRANSFER_ACCEPT, accept.encode())
        else:
            return False
        return True

    async def fetch(
        self,
        peers: Sequence[str],
        blob_id: bytes,
        *,
        store: BlobStore | None,
        max_bytes: int,
        offer_timeout: float,
    ) -> FetchedBlob:
        """`Transfers.fetch_blob`, with nothing left to a default: the same arguments, result and errors."""
        if not peers:
            raise LocalProtocolError("a blob is fetched from at least one peer")
        if store is None:
            store = MemoryStore()
        failures: dict[str, NeuroGridError] = {}
        for peer_id in peers:
            try:
                blob = await self._fetch_from(peer_id, blob_id, store, max_bytes, offer_timeout)
            except (PeerRefusedError, RemoteProtocolError, TransportError) as exc:
                if len(peers) == 1:
                    raise
                logger.warning("%s gave no blob %s: %s", peer_id, blob_id.hex(), exc)
                failures[peer_id] = exc
            else:
                return FetchedBlob(blob, peer_id, failures)
        reasons = "; ".join(f"{peer_id}: {exc}" for peer_id, exc in failures.items())
        raise BlobUnavailableError(
            f"none of {len(peers)} peers gave blob {blob_id.hex()}: {reasons}", failures=failures
        )

    async def _fetch_from(
        self, peer_id: str, blob_id: bytes, store: BlobStore, max_bytes: int, offer_timeout: float
    ) -> StoredBlob:
        await require_stream(self._protocol, peer_id)
        request = TensorMessage(
            msg_type=MessageType.TRANSFER_REQUEST,
            request_id=new_request_id(),
            data=TransferRequest(blob_id).encode(),
        )
        key = (peer_id, request.request_id)
        with (
            self._protocol.expect(
                peer_id, MessageType.TRANSFER_OFFER, request_id=request.request_id
            ) as asked,
            # The peer can end the transfer: its Error fails this waiter.
            self._protocol.expect(
                peer_id, MessageType.WEIGHTS, request_id=request.request_id
            ) as told,
        ):
            self._under_way[key] = asked
            try:
                offer = await self._ask(request, asked, offer_timeout)
                stored = await self._take(offer, blob_id, store, max_bytes, told)
                await self._acknowledge(offer)
            except (PeerRefusedError, StreamBrokenError):
                raise  # the peer knows, or is gone
            except RequestRefusedError as exc:
                self._tell(request, peer_id, exc)
                if exc.code == ErrorCode.DEADLINE_EXCEEDED:
                    raise ResponseTimeout(f"{peer_id} stopped sending: {exc}") from exc
                raise RemoteProtocolError(str(exc), code=exc.code) from exc
            except BaseException:  # cancelled, or this side's: the sender should not go on
                stopped = RequestRefusedError(
                    "the receiver stopped", code=ErrorCode.DEADLINE_EXCEEDED
                )
                self._tell(request, peer_id, stopped)
                raise
            finally:
                del self._under_way[key]
        return stored

    async def _acknowledge(self, offer: TensorMessage) -> None:
        """Tell a peer that its blob is here, whole; one that has gone since need not know."""
        try:
            await self._incoming.answer(offer, MessageType.WEIGHTS_ACK)
        except TransportError as exc:
            logger.debug("%s is not told that its blob came: %s", sender_of(offer), exc)

    def _tell(self, request: TensorMessage, peer_id: str, error: RequestRefusedError) -> None:
        self._protocol.host.start_soon(tell_stopped, self._protocol, peer_id, request, error)

    async def _ask(self, request: TensorMessage, asked: Waiter, timeout: float) -> TensorMessage:
        try:
            with trio.move_on_after(timeout):
                await self._protocol.send(asked.peer_id, request)
                return await asked.wait(timeout=timeout)
        finally:
            if not asked.is_done:
                self._given_up[asked.peer_id, request.request_id] = None
                if len(self._given_up) > MAX_GIVEN_UP:
                    del self._given_up[next(iter(self._given_up))]
        raise ResponseTimeout(f"{asked.peer_id} took no request for a blob within {timeout:g} s")

    async def _take(
        self,
        offer: TensorMessage,
        blob_id: bytes,
        store: BlobStore,
        max_bytes: int,
        told: Waiter,
    ) -> StoredBlob:
        """See the transfer through that a peer offers because we asked."""
        offered = await decode_offer(offer)
        num_bytes = offered.info.num_bytes
        if offered.info.blob_id != blob_id:
            raise RequestRefusedError(
                f"{told.peer_id} offers blob {offered.info.blob_id.hex()} instead of {blob_id.hex()}",
                code=ErrorCode.TRANSFER_INVALID,
            )
        if num_bytes > max_bytes:
            raise CapacityError(
                f"blob {blob_id.hex()} has {num_bytes:,} B, and no more than {max_bytes:,} B are taken",
                needed=num_bytes,
                available=max_bytes,
            )
        try:
            with self._incoming.admitted(offered) as transfer:
                stored = await self._incoming.receive(transfer, store, offer, told)
        except RequestRefusedError as exc:
            if exc.code not in (ErrorCode.OUT_OF_MEMORY, ErrorCode.LIMIT_EXCEEDED):
                raise
            # It is we who have no room: another peer is of no help.
            raise CapacityError(str(exc), needed=num_bytes, available=0) from exc
        if stored is None:
            raise TransportError(f"the transfer from {told.peer_id} was forgotten")
        return stored
