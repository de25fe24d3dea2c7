"""Properties of the codec under any input: what goes in comes out, and a peer can cause one error only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p import wire
from neurogrid.p2p.wire.decoder import _Decoder

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
LAYER = st.integers(0, wire.MAX_LAYERS - 1)
TOKENS = st.integers(1, 2**32 - 1)
LINE = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=40)
SPAN = st.tuples(LAYER, st.integers(1, wire.MAX_LAYERS)).filter(lambda s: s[0] < s[1])
# Without deadlines: how long an example takes on a busy machine says nothing of the codec.
UNHURRIED = settings(deadline=None)
BRIEF = settings(deadline=None, max_examples=50)

DECODERS = [wire.MessageDecoder, wire.StreamDecoder]

TRACES = st.builds(
    wire.TraceContext,
    st.binary(min_size=16, max_size=16).filter(any),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 255),
)


@st.composite
def messages(draw: st.DrawFn, types: frozenset[wire.MessageType | None]) -> wire.TensorMessage:
    msg_type = draw(st.sampled_from(sorted(types, key=lambda t: t or 0)))
    legacy = msg_type is None
    largest = min(200, wire.DEFAULT_LIMITS.for_type(msg_type))
    return wire.TensorMessage(
        msg_type,
        layer_id=draw(st.integers(0, 2**24 - 1) if legacy else U32),
        seq_id=draw(U64),
        request_id=0 if legacy else draw(U64),
        data=draw(st.binary(max_size=largest)),
        trace_context=draw(st.none() | TRACES) if msg_type in wire.TRACED_TYPES else None,
    )


V10_MESSAGES = messages(wire.V10_TYPES | {None})
V11_MESSAGES = messages(frozenset(wire.V11_TYPES))


def outcome(
    decoder: _Decoder, data: bytes, steps: list[int]
) -> tuple[list[wire.TensorMessage], str | None]:
    """Messages and the text of the error, if any, at the latest at the end of the stream."""
    received: list[wire.TensorMessage] = []
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


STEPS = st.lists(st.integers(1, 60), max_size=60)


@UNHURRIED
@given(st.lists(V10_MESSAGES, max_size=5), STEPS)
def test_round_trip_v10(sent: list[wire.TensorMessage], steps: list[int]) -> None:
    data = b"".join(map(wire.encode_message, sent))
    assert outcome(wire.MessageDecoder(), data, steps) == (sent, None)


@UNHURRIED
@given(st.lists(V11_MESSAGES, max_size=5), STEPS)
def test_round_trip_v11(sent: list[wire.TensorMessage], steps: list[int]) -> None:
    data = b"".join(map(wire.encode_message, sent))
    assert outcome(wire.StreamDecoder(), data, steps) == (sent, None)


@pytest.mark.parametrize("decoder_class", DECODERS)
@UNHURRIED
@given(st.binary(max_size=300), STEPS)
def test_arbitrary_bytes(decoder_class: type[_Decoder], data: bytes, steps: list[int]) -> None:
    assert outcome(decoder_class(), data, steps) == outcome(decoder_class(), data, [])


@st.composite
def mutated(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> bytes:
    """Valid bytes with some of them changed, cut out or put in."""
    data = bytearray(draw(source))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["change", "cut", "insert"])):
            case "change" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 8))]
            case _:
                data[at:at] = draw(st.binary(max_size=8))
    return bytes(data)


STREAMS = st.lists(V10_MESSAGES | V11_MESSAGES, min_size=1, max_size=3).map(
    lambda sent: b"".join(map(wire.encode_message, sent))
)


@pytest.mark.parametrize("decoder_class", DECODERS)
@UNHURRIED
@given(mutated(STREAMS), STEPS)
def test_mutated_bytes(decoder_class: type[_Decoder], data: bytes, steps: list[int]) -> None:
    assert outcome(decoder_class(), data, steps) == outcome(decoder_class(), data, [])


# Payloads

CHUNKS = st.integers(1, wire.MAX_CHUNKS).flatmap(
    lambda total: st.builds(
        wire.WeightsChunk, st.integers(0, total - 1), st.just(total), st.binary(max_size=50)
    )
)


@st.composite
def envelopes(draw: st.DrawFn) -> wire.TensorEnvelope:
    dtype = draw(st.sampled_from(sorted(wire.DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = math.prod(shape) * wire.DTYPES[dtype]
    start, stop = draw(SPAN)
    data = draw(st.binary(min_size=size, max_size=size))
    return wire.TensorEnvelope(draw(U64), draw(U32), start, stop, dtype, shape, data)


PAYLOADS: dict[str, st.SearchStrategy[Any]] = {
    "weights": CHUNKS,
    "layer_ids": st.builds(wire.LayerIds, st.lists(U32, max_size=20).map(tuple)),
    "gpu_info": st.builds(wire.GPUInfo, U64, U64, LINE),
    "hello": st.builds(
        wire.Hello,
        st.sampled_from(sorted(wire.ROLES)),
        LINE,
        st.lists(LINE, min_size=1, max_size=16).map(tuple),
        st.integers(1 << 16, 2**32 - 1),
    ),
    "error": st.builds(
        wire.ErrorPayload, st.integers(1, 65535), LINE, st.none() | st.floats(0.0, 86_400.0)
    ),
    "config_ack": st.builds(wire.ConfigAck, st.binary(min_size=32, max_size=32)),
    "assign": st.tuples(
        SPAN, TOKENS, st.integers(1, wire.MAX_SESSIONS), st.sampled_from(sorted(wire.DTYPES))
    ).map(lambda t: wire.Assign(t[0][0], t[0][1], t[1], t[2], t[3])),
    "assign_ack": st.builds(wire.AssignAck, st.lists(LAYER, max_size=40).map(tuple)),
    "transfer_offer": st.builds(
        wire.TransferOffer,
        LAYER,
        st.integers(0, wire.MAX_BLOB_BYTES),
        st.binary(min_size=32, max_size=32),
    ),
    "transfer_accept": st.builds(wire.TransferAccept, LAYER, st.booleans()),
    "ready": SPAN.map(lambda span: wire.Ready(*span)),
    "session_open": st.tuples(U64, SPAN, TOKENS).map(
        lambda t: wire.SessionOpen(t[0], *t[1], max_length=t[2])
    ),
    "session_close": st.builds(wire.SessionClose, U64),
    "session_ack": st.builds(wire.SessionAck, U64),
    "envelope": envelopes(),
}
PAYLOAD_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "weights": wire.WeightsChunk.decode,
    "layer_ids": wire.LayerIds.decode,
    "gpu_info": wire.GPUInfo.decode,
    "hello": wire.Hello.decode,
    "error": wire.ErrorPayload.decode,
    "config_ack": wire.ConfigAck.decode,
    "assign": wire.Assign.decode,
    "assign_ack": wire.AssignAck.decode,
    "transfer_offer": wire.TransferOffer.decode,
    "transfer_accept": wire.TransferAccept.decode,
    "ready": wire.Ready.decode,
    "session_open": wire.SessionOpen.decode,
    "session_close": wire.SessionClose.decode,
    "session_ack": wire.SessionAck.decode,
    "envelope": wire.decode_envelope,
}


def encode(payload: Any) -> bytes:
    if isinstance(payload, wire.TensorEnvelope):
        return b"".join(wire.encode_envelope_parts(payload))
    return bytes(payload.encode())


def decode_or_refuse(decode: Callable[[bytes], Any], data: bytes) -> None:
    """What decodes must survive being sent on; what does not must be the peer's error."""
    try:
        payload = decode(data)
    except RemoteProtocolError:
        return
    assert decode(encode(payload)) == payload


