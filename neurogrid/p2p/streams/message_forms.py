"""The forms of one message: bare in 1.0.0, in an envelope in 1.1.0, traced or not, and the Error that refuses it.

Pure functions from message to message; nothing is copied.
"""

from __future__ import annotations

from dataclasses import replace

from neurogrid.errors import (
    ConfigRequiredError,
    LocalProtocolError,
    PeerRefusedError,
    RemoteProtocolError,
    RequestRefusedError,
)
from neurogrid.p2p.streams.tracing import current_trace_context
from neurogrid.p2p.wire import (
    Data,
    ErrorCode,
    ErrorPayload,
    MessageCode,
    MessageType,
    TensorEnvelope,
    TensorMessage,
    decode_envelope,
    encode_envelope_parts,
    encode_message_parts,
    encode_parts,
)

__all__ = [
    "BadAnswerError",
    "bare",
    "enveloped",
    "is_traced",
    "message_parts",
    "name_of",
    "opened",
    "refusal",
    "refused_error",
    "require_request_id",
    "sender_of",
    "traced",
    "untraced",
]


class BadAnswerError(Exception):
    """An answer that cannot be read; it ends the request alone, since its frame was whole."""

    def __init__(self, error: RemoteProtocolError) -> None:
        super().__init__(str(error))
        self.error = error


def untraced(msg_type: MessageCode | None) -> MessageCode | None:
    """The type without regard to whether a trace goes with it."""
    return msg_type.kind if msg_type is not None else None


def is_traced(message: TensorMessage) -> bool:
    """Whether `traced` gives another message."""
    code = message.msg_type
    return code is not None and code.traced is not None and current_trace_context() is not None


def traced(message: TensorMessage) -> TensorMessage:
    """The message in the trace that is active, if one is and the message may carry it."""
    traced_type = message.msg_type.traced if message.msg_type is not None else None
    if traced_type is None:
        return message
    context = current_trace_context()
    if context is None:
        return message
    return replace(message, msg_type=traced_type, trace_context=context)


def enveloped(message: TensorMessage) -> TensorMessage:
    """A message for a long-lived stream, whose tensors have an envelope; plain bytes are a tensor of bytes."""
    code = message.msg_type
    if message.envelope is not None or code is None or not code.traits.is_tensor:
        return message
    envelope = TensorEnvelope(
        session_id=0,
        position=message.seq_id,
        start_layer=message.layer_id,
        stop_layer=message.layer_id + 1,
        dtype="U8",
        shape=(memoryview(message.data).nbytes,),
        data=message.data,
    )
    return replace(message, envelope=envelope)


def opened(message: TensorMessage) -> TensorMessage:
    """A received message of a long-lived stream, its envelope taken off if it is a tensor.

    Raises:
        RequestRefusedError: the envelope of an activation is malformed.
        BadAnswerError: that of a response is.
    """
    code = message.msg_type
    if code is None or not code.traits.is_tensor or message.envelope is not None:
        return message
    try:
        envelope = decode_envelope(message.data)
    except RemoteProtocolError as exc:
        if code.traits.answers is not None:
            raise BadAnswerError(exc) from exc
        raise RequestRefusedError(str(exc), code=exc.code) from exc
    # Written out: this is on the way of every token, and `replace` takes three times as long.
    return TensorMessage(
        message.msg_type,
        message.layer_id,
        message.seq_id,
        message.request_id,
        envelope.data,
        message.trace_context,
        message.from_peer,
        envelope,
    )


def bare(message: TensorMessage) -> TensorMessage:
    """A message for 1.0.0, whose tensors are bare float16.

    Raises:
        LocalProtocolError: the tensor has another dtype. Plain bytes pass: their meaning is the caller's.
    """
    envelope = message.envelope
    if envelope is None:
        return message
    if envelope.dtype not in ("F16", "U8"):
        raise LocalProtocolError(
            f"1.0.0 carries float16 and nothing else, and this tensor is {envelope.dtype}: convert it"
        )
    return replace(message, data=envelope.data, envelope=None)


def message_parts(message: TensorMessage, *more: Data) -> tuple[Data, ...]:
    """The buffers of a message: header, perhaps the head of an envelope, data, then `more` of it; uncopied.

    Raises:
        LocalProtocolError: a field is out of its range, or there is more Data than the type may have.
    """
    if message.envelope is None:
        return encode_message_parts(message, *more)
    prefix, tensor = encode_envelope_parts(message.envelope)
    return encode_parts(message, prefix, tensor, *more)


def refusal(message: TensorMessage, error: RequestRefusedError) -> TensorMessage:
    """The Error that answers `message`."""
    payload = ErrorPayload(
        code=ErrorCode(error.code), text=str(error), retry_after=error.retry_after
    )
    return TensorMessage(
        msg_type=MessageType.ERROR,
        layer_id=message.layer_id,
        request_id=message.request_id,
        data=payload.encode(),
    )


def refused_error(message: TensorMessage) -> PeerRefusedError:
    """Return the exception that a received Error raises where its request was made.

    Raises:
        RemoteProtocolError: its Data is malformed.
    """
    payload = ErrorPayload.decode(message.data)
    missing_config = payload.code == ErrorCode.CONFIG_REQUIRED
    kind = ConfigRequiredError if missing_config else PeerRefusedError
    return kind(
        f"{sender_of(message)} refused: {payload.text}",
        code=payload.code,
        text=payload.text,
        retry_after=payload.retry_after,
    )


def require_request_id(message: TensorMessage) -> None:
    """Check a message that is to be sent on a long-lived stream, where every request has an id.

    Raises:
        LocalProtocolError: it is a request with the id 0.
    """
    code = message.msg_type
    if not message.request_id and code is not None and code.traits.is_request:
        raise LocalProtocolError(f"{name_of(message)} needs a request id: see `new_request_id`")


def sender_of(message: TensorMessage) -> str:
    """Return the sender's peer id.

    Raises:
        LocalProtocolError: the message was not received.
    """
    if message.from_peer is None:
        raise LocalProtocolError("the message has no sender to answer")
    return message.from_peer


def name_of(message: TensorMessage) -> str:
    """The name of its type, for logs."""
    return message.msg_type.name if message.msg_type is not None else "legacy message"
