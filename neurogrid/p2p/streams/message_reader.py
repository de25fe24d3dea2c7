"""Bytes of a stream to messages, under the bounds of time and memory that no decoder can set.

A message that announces much waits for room before more of it is read, so that the peer waits too. One that is
begun and then stops or trickles is given up, be it in its header: each byte that has come buys it more time, so
that no peer holds room by promises. Between messages a long-lived stream may be silent for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import trio

from neurogrid.errors import RemoteProtocolError, RequestRefusedError
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.streams.budget import ByteBudget
from neurogrid.p2p.streams.intake import Intake
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.streams.succession import Hold
from neurogrid.p2p.wire import (
    Data,
    Decoder,
    ErrorCode,
    TensorMessage,
)

__all__ = ["MessageReader"]


class MessageReader(Intake):
    """Reads one direction of one stream. A context manager: leaving it gives back what is held.

    Args:
        silence_timeout: seconds without a byte after which the peer has given up; endless by default.
    """

    def __init__(
        self,
        stream: Stream,
        decoder: Decoder,
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
        # Of `receive_all`:
        self._on_message: Callable[[TensorMessage], None] = lambda message: None
        self._hold: Hold | None = None
        self._patience = trio.CancelScope()  # its own: messages are taken in another task

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
        self._on_message, self._hold = on_message, hold
        decoder = self._decoder
        while True:
            if hold is not None and hold.is_on:
                for message in await hold.wait():
                    on_message(message)
            if decoder.error is not None:
                raise decoder.error
            if decoder.awaited_bytes and not self._has_room:
                await self._make_room(decoder.awaited_bytes)
            elif decoder.num_gathered and self._since == math.inf:
                self._start_clock()  # of what came while the hold was on
            # Between messages nothing is timed. What begins one sets the clock, and this task looks at it when the
            # time of one is over: it may be the time of a message that has come long since.
            with trio.CancelScope(deadline=self._deadline()) as self._patience:
                if not await self._stream.receive_each(self):
                    decoder.receive_eof()
                    return
            if self._patience.cancelled_caught and trio.current_time() >= self._deadline():
                raise self._too_slow()

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
            self._came(num_bytes, messages)
            if messages:
                return messages

    async def _receive_some_in_time(self) -> tuple[int, list[TensorMessage]]:
        """As `_receive_some`, for as long as what has come pays for."""
        quiet = trio.current_time() + self._silence_timeout
        with trio.CancelScope(deadline=min(self._deadline(), quiet)):
            return await self._receive_some()
        raise self._too_slow()

    def _deadline(self) -> float:
        """Time until which the rest of the message under way may take; endless between messages."""
        return self._since + self._bounds.message_deadline(self._paid_bytes)

    def _too_slow(self) -> RemoteProtocolError:
        return RemoteProtocolError(
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

    # ------------------------------------------------------------------ as an intake

    def take(self, data: Data) -> bool:
        return self._hand_on(len(data), self._decoder.receive_data(data))

    def memory(self) -> memoryview | None:
        return self._decoder.get_buffer()

    def filled(self, num_bytes: int) -> bool:
        return self._hand_on(num_bytes, self._decoder.buffer_filled(num_bytes))

    def _hand_on(self, num_bytes: int, messages: Sequence[TensorMessage]) -> bool:
        """Whether what comes next can be taken without waiting."""
        self._came(num_bytes, messages)
        for message in messages:
            self._on_message(message)
        decoder = self._decoder
        if decoder.error is not None or (self._hold is not None and self._hold.is_on):
            return False
        if not decoder.num_gathered:
            return True
        awaited = decoder.awaited_bytes
        if awaited and not self._has_room:
            return self._take_room(awaited)
        if self._since == math.inf:
            self._start_clock()
        return True

    # ------------------------------------------------------------------ room and time

    def _came(self, num_bytes: int, messages: Sequence[TensorMessage]) -> None:
        """Count what came, and give back what the messages held that it has completed."""
        if messages:
            self._release()
        else:
            self._paid_bytes += num_bytes

    async def _make_room(self, num_bytes: int) -> None:
        """Wait until the message that was announced has room."""
        timeout = self._bounds.room_timeout
        while not self._take_room(num_bytes):
            if not await self._budget.wait_room(self._stream.peer_id, num_bytes, timeout=timeout):
                raise RequestRefusedError(
                    f"no room for a message of {num_bytes} B within {timeout:g} s",
                    code=ErrorCode.BUSY,
                    retry_after=timeout,
                )

    def _take_room(self, num_bytes: int) -> bool:
        """Start the clock of the message that was announced if there is room for it; whether there is."""
        if num_bytes > self._bounds.small_message:
            if not self._budget.try_add(self._stream.peer_id, num_bytes):
                return False
            self._held = num_bytes
        self._has_room = True
        self._start_clock()
        return True

    def _start_clock(self) -> None:
        self._since = trio.current_time()
        self._paid_bytes = 0
        if self._patience.deadline == math.inf:
            self._patience.deadline = self._deadline()

    def _release(self) -> None:
        self._since = math.inf
        self._has_room = False
        if self._held:
            self._budget.remove(self._stream.peer_id, self._held)
            self._held = 0
