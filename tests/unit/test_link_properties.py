"""Properties of the Yamux state machine: whatever a peer sends, one kind of error and bounded memory; whatever
two honest ends do, the bytes arrive in order."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.link import LinkLimits
from neurogrid.p2p.link.events import GoAwayReceived, PongReceived, StreamOpened
from neurogrid.p2p.link.inbox import Inbox
from neurogrid.p2p.link.limits import BufferPool, ConnectionBuffers
from neurogrid.p2p.link.outflow import Outflow
from neurogrid.p2p.link.stream_state import Outgoing
from neurogrid.p2p.link.yamux import Yamux

UNHURRIED = settings(deadline=None, max_examples=100)
LIMITS = LinkLimits(
    max_streams=4, max_owed_frames=8, connection_bytes=600_000, total_bytes=1_000_000
)


# Room for the first windows of three streams: nobody is reset for what he may send.
ROOMY = replace(LIMITS, connection_bytes=3 * 256 * 1024)


def make(*, is_initiator: bool, limits: LinkLimits = LIMITS) -> tuple[Yamux, BufferPool]:
    pool = BufferPool(limits)
    core = Yamux(
        is_initiator=is_initiator, limits=limits, buffers=ConnectionBuffers(pool), clock=lambda: 0.0
    )
    return core, pool


def frames_of(core: Yamux, max_payload: int = 70_000) -> bytes:
    batch = bytearray()
    while (frame := core.outflow.next_frame(max_payload)) is not None:
        batch += frame[0] + frame[1]
    return bytes(batch)


@st.composite
def any_frames(draw: st.DrawFn) -> bytes:
    """A frame that a peer might invent: mostly well-formed, rarely welcome."""
    frame_type = draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]) | st.integers(0, 255))
    flags = draw(st.sampled_from([0, 1, 1, 2, 4, 8]) | st.integers(0, 65_535))
    stream_id = draw(st.integers(0, 9))
    version = draw(st.sampled_from([0] * 50 + [1]))
    if frame_type == 0:
        size = draw(st.sampled_from([0, 1, 5, 5000, 70_000, 262_144, 262_145]))
        return struct.pack(">BBHII", version, 0, flags, stream_id, size) + bytes(size)
    length = draw(st.sampled_from([0, 0, 1, 2**20, 2**31, 2**32 - 1]))
    return struct.pack(">BBHII", version, frame_type, flags, stream_id, length)


@UNHURRIED
@given(
    st.booleans(),
    st.lists(any_frames() | st.binary(max_size=40), max_size=40),
    st.lists(st.integers(0, 6), max_size=40),
)
def test_a_peer_can_cause_one_error_and_bounded_memory(
    is_initiator: bool, inputs: list[bytes], doings: list[int]
) -> None:
    core, pool = make(is_initiator=is_initiator)
    ever = [core.open_stream(), core.open_stream()]
    todo = deque(doings)
    try:
        for data in inputs:
            for event in core.receive_data(data):
                if isinstance(event, StreamOpened):
                    core.accept(event.stream)
                    ever.append(event.stream)
            assert len(core.streams) <= 2 * LIMITS.max_streams
            assert pool.used <= LIMITS.connection_bytes
            assert pool.used == sum(stream.inbox.size for stream in ever)
            assert pool.granted <= LIMITS.connection_bytes
            doing = todo.popleft() if todo else 0
            streams = list(core.streams.values())
            if doing == 1 and streams:
                core.reset(streams[0])
            elif doing == 2 and streams:
                core.discard(streams[-1])
            elif doing == 3 and streams:
                core.consumed(streams[0], len(streams[0].inbox.take()))
            elif doing == 4 and streams and not streams[0].fin_wanted:
                core.queue(streams[0], memoryview(bytes(300_000)))
            elif doing == 5 and streams:
                core.finish(streams[0])
            elif doing == 6:
                frames_of(core)
    except RemoteProtocolError:
        core.give_up_all()
        assert pool.granted == 0


@UNHURRIED
@given(st.data())
def test_what_honest_ends_send_arrives_whole_and_in_order(data: st.DataObject) -> None:
    one, pool = make(is_initiator=True, limits=ROOMY)
    other, _ = make(is_initiator=False, limits=ROOMY)
    num_streams = data.draw(st.integers(1, 3))
    streams = [one.open_stream() for _ in range(num_streams)]
    wanted = {s.stream_id: b"" for s in streams}
    got = {s.stream_id: bytearray() for s in streams}
    accepted = {}
    wire = bytearray()
    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["write", "frame", "deliver", "read", "credit"]))
        if step == "write":
            stream = data.draw(st.sampled_from(streams))
            size = data.draw(st.sampled_from([1, 100, 5000, 150_000]))
            payload = bytes([len(wanted[stream.stream_id]) % 251]) * size
            wanted[stream.stream_id] += payload
            one.queue(stream, memoryview(payload))
        elif step == "frame" and (
            frame := one.outflow.next_frame(data.draw(st.integers(1, 70_000)))
        ):
            wire += frame[0] + frame[1]
        elif step == "deliver" and wire:
            cut = data.draw(st.integers(1, len(wire)))
            deliver(other, bytes(wire[:cut]), accepted)
            del wire[:cut]
        elif step == "read" and accepted:
            stream = data.draw(st.sampled_from(list(accepted.values())))
            piece = stream.inbox.take(data.draw(st.integers(1, 100_000)))
            other.consumed(stream, len(piece))
            got[stream.stream_id] += piece
        elif step == "credit":
            one.receive_data(frames_of(other))
    for stream in streams:
        one.finish(stream)
    while wire or one.outflow.has_output or any(s.inbox.size for s in accepted.values()):
        wire += frames_of(one)
        deliver(other, bytes(wire), accepted)
        wire.clear()
        for stream in accepted.values():
            while piece := stream.inbox.take():
                other.consumed(stream, len(piece))
                got[stream.stream_id] += piece
        one.receive_data(frames_of(other))
    assert {key: bytes(value) for key, value in got.items()} == wanted
    assert all(stream.fin_received for stream in accepted.values())
    assert pool.used == 0


def deliver(core: Yamux, data: bytes, accepted: dict) -> None:  # type: ignore[type-arg]
    for event in core.receive_data(data):
        if isinstance(event, StreamOpened):
            core.accept(event.stream)
            accepted[event.stream.stream_id] = event.stream
        assert not isinstance(event, GoAwayReceived | PongReceived)


@UNHURRIED
@given(
    st.lists(st.integers(1, 9000) | st.integers(30_000, 65_519), max_size=20),
    st.lists(st.integers(1, 100_000), max_size=40),
    st.booleans(),
)
def test_an_inbox_gives_what_it_got(sizes: list[int], reads: list[int], into: bool) -> None:
    inbox, expected, got = Inbox(), bytearray(), bytearray()
    for number, size in enumerate(sizes):
        message = bytes([number]) * 65_519
        inbox.append(message, 65_519 - size, 65_519)
        expected += message[:size]
    for size in [*reads, *[100_000] * 100]:
        assert inbox.size == len(expected) - len(got)
        if into:
            memory = bytearray(size)
            num_bytes = inbox.take_into(memoryview(memory))
            got += memory[:num_bytes]
        else:
            piece = inbox.take(size)
            assert isinstance(piece, bytes)
            assert 0 < len(piece) <= size or not inbox.size
            got += piece
    assert got == expected


def test_small_pieces_cost_little_more_than_their_bytes() -> None:
    inbox = Inbox()
    for _ in range(50_000):
        inbox.append(bytes(60_000), 0, 1)
    assert len(inbox._pieces) <= 2
    assert inbox.size == 50_000


def test_large_pieces_are_handed_out_as_they_are() -> None:
    inbox = Inbox()
    data = bytes(65_519)
    inbox.append(data, 0, len(data))
    assert inbox.take() is data


def test_answers_are_bounded() -> None:
    outflow = Outflow(max_owed=2, on_fin_sent=lambda stream: None)
    outflow.owe(b"1")
    outflow.owe(b"2")
    with pytest.raises(RemoteProtocolError):
        outflow.owe(b"3")


def test_a_write_tells_its_memory_free_once() -> None:
    core, _ = make(is_initiator=True)
    stream = core.open_stream()
    outgoing = core.queue(stream, memoryview(b"data"))
    frames_of(core)
    assert isinstance(outgoing, Outgoing)
    assert core.outflow.take_finished() == [outgoing]
    assert core.outflow.take_finished() == []
