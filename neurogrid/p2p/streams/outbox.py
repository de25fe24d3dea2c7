"""Messages that wait for the writer of a stream: three lanes, so that nothing small waits behind weights.

Owed messages come first (errors and credit, which the reader leaves here without waiting), then all others in
the order of their senders, then those whose traits say so, as weights. Senders wait until theirs is written, so the
lanes are as long as there are tasks that send; what is owed is bounded by number. Knows messages by their type only.
"""

from __future__ import annotations

from collections import deque

import trio

from neurogrid.errors import HeaderWriteError, NeuroGridError
from neurogrid.p2p.wire import Data, TensorMessage

__all__ = ["Outbox", "Outgoing"]


class Outgoing:
    """A message on its way to the writer, and how that ended."""

    def __init__(self, message: TensorMessage, parts: tuple[Data, ...] = ()) -> None:
        self.message = message
        self.parts = parts
        self.is_begun = False
        self._done = trio.Event()
        self._error: NeuroGridError | None = None

    def succeed(self) -> None:
        """Say that the message is written."""
        self._done.set()

    def fail(self, error: NeuroGridError) -> None:
        """Say that the message is not written, or not whole."""
        self._error = error
        self._done.set()

    async def wait(self) -> None:
        """Return when it is written; raises what prevented it."""
        await self._done.wait()
        if self._error is not None:
            raise self._error


class Outbox:
    """The lanes of one stream. One task takes from it, any number put."""

    def __init__(self, *, max_owed: int) -> None:
        self._max_owed = max_owed
        self._owed: deque[Outgoing] = deque()
        self._prompt: deque[Outgoing] = deque()
        self._last: deque[Outgoing] = deque()
        self._wake = trio.Event()
        self._is_awaited = False  # the writer waits for something to do
        self._closed: NeuroGridError | None = None
        self._finished: NeuroGridError | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written or waits to be: what is written to the stream now overtakes nothing."""
        return (
            self._is_awaited
            and not self._finished
            and not (self._owed or self._prompt or self._last)
        )

    def owe(self, message: TensorMessage) -> bool:
        """Leave a small message without waiting; False when as many are owed as may be."""
        if self._closed is not None or len(self._owed) >= self._max_owed:
            return False
        self._owed.append(Outgoing(message))
        self._wake.set()
        return True

    async def put(self, outgoing: Outgoing) -> None:
        """Leave a message and wait until it is written. Cancelled in time, it is taken back.

        Raises:
            HeaderWriteError: the outbox was closed before its turn.
            NeuroGridError: what the writer says.
        """
        if self._closed is not None:
            raise HeaderWriteError(str(self._closed)) from self._closed
        if self._finished is not None:
            raise self._finished
        code = outgoing.message.msg_type
        lane = self._last if code is not None and code.traits.is_last else self._prompt
        lane.append(outgoing)
        self._wake.set()
        try:
            await outgoing.wait()
        except trio.Cancelled:
            if not outgoing.is_begun and outgoing in lane:
                lane.remove(outgoing)
            raise

    def close(self, error: NeuroGridError) -> None:
        """Fail what waits, and take nothing more."""
        self._closed = error
        for lane in (self._owed, self._prompt, self._last):
            for outgoing in lane:
                not_begun = HeaderWriteError(str(error))
                not_begun.__cause__ = error
                outgoing.fail(not_begun)
            lane.clear()
        self._wake.set()

    def finish(self, error: NeuroGridError) -> None:
        """Fail what waits and is not owed, take nothing more, and let `next` end once what is owed was taken."""
        self._finished = error
        for lane in (self._prompt, self._last):
            for outgoing in lane:
                outgoing.fail(error)
            lane.clear()
        self._wake.set()

    async def next(self) -> Outgoing | None:
        """Wait for what is to be written next, and take it; None when the outbox is closed or finished."""
        while self._closed is None:
            lane = self._owed or self._prompt or self._last
            if lane:
                outgoing = lane.popleft()
                outgoing.is_begun = True
                return outgoing
            if self._finished is not None:
                return None
            self._wake = trio.Event()
            self._is_awaited = True
            try:
                await self._wake.wait()
            finally:
                self._is_awaited = False
        return None
