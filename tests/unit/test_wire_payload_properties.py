"""Properties of each payload under any input: what goes in comes out, and a peer can cause one error only."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p import wire
from neurogrid.p2p.wire.envelope import _any_map, _plain_map
from tests.unit.wire_strategies import (
    BRIEF,
    LAYER,
    LINE,
    SPAN,
    TOKENS,
    U32,
    U64,
    UNHURRIED,
    mutated,
)

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
    nanos = tuple(draw(st.lists(U64, max_size=4)))
    return wire.TensorEnvelope(draw(U64), draw(U64), start, stop, dtype, shape, data, nanos)


DIGEST = st.binary(min_size=32, max_size=32)
SOURCE = st.builds(
    "{}/p2p/{}".format,
    st.text(max_size=100),
    st.text(min_size=1, max_size=60).filter(lambda peer_id: "/p2p/" not in peer_id),
)


@st.composite
def offers(draw: st.DrawFn) -> wire.TransferOffer:
    """Up to 2 MiB of digests would slow every example down; the bound has a test of its own."""
    num_bytes = draw(st.integers(0, 6 * wire.CHUNK_BYTES))
    size = 32 * wire.num_chunks(num_bytes)
    digests = draw(st.binary(min_size=size, max_size=size))
    sources = draw(st.lists(SOURCE, max_size=wire.MAX_SOURCES))
    return wire.TransferOffer(
        draw(LAYER), num_bytes, wire.blob_id((digests,)), digests, tuple(sources)
    )


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
        U64,
    ),
    "credit": st.builds(wire.Credit, U64),
    "error": st.builds(
        wire.ErrorPayload, st.integers(1, 65535), LINE, st.none() | st.floats(0.0, 86_400.0)
    ),
    "config_ack": st.builds(wire.ConfigAck, DIGEST),
    "assign": st.tuples(
        SPAN, TOKENS, st.integers(1, wire.MAX_SESSIONS), st.sampled_from(sorted(wire.DTYPES))
    ).map(lambda t: wire.Assign(t[0][0], t[0][1], t[1], t[2], t[3])),
    "assign_ack": st.builds(wire.AssignAck, st.lists(LAYER, max_size=40).map(tuple)),
    "transfer_request": st.builds(wire.TransferRequest, DIGEST),
    "transfer_offer": offers(),
    "transfer_accept": st.builds(
        wire.TransferAccept, LAYER, st.booleans(), st.binary(max_size=200)
    ),
    "device_info_request": st.builds(
        wire.DeviceInfoRequest, st.sampled_from(sorted(wire.DTYPES)), st.just(b"") | DIGEST
    ),
    "device_info": st.builds(
        wire.DeviceInfo,
        LINE.map(lambda line: line[:64]),
        st.sampled_from(sorted(wire.DTYPES)),
        st.lists(LAYER, max_size=40).map(tuple),
        U64,
        U64,
        U64,
    ),
    "ready": st.builds(lambda span, same: wire.Ready(*span, same), SPAN, st.booleans()),
    "session_open": st.tuples(
        U64,
        SPAN,
        TOKENS,
        st.just(b"") | st.binary(min_size=65, max_size=200),
        st.sampled_from(["", *sorted(wire.SESSION_DTYPES)]),
        # Of a prior: its id, whether it stays open, and which part of the new session it is.
        st.none() | st.tuples(st.integers(1, 2**64 - 1), st.booleans(), st.floats(0.0, 1.0)),
        st.none() | st.binary(min_size=32, max_size=32),
        st.booleans(),
        st.booleans(),
    )
    .filter(lambda t: t[0])  # 0 is no session
    .map(
        lambda t: with_adapter(
            with_prior(
                wire.SessionOpen(
                    t[0],
                    *t[1],
                    t[2],
                    route=t[3],
                    wire=t[4],
                    cuts=t[7],
                    images=wire.encode_image_spans([wire.ImageSpan(t[2] - 1, 1, 1)] * t[8]),
                ),
                t[5],
            ),
            t[6],
        )
    )
    .filter(lambda opened: opened.prior != opened.session_id or not opened.prior),
    "route": st.builds(
        wire.Route,
        st.integers(1, 2**64 - 1),
        st.integers(0, 2**40 - 1),
        st.just(("a", "b")),
        st.lists(LAYER, min_size=3, max_size=3, unique=True).map(lambda x: tuple(sorted(x))),
        st.lists(st.sampled_from(["/x/p2p/a", "/y/p2p/b"]), max_size=8).map(tuple),
    ),
    "session_close": st.builds(wire.SessionClose, U64),
    "session_query": st.builds(wire.SessionQuery, U64),
    "session_ack": st.builds(
        wire.SessionAck,
        U64,
        st.none() | U32,
        st.booleans(),
        st.booleans(),
        st.none() | U32,
        st.booleans(),
    ),
    "envelope": envelopes(),
}
PAYLOAD_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "weights": wire.WeightsChunk.decode,
    "layer_ids": wire.LayerIds.decode,
    "gpu_info": wire.GPUInfo.decode,
    "hello": wire.Hello.decode,
    "credit": wire.Credit.decode,
    "error": wire.ErrorPayload.decode,
    "config_ack": wire.ConfigAck.decode,
    "assign": wire.Assign.decode,
    "assign_ack": wire.AssignAck.decode,
    "transfer_request": wire.TransferRequest.decode,
    "transfer_offer": wire.TransferOffer.decode,
    "transfer_accept": wire.TransferAccept.decode,
    "device_info_request": wire.DeviceInfoRequest.decode,
    "device_info": wire.DeviceInfo.decode,
    "ready": wire.Ready.decode,
    "session_open": wire.SessionOpen.decode,
    "route": wire.Route.decode,
    "session_close": wire.SessionClose.decode,
    "session_query": wire.SessionQuery.decode,
    "session_ack": wire.SessionAck.decode,
    "envelope": wire.decode_envelope,
}


def with_prior(opened: wire.SessionOpen, prior: tuple[int, bool, float] | None) -> wire.SessionOpen:
    if prior is None:
        return opened
    length = max(1, int(prior[2] * opened.max_length))
    return dataclasses.replace(opened, prior=prior[0], prior_length=length, keep_prior=prior[1])


def with_adapter(opened: wire.SessionOpen, blob_id: bytes | None) -> wire.SessionOpen:
    num_layers = opened.stop_layer - opened.start_layer
    if blob_id is None or not any(blob_id) or num_layers > 16_384:
        return opened
    return dataclasses.replace(opened, adapter=blob_id * num_layers)


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
@settings(deadline=None, max_examples=30)
@given(st.data())
def test_payload_round_trip_and_mutated(name: str, data: st.DataObject) -> None:
    payload = data.draw(PAYLOADS[name])
    encoded = encode(payload)
    assert PAYLOAD_DECODERS[name](encoded) == payload
    decode_or_refuse(PAYLOAD_DECODERS[name], data.draw(mutated(st.just(encoded))))


@UNHURRIED
@given(st.binary(max_size=100))
def test_arbitrary_payload(data: bytes) -> None:
    for decode in PAYLOAD_DECODERS.values():
        decode_or_refuse(decode, data)


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


def refuse_or_keep(data: bytes) -> None:
    try:
        config = wire.deserialize_config(data)
    except RemoteProtocolError:
        return
    assert wire.deserialize_config(wire.serialize_config(config)) == config


@UNHURRIED
@given(st.binary(max_size=60))
def test_arbitrary_bytes_as_config(data: bytes) -> None:
    refuse_or_keep(data)


@UNHURRIED
@given(configs(), st.data())
def test_config_round_trip_mutated_and_with_any_value_anywhere(
    config: wire.ModelConfig, data: st.DataObject
) -> None:
    encoded = wire.serialize_config(config)
    assert wire.deserialize_config(encoded) == config
    refuse_or_keep(data.draw(mutated(st.just(encoded))))
    entries = json.loads(encoded)
    entries[data.draw(st.sampled_from(sorted(entries)))] = data.draw(JSON)
    refuse_or_keep(json.dumps(entries).encode())


# Transfers


@BRIEF
@given(st.integers(1, wire.MAX_CHUNKS), st.data())
def test_bitmap_round_trip(total: int, data: st.DataObject) -> None:
    chunks = data.draw(st.sets(st.integers(0, total - 1), max_size=50))
    bitmap = wire.encode_bitmap(chunks, total)
    assert len(bitmap) == (-(-total // 8) if chunks else 0)
    assert len(bitmap) <= wire.MAX_BITMAP_BYTES
    assert wire.decode_bitmap(bitmap, total) == chunks


@UNHURRIED
@given(st.binary(max_size=20), st.integers(1, 200))
def test_arbitrary_bitmap(bitmap: bytes, total: int) -> None:
    """What is accepted names only chunks that there are; what is refused is the peer's error."""
    fits = len(bitmap) == -(-total // 8) and not int.from_bytes(bitmap, "big") % 2 ** (-total % 8)
    if bitmap and not fits:
        with pytest.raises(RemoteProtocolError) as caught:
            wire.decode_bitmap(bitmap, total)
        assert caught.value.code == wire.ErrorCode.TRANSFER_INVALID
        return
    chunks = wire.decode_bitmap(bitmap, total)
    assert all(0 <= index < total for index in chunks)
    assert int.from_bytes(wire.encode_bitmap(chunks, total), "big") == int.from_bytes(bitmap, "big")


@BRIEF
@given(offers(), st.data())
def test_an_offer_stands_or_falls_with_its_digests(
    offer: wire.TransferOffer, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(offer.digests) - 1))
    flipped = bytearray(offer.encode())
    place = flipped.index(offer.digests) + at
    flipped[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RemoteProtocolError) as caught:
        wire.TransferOffer.decode(flipped)
    assert caught.value.code == wire.ErrorCode.TRANSFER_INVALID
    index = at // wire.DIGEST_BYTES
    assert offer.digests.startswith(offer.chunk_digest(index), index * wire.DIGEST_BYTES)


