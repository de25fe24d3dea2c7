"""int8 and int4: groups of 256 elements, each with a scale, the largest magnitude over 127 or 7.

A group is its scale, float32, and then its integers: of 8 bits in two's complement, of 4 bits as 8 more than they are,
that of an even element in the low half of a byte. A scale that no normal float32 is becomes 0, and the group zeros: so
nothing depends on what a machine does with subnormal numbers. One of which the integers are too large for float32 is
refused. An element is off by at most half a scale.

G = groups, B = elements of a group, W = bytes of a group.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import numpy as np
import torch

from neurogrid.errors import NotFiniteError, RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.averaging.codecs.codec import (
    BlockCodec,
    Bytes,
    Floats,
    check_finite,
    check_scales,
)

__all__ = ["GROUP", "Int4", "Int8"]

GROUP: Final = 256
"""Elements that share a scale: scales take 1.6 % of what is sent in 8 bits, 3 % in 4."""

_SCALE_BYTES: Final = 4
_SMALLEST: Final = float(np.finfo(np.float32).tiny)


class _Integers(BlockCodec):
    block = GROUP
    _largest: int
    _bound: float  # of a scale: what is lowest times it is -2^127

    def _encode_blocks(self, values_GB: torch.Tensor, data_GW: Bytes, start: int) -> None:
        scales_G1 = values_GB.abs().amax(1, keepdim=True).numpy() / np.float32(self._largest)
        # NaN, which is at most nothing, is the largest of its group, and of all.
        if not scales_G1.max() <= self._bound:
            check_finite(values_GB.reshape(-1), start)
            index = int(values_GB.abs().argmax())
            raise NotFiniteError(
                f"element {start + index} is {float(values_GB.reshape(-1)[index])}, too large for {self.name}: "
                "find out why",
                index=start + index,
            )
        scales_G1[scales_G1 < _SMALLEST] = 0
        data_GW[:, :_SCALE_BYTES] = scales_G1.astype("<f4", copy=False).view(np.uint8)
        # Divided by infinity, elements of a group whose scale is 0 become 0.
        scales_G1[scales_G1 == 0] = np.inf
        steps_G1 = torch.from_numpy(scales_G1)
        self._pack((values_GB / steps_G1).round_(), data_GW[:, _SCALE_BYTES:])

    def _decode_blocks(self, data_GW: Bytes, values_GB: Floats) -> None:
        scales_G1 = data_GW[:, :_SCALE_BYTES].copy().view("<f4")
        check_scales(scales_G1, self._bound)
        self._unpack(data_GW[:, _SCALE_BYTES:], values_GB)
        values_GB *= scales_G1

    @abstractmethod
    def _pack(self, integers_GB: torch.Tensor, data_GW: Bytes) -> None: ...

    @abstractmethod
    def _unpack(self, data_GW: Bytes, integers_GB: Floats) -> None: ...


class Int8(_Integers):
    """Integers of -127 to 127; a reader takes -128, too."""

    name = "int8"
    _largest = 127
    _bound = 2.0**120

    def _block_bytes(self, num_elements: int) -> int:
        return _SCALE_BYTES + num_elements

    def _pack(self, integers_GB: torch.Tensor, data_GW: Bytes) -> None:
        torch.from_numpy(data_GW.view(np.int8)).copy_(integers_GB)

    def _unpack(self, data_GW: Bytes, integers_GB: Floats) -> None:
        integers_GB[:] = data_GW.view(np.int8)


class Int4(_Integers):
    """Integers of -7 to 7; a reader takes -8, too."""

    name = "int4"
    _largest = 7
    _bound = 2.0**124

    def _block_bytes(self, num_elements: int) -> int:
        return _SCALE_BYTES + (num_elements + 1) // 2

    def _pack(self, integers_GB: torch.Tensor, data_GW: Bytes) -> None:
        num_elements = integers_GB.shape[1]
        raised_GB = torch.zeros((len(integers_GB), 2 * data_GW.shape[1]), dtype=torch.uint8)
        # By int8, which torch makes four times as fast as uint8.
        raised_GB[:, :num_elements] = integers_GB.add_(8).to(torch.int8).view(torch.uint8)
        # Two elements as one number of 16 bits, of which the even one is the low byte.
        pairs = raised_GB.numpy().view("<u2")
        data_GW[:] = (pairs | (pairs >> 4)).astype(np.uint8)

    def _unpack(self, data_GW: Bytes, integers_GB: Floats) -> None:
        num_elements = integers_GB.shape[1]
        if num_elements % 2 and data_GW[0, -1] >> 4:
            raise RemoteProtocolError(
                "the half of a byte that belongs to no element is not 0",
                code=ErrorCode.PROTOCOL_VIOLATION,
            )
        pairs = data_GW.astype("<u2")
        pairs |= pairs << 4
        pairs &= 0x0F0F
        raised_GB = pairs.view(np.uint8)[:, :num_elements]
        integers_GB[:] = (raised_GB - np.uint8(8)).view(np.int8)
