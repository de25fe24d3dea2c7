"""What any foreign peer and we must manage over `/neurogrid/tensor/1.0.0`: one suite, run for each language.

`PeerSuite` is a base class: a test module inherits from it and says how its peer is started. Messages are tried with
either side as the dialler of the connection, over each channel security that the peer has; the rest with both diallers
and both securities, each once. A peer's process lives for a module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

import pytest
import trio

from neurogrid.errors import PeerRefusedError, StreamBrokenError
from neurogrid.p2p import (
    PROTOCOL_V10,
    PROTOCOL_V11,
    Host,
    MessageType,
    Protocol,
    Stream,
    TensorMessage,
    open_host,
)
from neurogrid.p2p.wire import encode_message
from tests.e2e.interop.foreign_peer import ForeignPeer, ForeignProcess, ForeignStream
from tests.e2e.interop.golden import GOLDEN

__all__ = ["BOTH_VERSIONS", "DEADLINE", "Meeting", "PeerSuite", "Way", "run"]

# For anything that takes seconds on an idle machine: the machines are shared, and slow at times.
DEADLINE = 240.0
MIB = 1024 * 1024
# The daemon resets a stream that it meant to end about once in some hundred times.
MAX_RESETS = 10

FOREIGN_ALONE = (PROTOCOL_V10,)
# 1.1.0 is offered first, and the foreign peer does not know it.
BOTH_VERSIONS = (PROTOCOL_V11, PROTOCOL_V10)
# A security and who dials.
Way = tuple[str, str]
# Gives the process of a security, which is started if there is none.
Processes = Callable[[str, Callable[[str], AbstractContextManager[ForeignProcess]]], ForeignProcess]
UNTRACED_TYPES = [t for t in MessageType if t.kind is t and t <= 0x09]


@dataclass
class Meeting:
    """We and a foreign peer, connected.

    Attributes:
        inbound: the streams that we opened, at their foreign end.
        received: sends each message that our host was sent.
        confirms: see `PeerSuite`.
    """

    peer: ForeignPeer
    host: Host
    protocol: Protocol
    inbound: trio.MemoryReceiveChannel[ForeignStream]
    received: trio.MemoryReceiveChannel[TensorMessage]
    confirms: bool

    async def next_message_stream(self) -> ForeignStream:
        """The next stream that we opened and on which there is a byte.

        Before its first message to a peer, our side opens and closes a stream to learn the version.
        """
        while True:
            stream = await self.inbound.receive()
            if first := await stream.receive_some():
                stream.unread(first)
                return stream
            await stream.aclose()

    async def send_from_there(self, data: bytes, *, num_messages: int = 1) -> list[TensorMessage]:
        """The foreign peer opens a stream, writes `data`, ends, and sees our end; returns what we got."""
        stream = await self.peer.open_stream(self.host.peer_id, [PROTOCOL_V10])
        assert stream.protocol == PROTOCOL_V10
        await stream.send_all(data)
        if not self.confirms:
            # An end of the daemon's is now and then a reset, which would overtake what was not read yet.
            messages = [await self.received.receive() for _ in range(num_messages)]
        await stream.send_eof()
        if self.confirms:
            messages = [await self.received.receive() for _ in range(num_messages)]
        await stream.receive_until_end()
        await stream.aclose()
        return messages

    async def send_from_there_and_reset(self, protocol_id: str, data: bytes) -> None:
        """The foreign peer opens a stream, writes `data`, and resets it."""
        stream = await self.peer.open_stream(self.host.peer_id, [protocol_id])
        await stream.send_all(data)
        await stream.reset()

    async def show_that_we_serve(self) -> None:
        """A message still comes through, from there."""
        golden = GOLDEN["activation"]
        (message,) = await self.send_from_there(golden.encoded)
        assert comparable(message) == golden.message


@asynccontextmanager
async def meet(
    process: ForeignProcess,
    *,
    dialler: str,
    confirms: bool,
    versions: Sequence[str] = FOREIGN_ALONE,
) -> AsyncIterator[Meeting]:
    """A foreign peer and a host of ours, connected; `dialler` is "we" or "they"."""
    with trio.fail_after(DEADLINE):
        async with process.use() as peer, open_host() as host:
            protocol = Protocol(host, versions=versions)
            send, received = trio.open_memory_channel[TensorMessage](len(GOLDEN))
            for msg_type in (None, *UNTRACED_TYPES):
                protocol.on_message(msg_type, send.send_nowait)
            inbound = await peer.accept_streams([PROTOCOL_V10])
            if dialler == "we":
                assert await host.connect(peer.address) == peer.peer_id
                await peer.wait_connected(host.peer_id)
            else:
                await peer.connect(host.addresses[0])
                while peer.peer_id not in host.connected_peers:  # which may be later than there
                    await trio.sleep(0.01)
            yield Meeting(peer, host, protocol, inbound, received, confirms)


def run(scenario: Callable[..., Awaitable[None]], *args: object) -> None:
    trio.run(partial(scenario, *args))


def comparable(message: TensorMessage) -> TensorMessage:
    """A received message as it was before it was sent: bytes that compare, and no sender."""
    return replace(message, data=bytes(message.data), from_peer=None)


def large_activation() -> TensorMessage:
    """16 MiB in which no part repeats, so that a block lost, doubled or moved is seen."""
    block = b"".join(sha256(n.to_bytes(4, "big")).digest() for n in range(16 * MIB // 32))
    return TensorMessage(msg_type=MessageType.ACTIVATION, layer_id=1, request_id=2, data=block)


class PeerSuite(ABC):
    """The tests; see the module.

    Attributes:
        confirms: whether the peer ends a stream in order after we have ended it, or it has. p2pd resets
            it in the first case, and sometimes in the second: see test_go_peer.
    """

    confirms: bool

    @abstractmethod
    def start_peer(self, security: str) -> AbstractContextManager[ForeignProcess]: ...

    @pytest.fixture(autouse=True)
    def _peers(self, processes: Processes) -> None:
        self._processes = processes

    def meet(
        self, security: str, dialler: str, versions: Sequence[str] = FOREIGN_ALONE
    ) -> AbstractAsyncContextManager[Meeting]:
        """We and the peer, connected."""
        process = self._processes(security, self.start_peer)
        return meet(process, dialler=dialler, confirms=self.confirms, versions=versions)

    async def send(self, meeting: Meeting, message: TensorMessage) -> None:
        """Send a message through our `Protocol`."""
        if self.confirms:
            await meeting.protocol.send(meeting.peer.peer_id, message)
        else:
            with pytest.raises(PeerRefusedError, match="reset the stream"):
                await meeting.protocol.send(meeting.peer.peer_id, message)

    @pytest.mark.parametrize("versions", [FOREIGN_ALONE, BOTH_VERSIONS], ids=["1.0.0", "both"])
    def test_golden_messages_leave_us_byte_for_byte(
        self, security: str, dialler: str, versions: Sequence[str]
    ) -> None:
        async def scenario() -> None:
            async with self.meet(security, dialler, versions) as meeting:
                for name, golden in GOLDEN.items():
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self.send, meeting, golden.message)
                        stream = await meeting.next_message_stream()
                        assert stream.protocol == PROTOCOL_V10
                        assert await stream.receive_until_end() == golden.encoded, name
                        await stream.aclose()

        run(scenario)

    @pytest.mark.parametrize("versions", [FOREIGN_ALONE, BOTH_VERSIONS], ids=["1.0.0", "both"])
    def test_golden_bytes_of_theirs_are_the_messages(
        self, security: str, dialler: str, versions: Sequence[str]
    ) -> None:
        async def scenario() -> None:
            async with self.meet(security, dialler, versions) as meeting:
                for golden in GOLDEN.values():
                    (message,) = await meeting.send_from_there(golden.encoded)
                    assert message.from_peer == meeting.peer.peer_id
                    assert comparable(message) == golden.message

        run(scenario)

    def test_several_messages_come_on_one_stream(self, way: Way) -> None:
        async def scenario() -> None:
            async with self.meet(*way) as meeting:
                received = await meeting.send_from_there(
                    b"".join(golden.encoded for golden in GOLDEN.values()),
                    num_messages=len(GOLDEN),
                )
                expected = [golden.message for golden in GOLDEN.values()]
                assert [comparable(message) for message in received] == expected

        run(scenario)

    def test_16_mib_arrive_there_intact(self, way: Way) -> None:
        async def scenario() -> None:
            message = large_activation()
            encoded = encode_message(message)
            async with self.meet(*way) as meeting:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.send, meeting, message)
                    stream = await meeting.next_message_stream()
                    received = await stream.receive_until_end()
                    await stream.aclose()
                assert len(received) == len(encoded)
                assert sha256(received).digest() == sha256(encoded).digest()

        run(scenario)

    def test_16_mib_of_theirs_arrive_intact(self, way: Way) -> None:
        async def scenario() -> None:
            message = large_activation()
            async with self.meet(*way) as meeting:
                (received,) = await meeting.send_from_there(encode_message(message))
                assert (received.layer_id, received.request_id) == (1, 2)
                assert len(received.data) == 16 * MIB
                assert sha256(received.data).digest() == sha256(message.data).digest()

        run(scenario)

    def test_their_end_of_a_stream_is_an_orderly_end(self, way: Way) -> None:
        async def one_stream(meeting: Meeting) -> bytes:
            golden = GOLDEN["activation"]
            ours = await meeting.host.open_stream(meeting.peer.peer_id, [PROTOCOL_V10])
            await ours.send_all(golden.encoded)
            theirs = await meeting.next_message_stream()
            assert await theirs.receive_exactly(len(golden.encoded)) == golden.encoded
            await theirs.send_all(b"answer")
            await theirs.aclose()
            answer = b""
            try:
                while data := await ours.receive_some():
                    answer += data
            finally:
                await ours.aclose()
            return answer

        async def scenario() -> None:
            async with self.meet(*way) as meeting:
                for _ in range(1 if self.confirms else MAX_RESETS):
                    try:
                        assert await one_stream(meeting) == b"answer"
                    except StreamBrokenError:
                        continue
                    return
                pytest.fail("every end was a reset")

        run(scenario)

    def test_their_reset_is_a_reset_and_no_end(self, way: Way) -> None:
        async def scenario() -> None:
            protocol_id = "/neurogrid/test/1.0.0"
            is_read = trio.Event()
            send, outcomes = trio.open_memory_channel[str](1)

            async def read(stream: Stream) -> None:
                assert await stream.receive_some() == b"abc"
                is_read.set()
                try:
                    rest = await stream.receive_some()
                except StreamBrokenError:
                    await send.send("reset")
                else:
                    await send.send(f"no reset, but {rest!r}")

            async with self.meet(*way) as meeting:
                meeting.host.set_stream_handler(protocol_id, read)
                stream = await meeting.peer.open_stream(meeting.host.peer_id, [protocol_id])
                await stream.send_all(b"abc")
                await is_read.wait()
                await stream.reset()
                assert await outcomes.receive() == "reset"

        run(scenario)

    def test_their_reset_in_mid_message_leaves_us_serving(self, way: Way) -> None:
        async def scenario() -> None:
            whole = GOLDEN["activation"].encoded + encode_message(large_activation())
            async with self.meet(*way) as meeting:
                for num_bytes in (3, 20, 26, len(whole) // 2):
                    await meeting.send_from_there_and_reset(PROTOCOL_V10, whole[:num_bytes])
                await meeting.show_that_we_serve()

        run(scenario)

    def test_their_end_in_mid_message_leaves_us_serving(self, way: Way) -> None:
        async def scenario() -> None:
            async with self.meet(*way) as meeting:
                for num_bytes in (3, 20, 26):
                    await meeting.send_from_there(
                        GOLDEN["activation"].encoded[:num_bytes], num_messages=0
                    )
                await meeting.show_that_we_serve()

        run(scenario)

    def test_their_reset_while_we_send_is_told_and_the_connection_lives(self, way: Way) -> None:
        async def scenario() -> None:
            async with self.meet(*way) as meeting:

                async def send() -> None:
                    with pytest.raises((PeerRefusedError, StreamBrokenError)):
                        await meeting.protocol.send(meeting.peer.peer_id, large_activation())

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send)
                    stream = await meeting.next_message_stream()
                    await stream.receive_exactly(1000)
                    await stream.reset()
                await meeting.show_that_we_serve()

        run(scenario)

    def test_a_lost_connection_in_mid_message_leaves_us_serving(self, way: Way) -> None:
        async def scenario() -> None:
            async with self.meet(*way) as meeting:
                stream = await meeting.peer.open_stream(meeting.host.peer_id, [PROTOCOL_V10])
                await stream.send_all(GOLDEN["activation"].encoded[:20])
                await meeting.peer.disconnect(meeting.host.peer_id)
                await meeting.host.wait_disconnected(meeting.peer.peer_id)
                await meeting.peer.connect(meeting.host.addresses[0])
                await meeting.show_that_we_serve()

        run(scenario)