@BRIEF
@given(st.lists(st.binary(max_size=100), max_size=8))
def test_a_hasher_does_not_see_the_pieces(pieces: list[bytes]) -> None:
    in_pieces, whole = wire.BlobHasher(), wire.BlobHasher()
    for piece in pieces:
        in_pieces.update(piece)
    whole.update(b"".join(pieces))
    assert in_pieces.digests() == whole.digests()
    assert in_pieces.digest() == wire.blob_id((whole.digests(),)) == whole.digest()


def test_the_largest_offer_fits_its_message() -> None:
    digests = bytes(wire.DIGEST_BYTES * wire.MAX_CHUNKS)
    offer = wire.TransferOffer(
        wire.MAX_LAYERS - 1,
        wire.MAX_BLOB_BYTES,
        wire.blob_id((digests,)),
        digests,
        ("😀" * (wire.MAX_ADDRESS_CHARS - 6) + "/p2p/x",) * wire.MAX_SOURCES,
    )
    data = offer.encode()
    assert wire.TransferOffer.decode(data) == offer
    frame = wire.encode_message(wire.TensorMessage(wire.MessageType.TRANSFER_OFFER, data=data))
    (message,) = wire.StreamDecoder().receive_data(frame)
    assert message.data == data


@UNHURRIED
@given(envelopes(), st.data())
def test_the_short_way_through_an_envelope_ends_where_the_long_one_does(
    envelope: wire.TensorEnvelope, data: st.DataObject
) -> None:
    """Most envelopes are read in one go. What that reads, the strict reader reads alike."""
    written = b"".join(wire.encode_envelope_parts(envelope))
    view = memoryview(data.draw(st.one_of(st.just(written), mutated(st.just(written)))))
    entries = data.draw(
        st.dictionaries(
            st.sampled_from(["sid", "pos", "start", "stop", "dtype", "shape", "nanos", "more"]),
            st.one_of(
                st.integers(-1, 2**64 - 1), st.booleans(), st.text(max_size=4), st.lists(U32)
            ),
        )
    )
    for some in (view, memoryview(msgpack.packb(entries))):
        plain = _plain_map(some)
        if plain is not None:
            assert plain == _any_map(some)
    assert _plain_map(memoryview(written)) is not None
