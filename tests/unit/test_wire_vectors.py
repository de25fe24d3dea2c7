"""The codec against `protocol_spec/vectors/`, which were written from the specification."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from blake3 import blake3

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p import wire
from neurogrid.p2p.wire.decoder import Decoder
from tests.unit.vectors import SPECIFICATION, in_turn, names, subject

DECODERS: dict[str, type[Decoder]] = {
    wire.PROTOCOL_V10: wire.MessageDecoder,
    wire.PROTOCOL_V11: wire.StreamDecoder,
}
# A further message that both versions can read, put behind each valid case.
TRAILING = wire.TensorMessage(wire.MessageType.WEIGHTS_ACK, layer_id=3)


FRAMING = names("framing_*")
PAYLOADS = [name for name in names("*") if "payload" in subject(name)]


def is_valid(case: Any) -> bool:
    return bool(case["result"] == "valid")


def as_message(fields: Mapping[str, Any]) -> wire.TensorMessage:
    trace = fields["trace"]
    return wire.TensorMessage(
        msg_type=None if fields["type"] is None else wire.MessageType[fields["type"]],
        layer_id=fields["layer_id"],
        seq_id=int(fields["seq_id"]),
        request_id=int(fields["request_id"]),
        data=bytes.fromhex(fields["data"]),
        trace_context=trace
        and wire.TraceContext(
            bytes.fromhex(trace["trace_id"]), bytes.fromhex(trace["span_id"]), trace["flags"]
        ),
    )


def run(
    decoder: Decoder, pieces: list[bytes]
) -> tuple[list[wire.TensorMessage], RemoteProtocolError | None, bool]:
    """The messages, the violation, and whether it was the end of the stream that brought it out."""
    messages: list[wire.TensorMessage] = []
    try:
        for piece in pieces:
            messages += decoder.receive_data(piece)
            if decoder.error is not None:
                return messages, decoder.error, False
    except RemoteProtocolError as error:
        return messages, error, False
    try:
        decoder.receive_eof()
    except RemoteProtocolError as error:
        return messages, error, True
    return messages, None, False


@in_turn(*FRAMING)
def test_framing(name: str, case: Any) -> None:
    data = bytes.fromhex(case["hex"])
    for step in (max(1, len(data)), 1):
        pieces = [data[i : i + step] for i in range(0, len(data), step)]
        messages, error, at_eof = run(DECODERS[subject(name)["protocol"]](), pieces)
        assert messages == [as_message(fields) for fields in case["messages"]]
        if is_valid(case):
            assert error is None
        else:
            assert error is not None
            assert at_eof == (case["result"] == "incomplete")
            assert error.code == wire.ErrorCode[case.get("error", "PROTOCOL_VIOLATION")]


@in_turn(*FRAMING, where=is_valid)
def test_framing_with_trailing_bytes(name: str, case: Any) -> None:
    trailing = wire.encode_message(TRAILING)
    data = bytes.fromhex(case["hex"])
    expected = [as_message(fields) for fields in case["messages"]]
    decoder = DECODERS[subject(name)["protocol"]]()
    assert decoder.receive_data(data + trailing) == [*expected, TRAILING]
    assert decoder.receive_data(data + trailing[:7]) == expected
    assert decoder.receive_data(trailing[7:]) == [TRAILING]
    decoder.receive_eof()


@in_turn(*FRAMING, where=lambda case: is_valid(case) and case.get("canonical", True))
def test_framing_encodes(name: str, case: Any) -> None:
    messages = [as_message(fields) for fields in case["messages"]]
    assert b"".join(map(wire.encode_message, messages)).hex() == case["hex"]
    parts = [part for message in messages for part in wire.encode_message_parts(message)]
    assert b"".join(parts).hex() == case["hex"]


def plain(value: Any) -> Any:
    """A field as the vectors write it: bytes in hex, tuples as lists."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, bytes | memoryview):
        return value.hex()
    return value


# 64-bit numbers stand in the vectors as strings, since JSON readers differ past 2**53.
U64_FIELDS = {
    *("session_id", "position", "total_bytes", "used_bytes", "credit", "max_total"),
    *("read_rate", "compute_rate", "layer_nanos", "prior", "stage_nanos", "batch"),
}


def to_fields(payload: Any) -> dict[str, Any]:
    fields = {f.name: plain(getattr(payload, f.name)) for f in dataclasses.fields(payload)}
    if isinstance(payload, wire.TransferOffer):
        fields["num_chunks"] = payload.num_chunks
    return {name: in_decimal(v) if name in U64_FIELDS else v for name, v in fields.items()}


def in_decimal(value: int | list[int]) -> str | list[str]:
    return [str(item) for item in value] if isinstance(value, list) else str(value)


def encode(payload: Any) -> bytes:
    if isinstance(payload, wire.TensorEnvelope):
        return b"".join(wire.encode_envelope_parts(payload))
    if isinstance(payload, wire.ModelConfig):
        return wire.serialize_config(payload)
    return bytes(payload.encode())


def decoder_of(name: str) -> Callable[[wire.Data], Any]:
    special: dict[str, Callable[[wire.Data], Any]] = {
        "TensorEnvelope": wire.decode_envelope,
        "ModelConfig": wire.deserialize_config,
    }
    return special.get(name) or getattr(wire, name).decode


