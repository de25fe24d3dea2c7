"""What we refuse to send, what we make of a peer's text, and what hostile payloads cost."""

from __future__ import annotations

import array
import dataclasses
import tracemalloc
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3

from neurogrid.errors import ConfigFormatError, LocalProtocolError, RemoteProtocolError
from neurogrid.p2p import wire
from neurogrid.p2p.wire import MessageType, TensorMessage
from neurogrid.p2p.wire.maps import printable_line

TRACE = wire.TraceContext(bytes(range(1, 17)), bytes(8), 1)
ENVELOPE = wire.TensorEnvelope(1, 0, 0, 1, "F16", (1, 1, 2), b"\1\2\3\4")
CONFIG = wire.ModelConfig("m", 2, 3, 2, 1, 1, 2, 7, 5, 0.5)
HELLO = wire.Hello("worker", "a", (wire.PROTOCOL_V11,), 1 << 20, 1 << 26)
ASSIGN = wire.Assign(0, 1, 10, 1, "F32")
OFFER = wire.TransferOffer(0, 10, blake3(bytes(32)).digest(), bytes(32))


@pytest.mark.parametrize(
    "message",
    [
        TensorMessage(MessageType.ACTIVATION, layer_id=-1),
        TensorMessage(MessageType.ACTIVATION, layer_id=2**32),
        TensorMessage(MessageType.ACTIVATION, seq_id=2**64),
        TensorMessage(MessageType.ACTIVATION, request_id=2**64),
        TensorMessage(MessageType.ACTIVATION, trace_context=TRACE),
        TensorMessage(MessageType.CREDIT, data=bytes(9)),
        TensorMessage(MessageType.WEIGHTS_ACK, data=b"\0"),
        TensorMessage(None, layer_id=2**24),
        TensorMessage(None, request_id=1),
        TensorMessage(None, trace_context=TRACE),
        TensorMessage(
            MessageType.TRACED_RESPONSE, trace_context=dataclasses.replace(TRACE, flags=256)
        ),
        TensorMessage(
            MessageType.TRACED_RESPONSE,
            trace_context=dataclasses.replace(TRACE, trace_id=bytes(16)),
        ),
        TensorMessage(
            MessageType.TRACED_RESPONSE, trace_context=dataclasses.replace(TRACE, span_id=b"\1")
        ),
        TensorMessage(MessageType.ACTIVATION, data=memoryview(bytes(8))[::2]),
    ],
)
def test_messages_that_we_do_not_send(message: TensorMessage) -> None:
    with pytest.raises(LocalProtocolError):
        wire.encode_message(message)


def test_parts_are_not_copied_and_count_bytes_of_any_element_type() -> None:
    numbers = array.array("f", [1.0, 2.0, 3.0])
    prefix = b"prefix"
    message = TensorMessage(MessageType.ACTIVATION, data=prefix)
    header, first, second = wire.encode_message_parts(message, memoryview(numbers))
    assert header[-4:] == (6 + 12).to_bytes(4, "big")
    assert first is prefix
    assert isinstance(second, memoryview)
    assert second.nbytes == len(second) == 12
    numbers[0] = 9.0
    assert bytes(second) == numbers.tobytes()