@pytest.mark.parametrize("name", PAYLOADS)
@BRIEF
@given(st.data())
def test_payload_round_trip(name: str, data: st.DataObject) -> None:
    payload = data.draw(PAYLOADS[name])
    assert PAYLOAD_DECODERS[name](encode(payload)) == payload


@pytest.mark.parametrize("name", PAYLOADS)
@BRIEF
@given(st.data())
def test_mutated_payload(name: str, data: st.DataObject) -> None:
    decode_or_refuse(PAYLOAD_DECODERS[name], data.draw(mutated(PAYLOADS[name].map(encode))))


@pytest.mark.parametrize("name", PAYLOADS)
@BRIEF
@given(st.binary(max_size=100))
def test_arbitrary_payload(name: str, data: bytes) -> None:
    decode_or_refuse(PAYLOAD_DECODERS[name], data)


# ModelConfig

SIZES = st.integers(1, 2**31 - 1)
FINITE = st.floats(0, allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | LINE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LINE, inner, max_size=3),
    max_leaves=10,
)


@st.composite
def configs(draw: st.DrawFn) -> wire.ModelConfig:
    num_layers = draw(st.integers(1, 5))
    kinds = st.lists(LINE, min_size=num_layers, max_size=num_layers).map(tuple)
    return wire.ModelConfig(
        model_name=draw(LINE),
        hidden_size=draw(SIZES),
        intermediate_size=draw(SIZES),
        num_layers=num_layers,
        num_heads=draw(SIZES),
        num_kv_heads=draw(SIZES),
        head_dim=draw(SIZES),
        vocab_size=draw(SIZES),
        max_seq_len=draw(SIZES),
        rms_norm_eps=draw(FINITE),
        rope_theta=draw(FINITE.filter(bool)),
        layer_types=draw(st.none() | kinds),
        tie_embeddings=draw(st.none() | st.booleans()),
        dtype=draw(st.none() | st.sampled_from(sorted(wire.CONFIG_DTYPES))),
        model_type=draw(st.none() | LINE),
        checkpoint_config=draw(st.none() | st.dictionaries(LINE, JSON, max_size=4)),
    )


@UNHURRIED
@given(configs())
def test_config_round_trip(config: wire.ModelConfig) -> None:
    assert wire.deserialize_config(wire.serialize_config(config)) == config


def refuse_or_keep(data: bytes) -> None:
    try:
        config = wire.deserialize_config(data)
    except RemoteProtocolError:
        return
    assert wire.deserialize_config(wire.serialize_config(config)) == config


@UNHURRIED
@given(mutated(configs().map(wire.serialize_config)))
def test_mutated_config(data: bytes) -> None:
    refuse_or_keep(data)


@UNHURRIED
@given(st.binary(max_size=60))
def test_arbitrary_bytes_as_config(data: bytes) -> None:
    refuse_or_keep(data)


@UNHURRIED
@given(configs(), st.data())
def test_config_with_any_value_anywhere(config: wire.ModelConfig, data: st.DataObject) -> None:
    entries = json.loads(wire.serialize_config(config))
    entries[data.draw(st.sampled_from(sorted(entries)))] = data.draw(JSON)
    refuse_or_keep(json.dumps(entries).encode())
