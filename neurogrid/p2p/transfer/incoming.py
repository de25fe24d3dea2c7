"""Transfers that come in: admitted within limits, their chunks verified, ended by whatever ends them first.

A transfer is owned by one task, which waits here for its end. The chunks come from the reader of the stream, in
order, and are hashed and written in threads; so the reader never waits for either. What a few of them cost is given
back to the sender at once, that no task is needed for each; for more of them it has to wait.

Source: protocol_spec/transfers.md.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import trio

from neurogrid.errors import NeuroGridError, RemoteProtocolError, RequestRefusedError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.exchange.pending import Waiter
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.transfer.chunks import BlobInfo, require_fit, transfer_invalid
from neurogrid.p2p.transfer.limits import TransferLimits
from neurogrid.p2p.transfer.partials import Added, PartialTable, SharedBlob
from neurogrid.p2p.transfer.policy import OfferedBlob
from neurogrid.p2p.transfer.store import BlobStore, StoredBlob
from neurogrid.p2p.wire import (
    Data,
    ErrorCode,
    MessageType,
    TensorMessage,
    TransferAccept,
    TransferOffer,
    WeightsChunk,
)
from neurogrid.renewed_event import RenewedEvent

__all__ = ["RETRY_AFTER", "IncomingTransfer", "IncomingTransfers", "decode_offer"]

logger = logging.getLogger(__name__)

# A peer that is told that there are too many transfers, or that it asks for too many, is told when to come again.
# Seconds.
RETRY_AFTER = 10.0
# Digests of at most 256 chunks cost microseconds to hash; 2 MiB of them take milliseconds, and a thread.
_SMALL_OFFER = 8 * 1024
# Chunks that have come meanwhile are verified in one go of a thread.
CHUNKS_AT_ONCE = 8
# Chunks that wait to be verified before their sender has to: what a transfer holds beside its credit. They are part of
# the bytes that it has announced, which `TransferLimits` bounds: a chunk's page is not touched before it is verified.
CHUNKS_AHEAD = 4


class IncomingTransfer:
    """One transfer from one peer, from its admission to its end.

    Attributes:
        offered: what it is.
        shared: where its chunks go; None until it may send.
    """

    def __init__(self, offered: OfferedBlob) -> None:
        self.offered = offered
        self.shared: SharedBlob | None = None
        self._queue: deque[tuple[int, WeightsChunk]] = deque()  # came, and was not looked at yet
        self._queue_changed = RenewedEvent()
        self._began = trio.current_time()
        self._is_closed = False  # no more chunks come
        self._ended = trio.Event()
        self._error: NeuroGridError | None = None

    @property
    def is_over(self) -> bool:
        """Whether no chunk matters any more."""
        return self._ended.is_set()

    @property
    def takes_chunks(self) -> bool:
        """Whether a chunk that comes now belongs to it."""
        return not self._is_closed and not self.is_over

    def close(self, error: NeuroGridError | None = None) -> None:
        """Its sender has ended it, or is gone: it ends once the chunks that came before that are verified and kept."""
        if self.shared is None:
            self.end(error)
        elif self.takes_chunks:
            self._is_closed, self._error = True, error
            self._queue_changed.set()

    def end(self, error: NeuroGridError | None = None) -> None:
        """End it: with an error, or because the blob is whole or nobody cares. The first end counts."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()
            self._queue_changed.set()

    def put(self, layer_id: int, chunk: WeightsChunk) -> Awaitable[None] | None:
        """A chunk has come; what is returned waits until so many more may."""
        self._queue.append((layer_id, chunk))
        self._queue_changed.set()
        return self._wait_short() if len(self._queue) > CHUNKS_AHEAD else None

    async def take(self) -> list[tuple[int, WeightsChunk]]:
        """Wait for chunks, and take those that have come, in order and some at most; none when the transfer is over."""
        while not self._queue and self.takes_chunks:
            await self._queue_changed.wait()
        if not self._queue and self._is_closed:
            self.end(self._error)
        if self.is_over:
            self._queue.clear()
        num_chunks = min(len(self._queue), CHUNKS_AT_ONCE)
        taken = [self._queue.popleft() for _ in range(num_chunks)]
        self._queue_changed.set()
        return taken

    async def _wait_short(self) -> None:
        while len(self._queue) > CHUNKS_AHEAD and not self.is_over:
            await self._queue_changed.wait()

    async def wait(self, silence_timeout: float) -> StoredBlob | None:
        """Wait for the end: the whole blob, or None when the transfer was forgotten.

        Raises:
            RequestRefusedError: nothing new came for `silence_timeout` seconds (DEADLINE_EXCEEDED), or
                what came was wrong.
            NeuroGridError: what else it was ended with.
        """
        shared = self.shared
        assert shared is not None
        while not self._ended.is_set():
            # Chunks of the same blob from another peer count: this one's are then duplicates.
            quiet_since = max(self._began, shared.last_progress)
            with trio.move_on_at(quiet_since + silence_timeout):
                await self._ended.wait()
            if quiet_since == max(self._began, shared.last_progress) and not self.is_over:
                self.end(
                    RequestRefusedError(
                        f"gave up layer {self.offered.layer_id}: {shared.num_received} of "
                        f"{shared.info.num_chunks} chunks came, and then nothing for "
                        f"{silence_timeout:g} s",
                        code=ErrorCode.DEADLINE_EXCEEDED,
                    )
                )
        if self._error is not None:
            raise self._error
        return shared.stored