@pytest.mark.parametrize(
    "encode",
    [
        wire.WeightsChunk(1, 1, b"").encode,
        wire.WeightsChunk(-1, 1, b"").encode,
        wire.WeightsChunk(0, wire.MAX_CHUNKS + 1, b"").encode,
        wire.WeightsChunk(0, 1, bytes(wire.CHUNK_BYTES + 1)).encode,
        wire.LayerIds((2**32,)).encode,
        wire.LayerIds((-1,)).encode,
        wire.LayerIds((0,) * (wire.MAX_LAYERS + 1)).encode,
        wire.GPUInfo(2**64, 0, "").encode,
        wire.GPUInfo(0, -1, "").encode,
        wire.GPUInfo(0, 0, "é" * 513).encode,
        dataclasses.replace(HELLO, role="boss").encode,
        dataclasses.replace(HELLO, versions=()).encode,
        dataclasses.replace(HELLO, max_data=2**64).encode,
        dataclasses.replace(HELLO, agent="a" * 257).encode,
        wire.ErrorPayload(0, "x").encode,
        wire.ErrorPayload(1, "x", retry_after=-1.0).encode,
        wire.ErrorPayload(1, "x", retry_after=float("nan")).encode,
        wire.ConfigAck(b"short").encode,
        dataclasses.replace(ASSIGN, stop_layer=0).encode,
        dataclasses.replace(ASSIGN, dtype="float32").encode,
        dataclasses.replace(ASSIGN, max_sessions=0).encode,
        wire.AssignAck((wire.MAX_LAYERS,)).encode,
        dataclasses.replace(OFFER, num_bytes=wire.MAX_BLOB_BYTES + 1).encode,
        dataclasses.replace(OFFER, blob_id=b"").encode,
        dataclasses.replace(OFFER, digests=bytes(64)).encode,
        dataclasses.replace(OFFER, digests=b"\1" * 32).encode,
        wire.TransferAccept(-1, True).encode,
        wire.TransferAccept(0, True, bytes(wire.MAX_BITMAP_BYTES + 1)).encode,
        wire.TransferRequest(bytes(31)).encode,
        wire.DeviceInfoRequest("float32").encode,
        wire.DeviceInfoRequest("F32", bytes(31)).encode,
        wire.DeviceInfo("k" * 65, "F32").encode,
        wire.DeviceInfo("cpu", "F32", (wire.MAX_LAYERS,)).encode,
        wire.DeviceInfo("cpu", "F32", read_rate=2**64).encode,
        wire.Credit(2**64).encode,
        wire.Credit(-1).encode,
        dataclasses.replace(HELLO, credit=2**64).encode,
        lambda: wire.encode_bitmap([8], 8),
        lambda: wire.encode_bitmap([-1], 8),
        wire.Ready(1, 1).encode,
        wire.SessionOpen(2**64, 0, 1, 1).encode,
        wire.SessionOpen(1, 0, 1, 0).encode,
        wire.SessionOpen(1, 0, 1, 9, prior=2).encode,
        wire.SessionOpen(1, 0, 1, 9, prior=2, prior_length=10).encode,
        wire.SessionOpen(1, 0, 1, 9, prior=1, prior_length=9).encode,
        wire.SessionOpen(1, 0, 1, 9, keep_prior=True).encode,
        wire.SessionOpen(1, 0, 2, 9, adapter=bytes([1] * 32)).encode,
        wire.SessionOpen(1, 0, 1, 9, adapter=bytes(32)).encode,
        wire.SessionClose(-1).encode,
        wire.SessionAck(1, 2**32).encode,
    ],
)
def test_payloads_that_we_do_not_send(encode: Callable[[], bytes]) -> None:
    with pytest.raises(LocalProtocolError):
        encode()


@pytest.mark.parametrize(
    "change",
    [
        {"session_id": 2**64},
        {"position": -1},
        {"stop_layer": 0},
        {"dtype": "float16"},
        {"shape": (1, 1, 3)},
        {"shape": (1,) * 8 + (2,)},
        {"shape": (-1, -2)},
        {"data": b"\1\2\3"},
    ],
)
def test_envelopes_that_we_do_not_send(change: dict[str, Any]) -> None:
    wire.encode_envelope_parts(ENVELOPE)
    with pytest.raises(LocalProtocolError):
        wire.encode_envelope_parts(dataclasses.replace(ENVELOPE, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 0},
        {"num_layers": wire.MAX_LAYERS + 1},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": float("inf")},
        {"dtype": "F32"},
        {"layer_types": ("full",)},
        {"model_name": "a\nb"},
        {"model_name": "\ud800"},
        {"checkpoint_config": {"time_step_limit": [0.0, float("inf")]}},
        {"checkpoint_config": {"a": b"bytes"}},
        {"checkpoint_config": {"a": "x" * (4 << 20)}},
    ],
)
def test_configs_that_we_do_not_send(change: dict[str, Any]) -> None:
    wire.serialize_config(CONFIG)
    with pytest.raises(LocalProtocolError, match="cannot be sent"):
        wire.serialize_config(dataclasses.replace(CONFIG, **change))


@pytest.mark.parametrize(
    ("data", "says"), [(b"", "empty"), (b"null", "null"), (b"{", "no JSON"), (b"{}", "missing")]
)
def test_a_config_that_is_none_has_an_error_of_its_own(data: bytes, says: str) -> None:
    with pytest.raises(ConfigFormatError, match=says) as caught:
        wire.deserialize_config(data)
    assert caught.value.code == wire.ErrorCode.CONFIG_INVALID
    assert ConfigFormatError("without a code").code == wire.ErrorCode.CONFIG_INVALID


