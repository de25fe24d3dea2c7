"""Send a blob to a peer: offer it, send the chunks that are missing there, wait until it is usable.

A blob is read in threads, a few chunks ahead of the network, so that of a blob of any size a few are in memory.
Blobs to one peer go one after the other: the peer has work with the one while the next comes, and has something to
begin with early. Credit paces the sender; the peer's Error stops it.

Source: protocol_spec/transfers.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from weakref import WeakKeyDictionary, WeakValueDictionary

import trio

from neurogrid.errors import (
    NeuroGridError,
    PeerRefusedError,
    PeerUnreachableError,
    RemoteProtocolError,
    RequestRefusedError,
    ResponseTimeout,
    StreamBrokenError,
    TooLargeForPeerError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.exchange.exchange import Exchange, new_request_id
from neurogrid.p2p.exchange.pending import Waiter
from neurogrid.p2p.streams.buffers import Tensor
from neurogrid.p2p.transfer.chunks import BlobInfo
from neurogrid.p2p.transfer.source import BlobSource, as_source
from neurogrid.p2p.wire import (
    ErrorCode,
    MessageType,
    TensorMessage,
    TransferAccept,
    TransferOffer,
    WeightsChunk,
    decode_bitmap,
)

__all__ = ["SentBlob", "require_stream", "send_blob", "tell_stopped"]

logger = logging.getLogger(__name__)

# For the answer to an offer: the peer may have to hash what it has on disk. Seconds.
ACCEPT_TIMEOUT = 180.0
# Without any chunk going out. Seconds.
STALL_TIMEOUT = 60.0
# From the last chunk to the acknowledgement: the peer may have to load what it got. Seconds.
ACK_TIMEOUT = 180.0
# Some chunks are read while others are written to the network, and one is there when another has been written. What it
# costs to ask a thread is a tenth of what the network costs for a chunk.
CHUNKS_IN_FLIGHT = 2
CHUNKS_A_READ = 4
# A blob that waits for another one to the same peer sends a chunk so often, so that it is not taken for given up.
# Seconds.
SIGN_OF_LIFE = 10.0
# One byte of each is read in a thread, so that nobody else waits for the disk.
PAGE_BYTES = 4096
# To tell a peer that a transfer is over. Seconds.
FAREWELL_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class SentBlob:
    """A blob that a peer has now.

    Attributes:
        blob_id: 32 bytes.
        num_bytes: its length.
        sent_bytes: how many of them went.
        held_bytes: how many the peer said it had already.
    """

    blob_id: bytes
    num_bytes: int
    sent_bytes: int
    held_bytes: int


async def send_blob(
    protocol: Exchange,
    peer_id: str,
    source: BlobSource | Tensor,
    *,
    layer_id: int = 0,
    request_id: int | None = None,
    sources: Sequence[str] = (),
    accept_timeout: float = ACCEPT_TIMEOUT,
    stall_timeout: float = STALL_TIMEOUT,
    ack_timeout: float = ACK_TIMEOUT,
    on_accept: Callable[[int], None] | None = None,
    on_sent: Callable[[int], None] | None = None,
) -> SentBlob:
    """Bring a blob to a peer that speaks 1.1.0; returns when it is usable there.

    Args:
        source: bytes, a memory map, an array, or anything else with a length, digests and chunks.
        layer_id: the number that the peer knows it by; of a model, the layer.
        request_id: of the TransferRequest that this answers; None when nobody asked.
        sources: full multiaddrs of other peers that have the blob, at most 16: the peer may fetch it there, and
            answers the offer afterwards.
        accept_timeout: seconds for the answer to the offer.
        stall_timeout: seconds that a chunk may take to go out.
        ack_timeout: seconds from the last chunk to the acknowledgement.
        on_accept: called once with the number of bytes that the peer lacks, before the first goes. What
            it raises ends the transfer.
        on_sent: called with the bytes of every chunk that went out.

    Raises:
        PeerRefusedError: the peer does not want it, or ended the transfer; `code` says why.
        ResponseTimeout: the peer did not answer in time.
        TransportError: the peer cannot be reached, speaks 1.0.0 alone, or takes no more chunks.
        RemoteProtocolError: it answered with nonsense.
        LocalProtocolError: the blob is larger than a transfer may be.

    Cancelled, or failed here, the peer is told and the stream stays whole. What arrived stays there for a
    while, so that the next attempt goes on where this one stopped.
    """
    source = as_source(source)
    request_id = request_id or new_request_id()
    # Before the first wait: the peer that asked for the blob may stop at any time.
    with protocol.expect(peer_id, MessageType.WEIGHTS_ACK, request_id=request_id) as acknowledged:
        await require_stream(protocol, peer_id)
        digests = await trio.to_thread.run_sync(source.digests)
        info = BlobInfo.of_digests(digests, source.num_bytes)
        offer = TensorMessage(
            msg_type=MessageType.TRANSFER_OFFER,
            layer_id=layer_id,
            request_id=request_id,
            data=TransferOffer(
                layer_id, info.num_bytes, info.blob_id, info.digests, tuple(sources)
            ).encode(),
        )
        sending = _Sending(protocol, peer_id, offer, info, source, stall_timeout, on_sent)
        try:
            reply = await protocol.request(
                peer_id, offer, MessageType.TRANSFER_ACCEPT, timeout=accept_timeout
            )
            missing = _missing(TransferAccept.decode(reply.data), info)
            missing_bytes = sum(map(info.chunk_bytes, missing or ()))
            if on_accept is not None:
                on_accept(missing_bytes)
            if missing is not None:
                await sending.run(missing, acknowledged, ack_timeout)
        except (PeerRefusedError, PeerUnreachableError, StreamBrokenError):
            raise  # the peer knows, or is gone
        except BaseException as exc:  # cancelled, or this side's: the receiver should not wait
            error = RequestRefusedError("the sender stopped", code=ErrorCode.DEADLINE_EXCEEDED)
            if isinstance(exc, TooLargeForPeerError):
                error = RequestRefusedError(str(exc), code=ErrorCode.LIMIT_EXCEEDED)
            if isinstance(exc, RemoteProtocolError):
                error = RequestRefusedError(str(exc), code=exc.code)
            protocol.host.start_soon(tell_stopped, protocol, peer_id, offer, error)
            raise
    return SentBlob(
        blob_id=info.blob_id,
        num_bytes=info.num_bytes,
        sent_bytes=sending.sent_bytes,
        held_bytes=info.num_bytes - missing_bytes,
    )


@dataclass
class _Sending:
    """The chunks of one accepted transfer on their way."""

    protocol: Exchange
    peer_id: str
    offer: TensorMessage
    info: BlobInfo
    source: BlobSource
    stall_timeout: float
    on_sent: Callable[[int], None] | None
    sent_bytes: int = 0

    async def run(self, missing: Sequence[int], acknowledged: Waiter, ack_timeout: float) -> None:
        """Send the missing chunks and wait for the acknowledgement, which may come before the last:
        somebody else may have brought the rest.
        """
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_all, missing, acknowledged, ack_timeout)
                await acknowledged.wait(timeout=math.inf)
                nursery.cancel_scope.cancel()

    async def _send_all(
        self, missing: Sequence[int], acknowledged: Waiter, ack_timeout: float
    ) -> None:
        indices = iter(missing)
        turn = _turn(self.protocol, self.peer_id)
        while not await _acquire(turn, SIGN_OF_LIFE):
            for chunk in await self._read(islice(indices, 1)):
                await self._send(chunk)
        try:
            ahead, ready = trio.open_memory_channel[WeightsChunk](CHUNKS_A_READ)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_all, indices, ahead)
                with ready:
                    for _ in range(CHUNKS_IN_FLIGHT):
                        nursery.start_soon(self._send_each, ready.clone())
        finally:
            turn.release()
        # `run` cancels this when the acknowledgement comes.
        await trio.sleep(ack_timeout)
        acknowledged.resolve(
            ResponseTimeout(
                f"{self.peer_id} acknowledged no blob {self.info.short_id} within {ack_timeout:g} s"
            )
        )

    async def _read_all(
        self, indices: Iterator[int], ahead: trio.MemorySendChannel[WeightsChunk]
    ) -> None:
        with ahead:
            while chunks := await self._read(islice(indices, CHUNKS_A_READ)):
                for chunk in chunks:
                    await ahead.send(chunk)

    async def _send_each(self, ready: trio.MemoryReceiveChannel[WeightsChunk]) -> None:
        # Not `async with`, which gives way between closing and failing: the reader would fail first, for a channel
        # that nobody reads, and that would be all that the caller hears.
        with ready:
            async for chunk in ready:
                await self._send(chunk)

    async def _send(self, chunk: WeightsChunk) -> None:
        numbers, data = chunk.encode_parts()
        message = TensorMessage(
            msg_type=MessageType.WEIGHTS,
            layer_id=self.offer.layer_id,
            request_id=self.offer.request_id,
            data=numbers,
        )
        with trio.move_on_after(self.stall_timeout) as scope:
            await self.protocol.send(self.peer_id, message, data)
        if scope.cancelled_caught:
            raise TransportError(
                f"the transfer stopped: no chunk went out for {self.stall_timeout:g} s"
            )
        num_bytes = self.info.chunk_bytes(chunk.chunk_index)
        self.sent_bytes += num_bytes
        if self.on_sent is not None:
            self.on_sent(num_bytes)

    async def _read(self, indices: Iterable[int]) -> list[WeightsChunk]:
        """The chunks, views of a file's pages perhaps, which lie in memory then."""

        def read() -> list[WeightsChunk]:
            total, source = self.info.num_chunks, self.source
            views = [memoryview(source.chunk(index)) for index in wanted]
            # Bytes whatever their elements are: those go uncopied, and are counted by their length.
            views = [view.cast("B") if view.nbytes else memoryview(b"") for view in views]
            for view in views:
                bytes(view[::PAGE_BYTES])
            return [
                WeightsChunk(index, total, view) for index, view in zip(wanted, views, strict=True)
            ]

        wanted = list(indices)
        return await trio.to_thread.run_sync(read) if wanted else []


