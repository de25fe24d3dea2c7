"""Properties of the two decoders under any input and any chopping: what goes in comes out, a peer can
cause one error only, and neither memory nor work depends on what a header claims.
"""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p import wire
from neurogrid.p2p.wire.decoder import Decoder
from tests.unit.wire_strategies import (
    BRIEF,
    U32,
    UNHURRIED,
    V10_MESSAGES,
    V11_MESSAGES,
    mutated,
)

KIB = 1024
DECODERS = [wire.MessageDecoder, wire.StreamDecoder]
BOTH = [
    pytest.param(wire.MessageDecoder, V10_MESSAGES, id="1.0.0"),
    pytest.param(wire.StreamDecoder, V11_MESSAGES, id="1.1.0"),
]
Messages = st.SearchStrategy[wire.TensorMessage]
STEPS = st.lists(st.integers(1, 60), max_size=60)


def outcome(
    decoder: Decoder, data: bytes, steps: list[int]
) -> tuple[list[wire.TensorMessage], str | None]:
    """Messages and the text of the error, if any, at the latest at the end of the stream."""
    received: list[wire.TensorMessage] = []
    steps = list(steps)
    at = 0
    code: int | None = None
    text: str | None = None
    try:
        while at < len(data):
            step = steps.pop() if steps else len(data)
            received += decoder.receive_data(data[at : at + step])
            at += step
        decoder.receive_eof()
    except RemoteProtocolError as error:
        code, text = error.code, str(error)
    assert code in {None, *wire.ErrorCode}
    return received, text


def encoded(sent: list[wire.TensorMessage]) -> bytes:
    return b"".join(map(wire.encode_message, sent))


@pytest.mark.parametrize(("decoder_class", "messages"), BOTH)
@UNHURRIED
@given(st.data(), STEPS)
def test_round_trip_and_trailing_bytes(
    decoder_class: type[Decoder], messages: Messages, data: st.DataObject, steps: list[int]
) -> None:
    """Also that a part of the next message takes nothing from the ones before; its rest completes it."""
    sent = data.draw(st.lists(messages, max_size=4))
    stream = encoded(sent)
    bytewise = [1] * len(stream)
    for chopping in ([], steps, bytewise):
        assert outcome(decoder_class(), stream, chopping) == (sent, None)
    last = data.draw(messages)
    trailing = wire.encode_message(last)
    cut = data.draw(st.integers(1, len(trailing) - 1))
    received, text = outcome(decoder_class(), stream + trailing[:cut], steps)
    assert received == sent
    assert text is not None
    assert text.startswith("the stream ended after")
    decoder = decoder_class()
    assert decoder.receive_data(stream + trailing[:cut]) == sent
    assert decoder.receive_data(trailing[cut:]) == [last]
    decoder.receive_eof()


@pytest.mark.parametrize("decoder_class", DECODERS)
@UNHURRIED
@given(st.binary(max_size=300), STEPS)
def test_arbitrary_bytes(decoder_class: type[Decoder], data: bytes, steps: list[int]) -> None:
    whole = outcome(decoder_class(), data, [])
    assert outcome(decoder_class(), data, steps) == whole
    assert outcome(decoder_class(), data, [1] * len(data)) == whole


STREAMS = st.lists(V10_MESSAGES | V11_MESSAGES, min_size=1, max_size=3).map(encoded)


@pytest.mark.parametrize("decoder_class", DECODERS)
@UNHURRIED
@given(mutated(STREAMS), STEPS, st.binary(max_size=50))
def test_mutated_bytes_and_that_a_broken_decoder_stays_broken(
    decoder_class: type[Decoder], data: bytes, steps: list[int], more: bytes
) -> None:
    decoder = decoder_class()
    whole = outcome(decoder, data, [])
    assert outcome(decoder_class(), data, steps) == whole
    assert outcome(decoder_class(), data, [1] * len(data)) == whole
    _, text = whole
    if text is None:
        return
    assert str(decoder.error) == text
    assert decoder.awaited_bytes <= wire.DEFAULT_LIMITS.max_data
    for again in (lambda: decoder.receive_data(more), decoder.receive_eof):
        with pytest.raises(RemoteProtocolError) as caught:
            again()
        assert str(caught.value) == text


# What is awaited


