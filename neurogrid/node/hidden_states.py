"""Hidden states as envelopes, and back: what a coordinator and its workers send each other.

A session says in which element type they travel; `I8` are the quantised rows of `neurogrid.model.files.quantized`.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import torch

from neurogrid.errors import RemoteProtocolError
from neurogrid.model.files.quantized import dequantize_rows, quantize_rows, quantized_width
from neurogrid.model.files.tensors import (
    TORCH_DTYPES,
    dtype_name,
    tensor_from_bytes,
    tensor_to_bytes,
)
from neurogrid.p2p.wire import ErrorCode, TensorEnvelope

__all__ = ["check_answer", "pack", "unpack", "width"]

QUANTIZED = "I8"


def pack(
    hidden_BTD: torch.Tensor,
    *,
    session_id: int,
    start: int,
    stop: int,
    position: int,
    wire: str = "",
    stage_nanos: tuple[int, ...] = (),
    batch: tuple[int, ...] = (),
) -> TensorEnvelope:
    """The envelope of [1, T, D] for layers [start, stop) of a session, at `position`.

    `wire` is one of `SESSION_DTYPES`; empty for the dtype of the tensor. `stage_nanos`: what the stages took so far.
    `batch`: number and size of the batch that it goes with.
    """
    if wire == QUANTIZED:
        hidden_BTD = quantize_rows(hidden_BTD)
    elif wire and hidden_BTD.dtype is not TORCH_DTYPES[wire]:
        hidden_BTD = hidden_BTD.to(TORCH_DTYPES[wire])
    return TensorEnvelope(
        session_id=session_id,
        position=position,
        start_layer=start,
        stop_layer=stop,
        dtype=dtype_name(hidden_BTD.dtype),
        shape=tuple(hidden_BTD.shape),
        data=tensor_to_bytes(hidden_BTD),
        stage_nanos=stage_nanos,
        batch=batch,
    )


def unpack(envelope: TensorEnvelope, *, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[1, T, D] in `dtype`; a view of the envelope's bytes where they are in that already."""
    tensor = tensor_from_bytes(envelope.data, TORCH_DTYPES[envelope.dtype], envelope.shape)
    if envelope.dtype == QUANTIZED:
        return dequantize_rows(tensor, hidden_size, dtype)
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def width(wire: str, hidden_size: int) -> int:
    """Elements of a row as it travels."""
    return quantized_width(hidden_size) if wire == QUANTIZED else hidden_size


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
