"""The transfers of one host: take blobs that are offered, serve those that are asked for, fetch from peers.

    class Keep(TransferPolicy):
        async def decide(self, offered):
            return Wanted(MemoryStore(), use)

    transfers = Transfers(protocol, Keep())
    await send_blob(protocol, peer_id, data)
    fetched = await transfers.fetch_blob([peer_id, other_id], blob_id)

A blob is known by its content, so it does not matter who sends it: what came of it from one peer is kept for
the next. This module knows the messages; what a blob is good for is the policy's affair.

Source: protocol_spec/transfers.md.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import trio

from neurogrid.errors import (
    LocalProtocolError,
    PeerRefusedError,
    RequestRefusedError,
)
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.exchange.pending import Waiter
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.transfer.chunks import BlobInfo, transfer_invalid
from neurogrid.p2p.transfer.fetcher import FetchedBlob, Fetcher
from neurogrid.p2p.transfer.incoming import RETRY_AFTER, IncomingTransfers, decode_offer
from neurogrid.p2p.transfer.limits import DEFAULT_TRANSFER_LIMITS, TransferLimits
from neurogrid.p2p.transfer.outgoing import ACCEPT_TIMEOUT, send_blob
from neurogrid.p2p.transfer.partials import PartialTable
from neurogrid.p2p.transfer.policy import Held, OfferedBlob, TransferPolicy, Wanted
from neurogrid.p2p.transfer.store import BlobStore
from neurogrid.p2p.wire import (
    ErrorCode,
    MessageType,
    TensorMessage,
    TransferAccept,
    TransferRequest,
    WeightsChunk,
)

__all__ = ["Transfers"]

logger = logging.getLogger(__name__)

# Two would both answer every offer.
_WITH_TRANSFERS: WeakSet[Exchange] = WeakSet()
# In place of a peer id, for what is counted of all peers.
_ALL = ""


class Transfers:
    """The transfers on one protocol, both ways.

    Weights without a request id (1.0.0, and plain weights) are not its affair.

    Args:
        protocol: what it serves the messages of transfers on, from now on.
        policy: what to take and to give; None takes and gives nothing, and can still fetch.
        limits: what peers may have under way, and what is kept of what they left.

    Raises:
        LocalProtocolError: the protocol has transfers already.
    """

    def __init__(
        self,
        protocol: Exchange,
        policy: TransferPolicy | None = None,
        *,
        limits: TransferLimits = DEFAULT_TRANSFER_LIMITS,
    ) -> None:
        if protocol in _WITH_TRANSFERS:
            raise LocalProtocolError("this protocol has transfers already")
        _WITH_TRANSFERS.add(protocol)
        self._protocol = protocol
        self._policy = TransferPolicy() if policy is None else policy
        self._limits = limits
        self._partials = PartialTable(protocol.host.start_soon, limits)
        self._incoming = IncomingTransfers(protocol, self._partials, limits)
        self._fetcher = Fetcher(protocol, self._incoming)
        self._taking: dict[tuple[str, int], trio.CancelScope] = {}  # offers, by peer and request id
        self._num_deciding: Counter[str] = Counter()
        self._num_served: Counter[str] = Counter()
        protocol.on_message(MessageType.TRANSFER_OFFER, self._on_offer)
        protocol.on_message(MessageType.TRANSFER_REQUEST, self._on_request)
        protocol.on_message(
            MessageType.WEIGHTS, self._on_weights, when=lambda message: message.request_id != 0
        )

    @property
    def num_incoming(self) -> int:
        """Transfers that come in now."""
        return len(self._incoming)

    @property
    def incoming_bytes(self) -> int:
        """Bytes that are here, verified, of the blobs that come in now."""
        return self._partials.open_bytes

    @property
    def num_served(self) -> int:
        """Transfers that go out now because somebody asked."""
        return self._num_served[_ALL]

    @property
    def idle_bytes(self) -> int:
        """Bytes of unfinished blobs that are kept in memory for a peer that offers them again."""
        return sum(blob.kept_bytes for blob in self._partials.idle)

    def forget(self, peer_id: str, *, layer_id: int | None = None) -> None:
        """End what comes in from a peer without telling it, of one layer or all; what is there is kept."""
        for transfer in self._incoming.find(peer_id, layer_id=layer_id):
            transfer.close()

    async def fetch_blob(
        self,
        peers: str | Sequence[str],
        blob_id: bytes,
        *,
        store: BlobStore | None = None,
        max_bytes: int | None = None,
        offer_timeout: float = ACCEPT_TIMEOUT,
    ) -> FetchedBlob:
        """Get a blob from the first of `peers` that has it, and what that one fails to send from the next.

        Args:
            peers: one connected peer or several, by their ids.
            blob_id: 32 bytes.
            store: where it goes; None for memory. What is there of it already is not asked for.
            max_bytes: the largest blob that is taken; None for `TransferLimits.max_bytes_per_peer`.
            offer_timeout: seconds for a peer's answer; it may have to hash the blob first.

        Raises:
            PeerRefusedError: the only peer does not have it (BLOB_UNKNOWN), or ended the transfer.
            TransportError: the only peer cannot be reached, or stopped.
            RemoteProtocolError: the only peer sent something else; the text names the chunk.
            BlobUnavailableError: several were asked, and none gave all of it.
            CapacityError: there is no room for it here.
            LocalProtocolError: no peer was named.

        Cancelled, the peer is told; what came is kept for a while.
        """
        return await self._fetcher.fetch(
            (peers,) if isinstance(peers, str) else tuple(peers),
            blob_id,
            store=store,
            max_bytes=self._limits.max_bytes_per_peer if max_bytes is None else max_bytes,
            offer_timeout=offer_timeout,
        )

    # Offers and chunks

    def _on_weights(self, message: TensorMessage) -> Awaitable[None] | None:
        peer_id = sender_of(message)
        WeightsChunk.require_numbers(message.data)
        if not self._fetcher.is_awaited(peer_id, message.request_id):
            self._policy.authorize(peer_id)
        return self._incoming.on_weights(message)

    def _on_offer(self, message: TensorMessage) -> Awaitable[None]:
        # The sender may end it with its next message, before the task that takes the offer has begun.
        self._protocol.announce(
            sender_of(message), MessageType.WEIGHTS, request_id=message.request_id
        )
        return self._take_offer(message)

    async def _take_offer(self, message: TensorMessage) -> None:
        peer_id = sender_of(message)
        # The sender's Error fails this waiter, as does the loss of the stream.
        with self._protocol.expect(
            peer_id, MessageType.WEIGHTS, request_id=message.request_id
        ) as told:
            if await self._fetcher.take_offer(message):
                return
            with self._alone(message):
                await self._take_unasked(message, told)

    @contextmanager
    def _alone(self, message: TensorMessage) -> Iterator[None]:
        """Take an offer, unless its id is that of a transfer under way: then our Error ends both at their sender.

        Raises:
            RequestRefusedError: it is (TRANSFER_INVALID).
        """
        key = (sender_of(message), message.request_id)
        twice = transfer_invalid(
            message.layer_id, "the request id is that of a transfer under way, which ends with this"
        )
        if self._fetcher.is_awaited(*key):
            self._incoming.fail(*key, twice)
            raise twice
        under_way = self._taking.pop(key, None)
        if under_way is not None:
            under_way.cancel()
            raise twice
        scope = self._taking[key] = trio.CancelScope()
        try:
            with scope:
                yield
        finally:
            if self._taking.get(key) is scope:
                del self._taking[key]

    async def _take_unasked(self, message: TensorMessage, told: Waiter) -> None:
        peer_id = sender_of(message)
        self._policy.authorize(peer_id)
        with _counted(self._num_deciding, peer_id, self._limits.max_offers_per_peer):
            offered = await decode_offer(message)
            decision = await self._policy.decide(offered)
        try:
            if await self._take(message, offered, decision, told):
                await self._policy.acknowledged(offered)
        except PeerRefusedError as exc:
            logger.info("%s stopped sending layer %d: %s", peer_id, offered.layer_id, exc)

    async def _take(
        self, message: TensorMessage, offered: OfferedBlob, decision: Held | Wanted, told: Waiter
    ) -> bool:
        """Answer an offer and see its transfer through; whether the sender knows that the blob is here."""
        if isinstance(decision, Held):
            accept = TransferAccept(layer_id=offered.layer_id, needed=False)
            await self._incoming.answer(message, MessageType.TRANSFER_ACCEPT, accept.encode())
            return True
        with self._incoming.admitted(offered) as transfer:
            try:
                stored = await self._incoming.receive(transfer, decision.store, message, told)
            except RequestRefusedError as exc:
                if exc.code == ErrorCode.DEADLINE_EXCEEDED:
                    self._policy.gave_up(offered, str(exc))
                raise
            if stored is None:
                return False
            await decision.use(stored)
        await self._incoming.answer(message, MessageType.WEIGHTS_ACK)
        return True

    # Requests

    async def _on_request(self, message: TensorMessage) -> None:
        peer_id = sender_of(message)
        self._policy.authorize_request(peer_id)
        blob_id = TransferRequest.decode(message.data).blob_id
        limits = self._limits
        with (
            # The peer that asked may stop before there is anything to send: its Error fails this waiter. Nothing
            # resolves it, since Weights are no answer.
            self._protocol.expect(
                peer_id, MessageType.WEIGHTS, request_id=message.request_id
            ) as told,
            _counted(self._num_served, peer_id, limits.max_served_per_peer),
            _counted(self._num_served, _ALL, limits.max_served),
        ):
            source = await self._policy.provide(peer_id, blob_id)
            if source is None:
                raise RequestRefusedError(
                    f"blob {blob_id.hex()} is not here", code=ErrorCode.BLOB_UNKNOWN
                )
            try:
                digests = await trio.to_thread.run_sync(source.digests)
                if BlobInfo.of_digests(digests, source.num_bytes).blob_id != blob_id:
                    raise LocalProtocolError(f"another blob was provided than {blob_id.hex()}")
                if not told.is_done:
                    await send_blob(self._protocol, peer_id, source, request_id=message.request_id)
            finally:
                self._policy.served(peer_id, blob_id)


@contextmanager
def _counted(counter: Counter[str], whose: str, limit: int) -> Iterator[None]:
    if counter[whose] >= limit:
        raise RequestRefusedError(
            f"{limit} such requests are being dealt with already",
            code=ErrorCode.BUSY,
            retry_after=RETRY_AFTER,
        )
    counter[whose] += 1
    try:
        yield
    finally:
        counter[whose] -= 1
        if not counter[whose]:
            del counter[whose]
