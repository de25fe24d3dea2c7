"""The forms of one message: bare, in an envelope, traced, refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neurogrid.errors import (
    ConfigRequiredError,
    LocalProtocolError,
    PeerRefusedError,
    RemoteProtocolError,
    RequestRefusedError,
)
from neurogrid.p2p import MessageType, TensorMessage
from neurogrid.p2p.streams.message_forms import (
    BadAnswerError,
    bare,
    enveloped,
    opened,
    refusal,
    refused_error,
    sender_of,
    traced,
    untraced,
)
from neurogrid.p2p.wire import ErrorCode, TensorEnvelope, encode_envelope_parts

ENVELOPE = TensorEnvelope(
    session_id=1,
    position=2,
    start_layer=3,
    stop_layer=5,
    dtype="F16",
    shape=(1, 2),
    data=b"\x00\x3c\x00\x40",
)
ACTIVATION = TensorMessage(
    msg_type=MessageType.ACTIVATION, layer_id=3, seq_id=2, request_id=9, from_peer="somebody"
)


@pytest.mark.parametrize("msg_type", [None, *MessageType])
def test_only_two_types_have_a_traced_twin(msg_type: MessageType | None) -> None:
    twins = {
        MessageType.TRACED_ACTIVATION: MessageType.ACTIVATION,
        MessageType.TRACED_RESPONSE: MessageType.RESPONSE,
    }
    assert untraced(msg_type) is twins.get(msg_type, msg_type)  # type: ignore[arg-type]


def test_without_a_trace_a_message_stays_what_it_is() -> None:
    assert traced(ACTIVATION) is ACTIVATION


def test_plain_bytes_become_a_tensor_of_bytes() -> None:
    message = enveloped(replace(ACTIVATION, data=b"abc"))
    assert message.envelope == TensorEnvelope(0, 2, 3, 4, "U8", (3,), b"abc")
    assert bare(message).data == b"abc"
    assert bare(message).envelope is None


def test_what_is_no_tensor_needs_no_envelope() -> None:
    for message in (
        TensorMessage(msg_type=None, data=b"abc"),
        TensorMessage(msg_type=MessageType.WEIGHTS, data=b"abc"),
        replace(ACTIVATION, envelope=ENVELOPE),
    ):
        assert enveloped(message) is message


def test_an_envelope_is_taken_off() -> None:
    message = opened(replace(ACTIVATION, data=b"".join(encode_envelope_parts(ENVELOPE))))
    assert message.envelope == ENVELOPE
    assert bytes(message.data) == ENVELOPE.data


def test_1_0_0_has_float16_alone() -> None:
    assert bare(replace(ACTIVATION, envelope=ENVELOPE)).data == ENVELOPE.data
    wide = replace(ENVELOPE, dtype="F32", shape=(1,))
    with pytest.raises(LocalProtocolError, match="float16"):
        bare(replace(ACTIVATION, envelope=wide))


def test_a_malformed_envelope_ends_its_request_alone() -> None:
    with pytest.raises(RequestRefusedError) as refused:
        opened(replace(ACTIVATION, data=b"\xc1"))
    assert refused.value.code == ErrorCode.PROTOCOL_VIOLATION
    with pytest.raises(BadAnswerError):
        opened(replace(ACTIVATION, msg_type=MessageType.RESPONSE, data=b"\xc1"))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.BUSY, PeerRefusedError),
        (ErrorCode.CONFIG_REQUIRED, ConfigRequiredError),
    ],
)
def test_a_refusal_comes_back_as_an_error(code: ErrorCode, kind: type[PeerRefusedError]) -> None:
    message = refusal(ACTIVATION, RequestRefusedError("not now", code=code, retry_after=2.5))
    assert message.request_id == ACTIVATION.request_id
    error = refused_error(replace(message, from_peer="somebody"))
    assert type(error) is kind
    assert (error.code, error.text, error.retry_after) == (code, "not now", 2.5)


def test_a_malformed_error_is_a_violation() -> None:
    with pytest.raises(RemoteProtocolError):
        refused_error(TensorMessage(msg_type=MessageType.ERROR, data=b"\xc1", from_peer="somebody"))


def test_a_message_of_our_own_has_no_sender() -> None:
    with pytest.raises(LocalProtocolError):
        sender_of(TensorMessage(msg_type=MessageType.ACTIVATION))
