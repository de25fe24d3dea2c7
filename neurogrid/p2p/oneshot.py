"""Streams of `/neurogrid/tensor/1.0.0`: one message each, confirmed by the receiver's end of the stream.

1.0.0 has no acknowledgement and no error message. But its receiver ends a stream once it has dealt with what
came on it, and resets it when it will not: so the sender, which has nothing more to say, listens for the end.

Source: protocol_spec/framing.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from neurogrid.errors import (
    NeuroGridError,
    PeerRefusedError,
    RemoteProtocolError,
    ResponseTimeout,
    StreamBrokenError,
)
from neurogrid.p2p.host import Host
from neurogrid.p2p.stream import Stream
from neurogrid.p2p.wire import (
    PROTOCOL_V10,
    ErrorCode,
    Limits,
    MessageDecoder,
    TensorMessage,
    encode_message,
)

__all__ = ["receive_oneshot", "send_oneshot"]

# A sender that is silent for this long in the middle of a message has given up. Seconds.
IDLE_TIMEOUT = 60.0
# Dealing with a message may mean loading a layer. Seconds.
CONFIRM_TIMEOUT = 300.0


async def send_oneshot(
    host: Host, peer_id: str, message: TensorMessage, *, on_sent: Callable[[int], None]
) -> None:
    """Send one message on a stream of its own; returns when the receiver has ended the stream.

    Raises:
        PeerRefusedError: the receiver reset the stream.
        TransportError: the peer cannot be reached, is gone, or did not confirm in time.

    Cancellation stops the waiting, not the sending: a frame that was begun is finished.
    """
    stream = await host.open_stream(peer_id, [PROTOCOL_V10])
    done = trio.Event()
    errors: list[NeuroGridError] = []

    async def deliver() -> None:
        try:
            data = encode_message(message)
            await stream.send_all(data)
            on_sent(len(data))
            await stream.send_eof()
            await _wait_for_end(stream)
        except NeuroGridError as exc:
            reset = isinstance(exc, StreamBrokenError) and peer_id in host.connected_peers
            errors.append(_refused(message, peer_id) if reset else exc)
        finally:
            done.set()
            await stream.aclose()

    host.start_soon(deliver)
    await done.wait()
    if errors:
        raise errors[0]


async def receive_oneshot(
    stream: Stream, *, limits: Limits, on_message: Callable[[TensorMessage], Awaitable[None]]
) -> None:
    """Hand each message of a stream to `on_message`, until its end; usually there is one.

    Raises:
        RemoteProtocolError: the bytes are no message, or stop in the middle of one.
        StreamBrokenError: the sender reset the stream.
    """
    decoder = MessageDecoder(limits)
    while True:
        with trio.move_on_after(IDLE_TIMEOUT) as idle:
            data = await stream.receive_some()
        if idle.cancelled_caught:
            raise RemoteProtocolError(f"no byte for {IDLE_TIMEOUT:g} s in the middle of a message")
        for message in decoder.receive_data(data):
            await on_message(message)
        if decoder.error is not None:
            raise decoder.error
        if not data:
            decoder.receive_eof()
            return


async def _wait_for_end(stream: Stream) -> None:
    with trio.move_on_after(CONFIRM_TIMEOUT) as scope:
        while await stream.receive_some():
            pass  # a receiver writes nothing here; only the end counts
    if scope.cancelled_caught:
        await stream.reset()
        raise ResponseTimeout(
            f"{stream.peer_id} did not end a message's stream within {CONFIRM_TIMEOUT:g} s"
        )


def _refused(message: TensorMessage, peer_id: str) -> PeerRefusedError:
    name = message.msg_type.name if message.msg_type is not None else "a legacy message"
    return PeerRefusedError(
        f"{peer_id} reset the stream of {name} (1.0.0 gives no reason; its log does)",
        code=ErrorCode.PROTOCOL_VIOLATION,
        text="stream reset",
    )
