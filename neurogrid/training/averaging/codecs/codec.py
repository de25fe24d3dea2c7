"""The interface of codecs, the forms of a vector on the wire, and the checks that all of them need.

A vector is worked on in tiles that a core's cache holds: what the steps of a form leave behind is never as large as
the vector, and is read while it is near. Tiles end where blocks do, so they do not show in the bytes.

G = blocks, B = elements of a block, W = bytes of a block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from neurogrid.errors import NotFiniteError, RemoteProtocolError
from neurogrid.p2p.wire import Data, ErrorCode

__all__ = [
    "TILE",
    "BlockCodec",
    "Bytes",
    "Codec",
    "Floats",
    "check_finite",
    "check_scales",
    "check_vector",
    "mean_by_halves",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

LARGEST: Final = float(np.finfo(np.float32).max)
"""The largest finite float32."""

TILE: Final = 65_536
"""Elements of a vector in 256 KiB: a multiple of every block."""


class Codec(ABC):
    """A form of a float32 vector on the wire. It holds no state: threads may share one.

    Attributes:
        name: what `parse_codec` takes; two codecs with the same name give the same bytes.
        block: elements; a vector may be cut at multiples of it, and the bytes of the pieces put together are those
            of the whole.
        tile: elements that are worked on at once, a multiple of `block`.
    """

    name: str
    block: int
    tile: int = TILE

    @abstractmethod
    def num_bytes(self, num_elements: int) -> int:
        """The exact size of what `encode` gives."""

    def encode(self, values: torch.Tensor) -> memoryview:
        """The bytes of `values`, float32 [n], contiguous, on the CPU.

        Those of `f32` are the memory of `values` itself; all others are new.

        Raises:
            NotFiniteError: a value is NaN or infinite, or this form has no finite number for it.
        """
        check_vector(values)
        data = self._memory_for(values)
        for start in range(0, len(values), self.tile):
            tile = values[start : start + self.tile]
            first = self.num_bytes(start)
            self._encode(tile, data[first : first + self.num_bytes(len(tile))], start)
        return data.data

    def decode(
        self, data: Data, num_elements: int, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Decode `data` into a vector, float32 [num_elements], all of it finite.

        Args:
            data: `num_bytes(num_elements)` bytes. Nothing refers to them afterwards.
            out: where to write it, float32 [num_elements], contiguous, on the CPU; a new tensor if None. What stands
                there after an error is undefined.

        Raises:
            RemoteProtocolError: no form of so many elements: SHAPE_MISMATCH for another number of bytes, NOT_FINITE
                for a number that is NaN or infinite, PROTOCOL_VIOLATION for all else.
        """
        if out is None:
            out = torch.empty(num_elements, dtype=torch.float32)
        check_vector(out)
        if len(out) != num_elements:
            raise ValueError(f"out has {len(out)} elements, and {num_elements} are due")
        self._check_size(data, num_elements)
        for start in range(0, num_elements, self.tile):
            self._decode_tile(data, start, out[start : start + self.tile])
        return out

    def decode_in_pieces(self, data: Data, num_elements: int) -> Iterator[torch.Tensor]:
        """Decode `data` piece by piece, in order, with the errors of `decode`.

        Yields:
            float32 [at most `tile`], all of it finite. The next one is written to the same memory.
        """
        self._check_size(data, num_elements)
        memory = torch.empty(min(self.tile, num_elements), dtype=torch.float32)
        for start in range(0, num_elements, self.tile):
            piece = memory[: num_elements - start]
            self._decode_tile(data, start, piece)
            yield piece

    def _check_size(self, data: Data, num_elements: int) -> None:
        needed, given = self.num_bytes(num_elements), memoryview(data).nbytes
        if given != needed:
            raise RemoteProtocolError(
                f"{given} bytes for {num_elements} elements in {self.name}: {needed} are due",
                code=ErrorCode.SHAPE_MISMATCH,
            )

    def _decode_tile(self, data: Data, start: int, tile: torch.Tensor) -> None:
        first = self.num_bytes(start)
        num_bytes = self.num_bytes(len(tile))
        self._decode(np.frombuffer(data, np.uint8, num_bytes, first), tile)

    def _memory_for(self, values: torch.Tensor) -> Bytes:
        """Memory that the bytes of `values` are written to."""
        return np.empty(self.num_bytes(len(values)), np.uint8)

    @abstractmethod
    def _encode(self, values: torch.Tensor, data: Bytes, start: int) -> None:
        """Write the form of a tile, once it is found to be finite. `start` is where it stands, for texts."""

    @abstractmethod
    def _decode(self, data: Bytes, values: torch.Tensor) -> None:
        """Write the elements of a tile; the number of bytes is right."""


