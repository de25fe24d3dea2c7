"""Pipes that carry a muxer's frames in and out: a socket with a Noise session of ours, or any secure connection.

Both give the same three things: `push` seals and sends what there is without ever waiting, `wait_writable` waits for
room, `receive` waits for bytes and hands them to the state machine. Neither knows about tasks.

Strategy of the socket: everything small, headers above all, is gathered into one Noise message; payload of any size is
encrypted straight from the writer's memory into messages of its own, and decrypted straight into a reader's where
that is lent. One `send` for a batch of messages, one `recv_into` for as many as have arrived.

Little is queued in the kernel: what was sealed cannot be overtaken any more.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import Final, TypeAlias

import trio
from libp2p.abc import ISecureConn

from neurogrid.p2p.link.events import Event
from neurogrid.p2p.link.frames import HEADER_BYTES
from neurogrid.p2p.link.noise import MAX_PLAINTEXT, MAX_SEALED, Opener, Sealer
from neurogrid.p2p.link.outflow import Outflow
from neurogrid.p2p.link.session import NoiseSession
from neurogrid.p2p.link.yamux import Yamux

__all__ = ["Pipe", "Pushed", "open_pipe"]

# A congestion control that does not pace, which every process may choose.
UNPACED: Final = b"reno"

Dispatch: TypeAlias = Callable[[Event], None]

# Payload up to this size is copied next to its header: cheaper than a Noise message of its own on both sides
# (0.8 us of cipher and as much again of Python, against 1.3 us for 64 KiB of copying).
JOIN_BYTES: Final = 20 * 1024
# The longest frame: as many full Noise messages, and before them a header with what may be joined to it. Another
# stream's frame waits for no more than this. Each frame costs a small Noise message and a dozen calls on both sides.
MESSAGES_PER_FRAME: Final = 4
# Unsent bytes in the kernel after which it takes no more: enough to keep a link of 10 Gbit/s busy for 200 us while
# this process does other things, and 2 ms of a link of 1 Gbit/s for what comes behind it.
NOTSENT_LOWAT: Final = 256 * 1024


# As long as the buffer to receive into is filled, so many are received before other tasks run: together some 300 us
# of work, where a turn of them all costs 15.
RECEIVES_A_TURN: Final = 2


class Pushed(Enum):
    """Outcome of `push`."""

    IDLE = auto()  # everything is with the kernel
    MORE = auto()  # there is more to send, and room for it
    BLOCKED = auto()  # wait for room


class Pipe(ABC):
    """Sends and receives for a state machine. OSError and libp2p's exceptions mean that it broke."""

    @abstractmethod
    def push(self, outflow: Outflow) -> Pushed:
        """Send one batch of frames, as far as it goes without waiting."""

    @abstractmethod
    async def wait_writable(self) -> None:
        """Wait until `push` may have room. May be cancelled only if the pipe is closed then."""

    @abstractmethod
    async def receive(self, core: Yamux, dispatch: Dispatch) -> bool:
        """Wait for bytes, hand them to `core`, and `dispatch` each thing that has happened; False at their end.

        Told at once, a reader can lend its memory to what has come behind.

        Raises:
            RemoteProtocolError: they are not what the peer should have sent.
        """

    @abstractmethod
    async def drain(self) -> None:
        """Drop what comes, until its end."""

    @abstractmethod
    def end(self) -> None:
        """Say that nothing more will be sent, as far as that can be said."""

    @abstractmethod
    async def close(self) -> None:
        """Close it; never raises what the network caused."""


def open_pipe(conn: ISecureConn) -> tuple[Pipe, bytes]:
    """Take over a secure connection; also the plaintext that was read from it already."""
    if isinstance(conn, NoiseSession):
        sock = conn.detach_socket()
        if sock is not None:
            return SocketPipe(sock, conn.sealer, conn.opener), conn.take_plaintext()
    return SecurePipe(conn), b""


def leave_unpaced_within_machine(sock: socket.socket) -> None:
    """Have what goes from this machine to itself go at once.

    Where the system's congestion control is BBR, it paces a connection at what it has seen it carry. Within a machine
    that is what its processes do: seen while they were slow for a moment, it keeps them slow, at two thirds for
    seconds, with a timer's interrupt for each piece.
    """
    if not hasattr(socket, "TCP_CONGESTION"):
        return  # Linux alone has the choice
    # The socket may be gone already, which its next user will see, or the kernel be without this control.
    with suppress(OSError):
        if sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)