@in_turn(*PAYLOADS)
def test_payload(name: str, case: Any) -> None:
    data = bytes.fromhex(case["hex"])
    decode = decoder_of(subject(name)["payload"])
    if case["result"] == "invalid":
        with pytest.raises(RemoteProtocolError) as caught:
            decode(data)
        assert caught.value.code == wire.ErrorCode[case["error"]]
        assert "\n" not in str(caught.value)
        return
    payload = decode(data)
    assert to_fields(payload) == case["fields"]
    assert decode(encode(payload)) == payload
    assert decode(bytearray(data)) == decode(memoryview(data)) == payload
    if case.get("canonical", True):
        assert encode(payload).hex() == case["hex"]


@in_turn("blob_id")
def test_blob_id(name: str, case: Any) -> None:
    size = case["num_bytes"]
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    chunks = list(wire.iter_weights_chunks(content))
    digests = [blake3(chunk.data).digest() for chunk in chunks]
    assert [digest.hex() for digest in digests] == case["chunk_digests"]
    assert len(chunks) == wire.num_chunks(size) == case["num_chunks"]
    assert {chunk.total_chunks for chunk in chunks} == {case["num_chunks"]}
    assert wire.blob_id(digests).hex() == case["blob_id"]
    for step in (1000 * 1000, wire.CHUNK_BYTES, 3 * wire.CHUNK_BYTES):
        hasher = wire.BlobHasher()
        for at in range(0, size, step):
            hasher.update(memoryview(content)[at : at + step])
        assert hasher.digest().hex() == case["blob_id"]
        assert hasher.digests().hex() == "".join(case["chunk_digests"])


@in_turn("bitmap")
def test_bitmap(name: str, case: Any) -> None:
    bitmap = bytes.fromhex(case["hex"])
    if case["result"] == "invalid":
        with pytest.raises(RemoteProtocolError) as caught:
            wire.decode_bitmap(bitmap, case["num_chunks"])
        assert caught.value.code == wire.ErrorCode[case["error"]]
        return
    assert wire.decode_bitmap(bitmap, case["num_chunks"]) == set(case["chunks"])
    if case.get("canonical", True):
        assert wire.encode_bitmap(case["chunks"], case["num_chunks"]) == bitmap


def test_every_type_has_valid_incomplete_and_invalid_frames() -> None:
    for name, types in (
        ("framing_v10", wire.v10_table().by_number.values()),
        ("framing_v11", wire.v11_table().by_number.values()),
    ):
        ids = {case["id"] for case in subject(name)["cases"]}
        for msg_type in types:
            stem = msg_type.name.lower().replace("_", "-")
            assert {f"{stem}-header-cut", f"{stem}-over-limit"} <= ids
            assert any(stem in i and "cut" not in i and "limit" not in i for i in ids)


def test_every_payload_has_vectors() -> None:
    named = {subject(name)["payload"] for name in PAYLOADS}
    # Records and certificates have protocols, and vectors, of their own.
    classes = {
        c.__name__
        for c in wire.ControlPayload.__subclasses__()
        if c.__module__.startswith("neurogrid.p2p.wire.") and c.__name__[0] != "_"
    }
    assert named >= classes | {"SessionClose", "SessionQuery", "WeightsChunk", "LayerIds", "Credit"}
    assert named >= {"GPUInfo", "ModelConfig", "TensorEnvelope"}


def test_every_error_code_has_a_vector() -> None:
    """Those that bytes alone provoke as the outcome of a case, the others in an Error message."""
    provoked: set[str] = set()
    # Those of witnessed runs have words of a text in the place of codes.
    for name in set(names("*")) - {"witnessed"}:
        for case in subject(name)["cases"]:
            provoked |= {case["error"]} if "error" in case else set()
    assert provoked >= {
        "PROTOCOL_VIOLATION",
        "LIMIT_EXCEEDED",
        "CONFIG_INVALID",
        "SHAPE_MISMATCH",
        "TRANSFER_INVALID",
    }
    assert provoked <= set(wire.ErrorCode.__members__)
    told = {case["fields"]["code"] for case in subject("error")["cases"] if "fields" in case}
    assert told >= set(wire.ErrorCode)


def test_every_file_is_read_by_a_test_and_has_an_id_for_each_case() -> None:
    here = {"blob_id", "bitmap", "framing_v10", "framing_v11", "stream_v11", "transfer_v11"}
    here |= {"record", "signed_route"}  # by test_records.py, test_routes.py
    here |= {"layer_blob", "config_fingerprint"}  # by test_blob.py, test_config.py
    here |= {"codes", "quantization"}  # by test_quantization.py
    here |= {"cache_codes"}  # by test_coded_caches.py
    here |= {"adapter_blob"}  # by test_adapters.py
    here |= {"noise_aesgcm"}  # by test_link_noise.py
    # by training/test_forms_vectors.py, test_result_fetching.py, test_message_vectors.py, test_decision_vectors.py
    here |= {"training_forms", "training_result_digest", "training_decisions"}
    here |= {"training_messages", "run_messages", "stage_messages", "witnessed_messages"}
    here |= {"witnessed_audits", "term_messages"}
    here |= {"stage_subspaces"}  # by test_subspace.py
    here |= {"checks"}  # by training/test_checks_vectors.py
    here |= {"witnessed"}  # by training/test_witnessed_vectors.py
    here |= {"training_manifest", "training_order"}  # by test_manifest.py, test_shuffling.py
    for name in names("*"):
        assert (name in here) != ("payload" in subject(name)), name
        assert (SPECIFICATION / subject(name)["specification"]).exists(), name
        assert subject(name)["subject"]
        ids = [case["id"] for case in subject(name)["cases"]]
        assert len(ids) == len(set(ids)), name
