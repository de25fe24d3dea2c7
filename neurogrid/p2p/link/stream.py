"""One stream of a `LinkConnection`, as py-libp2p wants it, and with two ways to receive that copy less.

A write hands its memory to the connection and waits until all of it was sealed. Cancelled, it takes back what
was not: the peer has a prefix of the write, and the connection and its other streams know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamReset

from neurogrid.p2p.link.inbox import Piece
from neurogrid.p2p.link.muxed_stream import MuxedStream
from neurogrid.p2p.link.stream_state import Outgoing, StreamState

if TYPE_CHECKING:
    from neurogrid.p2p.link.connection import LinkConnection

__all__ = ["LinkStream"]


class LinkStream(MuxedStream):
    """Made by `LinkConnection.open_stream` and `accept_stream`.

    One task may read at a time; any number may write, one write after the other.

    Attributes:
        muxed_conn: the connection.
        state: the state machine's part of the stream.
    """

    def __init__(self, connection: LinkConnection, state: StreamState) -> None:
        self.muxed_conn = connection
        self.state = state
        self._connection = connection
        self._reader: trio.lowlevel.Task | None = None
        self._take: Callable[[Piece], bool] | None = (
            None  # of a reader that waits in `receive_each`
        )
        self._is_taking = False
        self._has_enough = False  # it has had all that it wants
        self._take_error: Exception | None = None  # what it raised
        state.owner = self

    def __del__(self) -> None:
        # Whoever drops a stream unread gives its bytes back to the connection's account.
        self._connection.core.discard(self.state)

    @property
    def stream_id(self) -> int:
        """Yamux's number of the stream."""
        return self.state.stream_id

    @property
    def reset_by_peer(self) -> bool:
        """Whether the peer has reset the stream."""
        return self.state.reset_by_peer

    # ------------------------------------------------------------------ reading

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return what arrived in one piece, at least a byte and at most `max_bytes`; `b""` at the end.

        Without `max_bytes` the bytes are those that were decrypted, not a copy, if there are many.

        Raises:
            MuxedStreamReset: either side has reset the stream, or the connection is gone.

        Cancellation is safe: bytes that were not returned stay for the next call.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        inbox = self.state.inbox
        while not inbox.size:
            if not self._expects_data():
                return b""
            await self._wait()
        data = inbox.take(max_bytes)
        self._connection.consumed(self.state, len(data))
        await self._connection.breathe(len(data))
        return data

    async def receive_each(self, take: Callable[[Piece], bool]) -> bool:
        """Call `take` with what arrives, piece by piece, until it returns False; returns False at the end.

        It is called where the bytes arrive, in the task that reads the connection, which saves a turn of this one:
        it must not block, nor keep a piece that is a view; what it raises is raised here.

        Raises:
            MuxedStreamReset: either side has reset the stream, or the connection is gone.

        Cancellation is safe: what `take` was not called with stays for the next call.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            while self.state.inbox.size:
                piece = self.state.inbox.pop()
                self._connection.consumed(self.state, len(piece))
                if not take(piece):
                    return True
            if not self._expects_data():
                return False
            self._take, self._has_enough, self._take_error = take, False, None
            try:
                await self._wait()
            finally:
                self._take = None
            if self._take_error is not None:
                raise self._take_error
            if self._has_enough:
                return True

    async def receive_into(self, destination: memoryview) -> int:
        """Receive into `destination` (format "B", writable); return how many bytes came, 0 at the end.

        It waits for one byte and takes what arrived by then, decrypted in place where frames and time allow.

        Raises:
            MuxedStreamReset: either side has reset the stream, or the connection is gone.

        Cancellation is safe: nothing that arrived is lost, and the memory is not written to any more.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        state, core = self.state, self._connection.core
        filled = 0
        if not state.inbox.size and destination:
            loan = core.lend(state, destination)
            try:
                while not loan.filled:
                    if not self._expects_data():
                        return 0
                    await self._wait()
            finally:
                core.reclaim(state)
            filled = loan.filled
        taken = state.inbox.take_into(destination[filled:])
        self._connection.consumed(state, taken)
        await self._connection.breathe(filled + taken)
        return filled + taken

    def _expects_data(self) -> bool:
        """Whether it makes sense to wait: False at the end.

        Raises:
            MuxedStreamReset: nothing will ever come.
        """
        state = self.state
        if state.was_reset:
            self.check_open()
        if state.fin_received:
            return False
        if state.is_discarding:
            raise MuxedStreamReset("the stream was closed here")
        self._connection.check_alive()
        return True

    async def _wait(self) -> None:
        """Wait until something has happened to what can be read."""
        if self._reader is not None:
            raise trio.BusyResourceError("another task is reading from this stream")
        self._reader = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            # Before the task runs again more may arrive, and nobody would read it out of lent memory.
            self._connection.core.reclaim(self.state)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def wake(self) -> None:
        """Let the reader look again, or give it what has arrived."""
        if self._reader is None or self._is_taking:
            return
        if self._take is not None and self.state.inbox.size:
            self._is_taking = True  # what it does with them may want to wake it, too
            try:
                self._has_enough = self._take_all(self._take)
            except Exception as exc:  # noqa: BLE001  the reader raises it: it is not the connection's
                self._take_error = exc
            finally:
                self._is_taking = False
            state = self.state
            is_over = state.fin_received or state.was_reset or state.is_discarding
            if not (self._has_enough or self._take_error or is_over or self._connection.end_reason):
                return  # more may come, to a reader who has all that came
        reader, self._reader = self._reader, None
        if reader is not None:  # it may have been cancelled by what it was given
            trio.lowlevel.reschedule(reader)

    def _take_all(self, take: Callable[[Piece], bool]) -> bool:
        """Give the reader what has arrived; whether it has had all that it wants."""
        state, core = self.state, self._connection.core
        while state.inbox.size:
            piece = state.inbox.pop()
            core.consumed(state, len(piece))  # whoever gave us the bytes sends the credit
            if not take(piece):
                return True
        return False

    # ------------------------------------------------------------------ writing

    async def write(self, *data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`, contiguous buffers; return when they were sealed, and their memory is free.

        It waits while the peer reads too slowly, however long.

        Raises:
            MuxedStreamClosed: this side has finished.
            MuxedStreamReset: either side has reset the stream, or the connection is gone.

        Cancelled, a part of `data` from its beginning is sent, and the stream goes on.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_writable()
        connection = self._connection
        # A view without elements cannot be cast.
        views = [memoryview(buffer).cast("B") for buffer in data if memoryview(buffer).nbytes]
        if not views:
            return
        queued = [connection.core.queue(self.state, view) for view in views]
        connection.kick()
        if queued[-1].is_over:
            await connection.breathe(sum(map(len, views)))
        else:
            await self._wait_sent(queued)
        if not queued[-1].is_sent:
            self._check_writable()
            raise MuxedStreamReset("the stream was reset in the middle of a write")

    def write_nowait(self, data: bytes) -> bool:
        """Send all of `data` if nothing has to be waited for; False, and nothing is sent, if something has.

        Raises:
            MuxedStreamClosed: this side has finished.
            MuxedStreamReset: either side has reset the stream, or the connection is gone.
        """
        self._check_writable()
        state, connection = self.state, self._connection
        if not connection.is_idle or state.outbox or len(data) > state.send_window:
            return False
        outgoing = connection.core.queue(state, memoryview(data))
        connection.kick()
        # What the pipe has not taken yet, the writing task sends: `data` does not change.
        if outgoing.is_over and not outgoing.is_sent:
            self._check_writable()
            raise MuxedStreamReset("the stream was reset in the middle of a write")
        return True

    def check_open(self) -> None:
        """Raise if the stream was reset, or the connection is gone.

        Raises:
            MuxedStreamReset: which of them.
        """
        self._connection.check_alive()
        if self.state.was_reset:
            raise MuxedStreamReset(
                "the peer reset the stream"
                if self.state.reset_by_peer
                else "the stream was reset here"
            )

    def _check_writable(self) -> None:
        if self.state.was_reset or self._connection.end_reason is not None:
            self.check_open()
        if self.state.fin_wanted:
            raise MuxedStreamClosed("this side has finished sending")

    async def _wait_sent(self, queued: list[Outgoing]) -> None:
        queued[-1].owner = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            for outgoing in queued:
                self._connection.core.withdraw(self.state, outgoing)
            self._connection.kick_soon()  # an end may have waited for it
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def close_write(self) -> None:
        """Tell the peer that nothing more will be sent; reading goes on. Does not wait."""
        self._connection.core.finish(self.state)
        self._connection.kick()

    async def close(self) -> None:
        """Finish sending, and drop what arrives. What was written still gets there. Does not wait."""
        core = self._connection.core
        core.finish(self.state)
        core.discard(self.state)
        self.wake()
        self._connection.kick()

    async def reset(self) -> None:
        """Give the stream up in both directions: the peer sees a reset. Does not wait."""
        self._connection.core.reset(self.state)
        self.wake()
        self._connection.kick()

    # ------------------------------------------------------------------ the rest of the interface

    def get_remote_address(self) -> tuple[str, int] | None:
        """The peer's host and port."""
        return self._connection.get_remote_address()
