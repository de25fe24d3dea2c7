"""The Yamux state machine, frame by frame: streams, windows, flags, turns, violations. No sockets."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.link import LinkLimits
from neurogrid.p2p.link.events import (
    DataReceived,
    Event,
    GoAwayReceived,
    PongReceived,
    StreamAcknowledged,
    StreamFinished,
    StreamOpened,
    StreamReset,
)
from neurogrid.p2p.link.limits import BufferPool, ConnectionBuffers
from neurogrid.p2p.link.stream_state import StreamState
from neurogrid.p2p.link.yamux import Yamux

DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
KIB, MIB = 1024, 1024 * 1024


def frame(
    frame_type: int, flags: int, stream_id: int, length: int | None = None, data: bytes = b""
) -> bytes:
    """A frame as the specification draws it."""
    return (
        struct.pack(
            ">BBHII", 0, frame_type, flags, stream_id, len(data) if length is None else length
        )
        + data
    )


def make(*, is_initiator: bool = False, limits: LinkLimits | None = None) -> Yamux:
    pool = BufferPool(limits or LinkLimits())
    return Yamux(
        is_initiator=is_initiator,
        limits=pool.limits,
        buffers=ConnectionBuffers(pool),
        clock=lambda: 0.0,
    )


def sent(core: Yamux, max_payload: int = 64 * KIB) -> list[tuple[int, int, int, int | bytes]]:
    """All frames that wait, as (type, flags, stream id, length or payload)."""
    frames: list[tuple[int, int, int, int | bytes]] = []
    while (next_frame := core.outflow.next_frame(max_payload)) is not None:
        header, payload = next_frame
        version, frame_type, flags, stream_id, length = struct.unpack(">BBHII", header)
        assert version == 0
        if frame_type == DATA:
            assert length == len(payload)
        frames.append(
            (frame_type, flags, stream_id, bytes(payload) if frame_type == DATA else length)
        )
    return frames


def opened(core: Yamux, stream_id: int = 1) -> StreamState:
    """A stream of the peer, acknowledged."""
    (event,) = core.receive_data(frame(WINDOW, SYN, stream_id, 0))
    assert isinstance(event, StreamOpened)
    core.accept(event.stream)
    assert sent(core) == [(WINDOW, ACK, stream_id, 0)]
    return event.stream


def send(core: Yamux, stream: StreamState, data: bytes) -> None:
    core.queue(stream, memoryview(data))


# ---------------------------------------------------------------------- streams begin and end


def test_the_dialler_takes_odd_ids_and_the_other_even_ones() -> None:
    for is_initiator, ids in ((True, [1, 3, 5]), (False, [2, 4, 6])):
        core = make(is_initiator=is_initiator)
        assert [core.open_stream().stream_id for _ in ids] == ids
        assert sent(core) == [(WINDOW, SYN, stream_id, 0) for stream_id in ids]


def test_the_first_data_carries_the_syn() -> None:
    core = make(is_initiator=True)
    stream = core.open_stream()
    send(core, stream, b"hello")
    # What has only a flag to say goes first, and data need not say it again.
    assert sent(core) == [(WINDOW, SYN, 1, 0), (DATA, 0, 1, b"hello")]


def test_a_stream_of_the_peer_is_acknowledged_once() -> None:
    core = make()
    stream = opened(core)
    send(core, stream, b"answer")
    assert sent(core) == [(DATA, 0, 1, b"answer")]


@pytest.mark.parametrize("first", [frame(DATA, SYN, 1, data=b"hi"), frame(WINDOW, SYN, 1, 0)])
def test_both_types_may_open_a_stream(first: bytes) -> None:
    core = make()
    events = core.receive_data(first)
    assert isinstance(events[0], StreamOpened)
    assert core.streams[1].inbox.take() == (b"hi" if first[1] == DATA else b"")


def test_streams_need_not_be_opened_in_order() -> None:
    core = make()
    for stream_id in (5, 1, 3):
        assert len(core.receive_data(frame(WINDOW, SYN, stream_id, 0))) == 1
    assert sorted(core.streams) == [1, 3, 5]


def test_an_acknowledgement_is_told_once() -> None:
    core = make(is_initiator=True)
    stream = core.open_stream()
    assert core.receive_data(frame(WINDOW, ACK, 1, 0)) == [StreamAcknowledged(stream)]
    assert core.receive_data(frame(DATA, ACK, 1, data=b"x")) == [DataReceived(stream)]


def test_half_close_leaves_the_other_direction_open() -> None:
    core = make()
    stream = opened(core)
    core.finish(stream)
    core.finish(stream)
    assert sent(core) == [(WINDOW, FIN, 1, 0)]
    with pytest.raises(LocalProtocolError):
        send(core, stream, b"too late")
    assert core.receive_data(frame(DATA, 0, 1, data=b"still")) == [DataReceived(stream)]
    assert core.receive_data(frame(WINDOW, FIN, 1, 0)) == [StreamFinished(stream)]
    assert core.streams == {}
    assert stream.inbox.take() == b"still"


def test_the_end_rides_on_the_last_data() -> None:
    core = make()
    stream = opened(core)
    send(core, stream, b"one")
    send(core, stream, b"two")
    core.finish(stream)
    assert sent(core) == [(DATA, 0, 1, b"one"), (DATA, FIN, 1, b"two")]


def test_an_end_on_data_comes_after_the_data() -> None:
    core = make()
    stream = opened(core)
    data = frame(DATA, FIN, 1, data=b"last words")
    assert core.receive_data(data[:15]) == [DataReceived(stream)]
    assert not stream.fin_received
    assert core.receive_data(data[15:]) == [DataReceived(stream), StreamFinished(stream)]


def test_a_reset_of_the_peer_drops_what_was_unsent_and_leaves_what_was_unread() -> None:
    core = make()
    stream = opened(core)
    core.receive_data(frame(DATA, 0, 1, data=b"unread"))
    outgoing = core.queue(stream, memoryview(b"unsent"))
    assert core.receive_data(frame(WINDOW, RST, 1, 0)) == [StreamReset(stream)]
    assert stream.reset_by_peer
    assert stream.inbox.take() == b"unread"
    assert core.outflow.take_finished() == [outgoing]
    assert outgoing.is_over
    assert not outgoing.is_sent
    assert sent(core) == []
    assert core.streams == {}


def test_a_reset_of_ours_is_told_once_and_late_frames_are_dropped() -> None:
    core = make()
    stream = opened(core)
    core.receive_data(frame(DATA, 0, 1, data=b"unread"))
    core.reset(stream)
    core.reset(stream)
    assert sent(core) == [(WINDOW, RST, 1, 0)]
    assert stream.inbox.size == 0
    late = frame(DATA, 0, 1, data=bytes(1000)) + frame(WINDOW, 0, 1, 5) + frame(WINDOW, FIN, 1, 0)
    assert core.receive_data(late) == []
    assert core.receive_data(frame(PING, SYN, 0, 1)) == []


def test_a_reset_in_the_middle_of_a_frame_drops_its_rest() -> None:
    core = make()
    stream = opened(core)
    data = frame(DATA, FIN, 1, data=bytes(1000))
    core.receive_data(data[:500])
    core.reset(stream)
    assert core.receive_data(data[500:]) == []
    assert isinstance(core.receive_data(frame(WINDOW, SYN, 3, 0))[0], StreamOpened)


def test_a_stream_that_the_peer_never_heard_of_needs_no_reset() -> None:
    core = make(is_initiator=True)
    core.reset(core.open_stream())
    assert sent(core) == []


def test_a_closed_reader_drops_and_credits_what_comes() -> None:
    core = make()
    stream = opened(core)
    core.receive_data(frame(DATA, 0, 1, data=bytes(100 * KIB)))
    core.discard(stream)
    core.receive_data(frame(DATA, 0, 1, data=bytes(100 * KIB)))
    assert stream.inbox.size == 0
    assert (WINDOW, 0, 1, 200 * KIB) in sent(core)


def test_a_stream_that_only_we_have_closed_is_reset_in_the_end() -> None:
    core = make()
    stream = opened(core)
    core.finish(stream)
    core.discard(stream)
    assert sent(core) == [(WINDOW, FIN, 1, 0)]
    assert core.sweep(2) == core.sweep(2) == []
    assert core.sweep(2) == [stream]
    assert sent(core) == [(WINDOW, RST, 1, 0)]


def test_half_closed_streams_are_not_swept() -> None:
    core = make()
    core.finish(opened(core))
    sent(core)
    assert [core.sweep(1) for _ in range(5)] == [[]] * 5


# ---------------------------------------------------------------------- windows


def test_data_stops_at_the_window_and_goes_on_with_credit() -> None:
    core = make()
    stream = opened(core)
    send(core, stream, bytes(300 * KIB))
    assert sum(len(f[3]) for f in sent(core) if isinstance(f[3], bytes)) == 256 * KIB
    assert sent(core) == []
    core.receive_data(frame(WINDOW, 0, 1, 10))
    assert sent(core) == [(DATA, 0, 1, bytes(10))]
    core.receive_data(frame(WINDOW, 0, 1, MIB))
    assert sent(core) == [(DATA, 0, 1, bytes(44 * KIB - 10))]


def test_a_window_grows_while_its_reader_keeps_up() -> None:
    core = make(limits=LinkLimits(small_window=MIB, max_window=MIB))
    stream = opened(core)
    window, granted = 256 * KIB, []
    for _ in range(6):
        core.receive_data(frame(DATA, 0, 1, data=bytes(window // 2)))
        while data := stream.inbox.take():
            core.consumed(stream, len(data))
        ((_, _, _, credit),) = sent(core)
        assert isinstance(credit, int)
        granted.append(credit)
        window += credit - window // 2
    assert window == MIB
    assert granted == [384 * KIB, 768 * KIB] + [512 * KIB] * 4


@pytest.mark.parametrize(
    ("seconds", "window"), [(0.03, 4 * MIB), (0.05, MIB), (3.0, MIB)], ids=["fast", "slow", "idle"]
)
def test_a_large_window_is_for_long_round_trips(seconds: float, window: int) -> None:
    """Half a window used up within four round trips, of 10 ms here: the window is what holds the peer up."""
    now = 0.0
    pool = BufferPool(LinkLimits(small_window=MIB, max_window=4 * MIB))
    core = Yamux(
        is_initiator=False,
        limits=pool.limits,
        buffers=ConnectionBuffers(pool),
        clock=lambda: now,
    )
    core.windows.round_trip = 0.01
    stream = opened(core)
    for _ in range(10):
        core.receive_data(frame(DATA, 0, 1, data=bytes(stream.window // 2)))
        now += seconds
        while data := stream.inbox.take():
            core.consumed(stream, len(data))
        sent(core)
    assert stream.window == window


def test_a_window_does_not_grow_for_a_slow_reader() -> None:
    core = make()
    stream = opened(core)
    core.receive_data(frame(DATA, 0, 1, data=bytes(256 * KIB)))
    data = stream.inbox.take(128 * KIB)
    core.consumed(stream, len(data))
    assert sent(core) == [(WINDOW, 0, 1, 128 * KIB)]


def test_windows_grow_no_further_than_the_connection_may_hold() -> None:
    core = make(limits=LinkLimits(connection_bytes=MIB))
    for stream_id in (1, 3, 5, 7):
        stream = opened(core, stream_id)
        for _ in range(3):
            core.receive_data(frame(DATA, 0, stream_id, data=bytes(128 * KIB)))
            while data := stream.inbox.take():
                core.consumed(stream, len(data))
            sent(core)
    assert sum(s.window - 256 * KIB for s in core.streams.values()) <= MIB


def test_credit_is_not_given_to_a_peer_that_has_finished() -> None:
    core = make()
    stream = opened(core)
    core.receive_data(frame(DATA, FIN, 1, data=bytes(200 * KIB)))
    while data := stream.inbox.take():
        core.consumed(stream, len(data))
    assert sent(core) == []


def test_unread_bytes_beyond_the_connections_bound_reset_the_stream() -> None:
    core = make(limits=LinkLimits(connection_bytes=300 * KIB))
    first, second = opened(core, 1), opened(core, 3)
    core.receive_data(frame(DATA, 0, 1, data=bytes(200 * KIB)))
    events = core.receive_data(frame(DATA, 0, 3, data=bytes(200 * KIB)))
    assert events == [StreamReset(second)]
    assert sent(core) == [(WINDOW, RST, 3, 0)]
    assert first.inbox.size == 200 * KIB


def test_connections_share_a_bound_and_keep_a_part_of_their_own() -> None:
    limits = LinkLimits(total_bytes=300 * KIB, assured_bytes=50 * KIB)
    pool = BufferPool(limits)
    greedy, modest = (
        Yamux(is_initiator=False, limits=limits, buffers=ConnectionBuffers(pool), clock=lambda: 0.0)
        for _ in "ab"
    )
    opened(greedy), opened(greedy, 3), opened(modest)
    greedy.receive_data(frame(DATA, 0, 1, data=bytes(200 * KIB)))
    greedy.receive_data(frame(DATA, 0, 3, data=bytes(90 * KIB)))
    assert len(modest.receive_data(frame(DATA, 0, 1, data=bytes(40 * KIB)))) == 1
    assert pool.used == 330 * KIB
    assert modest.streams[1].inbox.size == 40 * KIB
    reset = modest.receive_data(frame(DATA, 0, 1, data=bytes(40 * KIB)))
    assert isinstance(reset[0], StreamReset)
    assert pool.used == 290 * KIB


# ---------------------------------------------------------------------- a reader's own memory


def test_payload_is_placed_into_a_readers_memory() -> None:
    core = make()
    stream = opened(core)
    memory = bytearray(10)
    loan = core.lend(stream, memoryview(memory))
    core.receive_data(frame(DATA, 0, 1, 8))
    assert core.payload_target(9) is None
    target = core.payload_target(6)
    assert target is not None
    target[:] = b"direct"
    assert core.payload_placed(6) == [DataReceived(stream)]
    core.receive_data(b"ly" + frame(DATA, 0, 1, data=b"!?and more"))
    assert loan.filled == 10
    assert bytes(memory) == b"directly!?"
    assert stream.inbox.take() == b"and more"


def test_memory_that_is_wanted_full_is_told_of_once() -> None:
    core = make()
    stream = opened(core)
    memory = bytearray(10)
    core.lend(stream, memoryview(memory), wants_all=True)
    assert core.receive_data(frame(DATA, 0, 1, data=b"1234")) == []
    core.receive_data(frame(DATA, 0, 1, 4))
    target = core.payload_target(4)
    assert target is not None
    target[:] = b"5678"
    assert core.payload_placed(4) == []
    assert core.receive_data(frame(DATA, 0, 1, data=b"90")) == [DataReceived(stream)]
    assert memory == b"1234567890"
    assert core.receive_data(frame(DATA, 0, 1, data=b"more")) == [DataReceived(stream)]


def test_memory_that_was_reclaimed_is_left_alone() -> None:
    core = make()
    stream = opened(core)
    memory = bytearray(10)
    core.lend(stream, memoryview(memory))
    core.reclaim(stream)
    core.receive_data(frame(DATA, 0, 1, data=b"data"))
    assert memory == bytes(10)
    assert stream.inbox.take() == b"data"


# ---------------------------------------------------------------------- turns


def test_streams_take_turns_frame_by_frame() -> None:
    core = make()
    bulk, small = opened(core, 1), opened(core, 3)
    send(core, bulk, bytes(100 * KIB))
    first = core.outflow.next_frame(10 * KIB)
    assert first is not None
    send(core, small, b"urgent")
    turns = [(stream_id, len(data)) for _, _, stream_id, data in sent(core, 10 * KIB)]  # type: ignore[arg-type]
    assert turns[:3] == [(1, 10 * KIB), (3, 6), (1, 10 * KIB)]


def test_pings_credit_and_resets_go_before_data() -> None:
    core = make()
    bulk, other = opened(core, 1), opened(core, 3)
    send(core, bulk, b"bulk")
    core.receive_data(frame(PING, SYN, 0, 7))
    core.reset(other)
    assert sent(core) == [(PING, ACK, 0, 7), (WINDOW, RST, 3, 0), (DATA, 0, 1, b"bulk")]


def test_a_write_withdrawn_in_the_middle_leaves_a_prefix() -> None:
    core = make()
    stream = opened(core)
    outgoing = core.queue(stream, memoryview(b"x" * 100))
    core.queue(stream, memoryview(b"next"))
    assert core.outflow.next_frame(30) is not None
    core.withdraw(stream, outgoing)
    core.finish(stream)
    assert sent(core) == [(DATA, FIN, 1, b"next")]


def test_an_end_waits_no_more_for_a_write_that_was_withdrawn() -> None:
    core = make()
    stream = opened(core)
    outgoing = core.queue(stream, memoryview(b"never"))
    core.finish(stream)
    core.withdraw(stream, outgoing)
    assert sent(core) == [(WINDOW, FIN, 1, 0)]


# ---------------------------------------------------------------------- the connection


def test_pings_are_answered_and_pongs_told() -> None:
    core = make()
    assert core.receive_data(frame(PING, SYN, 0, 99)) == []
    core.ping(5)
    assert sent(core) == [(PING, ACK, 0, 99), (PING, SYN, 0, 5)]
    assert core.receive_data(frame(PING, ACK, 0, 5)) == [PongReceived(5)]


def test_no_streams_are_opened_to_a_peer_that_goes_away() -> None:
    core = make(is_initiator=True)
    stream = core.open_stream()
    assert core.receive_data(frame(GO_AWAY, 0, 0, 0)) == [GoAwayReceived(0)]
    with pytest.raises(LocalProtocolError):
        core.open_stream()
    send(core, stream, b"goes on")
    assert sent(core)[-1] == (DATA, 0, 1, b"goes on")


def test_after_going_away_new_streams_are_refused() -> None:
    core = make()
    core.go_away(0)
    core.go_away(1)
    assert core.receive_data(frame(DATA, SYN, 1, data=b"late")) == []
    assert sent(core) == [(WINDOW, RST, 1, 0), (GO_AWAY, 0, 0, 0)]


def test_streams_beyond_the_bound_are_refused_and_the_others_live() -> None:
    core = make(limits=LinkLimits(max_streams=2))
    for stream_id in (1, 3, 5):
        core.receive_data(frame(DATA, SYN, stream_id, data=b"x"))
    assert sent(core) == [(WINDOW, RST, 5, 0)]
    core.reset(core.streams[1])
    assert isinstance(core.receive_data(frame(WINDOW, SYN, 7, 0))[0], StreamOpened)


def test_refusals_that_the_peer_does_not_read_are_bounded() -> None:
    core = make(limits=LinkLimits(max_owed_frames=3))

    def offer(stream_id: int) -> None:
        (event,) = core.receive_data(frame(WINDOW, SYN, stream_id, 0))
        assert isinstance(event, StreamOpened)
        core.refuse(event.stream)

    for stream_id in (1, 3, 5):
        offer(stream_id)
    assert not core.streams
    with pytest.raises(RemoteProtocolError):
        offer(7)
    assert sent(core) == [(WINDOW, RST, stream_id, 0) for stream_id in (1, 3, 5)]
    offer(9)


def test_our_own_streams_are_bounded_and_wait_for_acknowledgement() -> None:
    core = make(is_initiator=True, limits=LinkLimits(max_streams=3, max_unacknowledged=2))
    first, second = core.open_stream(), core.open_stream()
    assert not core.can_open
    core.receive_data(frame(WINDOW, ACK, 1, 0))
    assert core.can_open
    core.open_stream()
    with pytest.raises(LocalProtocolError):
        core.open_stream()
    core.receive_data(frame(WINDOW, RST, first.stream_id, 0))
    core.reset(second)
    assert core.can_open
    core.open_stream()


def test_everything_may_come_byte_by_byte() -> None:
    core = make()
    data = (
        frame(DATA, SYN, 1, data=b"abc")
        + frame(PING, SYN, 0, 3)
        + frame(DATA, FIN, 1, data=b"def")
        + frame(GO_AWAY, 0, 0, 0)
    )
    events: list[Event] = []
    for byte in data:
        events += core.receive_data(bytes([byte]))
    assert isinstance(events[0], StreamOpened)
    assert events[-2:] == [StreamFinished(core.streams[1]), GoAwayReceived(0)]
    assert core.streams[1].inbox.take() == b"abcdef"


VIOLATIONS: dict[str, Callable[[Yamux], bytes]] = {
    "version": lambda core: b"\x01" + frame(PING, SYN, 0, 1)[1:],
    "type": lambda core: frame(4, 0, 0, 0),
    "type on a stream": lambda core: frame(200, 0, 1, 0),
    "ping on a stream": lambda core: frame(PING, SYN, 1, 1),
    "ping without a flag": lambda core: frame(PING, 0, 0, 1),
    "goodbye on a stream": lambda core: frame(GO_AWAY, 0, 1, 0),
    "stream 0": lambda core: frame(DATA, SYN, 0, data=b"x"),
    "data on stream 0": lambda core: frame(DATA, 0, 0, data=b"x"),
    "our parity": lambda core: frame(WINDOW, SYN, 2, 0),
    "opened twice": lambda core: frame(WINDOW, SYN, 1, 0),
    "never opened by them": lambda core: frame(DATA, 0, 3, data=b"x"),
    "never opened by us": lambda core: frame(WINDOW, 0, 2, 1),
    "window exceeded": lambda core: frame(DATA, 0, 1, 256 * KIB + 1),
    "window exceeded with the syn": lambda core: frame(DATA, SYN, 3, 256 * KIB + 1),
    "window exceeded bit by bit": lambda core: 3 * frame(DATA, 0, 1, data=bytes(100 * KIB)),
    "window beyond its type": lambda core: frame(WINDOW, 0, 1, 2**32 - 1),
    "data after the end": lambda core: frame(WINDOW, FIN, 1, 0) + frame(DATA, 0, 1, data=b"x"),
    "pings without end": lambda core: 1025 * frame(PING, SYN, 0, 1),
    "streams without end": lambda core: b"".join(
        frame(WINDOW, SYN, 3 + 2 * i, 0) for i in range(2048 + 1025)
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_ends_the_connection(name: str) -> None:
    core = make()
    opened(core)
    with pytest.raises(RemoteProtocolError):
        core.receive_data(VIOLATIONS[name](core))


def test_a_window_used_up_to_the_last_byte_is_no_violation() -> None:
    core = make()
    stream = opened(core)
    core.receive_data(frame(DATA, 0, 1, data=bytes(256 * KIB)))
    while data := stream.inbox.take():
        core.consumed(stream, len(data))
    with pytest.raises(RemoteProtocolError):
        # Credit that is not sent yet is no credit.
        core.receive_data(frame(DATA, 0, 1, data=b"x"))