@pytest.mark.parametrize(("decoder_class", "messages"), BOTH)
@BRIEF
@given(st.data())
def test_awaited_bytes_are_those_of_the_message_under_way(
    decoder_class: type[Decoder], messages: Messages, data: st.DataObject
) -> None:
    decoder = decoder_class()
    for message in data.draw(st.lists(messages, min_size=1, max_size=3)):
        stream = wire.encode_message(message)
        header = wire.header_bytes(message.msg_type)
        for at in range(len(stream)):
            under_way = header <= at
            assert decoder.awaited_bytes == (len(message.data) if under_way else 0)
            received = decoder.receive_data(stream[at : at + 1])
            assert received == ([message] if at + 1 == len(stream) else [])
        assert decoder.awaited_bytes == 0


@pytest.mark.parametrize("decoder_class", DECODERS)
@UNHURRIED
@given(st.sampled_from(sorted(wire.v10_table().by_number.values())), U32)
def test_what_is_over_its_limit_is_never_awaited(
    decoder_class: type[Decoder], msg_type: wire.MessageType, claimed: int
) -> None:
    header = bytearray(wire.encode_message(wire.TensorMessage(msg_type)))
    header[21:25] = claimed.to_bytes(4, "big")
    decoder = decoder_class()
    if claimed <= wire.DEFAULT_LIMITS.for_type(msg_type):
        decoder.receive_data(header)
        assert decoder.awaited_bytes == claimed
        return
    with pytest.raises(RemoteProtocolError) as caught:
        decoder.receive_data(header)
    assert caught.value.code == wire.ErrorCode.LIMIT_EXCEEDED
    assert decoder.awaited_bytes == 0


# Memory and work


@pytest.mark.parametrize("decoder_class", DECODERS)
@BRIEF
@given(
    st.sampled_from(sorted(wire.v10_table().by_number.values())),
    st.just(2**32 - 1) | U32,
    st.binary(max_size=200),
    STEPS,
)
def test_a_claim_costs_kilobytes(
    decoder_class: type[Decoder],
    msg_type: wire.MessageType,
    claimed: int,
    arrived: bytes,
    steps: list[int],
) -> None:
    """Whatever the header announces, up to 4 GiB: memory follows what came."""
    frame = bytearray(wire.encode_message(wire.TensorMessage(msg_type)))
    frame[21:25] = claimed.to_bytes(4, "big")
    tracemalloc.start()
    try:
        outcome(decoder_class(), bytes(frame) + arrived, steps)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * KIB


def counting(decoder_class: type[Decoder]) -> type[Decoder]:
    """The decoder with counts of its work: bytes written, and steps taken."""

    class Counting(decoder_class):  # type: ignore[misc, valid-type]
        written = 0
        steps = 0

        def _take_header(self, view: memoryview) -> int:
            taken: int = super()._take_header(view)
            self.written += taken
            self.steps += 1
            return taken

        def _take_body(self, view: memoryview, wanted: int) -> int:
            taken: int = super()._take_body(view, wanted)
            self.written += taken
            self.steps += 1
            return taken

        def _grow(self, arrived: int, wanted: int) -> None:
            self.written += self._filled
            super()._grow(arrived, wanted)

    return Counting


@pytest.mark.parametrize("decoder_class", DECODERS)
@BRIEF
@given(st.data())
def test_work_is_linear_whatever_the_chopping(
    decoder_class: type[Decoder], data: st.DataObject
) -> None:
    """Counted, not timed: bytes copied by bytes that came, steps by pieces and messages."""
    sizes = data.draw(st.lists(st.integers(0, 300 * KIB), min_size=1, max_size=3))
    stream = encoded(
        [wire.TensorMessage(wire.MessageType.ACTIVATION, data=bytes(n)) for n in sizes]
    )
    pieces = data.draw(st.lists(st.integers(1, 80 * KIB), min_size=1, max_size=30))
    decoder = counting(decoder_class)()
    at = num_pieces = 0
    received = 0
    while at < len(stream):
        step = pieces[num_pieces % len(pieces)] if num_pieces < 2000 else len(stream)
        received += len(decoder.receive_data(stream[at : at + step]))
        at += step
        num_pieces += 1
    assert received == len(sizes)
    assert decoder.written <= 2 * len(stream)  # type: ignore[attr-defined]
    assert decoder.steps <= num_pieces + 2 * len(sizes)  # type: ignore[attr-defined]