class BlockCodec(Codec):
    """A form in blocks, each of which stands for itself. The last may have fewer elements."""

    def num_bytes(self, num_elements: int) -> int:
        num_blocks, rest = divmod(num_elements, self.block)
        whole = num_blocks * self._block_bytes(self.block)
        return whole + self._block_bytes(rest) if rest else whole

    def _encode(self, values: torch.Tensor, data: Bytes, start: int) -> None:
        split = len(values) // self.block * self.block
        width = self._block_bytes(self.block)
        if split:
            cut = split // self.block * width
            self._encode_blocks(
                values[:split].view(-1, self.block), data[:cut].reshape(-1, width), start
            )
        if split < len(values):
            rest = data[split // self.block * width :]
            self._encode_blocks(values[split:].unsqueeze(0), rest[None], start + split)

    def _decode(self, data: Bytes, values: torch.Tensor) -> None:
        split = len(values) // self.block * self.block
        width = self._block_bytes(self.block)
        numbers: Floats = values.numpy()
        if split:
            cut = split // self.block * width
            self._decode_blocks(
                data[:cut].reshape(-1, width), numbers[:split].reshape(-1, self.block)
            )
        if split < len(values):
            self._decode_blocks(data[split // self.block * width :][None], numbers[split:][None])

    @abstractmethod
    def _block_bytes(self, num_elements: int) -> int:
        """W of a block of B elements, 1 to `block`."""

    @abstractmethod
    def _encode_blocks(self, values_GB: torch.Tensor, data_GW: Bytes, start: int) -> None: ...

    @abstractmethod
    def _decode_blocks(self, data_GW: Bytes, values_GB: Floats) -> None: ...


def check_finite(values: torch.Tensor, start: int) -> None:
    """Raises:
    NotFiniteError: an element is NaN or infinite. `start` is where the first of them stands.
    """
    # A sum that is finite acquits all of its terms, at the speed of memory.
    if math.isfinite(values.sum().item()):
        return
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0])
        raise NotFiniteError(
            f"element {start + first} is {float(values[first])}: what is sent has to be finite",
            index=start + first,
        )


def check_scales(scales: Floats, bound: float) -> None:
    """Raises:
    RemoteProtocolError: a scale is negative, or not at most `bound`.
    """
    if np.signbit(scales).any():
        raise RemoteProtocolError("a scale is negative", code=ErrorCode.PROTOCOL_VIOLATION)
    # NaN is not at most anything.
    if not bool((scales <= bound).all()):
        raise RemoteProtocolError(
            f"a scale is not a number up to {bound:g}", code=ErrorCode.NOT_FINITE
        )


def mean_by_halves(values_GB: Floats, counts_G1: npt.NDArray[np.int64] | int) -> Floats:
    """The sum over B divided by a count, float32 [G, 1]; 0 for a count of 0.

    Summed in float64, by halves: zeros are appended up to a power of two, and then the second half is added to the
    first until one is left. So the order is fixed, and no library can choose another.
    """
    num_groups, num_elements = values_GB.shape
    size = 1 << max(0, num_elements - 1).bit_length()
    sums = np.zeros((num_groups, size))
    sums[:, :num_elements] = values_GB
    while size > 1:
        size //= 2
        sums = sums[:, :size] + sums[:, size:]
    return (sums / np.maximum(counts_G1, 1)).astype(np.float32)


def check_vector(values: torch.Tensor) -> None:
    if (
        values.dtype != torch.float32
        or values.dim() != 1
        or not values.is_contiguous()
        or values.device.type != "cpu"
    ):
        raise ValueError(
            f"a contiguous vector of float32 on the CPU is wanted, not {values.dtype} "
            f"{list(values.shape)} on {values.device}"
        )
