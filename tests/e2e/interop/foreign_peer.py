"""A libp2p peer in another language: a process of ours on 127.0.0.1, driven over its control socket.

The peer dials, opens and accepts; what its streams carry comes to the test as plain bytes, over Unix
sockets. So a test holds both ends of a stream, and none of our code touches the foreign end.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import MSG_PEEK
from typing import TypeVar

import pytest
import trio

from tests.e2e.interop.control import Answer, Control, StreamStart

__all__ = ["ForeignPeer", "ForeignProcess", "ForeignStream", "start_process"]

T = TypeVar("T")

MAX_WAITING_STREAMS = 64  # inbound streams that the test has not taken yet
MAX_ANSWER_BYTES = 64 * 1024
START_TIMEOUT = 120.0  # seconds: node loads some hundred modules, perhaps from a cold disk
EXIT_TIMEOUT = 10.0  # seconds
POLL_INTERVAL = 0.02  # seconds


class ForeignStream:
    """The foreign end of a libp2p stream.

    Attributes:
        protocol: what was negotiated.
    """

    def __init__(
        self,
        socket: trio.SocketStream,
        start: StreamStart,
        *,
        received: bytes,
        num_held: int,
        reset: Callable[[int], Awaitable[None]] | None,
    ) -> None:
        self.protocol = start.protocol
        self._socket = socket
        self._received = bytearray(received)
        self._num_held = num_held
        self._num_sent = 0
        self._reset = reset

    async def send_all(self, data: bytes) -> None:
        await self._socket.send_all(data)
        self._num_sent += len(data)

    async def send_eof(self) -> None:
        """Say that nothing more will be sent."""
        await self._socket.send_eof()

    async def receive_some(self) -> bytes:
        while self._num_held:
            self._num_held -= len(await self._socket.receive_some(self._num_held))
        if self._received:
            data = bytes(self._received)
            self._received.clear()
            return data
        return bytes(await self._socket.receive_some())

    async def receive_exactly(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            some = await self.receive_some()
            assert some, f"the stream ended after {len(data)} of {num_bytes} bytes"
            data += some
        self.unread(data[num_bytes:])
        return bytes(data[:num_bytes])

    async def receive_until_end(self) -> bytes:
        data = bytearray()
        while some := await self.receive_some():
            data += some
        return bytes(data)

    def unread(self, data: bytes) -> None:
        """Put bytes back, to be received again."""
        self._received[:0] = data

    async def reset(self) -> None:
        """Reset the stream, once what was sent is on it."""
        if self._reset is not None:
            await self._reset(self._num_sent)
        elif not self._num_held:
            # The daemon resets a stream whose socket breaks, and a Unix socket breaks, rather than
            # ends, when it is closed with bytes in it that were not read.
            await trio.lowlevel.wait_readable(self._socket.socket)
        await self.aclose()

    async def aclose(self) -> None:
        """End the stream, both ways."""
        await self._socket.aclose()


class ForeignPeer:
    """A foreign peer that runs. Made by `ForeignProcess.use`.

    Attributes:
        peer_id: its peer id (base58).
        address: where to dial it, with its `/p2p/` part.
    """

    def __init__(self, process: ForeignProcess, nursery: trio.Nursery) -> None:
        self.peer_id = ""
        self.address = ""
        self._process = process
        self._control = process.control
        self._directory = process.directory
        self._nursery = nursery
        self._sockets: list[trio.SocketStream] = []

    def close_sockets(self) -> None:
        """Close what the test left open."""
        for socket in self._sockets:
            socket.socket.close()

    async def identify(self) -> None:
        """Learn who the peer is; it must listen on loopback alone."""
        answer = await self._ask(self._control.identify())
        assert answer.addresses, "the foreign peer listens nowhere"
        assert all(a.startswith("/ip4/127.0.0.1/") for a in answer.addresses), answer.addresses
        self.peer_id = answer.peer_id
        self.address = f"{answer.addresses[0]}/p2p/{answer.peer_id}"

    async def connect(self, address: str) -> None:
        """Dial a full multiaddr.

        Raises:
            RequestFailedError: there is no connection, for the reason that the peer gives.
        """
        place, _, peer_id = address.partition("/p2p/")
        await self._ask(self._control.connect(peer_id, place))

    async def wait_connected(self, peer_id: str) -> None:
        """Return when the peer has a connection to `peer_id` that somebody else dialled.

        Whoever dials is done before the other side is; asked for a stream in between, that side would dial.
        """
        while peer_id not in (await self._ask(self._control.list_peers())).peers:
            await trio.sleep(POLL_INTERVAL)

    async def disconnect(self, peer_id: str) -> None:
        """Close all connections to a peer."""
        await self._ask(self._control.disconnect(peer_id))

    async def open_stream(self, peer_id: str, protocols: Sequence[str]) -> ForeignStream:
        """Open a stream to a connected peer."""
        socket = await self._open_control()
        await socket.send_all(self._control.open_stream(peer_id, protocols))
        # The answer is left in the socket for as long as nothing is received: see `ForeignStream.reset`.
        answer = None
        while answer is None:
            buffer = bytearray(await socket.socket.recv(MAX_ANSWER_BYTES, MSG_PEEK))
            assert buffer, "the foreign peer ended the connection within an answer"
            num_bytes = len(buffer)
            answer = self._control.take_answer(buffer)
        assert answer.stream is not None
        return self._stream(socket, answer.stream, num_held=num_bytes - len(buffer))

    def _stream(
        self,
        socket: trio.SocketStream,
        start: StreamStart,
        *,
        received: bytes = b"",
        num_held: int = 0,
    ) -> ForeignStream:
        reset = None if start.name is None else partial(self._reset_stream, start.name)
        return ForeignStream(socket, start, received=received, num_held=num_held, reset=reset)

    async def _reset_stream(self, name: str, after_bytes: int) -> None:
        await self._ask(self._control.reset_stream(name, after_bytes))

    async def accept_streams(
        self, protocols: Sequence[str]
    ) -> trio.MemoryReceiveChannel[ForeignStream]:
        """Accept inbound streams of these protocols; they come over the channel."""
        acceptors = self._process.acceptors
        is_new = tuple(protocols) not in acceptors
        path = acceptors.setdefault(
            tuple(protocols), self._directory / f"streams{len(acceptors)}.sock"
        )
        path.unlink(missing_ok=True)  # of who used the process before
        listening = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        await listening.bind(str(path))
        listening.listen(MAX_WAITING_STREAMS)
        send, receive = trio.open_memory_channel[ForeignStream](MAX_WAITING_STREAMS)

        async def hand_on(socket: trio.SocketStream) -> None:
            buffer = bytearray()
            start = await _receive(socket, buffer, self._control.take_stream_start)
            await send.send(self._stream(socket, start, received=bytes(buffer)))

        async def accept() -> None:
            with listening:
                while True:
                    connection, _ = await listening.accept()
                    self._sockets.append(trio.SocketStream(connection))
                    self._nursery.start_soon(hand_on, self._sockets[-1])

        self._nursery.start_soon(accept)
        if is_new:
            await self._ask(self._control.accept_streams(str(path), protocols))
        return receive

    async def _open_control(self) -> trio.SocketStream:
        self._sockets.append(await trio.open_unix_socket(str(self._directory / "control.sock")))
        return self._sockets[-1]

    async def _ask(self, request: bytes) -> Answer:
        async with await self._open_control() as socket:
            await socket.send_all(request)
            return await _receive(socket, bytearray(), self._control.take_answer)


@dataclass
class ForeignProcess:
    """A foreign peer's process, which serves `directory/control.sock`. Made by `start_process`.

    Attributes:
        acceptors: the Unix sockets to which it brings inbound streams, by their protocols.
    """

    process: subprocess.Popen[bytes]
    control: Control
    directory: Path
    acceptors: dict[tuple[str, ...], Path] = field(default_factory=dict)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[ForeignPeer]:
        """Drive it until the block is left. Wait for its socket first: neither peer tells when it is ready."""
        async with trio.open_nursery() as nursery:
            with trio.fail_after(START_TIMEOUT):
                while not await self._is_ready():
                    await trio.sleep(POLL_INTERVAL)
            peer = ForeignPeer(self, nursery)
            try:
                await peer.identify()
                yield peer
            finally:
                peer.close_sockets()
                nursery.cancel_scope.cancel()

    async def _is_ready(self) -> bool:
        try:
            await (await trio.open_unix_socket(str(self.directory / "control.sock"))).aclose()
        except OSError:
            if self.process.poll() is not None:
                log = (self.directory / "log").read_text(errors="replace")[-2000:]
                pytest.fail(f"{self.process.args} ended with {self.process.returncode}: {log}")
            return False
        return True


@contextmanager
def start_process(
    command: Callable[[Path], Sequence[str]], control: Control
) -> Iterator[ForeignProcess]:
    """Run `command(directory)`, which serves `directory/control.sock`, until the block is left."""
    # The path of a Unix socket has 107 bytes at most, which pytest's own directories may exceed.
    with tempfile.TemporaryDirectory(prefix="ng-peer-") as name:
        directory = Path(name)
        with (directory / "log").open("wb") as log:
            # Its standard input is a pipe, whose end it sees even if this process is killed.
            process = subprocess.Popen(
                command(directory), stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        try:
            yield ForeignProcess(process, control, directory)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.terminate()
    try:
        process.wait(EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _receive(
    socket: trio.SocketStream, buffer: bytearray, take: Callable[[bytearray], T | None]
) -> T:
    """Receive until `take` finds a whole message; what follows it is left in `buffer`."""
    while (message := take(buffer)) is None:
        data = await socket.receive_some()
        assert data, "the foreign peer ended the connection within a message"
        buffer += data
    return message
