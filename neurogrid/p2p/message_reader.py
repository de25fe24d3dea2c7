"""Bytes of a stream to messages, under the bounds of time and memory that no decoder can set.

A message that announces much waits for room before more of it is read, so that the peer waits too. One that is
begun and then stops or trickles is given up, be it in its header: what has come pays for the time that it may take
on, so that nobody holds room by promises. Between messages a long-lived stream may be silent for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Self

import trio

from neurogrid.errors import RemoteProtocolError, RequestRefusedError
from neurogrid.p2p.bounds import Bounds
from neurogrid.p2p.budget import ByteBudget
from neurogrid.p2p.stream import Stream
from neurogrid.p2p.succession import Hold
from neurogrid.p2p.wire import (
    Data,
    ErrorCode,
    MessageDecoder,
    StreamDecoder,
    TensorMessage,
)

__all__ = ["MessageReader"]


class MessageReader:
    """Reads one direction of one stream. A context manager: leaving it gives back what is held.

    Args:
        silence_timeout: seconds without a byte after which the peer has given up; endless by default.
    """

    def __init__(
        self,
        stream: Stream,
        decoder: MessageDecoder | StreamDecoder,
        *,
        budget: ByteBudget,
        bounds: Bounds,
        silence_timeout: float = math.inf,
    ) -> None:
        self._stream = stream
        self._decoder = decoder
        self._budget = budget
        self._bounds = bounds
        self._silence_timeout = silence_timeout
        # Of the message that is being gathered:
        self._paid_bytes = 0  # that have come since `_since`
        self._since = math.inf  # when its header began, and then its Data
        self._has_room = False  # its header is there, and room for its Data
        self._held = 0  # of the budget

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()

    async def receive_all(
        self, on_message: Callable[[TensorMessage], None], *, hold: Hold | None = None
    ) -> None:
        """Call `on_message` with each message until the orderly end of the stream. It must not block.

        While `hold` is on, nothing more is read; then `on_message` is called with what it has kept, first of all.

        Raises:
            RemoteProtocolError, RequestRefusedError, StreamBrokenError: as `receive`, and what `on_message` raises.
        """
        decoder = self._decoder

        def take(data: Data) -> bool:
            for message in decoder.receive_data(data):
                on_message(message)
            is_held = hold is not None and hold.is_on
            return not decoder.num_gathered and decoder.error is None and not is_held

        while True:
            if hold is not None and hold.is_on:
                for message in await hold.wait():
                    on_message(message)
            if not decoder.num_gathered and decoder.error is None:
                # Between messages nothing is timed, and small ones come whole.
                if not await self._stream.receive_each(take):
                    return
            else:
                messages = await self.receive()
                if not messages:
                    return
                for message in messages:
                    on_message(message)

    async def receive(self) -> list[TensorMessage]:
        """The messages that the next bytes complete, at least one; none at the orderly end of the stream.

        Raises:
            RemoteProtocolError: the bytes are no message, stop in the middle of one, or come too slowly.
            RequestRefusedError: there was no room for a large message in time (BUSY).
            StreamBrokenError: the stream was reset.

        After cancellation nothing is lost: the next call goes on.
        """
        while True:
            if self._decoder.error is not None:
                raise self._decoder.error
            awaited = self._decoder.awaited_bytes
            if awaited and not self._has_room:
                await self._make_room(awaited)
            elif self._decoder.num_gathered and self._since == math.inf:
                self._start_clock()
            num_bytes, messages = await self._receive_some_in_time()
            if not num_bytes:
                self._decoder.receive_eof()
                return []
            self._paid_bytes += num_bytes
            if messages:
                self._release()
                return messages

    async def _receive_some_in_time(self) -> tuple[int, list[TensorMessage]]:
        """As `_receive_some`, for as long as what has come pays for."""
        quiet = trio.current_time() + self._silence_timeout
        deadline = self._since + self._bounds.message_deadline(self._paid_bytes)
        with trio.CancelScope(deadline=min(deadline, quiet)):
            return await self._receive_some()
        raise RemoteProtocolError(
            f"{self._stream.peer_id} was silent or too slow in the middle of a message",
            code=ErrorCode.DEADLINE_EXCEEDED,
        )

    async def _receive_some(self) -> tuple[int, list[TensorMessage]]:
        """Wait for bytes; returns how many came, 0 at the end, and the messages that they complete."""
        decoder = self._decoder
        buffer = decoder.get_buffer()
        if buffer is None:
            data = await self._stream.receive_some()
            return len(data), decoder.receive_data(data)
        num_bytes = await self._stream.receive_into(buffer)
        return num_bytes, decoder.buffer_filled(num_bytes)

    async def _make_room(self, num_bytes: int) -> None:
        """Wait until the message that was announced has room, and start its clock."""
        if num_bytes > self._bounds.small_message:
            peer_id, timeout = self._stream.peer_id, self._bounds.room_timeout
            if not await self._budget.wait_room(peer_id, num_bytes, timeout=timeout):
                raise RequestRefusedError(
                    f"no room for a message of {num_bytes} B within {timeout:g} s",
                    code=ErrorCode.BUSY,
                    retry_after=timeout,
                )
            self._budget.add(peer_id, num_bytes)
            self._held = num_bytes
        self._has_room = True
        self._start_clock()

    def _start_clock(self) -> None:
        self._since = trio.current_time()
        self._paid_bytes = 0

    def _release(self) -> None:
        self._since = math.inf
        self._has_room = False
        if self._held:
            self._budget.remove(self._stream.peer_id, self._held)
            self._held = 0
