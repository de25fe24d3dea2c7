"""Spans of the images of a session among its tokens (`protocol_spec/sessions.md`, "Images")."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.limits import MAX_IMAGE_SPAN_BYTES
from neurogrid.p2p.wire.maps import MAX_U32

__all__ = ["IMAGE_SPAN_BYTES", "ImageSpan", "decode_image_spans", "encode_image_spans"]

_SPAN: Final = struct.Struct(">III")
IMAGE_SPAN_BYTES: Final = _SPAN.size
"""Bytes of one span."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The tokens of one image, which follow each other, row after row.

    Attributes:
        start: the position of the first.
        rows, columns: as they lie in the image, 1 or more; one row where that is not known.
    """

    start: int
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        """The position behind the last."""
        return self.start + self.num_tokens


def encode_image_spans(spans: Sequence[ImageSpan]) -> bytes:
    """Three u32 for each, big-endian: start, rows, columns."""
    return b"".join(_SPAN.pack(span.start, span.rows, span.columns) for span in spans)


def decode_image_spans(data: bytes, *, max_length: int) -> tuple[ImageSpan, ...]:
    """The spans of a session of at most `max_length` tokens.

    Raises:
        RemoteProtocolError: they are none of it, or not in order (PROTOCOL_VIOLATION).
    """
    if not data or len(data) % IMAGE_SPAN_BYTES or len(data) > MAX_IMAGE_SPAN_BYTES:
        raise violation(
            f"images are 1 to {MAX_IMAGE_SPAN_BYTES // IMAGE_SPAN_BYTES} times {IMAGE_SPAN_BYTES} bytes, "
            f"not {len(data)} bytes"
        )
    spans = tuple(ImageSpan(*numbers) for numbers in _SPAN.iter_unpack(data))
    end = 0
    for span in spans:
        # Below 2**64: of Python's integers none overflows.
        if span.start < end or not span.num_tokens or span.stop > min(max_length, MAX_U32):
            raise violation(
                f"an image of {span.rows} x {span.columns} tokens at {span.start} is none of a session of {max_length} "
                f"tokens in which {end} are taken"
            )
        end = span.stop
    return spans