def test_a_config_over_the_limit_is_not_parsed() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        wire.deserialize_config(b" " * (wire.DEFAULT_LIMITS.model_config + 1))
    assert caught.value.code == wire.ErrorCode.LIMIT_EXCEEDED


def test_a_fingerprint_is_over_the_bytes_that_travelled() -> None:
    data = wire.serialize_config(CONFIG)
    assert wire.config_fingerprint(data) == wire.config_fingerprint(memoryview(data))
    assert wire.config_fingerprint(data) != wire.config_fingerprint(data + b" ")
    assert len(wire.config_fingerprint(data)) == wire.FINGERPRINT_BYTES


def test_our_own_error_text_never_fails_to_travel() -> None:
    text = "first line\nsecond \ud800 \x1b[31m " + "x" * 5000
    payload = wire.ErrorPayload.decode(wire.ErrorPayload(17, text).encode())
    assert payload.text.startswith("first line second \ufffd \ufffd[31m xxx")
    assert len(payload.text) == wire.MAX_ERROR_CHARS
    assert payload.text.endswith("…")
    assert payload.text.isprintable()


def test_the_tensor_is_a_view_and_starts_aligned() -> None:
    prefix, data = wire.encode_envelope_parts(ENVELOPE)
    assert data is ENVELOPE.data
    assert len(prefix) % wire.TENSOR_ALIGNMENT == 0
    whole = bytearray(prefix + bytes(data))
    decoded = wire.decode_envelope(whole)
    whole[-4:] = b"\7\7\7\7"
    assert decoded.data == b"\7\7\7\7"


def test_an_envelope_map_over_its_limit_is_refused() -> None:
    entries = {"sid": 1, "zz": "x" * (1 << 16)}
    data = wire.maps.encode_map(entries)
    with pytest.raises(RemoteProtocolError) as caught:
        wire.decode_envelope(data + bytes(100))
    assert caught.value.code == wire.ErrorCode.LIMIT_EXCEEDED


HOSTILE = {
    "deep arrays under an unknown key": b"\x81\xa1z" + b"\x91" * 60_000,
    "wide arrays under an unknown key": b"\x81\xa1z" + b"\xdd\x00\xff\xff\xff" * 10_000,
    "wide arrays under a known key": b"\x81\xa5shape" + b"\xdd\x00\xff\xff\xff" * 10_000,
    "wide maps as a number": b"\x81\xa3sid" + b"\xdf\x00\xff\xff\xff" * 10_000,
    "a string that is not there": b"\x81\xa3sid\xdb\xff\xff\xff\xff",
    "bytes that are not there": b"\x81\xa3sid\xc6\xff\xff\xff\xff",
    "a key of 60 kB": b"\x81\xda\xea\x60" + b"k" * 60_000,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("decode", [wire.decode_envelope, wire.AssignAck.decode])
def test_hostile_maps_cost_little(data: bytes, decode: Callable[[bytes], object]) -> None:
    decode_twice = 2  # imports and caches are paid in the first round
    for _ in range(decode_twice):
        tracemalloc.start()
        try:
            with pytest.raises(RemoteProtocolError):
                decode(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 256 * 1024


def test_hasher_may_be_asked_in_between() -> None:
    hasher = wire.BlobHasher()
    empty = hasher.digest()
    hasher.update(b"a")
    one = hasher.digest()
    assert hasher.digest() == one != empty
    hasher.update(b"b")
    other = wire.BlobHasher()
    other.update(memoryview(b"ab"))
    assert hasher.digest() == other.digest()


def test_chunks_count_bytes_not_items() -> None:
    chunks = list(wire.iter_weights_chunks(array.array("Q", [0] * (1 << 18))))  # type: ignore[arg-type]
    assert [len(chunk.data) for chunk in chunks] == [1 << 20, 1 << 20]


def test_printable_is_what_the_chapter_says() -> None:
    spaces = {*range(9, 14), *range(0x1C, 0x20), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)}
    spaces |= {0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
    for start in range(0, 0x110000, 0x100):
        characters = "".join(map(chr, range(start, start + 0x100)))
        expected = "".join(
            c
            if c == " " or unicodedata.category(c)[0] in "LMNPS"
            else " "
            if ord(c) in spaces
            else "\ufffd"
            for c in characters
        )
        assert printable_line(characters) == expected, hex(start)
