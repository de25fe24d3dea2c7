"""A long-lived stream, as `/neurogrid/tensor/1.1.0` has them: Hello first, then many messages each way.

One task reads and one writes. The writer is never cancelled in mid-message while the host runs, so a
caller may give up waiting for `send` at any time and the stream stays whole. The reader never waits for
the writer: what it owes the peer (errors, credit) goes into a bounded queue. What the messages mean is
not known here: they go to a callback, in the order in which they arrived. What they are is said by a table.

Credited messages wait for credit; those that go last let everything else pass them in the queue.

Source: protocol_spec/streams.md, protocol_spec/sessions.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import trio

from neurogrid.errors import (
    DataWriteError,
    HeaderWriteError,
    NeuroGridError,
    RemoteProtocolError,
    RequestRefusedError,
    ResponseTimeout,
    StreamBrokenError,
    TooLargeForPeerError,
)
from neurogrid.p2p.streams.bounds import DEFAULT_BOUNDS, Bounds
from neurogrid.p2p.streams.budget import ByteBudget
from neurogrid.p2p.streams.credit import GrantedCredit, ReceivedCredit
from neurogrid.p2p.streams.message_forms import message_parts, name_of, require_request_id
from neurogrid.p2p.streams.message_reader import MessageReader
from neurogrid.p2p.streams.message_writer import write_message
from neurogrid.p2p.streams.outbox import Outbox, Outgoing
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.streams.succession import DRAIN_TIMEOUT, Hold, StreamMovedError
from neurogrid.p2p.wire import (
    Credit,
    Data,
    Decoder,
    ErrorCode,
    ErrorPayload,
    Hello,
    MessageCode,
    MessageTable,
    MessageType,
    TensorMessage,
)
from neurogrid.p2p.wire.faults import over_limit, violation
from neurogrid.renewed_event import RenewedEvent

__all__ = ["MessageStream"]

MessageCallback = Callable[["MessageStream", TensorMessage], None]
SentCallback = Callable[[MessageCode | None, int], None]

# To tell a peer which rule it broke, before the stream is reset. Seconds.
FAREWELL_TIMEOUT = 5.0
# For a peer that was told to read that, and to end its side. Seconds.
PARTING_TIMEOUT = 1.0
# Bytes of Data: up to this a message is written by its sender's task; the copy costs less than a turn of the writer.
LARGEST_PROMPT = 64 * 1024 - 64
# Sends after which the sender's task lets the others run.
SENDS_A_BREATH = 16


class MessageStream:
    """One long-lived stream to one peer. `run` drives it; until then nothing happens.

    Attributes:
        peer_id: the remote peer (base58).
        hello: what the peer said of itself; None until its Hello has arrived.
        is_relayed: whether it goes through a relay.
        follows: the streams whose place it takes with its Hello.
        is_retired: whether another has taken its place.
        is_complete: whether the peer has ended its direction in order: nothing of it was lost.
        received_all: set when nothing more comes.

    Args:
        succeed: puts the stream that follows this one in its place; False if there is none.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        hello: Hello,
        table: MessageTable,
        on_message: MessageCallback,
        on_sent: SentCallback,
        budget: ByteBudget,
        bounds: Bounds = DEFAULT_BOUNDS,
        follows: Sequence[MessageStream] = (),
        succeed: Callable[[MessageStream], bool] = lambda stream: False,
    ) -> None:
        self.peer_id = stream.peer_id
        self.hello: Hello | None = None
        self._stream = stream
        self._own_hello = hello
        self._decoder = Decoder(table, from_peer=stream.peer_id)
        self._on_message = on_message
        self._on_sent = on_sent
        self._budget = budget
        self._bounds = bounds
        self._outbox = Outbox(max_owed=bounds.max_owed)
        self._granted = GrantedCredit(hello.credit)
        self._credit = ReceivedCredit()
        self._credit_came = RenewedEvent()
        self._credit_turn = trio.Lock()
        self._hello_received = trio.Event()
        self._reading = trio.CancelScope()
        self._num_stray_errors = 0  # in a row
        self._num_unbreathed = 0  # sends since other tasks were let in
        self._closed: NeuroGridError | None = None
        self.is_relayed = stream.is_relayed
        self.follows = tuple(follows)
        self.is_retired = False
        self.is_complete = False
        self.received_all = trio.Event()
        self._succeed = succeed
        self._hold = Hold(self.follows)
        self._wrote_all = trio.Event()

    @property
    def is_open(self) -> bool:
        """Whether messages can still be sent."""
        return self._closed is None

    @property
    def end_reason(self) -> NeuroGridError | None:
        """Error that the stream ended with; None while it is open."""
        return self._closed

    async def run(self) -> None:
        """Read and write until the stream ends; raises nothing that the peer or network caused."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                self._outbox.owe(_message(MessageType.HELLO, self._own_hello))
                error: NeuroGridError | None = None
                self._reading.deadline = trio.current_time() + self._bounds.hello_timeout
                with self._reading:
                    error = await self._read()
                if self._reading.cancelled_caught and self._closed is None:
                    error = self._late_hello()
                if self.is_complete and self._closed is None and self._succeed(self):
                    self.retire()
                if self.is_complete and self.is_retired:
                    with trio.move_on_after(DRAIN_TIMEOUT):
                        await self._wrote_all.wait()
                if isinstance(error, RemoteProtocolError | RequestRefusedError):
                    await self.fail(error)
                elif error is not None:
                    self._end(error)
                nursery.cancel_scope.cancel()
        finally:
            self.received_all.set()
            self._end(StreamBrokenError("this host is closing"))
            if isinstance(self._closed, RemoteProtocolError | RequestRefusedError):
                await self._part()
                await self._stream.reset()
            else:
                await self._stream.aclose()

    def retire(self) -> None:
        """Another stream has taken the place of this one: what is begun is finished, and then our direction ends.

        A task that waits to send here gets a `StreamMovedError`. The stream is read until the
        peer has ended its own direction.
        """
        if self._closed is None and not self.is_retired:
            self.is_retired = True
            self._outbox.finish(self._moved())
            self._credit_came.set()

    def _moved(self) -> StreamMovedError:
        return StreamMovedError(f"the stream to {self.peer_id} has a successor")

    async def _part(self) -> None:
        """End our side and let the peer end its own: a reset overtakes what it has not read, our Error too."""
        with trio.move_on_after(PARTING_TIMEOUT), suppress(StreamBrokenError):
            await self._stream.send_eof()
            while await self._stream.receive_some():
                pass

    # Sending

    async def send(self, message: TensorMessage, *more: Data) -> None:
        """Send one message and return when it is written to the connection.

        `more` belongs to its Data, behind what the message has: a large buffer is not copied to stand there.

        Raises:
            HeaderWriteError: the stream ended before any of it went out.
            DataWriteError: the stream ended with part of it sent, perhaps.
            LocalProtocolError: more Data than the peer said it accepts (TooLargeForPeerError), or than any may
                have, or a request without an id.

        After cancellation the message was not sent, or will be whole; the stream stays usable.
        """
        require_request_id(message)
        parts = message_parts(message, *more)
        num_bytes = sum(map(len, parts[1:]))
        self._require_open()
        if self.hello is not None and num_bytes > self.hello.max_data:
            raise TooLargeForPeerError(
                f"{num_bytes} B are more than the {self.hello.max_data} B that "
                f"{self.peer_id} accepts in one message"
            )
        await self.breathe()
        if _is_credited(message):
            await self._send_credited(message, parts, num_bytes)
        elif not self._send_nowait(message, parts, num_bytes):
            await self._outbox.put(Outgoing(message, parts))

    def send_nowait(self, message: TensorMessage) -> bool:
        """Send a small message if nothing has to be waited for; False if something has, and nothing is sent.

        Raises:
            DataWriteError: the stream broke; so much is known.
            LocalProtocolError: the message cannot be sent.
        """
        if self.hello is None or self._closed is not None or not self._outbox.is_idle:
            return False
        is_credited = _is_credited(message)
        if is_credited and (self._credit_turn.locked() or not self._credit.is_available):
            return False
        require_request_id(message)
        parts = message_parts(message)
        num_bytes = sum(map(len, parts)) - len(parts[0])
        if num_bytes > self.hello.max_data or not self._send_nowait(message, parts, num_bytes):
            return False
        if is_credited:
            self._credit.begin(num_bytes)
        return True

    def owe(self, message: TensorMessage) -> None:
        """Send a small message some time, without waiting; for the reader and what it calls.

        A peer that reads none of what it makes us owe it loses the stream.
        """
        if self._closed is None and not self.is_retired and not self._outbox.owe(message):
            self._end(
                over_limit(f"{self.peer_id} makes us owe it {self._bounds.max_owed} messages")
            )

    def served(self, num_bytes: int) -> None:
        """A credited message with `num_bytes` B of Data is done with: the peer may send more."""
        self._tell(self._granted.served(num_bytes))

    def _tell(self, credit: Credit | None) -> None:
        if credit is not None:
            self.owe(TensorMessage(msg_type=MessageType.CREDIT, data=credit.encode()))

    def ignored_error(self) -> None:
        """An Error came that ends no request of ours.

        Raises:
            RemoteProtocolError: it is one of too many in a row.
        """
        self._num_stray_errors += 1
        if self._num_stray_errors > self._bounds.max_stray_errors:
            raise over_limit(f"{self._num_stray_errors} Errors in a row that answer nothing")

    def _send_nowait(self, message: TensorMessage, parts: tuple[Data, ...], num_bytes: int) -> bool:
        """Write a small message in the sender's own task, if nothing is before it and the stream takes it whole."""
        if num_bytes > LARGEST_PROMPT or not self._outbox.is_idle:
            return False
        data = b"".join(parts)
        try:
            is_sent = self._stream.send_nowait(data)
        except StreamBrokenError as exc:
            self._end(exc)
            raise DataWriteError(str(exc)) from exc
        if is_sent:
            self._on_sent(message.msg_type, len(data))
        return is_sent

    async def breathe(self) -> None:
        """Let other tasks run once in a while, though nothing has to be waited for."""
        self._num_unbreathed += 1
        if self._num_unbreathed < SENDS_A_BREATH:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            self._num_unbreathed = 0
            await trio.lowlevel.checkpoint()

    async def _send_credited(
        self, message: TensorMessage, parts: tuple[Data, ...], num_bytes: int
    ) -> None:
        if self._credit.is_available and not self._credit_turn.locked():
            self._credit.begin(num_bytes)
        else:
            await self._wait_credit(num_bytes)
        if self._send_nowait(message, parts, num_bytes):
            return
        outgoing = Outgoing(message, parts)
        try:
            await self._outbox.put(outgoing)
        except trio.Cancelled:
            if not outgoing.is_begun:
                # The peer will never count it, so neither may we: our count must not run away from its.
                self._credit.take_back(num_bytes)
                self._credit_came.set()
            raise

    async def _wait_credit(self, num_bytes: int) -> None:
        """Wait for credit in turn, and take it."""
        async with self._credit_turn:
            self._require_open()
            while not self._credit.is_available:
                await self._credit_came.wait()
                self._require_open()
            self._credit.begin(num_bytes)

    def _require_open(self) -> None:
        if self._closed is not None:
            raise HeaderWriteError(str(self._closed)) from self._closed
        if self.is_retired:
            raise self._moved()

    # Life

    async def wait_hello(self) -> Hello:
        """Wait for the peer's Hello.

        Raises:
            ResponseTimeout: none came in time.
            StreamBrokenError: the stream ended first.
        """
        timeout = self._bounds.hello_timeout
        with trio.move_on_after(timeout):
            await self._hello_received.wait()
        if self.hello is not None:
            return self.hello
        if self._closed is not None:
            raise StreamBrokenError(str(self._closed)) from self._closed
        raise ResponseTimeout(f"{self.peer_id} sent no Hello within {timeout:g} s")

    async def fail(self, error: RemoteProtocolError | RequestRefusedError) -> None:
        """Tell the peer why, and end the stream."""
        if self._closed is None:
            payload = ErrorPayload(
                code=ErrorCode(error.code),
                text=str(error),
                retry_after=getattr(error, "retry_after", None),
            )
            message = _message(MessageType.ERROR, payload)
            # A peer that is gone already is what we are after.
            with trio.move_on_after(FAREWELL_TIMEOUT), suppress(StreamBrokenError):
                await self._outbox.put(Outgoing(message, message_parts(message)))
        self._end(error)

    def lose(self, error: NeuroGridError) -> None:
        """End all that waits here: the connection underneath is gone."""
        self._end(error)

    async def close(self) -> None:
        """End the stream in order; the peer sees the end of it."""
        self._end(StreamBrokenError(f"the stream to {self.peer_id} was closed"))
        await self._stream.aclose()

    def _late_hello(self) -> RemoteProtocolError:
        timeout = self._bounds.hello_timeout
        return RemoteProtocolError(
            f"{self.peer_id} sent no Hello within {timeout:g} s", code=ErrorCode.DEADLINE_EXCEEDED
        )

    def _end(self, error: NeuroGridError) -> None:
        """Let no task send any more, and wake all that wait to."""
        if self._closed is not None:
            return
        self._closed = error
        self._reading.cancel()
        self._hello_received.set()
        self._credit_came.set()
        self._outbox.close(error)

    # The two tasks

    async def _read(self) -> NeuroGridError:
        """Hand on what comes; returns why nothing more does."""
        try:
            with MessageReader(
                self._stream, self._decoder, budget=self._budget, bounds=self._bounds
            ) as reader:
                await reader.receive_all(self._receive, hold=self._hold)
        except NeuroGridError as exc:
            return exc
        finally:
            self.received_all.set()
        self.is_complete = True
        return StreamBrokenError(f"{self.peer_id} closed the stream")

    def _receive(self, message: TensorMessage) -> None:
        if self._hold.is_on:
            self._hold.keep(message)
            return
        if message.msg_type is not MessageType.ERROR:
            self._num_stray_errors = 0
        if message.msg_type is MessageType.HELLO:
            if self.hello is not None:
                raise violation("a second Hello")
            self.hello = Hello.decode(message.data)
            self._reading.deadline = math.inf
            self._hold.begin()
            self._take_grant(self.hello.credit)
            self._hello_received.set()
        elif self.hello is None and message.msg_type is not MessageType.ERROR:
            raise violation("the first message was no Hello")
        elif not message.request_id and _is_request(message):
            raise violation(f"{name_of(message)} without a request id")
        elif message.msg_type is MessageType.CREDIT:
            self._take_grant(Credit.decode(message.data).max_total)
        elif _is_credited(message):
            self._tell(self._granted.arrived(len(message.data)))
        self._on_message(self, message)

    def _take_grant(self, max_total: int) -> None:
        self._credit.grant(max_total)
        self._credit_came.set()

    async def _write(self) -> None:
        while (outgoing := await self._outbox.next()) is not None:
            try:
                await self._write_message(outgoing)
            except NeuroGridError as exc:
                outgoing.fail(exc)
                self._end(exc)
            except trio.Cancelled:
                outgoing.fail(DataWriteError(f"{self._closed or 'this host is closing'}"))
                raise
            else:
                outgoing.succeed()
        if self.is_retired and self._closed is None:
            with suppress(StreamBrokenError):  # then the reader says so
                await self._stream.send_eof()
        self._wrote_all.set()

    async def _write_message(self, outgoing: Outgoing) -> None:
        parts = outgoing.parts or message_parts(outgoing.message)
        num_bytes = await write_message(self._stream, parts, bounds=self._bounds)
        self._on_sent(outgoing.message.msg_type, num_bytes)


def _is_credited(message: TensorMessage) -> bool:
    return message.msg_type is not None and message.msg_type.traits.is_credited


def _is_request(message: TensorMessage) -> bool:
    return message.msg_type is not None and message.msg_type.traits.is_request


def _message(msg_type: MessageType, payload: Hello | ErrorPayload) -> TensorMessage:
    return TensorMessage(msg_type=msg_type, data=payload.encode())
