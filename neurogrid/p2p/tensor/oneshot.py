"""Streams of `/neurogrid/tensor/1.0.0`: one message each, confirmed by the receiver's end of the stream.

1.0.0 has no acknowledgement and no error message. But its receiver ends a stream once it has dealt with what
came on it, and resets it when it will not: so the sender, which has nothing more to say, listens for the end.

Source: protocol_spec/framing.md.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import trio

from neurogrid.errors import (
    NeuroGridError,
    PeerRefusedError,
    RemoteProtocolError,
    RequestRefusedError,
    ResponseTimeout,
    StreamBrokenError,
    TransportError,
)
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.streams.budget import ByteBudget
from neurogrid.p2p.streams.message_forms import bare
from neurogrid.p2p.streams.message_reader import MessageReader
from neurogrid.p2p.streams.message_writer import write_message
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.wire import (
    PROTOCOL_V10,
    Data,
    Decoder,
    ErrorCode,
    MessageCode,
    MessageTable,
    TensorMessage,
    encode_message_parts,
)

__all__ = ["OneshotStreams"]

logger = logging.getLogger(__name__)


class OneshotStreams:
    """The 1.0.0 streams of one host, both ways.

    Args:
        on_message: serves one message of a peer; the stream ends when it returns.
        on_sent: called with peer id, type and bytes of a message when one has gone out.
    """

    def __init__(
        self,
        host: Host,
        *,
        table: MessageTable,
        bounds: Bounds,
        budget: ByteBudget,
        on_message: Callable[[str, TensorMessage], Awaitable[None]],
        on_sent: Callable[[str, MessageCode | None, int], None],
    ) -> None:
        self._host = host
        self._table = table
        self._bounds = bounds
        self._budget = budget
        self._on_message = on_message
        self._on_sent = on_sent
        self._num_streams: Counter[str] = Counter()
        self._served: set[str] = set()

    def has_served(self, peer_id: str) -> bool:
        """Whether a peer that is connected has sent us such a stream."""
        return peer_id in self._served

    def forget(self, peer_id: str) -> None:
        """A peer is not connected any more."""
        self._served.discard(peer_id)

    async def send(self, peer_id: str, message: TensorMessage, *more: Data) -> None:
        """Send one message on a stream of its own; returns when the receiver has ended the stream.

        Raises:
            PeerRefusedError: the receiver reset the stream.
            TransportError: the peer cannot be reached, is gone, or did not confirm in time.
            LocalProtocolError: the message cannot be said in 1.0.0.

        Cancellation stops the waiting, not the sending: a frame that was begun is finished.
        """
        parts = encode_message_parts(bare(message), *more)
        stream = await self._host.open_stream(peer_id, [PROTOCOL_V10])
        done = trio.Event()
        errors: list[NeuroGridError] = []
        confirming = trio.CancelScope()

        async def deliver() -> None:
            try:
                num_bytes = await write_message(stream, parts, bounds=self._bounds)
                self._on_sent(peer_id, message.msg_type, num_bytes)
                await stream.send_eof()
                with confirming:
                    await _wait_for_end(stream, self._bounds.confirm_timeout)
            except NeuroGridError as exc:
                is_refused = isinstance(exc, StreamBrokenError) and stream.is_reset_by_peer
                errors.append(_refused(message, peer_id) if is_refused else exc)
            except trio.Cancelled:
                errors.append(StreamBrokenError("this host is closing"))
                raise
            finally:
                done.set()
                await stream.aclose()

        self._host.start_soon(deliver)
        try:
            await done.wait()
        except trio.Cancelled:
            confirming.cancel()
            raise
        if errors:
            raise errors[0]

    async def serve(self, stream: Stream) -> None:
        """Serve each message of a stream until its end; usually there is one."""
        peer_id = stream.peer_id
        if self._num_streams[peer_id] >= self._bounds.max_v10_streams_per_peer:
            # Not a warning for each: they come by the thousand.
            logger.debug("%s has too many 1.0.0 streams open already", peer_id)
            await stream.reset()
            return
        self._num_streams[peer_id] += 1
        if self._num_streams[peer_id] == self._bounds.max_v10_streams_per_peer:
            logger.warning("%s has as many 1.0.0 streams open as it may: more are reset", peer_id)
        if self._host.is_connected(peer_id):  # else nobody would forget it
            self._served.add(peer_id)
        try:
            await self._receive(stream)
        except (RemoteProtocolError, RequestRefusedError) as exc:
            logger.warning("reset a 1.0.0 stream of %s: %s", peer_id, exc)
            await stream.reset()
        except (TransportError, PeerRefusedError) as exc:
            # The stream broke, or the peer would not have our answer.
            logger.debug("a 1.0.0 stream of %s ended: %s", peer_id, exc)
            await stream.reset()
        else:
            await stream.aclose()
        finally:
            self._num_streams[peer_id] -= 1
            if not self._num_streams[peer_id]:
                del self._num_streams[peer_id]

    async def _receive(self, stream: Stream) -> None:
        with MessageReader(
            stream,
            Decoder(self._table, from_peer=stream.peer_id),
            budget=self._budget,
            bounds=self._bounds,
            silence_timeout=self._bounds.silence_timeout,
        ) as reader:
            while messages := await reader.receive():
                for message in messages:
                    await self._on_message(stream.peer_id, message)


async def _wait_for_end(stream: Stream, timeout: float) -> None:
    with trio.move_on_after(timeout) as scope:
        while await stream.receive_some():
            pass  # a receiver writes nothing here; only the end counts
    if scope.cancelled_caught:
        await stream.reset()
        raise ResponseTimeout(
            f"{stream.peer_id} did not end a message's stream within {timeout:g} s"
        )


def _refused(message: TensorMessage, peer_id: str) -> PeerRefusedError:
    name = message.msg_type.name if message.msg_type is not None else "a legacy message"
    return PeerRefusedError(
        f"{peer_id} reset the stream of {name} (1.0.0 gives no reason; its log does)",
        code=ErrorCode.PROTOCOL_VIOLATION,
        text="stream reset",
    )
