"""f32, f16 and bf16: each element by itself, little-endian, rounded to the nearest, ties to even.

A value that is too large for f16 or bf16 is refused: infinity in its place would spoil the mean of everybody, and the
largest finite number would be another update than was computed, and nobody would know.
"""

from __future__ import annotations

import numpy as np
import torch

from neurogrid.errors import NotFiniteError, RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.averaging.codecs.codec import TILE, Bytes, Codec, check_finite

__all__ = ["Bfloat16", "Float16", "Float32"]


class _Floats(Codec):
    block = 1
    _itemsize: int

    def num_bytes(self, num_elements: int) -> int:
        return num_elements * self._itemsize

    def _check_decoded(self, values: torch.Tensor) -> None:
        try:
            check_finite(values, 0)
        except NotFiniteError as exc:
            raise RemoteProtocolError(
                f"a number in {self.name} is not finite", code=ErrorCode.NOT_FINITE
            ) from exc


class Float32(_Floats):
    """IEEE binary32: what is sent is the memory of the vector."""

    name = "f32"
    # More than a core's cache holds, since its one or two steps leave nothing beside the vector.
    tile = 16 * TILE
    _itemsize = 4

    def _memory_for(self, values: torch.Tensor) -> Bytes:
        # A copy where a machine is not little-endian.
        data: Bytes = values.numpy().astype("<f4", copy=False).view(np.uint8)
        return data

    def _encode(self, values: torch.Tensor, data: Bytes, start: int) -> None:
        check_finite(values, start)  # the bytes are there

    def _decode(self, data: Bytes, values: torch.Tensor) -> None:
        values.numpy()[:] = data.view("<f4")
        self._check_decoded(values)


class _Half(_Floats):
    """A form of 16 bits, of which torch knows the dtype."""

    _itemsize = 2
    _dtype: torch.dtype
    _too_large: float  # what would be rounded to infinity, from here on

    def _encode(self, values: torch.Tensor, data: Bytes, start: int) -> None:
        low, high = torch.aminmax(values)
        # NaN is below nothing.
        if not (-low.item() < self._too_large and high.item() < self._too_large):
            check_finite(values, start)
            index = int(values.abs().argmax())
            raise NotFiniteError(
                f"element {start + index} is {float(values[index])}, and the largest of {self.name} is "
                f"{torch.finfo(self._dtype).max:g}: send it as f32, or find out why it is so large",
                index=start + index,
            )
        torch.from_numpy(data.view(np.int16)).view(self._dtype).copy_(values)


class Float16(_Half):
    """IEEE binary16: 11 bits of a number, up to 65,504; below 2^-24 nothing is left."""

    name = "f16"
    _dtype = torch.float16
    _too_large = 65520.0

    def _decode(self, data: Bytes, values: torch.Tensor) -> None:
        # torch does not take memory that must not be written to, and numpy is ten times slower at this.
        values.copy_(torch.from_numpy(data.view("<f2").astype(np.float16)))
        self._check_decoded(values)


class Bfloat16(_Half):
    """bfloat16: 8 bits of a number, and the range of f32."""

    name = "bf16"
    _dtype = torch.bfloat16
    _too_large = (2 - 2**-8) * 2.0**127

    def _decode(self, data: Bytes, values: torch.Tensor) -> None:
        # The upper half of an f32.
        np.left_shift(data.view("<u2"), np.uint32(16), out=values.numpy().view(np.uint32))
        self._check_decoded(values)
