"""A stream to one peer, over any network: bytes in order, an end, a reset.

The layers above know this interface alone. Behind it stand libp2p (`libp2p_stream`) and the network in
memory (`memory`), which pass the same conformance suite (tests/conformance), so that what holds over one
holds over the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from neurogrid.errors import RemoteProtocolError, StreamBrokenError
from neurogrid.p2p.streams.intake import Intake, feed

__all__ = ["Stream", "receive_exactly", "receive_prefixed"]

_MAX_LENGTH_BYTES = 4  # of any bound that is asked for


class Stream(ABC):
    """A negotiated, bidirectional byte stream to one peer.

    One task reads and one writes, at most; `aclose` and `reset` may come from any. To read and to write have no
    deadline: the caller sets one.

    Attributes:
        peer_id: the remote peer, authenticated by the connection's handshake (base58).
        protocol_id: what was negotiated for this stream.
    """

    def __init__(self, *, peer_id: str, protocol_id: str) -> None:
        self.peer_id = peer_id
        self.protocol_id = protocol_id

    @property
    def is_relayed(self) -> bool:
        """Whether what is sent goes through a relay: there may be a better way by and by."""
        return False

    @property
    def is_reset_by_peer(self) -> bool:
        """Whether the peer has reset the stream, which says no to it; a lost connection says nothing."""
        return False

    @abstractmethod
    async def receive_some(self, max_bytes: int = 256 * 1024) -> bytes:
        """Return between 1 and `max_bytes` bytes, or `b""` when the peer has finished sending.

        Raises:
            StreamBrokenError: the stream was reset or the connection is gone.

        Cancellation is safe: bytes that were not returned stay for the next call.
        """

    async def receive_each(self, intake: Intake) -> bool:
        """Give `intake` what comes until it wants no more; returns False at the end of the stream.

        As a loop over `receive_some` and `receive_into`, but that implementations that can call it where the bytes
        arrive, without a turn of this task. What it raises is raised here.

        Raises:
            StreamBrokenError: the stream was reset or the connection is gone.

        Cancellation is safe: what `intake` was not told of stays for the next call.
        """
        return await feed(intake, self.receive_some, self.receive_into)

    async def receive_into(self, destination: memoryview) -> int:
        """Receive into `destination` (bytes, writable); return how many came, 0 when the peer has finished.

        It waits for one byte, and takes what arrived by then: as `receive_some`, but for a caller that has the
        memory already. Implementations that can, write there without a copy.

        Raises:
            StreamBrokenError: the stream was reset or the connection is gone.

        Cancellation is safe, as for `receive_some`.
        """
        data = await self.receive_some(len(destination))
        destination[: len(data)] = data
        return len(data)

    @abstractmethod
    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`; waits while the peer reads too slowly.

        Raises:
            StreamBrokenError: the stream was reset, finished or closed, or the connection is gone.

        Cancelled, a part of `data` from its beginning is sent, or nothing; the stream and the connection
        stay whole. The memory of `data` may be used again in any case.
        """

    async def send_parts(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """As `send_all` of what the parts are together, which need not be copied into one.

        Implementations that can, send a small part together with what follows it.
        """
        for part in parts:
            await self.send_all(part)

    def send_nowait(self, data: bytes) -> bool:
        """Write all of `data` if that needs no waiting; False, and nothing is written, if it would.

        For what is small and urgent, at most 64 KiB, and not while a task is in `send_all`. False is always
        right; a caller that gets it sends in the usual way.

        Raises:
            StreamBrokenError: the stream was reset, finished or closed, or the connection is gone.
        """
        return False

    @abstractmethod
    async def send_eof(self) -> None:
        """Tell the peer that nothing more will be sent; receiving goes on.

        Raises:
            StreamBrokenError: the stream was reset or the connection is gone.

        Cancelled, it is told all the same.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close both directions; never raises, and is not cancelled half-way.

        What was sent before still arrives. What the peer still sends is dropped.
        """

    @abstractmethod
    async def reset(self) -> None:
        """Abandon the stream in both directions: the peer sees a reset. Never raises."""


async def receive_exactly(stream: Stream, num_bytes: int) -> bytes:
    """Receive `num_bytes`, and nothing of what follows; the caller sets the deadline.

    Raises:
        StreamBrokenError: the stream ended before.
    """
    received = bytearray()
    while len(received) < num_bytes:
        data = await stream.receive_some(num_bytes - len(received))
        if not data:
            raise StreamBrokenError(f"{stream.peer_id} ended a {stream.protocol_id} stream early")
        received += data
    return bytes(received)


async def receive_prefixed(stream: Stream, max_bytes: int) -> bytes:
    """Receive what stands behind its length, an unsigned varint, as libp2p's own protocols write their messages.

    Nothing of what follows is taken: a relayed connection begins right behind a message. The caller sets the deadline.

    Raises:
        RemoteProtocolError: the length has no end, or is above `max_bytes`.
        StreamBrokenError: the stream ended before.

    Source: https://github.com/multiformats/unsigned-varint
    """
    length = shift = 0
    for _ in range(_MAX_LENGTH_BYTES):
        (byte,) = await receive_exactly(stream, 1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
    else:
        raise RemoteProtocolError(f"{stream.peer_id} announces a message without an end")
    if length > max_bytes:
        raise RemoteProtocolError(
            f"{stream.peer_id} announces a message of {length} B, and {max_bytes} B are the most"
        )
    return await receive_exactly(stream, length)
