"""The stream decoders: what they keep, what they cost, and how they fail."""

from __future__ import annotations

import ctypes
import resource
import struct
import tracemalloc
from typing import NoReturn

import pytest

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.wire import (
    DEFAULT_LIMITS,
    TENSOR_ALIGNMENT,
    ErrorCode,
    Limits,
    MessageDecoder,
    MessageType,
    StreamDecoder,
    TensorMessage,
    encode_header,
    encode_message,
)
from neurogrid.p2p.wire import decoder as decoder_module
from neurogrid.p2p.wire.decoder import Decoder

KIB = 1024
MIB = 1024 * KIB


def activation(size: int, *, request_id: int = 0) -> TensorMessage:
    return TensorMessage(MessageType.ACTIVATION, request_id=request_id, data=bytes(size))


class CountingDecoder(StreamDecoder):
    """Counts the work: bytes moved when a buffer grows, and the passes through the two steps."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(limits)
        self.moved = 0
        self.passes = 0

    def _grow(self, arrived: int, wanted: int) -> None:
        self.moved += self._filled
        super()._grow(arrived, wanted)

    def _take_header(self, view: memoryview) -> int:
        self.passes += 1
        return super()._take_header(view)

    def _take_body(self, view: memoryview, wanted: int) -> int:
        self.passes += 1
        return super()._take_body(view, wanted)


@pytest.mark.parametrize("step", [1, 7, 100, 4 * KIB, 64 * KIB, 3 * MIB])
def test_work_is_linear_in_bytes_and_pieces(step: int) -> None:
    size = 64 * KIB if step < 100 else 3 * MIB
    data = encode_message(activation(size))
    decoder = CountingDecoder()
    messages = []
    num_pieces = 0
    for at in range(0, len(data), step):
        num_pieces += 1
        messages += decoder.receive_data(data[at : at + step])
    assert [len(m.data) for m in messages] == [size]
    assert decoder.moved <= size * 2 / 3
    assert decoder.passes <= num_pieces + 1


def test_many_messages_in_one_piece_take_two_passes_each() -> None:
    decoder = CountingDecoder()
    messages = decoder.receive_data(encode_message(activation(5)) * 1000)
    assert len(messages) == 1000
    assert decoder.passes == 2000
    assert decoder.moved == 0


@pytest.mark.parametrize("decoder_class", [MessageDecoder, StreamDecoder])
@pytest.mark.parametrize("arrived", [0, 1, 100])
def test_an_announced_length_costs_kilobytes(decoder_class: type[Decoder], arrived: int) -> None:
    header = encode_header(activation(0), DEFAULT_LIMITS.tensor)
    tracemalloc.start()
    try:
        decoders = [decoder_class() for _ in range(10)]
        for decoder in decoders:
            assert decoder.receive_data(header + bytes(arrived)) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * 20 * KIB


def test_a_length_of_four_gib_is_refused_for_kilobytes() -> None:
    data = bytes.fromhex("01" + "00" * 20 + "ffffffff")

    def refuse() -> pytest.ExceptionInfo[RemoteProtocolError]:
        with pytest.raises(RemoteProtocolError, match="4294967295") as caught:
            MessageDecoder().receive_data(data)
        return caught

    refuse()  # what is made once, such as a compiled pattern, does not count
    tracemalloc.start()
    try:
        caught = refuse()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.code == ErrorCode.LIMIT_EXCEEDED
    assert peak < 20 * KIB


def test_memory_follows_what_arrived() -> None:
    header = encode_header(activation(0), DEFAULT_LIMITS.tensor)
    piece = bytes(64 * KIB)
    decoder = StreamDecoder()
    tracemalloc.start()
    try:
        decoder.receive_data(header)
        for count in range(1, 33):
            decoder.receive_data(piece)
            held, _ = tracemalloc.get_traced_memory()
            assert held <= 8 * count * len(piece) + 16 * KIB
    finally:
        tracemalloc.stop()


def test_data_is_writable_aligned_and_its_own() -> None:
    source = bytearray(encode_message(activation(100)) + encode_message(activation(40 * KIB)))
    decoder = StreamDecoder()
    messages = decoder.receive_data(source[:1000]) + decoder.receive_data(memoryview(source)[1000:])
    source[:] = b"\xff" * len(source)
    for message in messages:
        assert isinstance(message.data, memoryview)
        assert not message.data.readonly
        assert message.data == bytes(len(message.data))
        address = ctypes.addressof(ctypes.c_char.from_buffer(message.data))
        assert address % TENSOR_ALIGNMENT == 0
        message.data[0] = 1


def test_messages_before_a_violation_are_given_and_the_violation_stays() -> None:
    good = encode_message(activation(3, request_id=7))
    decoder = StreamDecoder(from_peer="12D3KooW")
    (message,) = decoder.receive_data(good + b"\xff" + good)
    assert message.request_id == 7
    assert message.from_peer == "12D3KooW"
    assert decoder.error is not None
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="0xff"):
            decoder.receive_data(good)
        with pytest.raises(RemoteProtocolError, match="0xff"):
            decoder.receive_eof()


@pytest.mark.parametrize("size", [0, 1, 24, 25, 26, 34])
def test_end_of_stream(size: int) -> None:
    data = encode_message(activation(10))[:size]
    decoder = MessageDecoder()
    assert decoder.receive_data(data) == []
    if size == 0:
        decoder.receive_eof()
        decoder.receive_eof()
        return
    with pytest.raises(RemoteProtocolError, match="ended after") as caught:
        decoder.receive_eof()
    assert caught.value.code == ErrorCode.PROTOCOL_VIOLATION
    with pytest.raises(RemoteProtocolError, match="ended after"):
        decoder.receive_data(b"\x01")


def test_data_after_the_end_is_our_own_mistake() -> None:
    decoder = MessageDecoder()
    decoder.receive_eof()
    assert decoder.receive_data(b"") == []
    with pytest.raises(LocalProtocolError):
        decoder.receive_data(b"\x01")


def test_limits_are_per_type_and_inclusive() -> None:
    limits = Limits(tensor=10, weights=5)
    for msg_type, allowed in (
        (MessageType.ACTIVATION, 10),
        (MessageType.TRACED_RESPONSE, 10),
        (None, 10),
        (MessageType.WEIGHTS, 5),
        (MessageType.WEIGHTS_ACK, 0),
        (MessageType.GPU_INFO_REQUEST, 0),
    ):
        fits = encode_message(TensorMessage(msg_type, data=bytes(allowed)))
        assert [len(m.data) for m in MessageDecoder(limits).receive_data(fits)] == [allowed]
        too_long = TensorMessage(msg_type)
        header = encode_header(
            too_long, allowed + 1, limits=Limits(weights_ack=1, gpu_info_request=1)
        )
        with pytest.raises(RemoteProtocolError) as caught:
            MessageDecoder(limits).receive_data(header)
        assert caught.value.code == ErrorCode.LIMIT_EXCEEDED
        with pytest.raises(LocalProtocolError):
            encode_message(TensorMessage(msg_type, data=bytes(allowed + 1)), limits=limits)


def test_the_largest_limit_is_what_a_hello_announces() -> None:
    assert DEFAULT_LIMITS.max_data == max(map(DEFAULT_LIMITS.for_type, [None, *MessageType]))
    assert Limits(tensor=1, hello=9 * MIB).max_data == 9 * MIB


def test_versions_share_nothing_but_their_common_types() -> None:
    legacy = encode_message(TensorMessage(None, layer_id=5))
    hello = encode_message(TensorMessage(MessageType.HELLO))
    assert MessageDecoder().receive_data(legacy)
    assert StreamDecoder().receive_data(hello)
    with pytest.raises(RemoteProtocolError):
        StreamDecoder().receive_data(legacy)
    with pytest.raises(RemoteProtocolError):
        MessageDecoder().receive_data(hello)


@pytest.mark.parametrize("decoder_class", [MessageDecoder, StreamDecoder])
@pytest.mark.parametrize("size", [64 * KIB + 1, MIB + 8, 3 * MIB])
@pytest.mark.parametrize("step", [1000, 64 * KIB, 4 * MIB])
def test_large_data_can_be_received_into_its_place(
    decoder_class: type[MessageDecoder | StreamDecoder], size: int, step: int
) -> None:
    decoder = decoder_class()
    stream = memoryview(encode_message(activation(size)) + encode_message(activation(10)))
    messages: list[TensorMessage] = []
    at, direct_bytes = 0, 0
    while at < len(stream):
        buffer = decoder.get_buffer()
        if buffer is None:
            piece = stream[at : at + 100]
            messages += decoder.receive_data(piece)
            at += len(piece)
        else:
            piece = stream[at : at + min(step, len(buffer))]
            buffer[: len(piece)] = piece
            messages += decoder.buffer_filled(len(piece))
            at += len(piece)
            direct_bytes += len(piece)
    assert [len(message.data) for message in messages] == [size, 10]
    assert messages[0].data == activation(size).data
    assert not memoryview(messages[0].data).readonly
    assert direct_bytes > size - 64 * KIB - 200
    decoder.receive_eof()


def test_a_buffer_that_is_lent_and_not_filled_costs_little() -> None:
    decoder = StreamDecoder()
    header = encode_message(activation(0))[:-4] + struct.pack(">I", 256 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decoder.receive_data(header) == []
    for count in range(3):
        buffer = decoder.get_buffer()
        assert buffer is not None
        assert len(buffer) == 256 * MIB - 3 * KIB * count
        buffer[: 3 * KIB] = bytes(3 * KIB)
        assert decoder.buffer_filled(3 * KIB) == []
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * KIB < 16 * MIB
    with pytest.raises(RemoteProtocolError, match=f"{9 * KIB} of {256 * MIB} bytes"):
        decoder.receive_eof()


@pytest.mark.parametrize("is_lent", [True, False])
def test_a_message_for_which_there_is_no_memory_breaks_the_stream_and_nothing_else(
    is_lent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the system gives no process more than there is."""

    def no_pages(*_: object, **__: object) -> NoReturn:
        raise OSError(12, "Cannot allocate memory")

    def no_heap(num_bytes: int) -> NoReturn:
        raise MemoryError

    decoder = StreamDecoder()
    header = encode_message(activation(0))[:-4] + struct.pack(">I", 256 * MIB)
    assert decoder.receive_data(header) == []
    monkeypatch.setattr("mmap.mmap", no_pages)
    monkeypatch.setattr(decoder_module, "bytearray", no_heap, raising=False)
    with pytest.raises(RemoteProtocolError, match="no memory here for a message of") as told:
        decoder.get_buffer() if is_lent else decoder.receive_data(bytes(100))
    assert told.value.code == ErrorCode.BUSY
    assert decoder.error is told.value
    with pytest.raises(RemoteProtocolError, match="no memory here"):
        decoder.receive_data(bytes(100))


def test_no_buffer_is_lent_for_what_is_small_or_broken() -> None:
    decoder = StreamDecoder()
    assert decoder.get_buffer() is None
    decoder.receive_data(encode_message(activation(100))[:30])
    assert decoder.get_buffer() is None
    with pytest.raises(LocalProtocolError):
        decoder.buffer_filled(1000)
    broken = StreamDecoder()
    with pytest.raises(RemoteProtocolError):
        broken.receive_data(b"\xff")
    with pytest.raises(RemoteProtocolError):
        broken.get_buffer()