_turns: WeakKeyDictionary[Exchange, WeakValueDictionary[str, trio.Lock]] = WeakKeyDictionary()


def _turn(protocol: Exchange, peer_id: str) -> trio.Lock:
    """Return the lock that a task holds while it sends chunks to the peer."""
    turns = _turns.setdefault(protocol, WeakValueDictionary())
    return turns.setdefault(peer_id, trio.Lock())


async def _acquire(lock: trio.Lock, timeout: float) -> bool:
    """Whether it could be had within so many seconds."""
    with trio.move_on_after(timeout) as scope:
        await lock.acquire()
    return not scope.cancelled_caught


async def require_stream(protocol: Exchange, peer_id: str) -> None:
    """Raise PeerUnreachableError for a peer that has no long-lived stream, and so no transfers."""
    if peer_id == protocol.host.peer_id:
        return
    version = (await protocol.open(peer_id)).rpartition("/")[2]
    if protocol.hello_of(peer_id) is None:
        raise PeerUnreachableError(
            f"{peer_id} speaks {version} alone, which has no transfers; send it plain weights"
        )


async def tell_stopped(
    protocol: Exchange, peer_id: str, message: TensorMessage, error: RequestRefusedError
) -> None:
    """Tell a peer why we have given up a transfer, whose id `message` has; never raises."""
    try:
        with trio.move_on_after(FAREWELL_TIMEOUT):
            await protocol.refuse(replace(message, from_peer=peer_id), error)
    except NeuroGridError as exc:
        logger.debug("%s cannot be told: %s", peer_id, exc)


def _missing(accept: TransferAccept, info: BlobInfo) -> list[int] | None:
    """The chunks that the peer asks for; None when it needs none and acknowledges none.

    Raises:
        RemoteProtocolError: its bitmap does not fit the blob.
    """
    if not accept.needed:
        return None
    held = decode_bitmap(accept.have, info.num_chunks)
    return [index for index in range(info.num_chunks) if index not in held]
