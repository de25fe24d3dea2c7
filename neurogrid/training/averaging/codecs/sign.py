"""sign: a bit for each element, and the mean magnitude of 4,096.

A block is its scale, float32, and then a bit for each element, from the lowest of the first byte on: 1 is minus the
scale, 0 plus. An element of 0 is plus, too: one bit has no zero, and error feedback takes it back.

G = blocks, B = elements of a block, W = bytes of a block.
"""

from __future__ import annotations

import numpy as np
import torch

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.averaging.codecs.codec import (
    LARGEST,
    BlockCodec,
    Bytes,
    Floats,
    check_finite,
    check_scales,
    mean_by_halves,
)

__all__ = ["Sign"]

_SCALE_BYTES = 4


class Sign(BlockCodec):
    """One bit, and a scale for 4,096: a thirty-second of f32."""

    name = "sign"
    block = 4096

    def _block_bytes(self, num_elements: int) -> int:
        return _SCALE_BYTES + (num_elements + 7) // 8

    def _encode_blocks(self, values_GB: torch.Tensor, data_GW: Bytes, start: int) -> None:
        check_finite(values_GB.reshape(-1), start)
        numbers = values_GB.numpy()
        scales_G1 = mean_by_halves(np.abs(numbers), numbers.shape[1])
        data_GW[:, :_SCALE_BYTES] = scales_G1.astype("<f4", copy=False).view(np.uint8)
        data_GW[:, _SCALE_BYTES:] = np.packbits(numbers < 0, axis=1, bitorder="little")

    def _decode_blocks(self, data_GW: Bytes, values_GB: Floats) -> None:
        scales_G1 = data_GW[:, :_SCALE_BYTES].copy().view("<f4")
        check_scales(scales_G1, LARGEST)
        num_elements = values_GB.shape[1]
        if num_elements % 8 and data_GW[0, -1] >> num_elements % 8:
            raise RemoteProtocolError(
                "bits that belong to no element are not 0", code=ErrorCode.PROTOCOL_VIOLATION
            )
        bits_GB = np.unpackbits(
            data_GW[:, _SCALE_BYTES:], axis=1, count=num_elements, bitorder="little"
        )
        # The bit of the sign of a float32.
        np.left_shift(bits_GB, np.uint32(31), out=values_GB.view(np.uint32))
        values_GB.view(np.uint32)[:] |= scales_G1.astype(np.float32, copy=False).view(np.uint32)
