"""One stream of a `LinkConnection`, as py-libp2p wants it, and with two ways to receive that copy less.

A write hands its memory to the connection and waits until all of it was sealed. Cancelled, it takes back what
was not: the peer has a prefix of the write, and the connection and its other streams know nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamReset

from neurogrid.p2p.link.muxed_stream import MuxedStream
from neurogrid.p2p.link.stream_state import Loan, Outgoing, StreamState
from neurogrid.p2p.streams.intake import Intake

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
        self._intake: Intake | None = None  # of a reader that waits in `receive_each`
        self._loan: Loan | None = None  # of the intake's memory, until it was told of it
        self._is_taking = False
        self._has_enough = False  # it has had all that it wants
        self._intake_error: Exception | None = None  # what it raised
        state.owner = self

    def __del__(self) -> None:
        # A stream that is dropped unread gives its bytes back to the connection's account.
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
        # Without `max_bytes` these are the bytes that were decrypted, not a copy, if there are many.
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

    async def receive_each(self, intake: Intake) -> bool:
        # It is called where the bytes arrive, in the task that reads the connection, which saves a turn of this one;
        # its memory is decrypted into where frames allow.
        await trio.lowlevel.checkpoint_if_cancelled()
        connection = self._connection
        while True:
            has_enough = self._give(intake, intake.memory())
            if connection.core.outflow.has_output:
                connection.kick()  # credit for what it was given
            if has_enough:
                return True
            try:
                if not self._expects_data():
                    return False
                self._intake, self._has_enough, self._intake_error = intake, False, None
                await self._wait()
            finally:
                self._intake = None
                has_more = self._settle(intake)
            if self._intake_error is not None:
                raise self._intake_error
            if self._has_enough or not has_more:
                return True

    async def receive_into(self, destination: memoryview) -> int:
        # It waits for one byte and takes what arrived by then, decrypted in place where frames and time allow.
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
        if self._intake is not None:
            self._is_taking = True  # what it does with them may want to wake it, too
            try:
                self._has_enough = self._give_more(self._intake)
            except Exception as exc:  # noqa: BLE001  the reader raises it: it is not the connection's
                self._intake_error = exc
            finally:
                self._is_taking = False
            state = self.state
            is_over = state.fin_received or state.was_reset or state.is_discarding
            if not (
                self._has_enough or self._intake_error or is_over or self._connection.end_reason
            ):
                return  # more may come, to a reader that has all that came
        reader, self._reader = self._reader, None
        if reader is not None:  # it may have been cancelled by what it was given
            trio.lowlevel.reschedule(reader)

    def _give_more(self, intake: Intake) -> bool:
        """As `_give`, to an intake that has had all that came before."""
        if self._loan is None:
            return self._give(intake, None)  # it had no memory then
        if self.state.loan is not None:
            return False  # its memory is not full
        return not self._settle(intake) or self._give(intake, intake.memory())

    def _give(self, intake: Intake, memory: memoryview | None) -> bool:
        """Give an intake what has arrived, and its memory to what comes next; whether it has had all that it wants."""
        state, core = self.state, self._connection.core
        inbox = state.inbox
        while inbox.size:
            # The task that gave us the bytes sends the credit.
            if memory is None:
                piece = inbox.pop()
                core.consumed(state, len(piece))
                goes_on = intake.take(piece)
            else:
                num_bytes = inbox.take_into(memory)
                core.consumed(state, num_bytes)
                goes_on = intake.filled(num_bytes)
            if not goes_on:
                return True
            memory = intake.memory()
        if memory is not None and not state.is_discarding:
            self._loan = core.lend(state, memory, wants_all=True)
        return False

    def _settle(self, intake: Intake) -> bool:
        """Take the intake's memory back, and tell it how much has come into it; whether it wants more."""
        loan, self._loan = self._loan, None
        if loan is None:
            return True
        self._connection.core.reclaim(self.state)
        return not loan.filled or intake.filled(loan.filled)

    # ------------------------------------------------------------------ writing

    async def write(self, *data: bytes | bytearray | memoryview) -> None:
        # It returns when they were sealed.
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
        self._connection.core.finish(self.state)
        self._connection.kick()

    async def close(self) -> None:
        core = self._connection.core
        core.finish(self.state)
        core.discard(self.state)
        self.wake()
        self._connection.kick()

    async def reset(self) -> None:
        self._connection.core.reset(self.state)
        self.wake()
        self._connection.kick()
