"""topk: of each 4,096 elements the K largest by magnitude, by index, in 2 bits; all others are 0.

A block is two magnitudes, float32, the lower and the upper; K indices of 12 bits, ascending; K values of 2 bits, of
which the low one is the sign and the high one says which magnitude. The middle of the smallest and the largest
magnitude that are sent parts them in two, or 0 if the smallest is 0; each magnitude is the mean of its part. Of equal
elements the one with the lower index is sent. As in SparseLoCo (arXiv 2508.15706), whose 1.56 % is `topk:64`.

G = blocks, B = elements of a block, K = elements that are sent, W = bytes of a block.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from neurogrid.errors import ConfigurationError, RemoteProtocolError
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

__all__ = ["TopK"]

Indices: TypeAlias = npt.NDArray[np.int64]

_MAGNITUDE_BYTES: Final = 8
_FOLDS: Final = 8


class TopK(BlockCodec):
    """The `num_sent` largest of each 4,096.

    Raises:
        ConfigurationError: `num_sent` is not 1 to 4,096.
    """

    block = 4096

    def __init__(self, num_sent: int = 64) -> None:
        if not 1 <= num_sent <= self.block:
            raise ConfigurationError(f"topk:{num_sent}: 1 to {self.block} of {self.block} are sent")
        self.name = f"topk:{num_sent}"
        self.num_sent = num_sent

    def _block_bytes(self, num_elements: int) -> int:
        num_sent = min(self.num_sent, num_elements)
        return _MAGNITUDE_BYTES + (3 * num_sent + 1) // 2 + (num_sent + 3) // 4

    def _encode_blocks(self, values_GB: torch.Tensor, data_GW: Bytes, start: int) -> None:
        check_finite(values_GB.reshape(-1), start)
        num_blocks, num_elements = values_GB.shape
        num_sent = min(self.num_sent, num_elements)
        indices_GK = _largest(np.abs(values_GB.numpy()), num_sent)
        sent_GK = np.take_along_axis(values_GB.numpy(), indices_GK, axis=1)
        magnitudes_GK = np.abs(sent_GK)
        half = np.float32(0.5)
        smallest_G1 = magnitudes_GK.min(1, keepdims=True)
        middle_G1 = smallest_G1 * half + magnitudes_GK.max(1, keepdims=True) * half
        # Zeros are a part of their own, and stay zeros: gradients of a table of embeddings are mostly that.
        middle_G1[smallest_G1 == 0] = 0
        is_upper_GK = magnitudes_GK > middle_G1
        two_G2 = np.concatenate(
            [
                mean_by_halves(np.where(part_GK, magnitudes_GK, 0), part_GK.sum(1, keepdims=True))
                for part_GK in (~is_upper_GK, is_upper_GK)
            ],
            axis=1,
        ).astype("<f4", copy=False)
        cut = _MAGNITUDE_BYTES + (3 * num_sent + 1) // 2
        data_GW[:, :_MAGNITUDE_BYTES] = two_G2.view(np.uint8)
        data_GW[:, _MAGNITUDE_BYTES:cut] = _pack_indices(indices_GK)
        codes_GK = np.zeros((num_blocks, 4 * (data_GW.shape[1] - cut)), np.uint8)
        codes_GK[:, :num_sent] = (sent_GK < 0) | (is_upper_GK << np.uint8(1))
        data_GW[:, cut:] = (
            codes_GK[:, ::4]
            | (codes_GK[:, 1::4] << 2)
            | (codes_GK[:, 2::4] << 4)
            | (codes_GK[:, 3::4] << 6)
        )

    def _decode_blocks(self, data_GW: Bytes, values_GB: Floats) -> None:
        num_blocks, num_elements = values_GB.shape
        num_sent = min(self.num_sent, num_elements)
        cut = _MAGNITUDE_BYTES + (3 * num_sent + 1) // 2
        two_G2 = data_GW[:, :_MAGNITUDE_BYTES].copy().view("<f4")
        check_scales(two_G2, LARGEST)
        indices_GK = _unpack_indices(data_GW[:, _MAGNITUDE_BYTES:cut], num_sent)
        codes_GK = (data_GW[:, cut:, None] >> np.array([0, 2, 4, 6], np.uint8)) & np.uint8(3)
        codes_GK = codes_GK.reshape(num_blocks, -1)
        if (
            codes_GK[:, num_sent:].any()
            or (indices_GK[:, num_sent:] != 0).any()
            or (np.diff(indices_GK[:, :num_sent], axis=1) <= 0).any()
            or (indices_GK[:, num_sent - 1] >= num_elements).any()
        ):
            raise RemoteProtocolError(
                f"indices of {self.name} do not ascend below {num_elements}, or bits of no element are not 0",
                code=ErrorCode.PROTOCOL_VIOLATION,
            )
        sent_GK = np.take_along_axis(two_G2, (codes_GK[:, :num_sent] >> 1).astype(np.intp), axis=1)
        np.negative(sent_GK, out=sent_GK, where=(codes_GK[:, :num_sent] & 1).astype(bool))
        values_GB[:] = 0
        np.put_along_axis(values_GB, indices_GK[:, :num_sent], sent_GK, axis=1)


def _largest(magnitudes_GB: Floats, num_sent: int) -> Indices:
    """Ascending indices [G, K] of the largest, of equal ones those with the lower index."""
    num_blocks, num_elements = magnitudes_GB.shape
    if num_elements % _FOLDS or num_elements < 2 * _FOLDS * num_sent:
        return _select(magnitudes_GB, num_sent)
    # Of the maxima of eight elements each, K are at least as large as the Kth of them: so nothing below that is
    # among the K largest of all, and hardly more than K elements are left to choose from.
    maxima = magnitudes_GB.reshape(num_blocks, _FOLDS, -1).max(1)
    wanted_GB = magnitudes_GB >= _bounds(maxima, num_sent)
    found = np.flatnonzero(wanted_GB)
    blocks, columns = np.divmod(found, num_elements)
    counts_G = np.bincount(blocks, minlength=num_blocks)
    places = np.arange(len(found)) - (np.cumsum(counts_G) - counts_G)[blocks]
    left = np.full((num_blocks, counts_G.max()), -1, np.float32)
    left[blocks, places] = magnitudes_GB.reshape(-1)[found]
    indices = np.zeros(left.shape, np.int64)
    indices[blocks, places] = columns
    return np.take_along_axis(indices, _select(left, num_sent), axis=1)


def _select(magnitudes_GB: Floats, num_sent: int) -> Indices:
    bounds_G1 = _bounds(magnitudes_GB, num_sent)
    wanted_GB = magnitudes_GB >= bounds_G1
    for row in np.flatnonzero(np.count_nonzero(wanted_GB, axis=1) > num_sent):
        wanted_GB[row] = magnitudes_GB[row] > bounds_G1[row]
        ties = np.flatnonzero(magnitudes_GB[row] == bounds_G1[row])
        wanted_GB[row, ties[: num_sent - np.count_nonzero(wanted_GB[row])]] = True
    return np.nonzero(wanted_GB)[1].reshape(len(magnitudes_GB), num_sent)


def _bounds(magnitudes_GB: Floats, num_sent: int) -> Floats:
    """The Kth largest of each block, [G, 1]."""
    place = magnitudes_GB.shape[1] - num_sent
    bounds: Floats = np.partition(magnitudes_GB, place, axis=1)[:, place, None]
    return bounds


def _pack_indices(indices_GK: Indices) -> Bytes:
    """Two in three bytes, the first in the lower 12 bits; the last of an odd number in two."""
    num_blocks, num_sent = indices_GK.shape
    even = np.zeros((num_blocks, num_sent + num_sent % 2), np.uint32)
    even[:, :num_sent] = indices_GK
    pairs = even[:, ::2] | (even[:, 1::2] << 12)
    packed = np.stack((pairs, pairs >> 8, pairs >> 16), axis=-1).astype(np.uint8)
    return packed.reshape(num_blocks, -1)[:, : (3 * num_sent + 1) // 2]


def _unpack_indices(data_GW: Bytes, num_sent: int) -> Indices:
    """[G, K], and another, of bits that should be 0, where K is odd."""
    num_blocks, num_bytes = data_GW.shape
    padded = np.zeros((num_blocks, (num_sent + 1) // 2 * 3), np.int64)
    padded[:, :num_bytes] = data_GW
    triples = padded.reshape(num_blocks, -1, 3)
    pairs = triples[..., 0] | (triples[..., 1] << 8) | (triples[..., 2] << 16)
    return np.stack((pairs & 0xFFF, pairs >> 12), axis=-1).reshape(num_blocks, -1)