class IncomingTransfers:
    """The transfers that come in to one host, by peer and request id."""

    def __init__(self, protocol: Exchange, partials: PartialTable, limits: TransferLimits) -> None:
        self._protocol = protocol
        self._partials = partials
        self._limits = limits
        self._open: dict[tuple[str, int], IncomingTransfer] = {}
        # Keys only; a dict keeps their order.
        self._ended_well: dict[tuple[str, int], None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def find(self, peer_id: str, *, layer_id: int | None = None) -> list[IncomingTransfer]:
        """The transfers of a peer, of one layer or of all."""
        return [
            transfer
            for transfer in self._open.values()
            if transfer.offered.peer_id == peer_id and layer_id in (None, transfer.offered.layer_id)
        ]

    def fail(self, peer_id: str, request_id: int, error: RequestRefusedError) -> None:
        """End a transfer, if there is such a one: its sender is told why."""
        transfer = self._open.get((peer_id, request_id))
        if transfer is not None:
            transfer.end(error)

    @contextmanager
    def admitted(self, offered: OfferedBlob) -> Iterator[IncomingTransfer]:
        """A transfer for the length of the block. Left without an error, it ended well: late chunks of it
        are ignored, and not called wrong.

        Raises:
            RequestRefusedError: its id is in use (TRANSFER_INVALID), or there would be too many transfers
                or bytes (LIMIT_EXCEEDED).
        """
        key = (offered.peer_id, offered.request_id)
        if key in self._open:
            raise transfer_invalid(offered.layer_id, "the request id is that of another transfer")
        self._require_room(offered)
        transfer = self._open[key] = IncomingTransfer(offered)
        try:
            yield transfer
            self._ended_well[key] = None
            if len(self._ended_well) > self._limits.max_remembered:
                del self._ended_well[next(iter(self._ended_well))]
        finally:
            transfer.end()
            del self._open[key]

    def _require_room(self, offered: OfferedBlob) -> None:
        limits, layer_id, num_bytes = self._limits, offered.layer_id, offered.info.num_bytes
        mine = self.find(offered.peer_id)
        everybodys = list(self._open.values())
        for transfers, max_number, max_bytes, whose in (
            (mine, limits.max_transfers_per_peer, limits.max_bytes_per_peer, "of yours"),
            (everybodys, limits.max_transfers, limits.max_bytes, "of all peers"),
        ):
            if len(transfers) >= max_number:
                raise _too_much(
                    f"{max_number} transfers {whose} are under way already; finish one before "
                    f"layer {layer_id}"
                )
            under_way = sum(transfer.offered.info.num_bytes for transfer in transfers)
            if under_way + num_bytes > max_bytes:
                raise _too_much(
                    f"layer {layer_id} was announced with {num_bytes:,} B; transfers {whose} may have "
                    f"{max_bytes:,} B at once, and {under_way:,} B are under way"
                )

    async def receive(
        self, transfer: IncomingTransfer, store: BlobStore, offer: TensorMessage, told: Waiter
    ) -> StoredBlob | None:
        """Accept an offer and see its chunks come; None when the transfer was forgotten.

        Args:
            store: where they go.
            offer: the message that is answered.
            told: fails when the sender ends the transfer, or is gone.

        Raises:
            RequestRefusedError: what came was wrong, nothing came, or there is no room for it.
            PeerRefusedError, TransportError: what `told` says.
        """
        shared = await self._partials.open(store, transfer.offered.info)
        shared.on_stored[transfer] = transfer.end
        try:
            transfer.shared = shared
            if shared.stored is not None:
                transfer.end()
            assert shared.partial is not None
            accept = TransferAccept(
                layer_id=transfer.offered.layer_id,
                needed=True,
                have=shared.partial.chunks.bitmap(),
            )
            await self.answer(offer, MessageType.TRANSFER_ACCEPT, accept.encode())
            return await self._wait(transfer, shared, told)
        finally:
            del shared.on_stored[transfer]
            self._partials.close(shared)

    async def answer(self, offer: TensorMessage, msg_type: MessageType, data: bytes = b"") -> None:
        """Answer an offer: to its sender, under its ids."""
        await self._protocol.send(
            sender_of(offer),
            TensorMessage(
                msg_type=msg_type, layer_id=offer.layer_id, request_id=offer.request_id, data=data
            ),
        )

    async def _wait(
        self, transfer: IncomingTransfer, shared: SharedBlob, told: Waiter
    ) -> StoredBlob | None:
        async def listen() -> None:
            try:
                await told.wait(timeout=math.inf)
            except NeuroGridError as exc:
                transfer.close(exc)

        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                nursery.start_soon(self._add_all, transfer, shared)
                stored = await transfer.wait(self._limits.silence_timeout)
                nursery.cancel_scope.cancel()
        return stored

    def on_weights(self, message: TensorMessage) -> Awaitable[None] | None:
        """Take a chunk, in the order in which they come; what is returned waits while there are too many.

        Raises:
            RequestRefusedError: there is no such transfer.
            RemoteProtocolError: it is no chunk at all.
        """
        key = (sender_of(message), message.request_id)
        transfer = self._open.get(key)
        if transfer is None or transfer.shared is None:
            if key in self._ended_well:
                return None
            raise RequestRefusedError(
                f"weights of layer {message.layer_id} came without an accepted offer",
                code=ErrorCode.TRANSFER_INVALID,
            )
        if not transfer.takes_chunks:
            return None  # its sender is about to hear why, or has ended it
        try:
            chunk = WeightsChunk.decode(message.data)
        except RemoteProtocolError as exc:
            if exc.code == ErrorCode.PROTOCOL_VIOLATION:
                raise
            # The frame was whole: the transfer is over, the stream is not.
            transfer.end(
                RequestRefusedError(f"weights of layer {message.layer_id}: {exc}", code=exc.code)
            )
            return None
        return transfer.put(message.layer_id, chunk)

    async def _add_all(self, transfer: IncomingTransfer, shared: SharedBlob) -> None:
        """Verify and keep chunks as they come, until the transfer is over."""
        try:
            while taken := await transfer.take():
                async with shared.lock:
                    # Of a blob that is whole by now nothing more matters.
                    if not transfer.is_over and shared.stored is None:
                        await self._add(transfer, shared, taken)
        except RequestRefusedError as exc:
            transfer.end(exc)

    async def _add(
        self,
        transfer: IncomingTransfer,
        shared: SharedBlob,
        taken: Sequence[tuple[int, WeightsChunk]],
    ) -> None:
        fitting: list[tuple[int, Data]] = []
        misfit: RequestRefusedError | None = None
        for layer_id, chunk in taken:
            try:
                _require_chunk_of(transfer.offered, layer_id, chunk)
            except RequestRefusedError as exc:
                misfit = exc
                break
            fitting.append((chunk.chunk_index, chunk.data))
        added = await self._partials.add(shared, fitting)
        if Added.WRONG in added:
            self._refuse_wrong(transfer.offered, shared, fitting[len(added) - 1][0])
        if misfit is not None:
            raise misfit

    def _refuse_wrong(self, offered: OfferedBlob, shared: SharedBlob, index: int) -> NoReturn:
        assert shared.partial is not None
        if index in shared.partial.chunks:
            raise transfer_invalid(
                offered.layer_id, f"chunk {index} came twice with different bytes"
            )
        raise RequestRefusedError(
            f"weights of layer {offered.layer_id}: chunk {index} from {offered.peer_id} has "
            "another hash than announced",
            code=ErrorCode.HASH_MISMATCH,
        )


def _require_chunk_of(offered: OfferedBlob, layer_id: int, chunk: WeightsChunk) -> None:
    """Raise RequestRefusedError for a chunk that cannot be one of the blob that was offered."""
    info, index = offered.info, chunk.chunk_index
    if layer_id != offered.layer_id:
        raise transfer_invalid(offered.layer_id, f"a chunk of layer {layer_id} came instead")
    require_fit(
        chunk,
        layer_id=layer_id,
        total_chunks=info.num_chunks,
        expected_bytes=info.chunk_bytes(index) if index < info.num_chunks else None,
    )


async def decode_offer(message: TensorMessage) -> OfferedBlob:
    """Read an offer, whose digests are hashed.

    Raises:
        RequestRefusedError: the digests are not those of the blob (TRANSFER_INVALID).
        RemoteProtocolError: it is no offer at all.
    """
    try:
        if len(message.data) <= _SMALL_OFFER:
            offer = TransferOffer.decode(message.data)
        else:
            offer = await trio.to_thread.run_sync(TransferOffer.decode, message.data)
    except RemoteProtocolError as exc:
        if exc.code == ErrorCode.PROTOCOL_VIOLATION:
            raise
        # The frame was whole: this offer is refused, the stream goes on.
        raise RequestRefusedError(str(exc), code=exc.code) from exc
    return OfferedBlob(
        sender_of(message),
        offer.layer_id,
        message.request_id,
        BlobInfo.of_offer(offer),
        offer.sources,
    )


def _too_much(text: str) -> RequestRefusedError:
    return RequestRefusedError(text, code=ErrorCode.LIMIT_EXCEEDED, retry_after=RETRY_AFTER)