class SocketPipe(Pipe):
    """A TCP socket, sealed by Noise."""

    def __init__(self, sock: socket.socket, sealer: Sealer, opener: Opener) -> None:
        sock.setblocking(False)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT)
        leave_unpaced_within_machine(sock)
        self._socket = sock
        self._fd = sock.fileno()
        self._sealer = sealer
        self._opener = opener
        # For small frames that are sealed as one. Not shared: connections may live in several threads.
        self._scratch = memoryview(bytearray(MAX_PLAINTEXT))
        self._may_have_more = False

    def push(self, outflow: Outflow) -> Pushed:
        sealer = self._sealer
        has_more = outflow.has_output if sealer.num_pending else self._seal(outflow)
        pending = sealer.pending
        if pending:
            try:
                sent = self._socket.send(pending)
            except BlockingIOError:
                return Pushed.BLOCKED
            sealer.sent(sent)
            if sent < len(pending):
                return Pushed.BLOCKED
        if not has_more:
            return Pushed.IDLE
        sealer.grow()
        return Pushed.MORE

    def _seal(self, outflow: Outflow) -> bool:
        """Fill the sealer's buffer with frames; whether there may be more than fit."""
        sealer, seal, small, filled = self._sealer, self._sealer.seal, self._scratch, 0
        has_more = True
        # Room for what is gathered, for what is joined to the frame's header, and for the rest of it.
        while (num_messages := sealer.free // MAX_SEALED - 2) > 0:
            frame = outflow.next_frame(
                min(num_messages, MESSAGES_PER_FRAME) * MAX_PLAINTEXT + JOIN_BYTES
            )
            if frame is None:
                has_more = False
                break
            header, payload = frame
            joined = len(payload)
            if joined > JOIN_BYTES:
                joined %= MAX_PLAINTEXT
                if joined > JOIN_BYTES:
                    joined = 0
            end = filled + HEADER_BYTES + joined
            if end > MAX_PLAINTEXT:
                seal(small[:filled])
                filled, end = 0, HEADER_BYTES + joined
            small[filled : filled + HEADER_BYTES] = header
            small[filled + HEADER_BYTES : end] = payload[:joined]
            filled = end
            if joined < len(payload):
                seal(small[:filled])
                for at in range(joined, len(payload), MAX_PLAINTEXT):
                    seal(payload[at : at + MAX_PLAINTEXT])
                filled = 0
        if filled:
            seal(small[:filled])
        return has_more

    async def wait_writable(self) -> None:
        await trio.lowlevel.wait_writable(self._fd)

    async def receive(self, core: Yamux, dispatch: Dispatch) -> bool:
        if not self._may_have_more:
            await trio.lowlevel.wait_readable(self._fd)
        else:
            await trio.lowlevel.checkpoint()
        for _ in range(RECEIVES_A_TURN):
            space = self._opener.space
            try:
                num_bytes = self._socket.recv_into(space)
            except BlockingIOError:
                self._may_have_more = False
                return True
            if not num_bytes:
                return False
            self._opener.received(num_bytes)
            self._open_all(core, dispatch)
            self._may_have_more = num_bytes == len(space)
            if not self._may_have_more:
                break
        return True

    def _open_all(self, core: Yamux, dispatch: Dispatch) -> None:
        """Decrypt every message that is there whole, straight to where it belongs."""
        opener = self._opener
        while (length := opener.next_length()) is not None:
            target = core.payload_target(length)
            if target is not None:
                opener.open_into(target)
                events = core.payload_placed(length)
            else:
                events = core.receive_data(opener.open())
            for event in events:
                dispatch(event)

    async def drain(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._fd)
            try:
                if not self._socket.recv_into(self._scratch):
                    return
            except BlockingIOError:
                continue

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    async def close(self) -> None:
        trio.lowlevel.notify_closing(self._fd)
        self._socket.close()


class SecurePipe(Pipe):
    """Any secure connection of py-libp2p, through its own `read` and `write`."""

    def __init__(self, conn: ISecureConn) -> None:
        self._conn = conn
        self._pending = b""

    def push(self, outflow: Outflow) -> Pushed:
        if not self._pending:
            batch = bytearray()
            while len(batch) < MAX_PLAINTEXT and (frame := outflow.next_frame(MAX_PLAINTEXT)):
                batch += frame[0]
                batch += frame[1]
            self._pending = bytes(batch)
        return Pushed.BLOCKED if self._pending else Pushed.IDLE

    async def wait_writable(self) -> None:
        if self._pending:
            await self._conn.write(self._pending)
            self._pending = b""

    async def receive(self, core: Yamux, dispatch: Dispatch) -> bool:
        data = await self._conn.read()
        for event in core.receive_data(bytes(data)):
            dispatch(event)
        return bool(data)

    async def drain(self) -> None:
        while await self._conn.read():
            pass

    def end(self) -> None:
        pass  # none of py-libp2p's connections can

    async def close(self) -> None:
        await self._conn.close()
