"""Hidden states as envelopes, and back: what a coordinator and its workers send each other.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import torch

from neurogrid.errors import RemoteProtocolError
from neurogrid.model.tensors import WIRE_DTYPES, dtype_name, tensor_from_bytes, tensor_to_bytes
from neurogrid.p2p.wire import ErrorCode, TensorEnvelope

__all__ = ["check_answer", "pack", "unpack"]


def pack(
    hidden_BTD: torch.Tensor, *, session_id: int, start: int, stop: int, position: int
) -> TensorEnvelope:
    """The envelope of [1, T, D] for layers [start, stop) of a session, at `position`."""
    return TensorEnvelope(
        session_id=session_id,
        position=position,
        start_layer=start,
        stop_layer=stop,
        dtype=dtype_name(hidden_BTD.dtype),
        shape=tuple(hidden_BTD.shape),
        data=tensor_to_bytes(hidden_BTD),
    )


def unpack(envelope: TensorEnvelope) -> torch.Tensor:
    """The tensor of an envelope, a view of its bytes."""
    return tensor_from_bytes(envelope.data, WIRE_DTYPES[envelope.dtype], envelope.shape)


def check_answer(
    answer: TensorEnvelope | None, asked: TensorEnvelope, *, start: int, stop: int, peer_id: str
) -> TensorEnvelope:
    """Check that a response is that of an activation that ended with layers [start, stop).

    Raises:
        RemoteProtocolError: it is another's (SHAPE_MISMATCH).
    """
    if answer is None or (
        answer.session_id,
        answer.position,
        answer.start_layer,
        answer.stop_layer,
        answer.dtype,
        answer.shape,
    ) != (asked.session_id, asked.position, start, stop, asked.dtype, asked.shape):
        raise RemoteProtocolError(
            f"{peer_id} answered with another activation than was asked for",
            code=ErrorCode.SHAPE_MISMATCH,
        )
    return answer
