"""The bytes that arrived on one stream and were not read yet.

Strategy: what was decrypted into a bytes object of its own is kept and handed out as it is, without a copy. Pieces
that are small, or a small part of the object that they came in, are gathered instead: a peer that sends
frames of one byte must not make us keep 64 KiB, or an object, for each.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from neurogrid.p2p.streams.intake import Piece

__all__ = ["Inbox"]

# Below this a copy is cheaper than to keep the piece apart.
_SMALL: Final = 4096
# Gathered pieces are handed out in this size at most, so that taking one copies a bounded amount.
_GATHERED: Final = 64 * 1024


class Inbox:
    """A queue of bytes in pieces.

    Attributes:
        size: bytes in it.
    """

    __slots__ = ("_pieces", "size")

    def __init__(self) -> None:
        self._pieces: deque[Piece] = deque()
        self.size = 0

    def append(self, data: bytes, start: int, stop: int) -> None:
        """Add `data[start:stop]`, which must not be empty."""
        num_bytes = stop - start
        self.size += num_bytes
        if num_bytes == len(data) and num_bytes >= _SMALL:
            self._pieces.append(data)
        elif num_bytes >= _SMALL and 2 * num_bytes >= len(data):
            self._pieces.append(memoryview(data)[start:stop])
        else:
            piece = memoryview(data)[start:stop]
            last = self._pieces[-1] if self._pieces else None
            if isinstance(last, bytearray) and len(last) + num_bytes <= _GATHERED:
                last += piece
            else:
                self._pieces.append(bytearray(piece))

    def pop(self) -> Piece:
        """Remove and return the first piece, as it lies; there must be one."""
        piece = self._pieces.popleft()
        self.size -= len(piece)
        return piece

    def take(self, max_bytes: int | None = None) -> bytes:
        """Remove and return the first piece, or its first `max_bytes`; `b""` when empty."""
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        if max_bytes is not None and len(piece) > max_bytes:
            view = memoryview(piece)
            self._pieces.appendleft(view[max_bytes:])
            piece = view[:max_bytes]
        self.size -= len(piece)
        return piece if isinstance(piece, bytes) else bytes(piece)

    def take_into(self, destination: memoryview) -> int:
        """Move bytes into `destination` until it is full or this is empty; return how many."""
        at, room = 0, len(destination)
        while at < room and self._pieces:
            piece = self._pieces.popleft()
            num_bytes = len(piece)
            if num_bytes > room - at:
                view = memoryview(piece)
                num_bytes = room - at
                self._pieces.appendleft(view[num_bytes:])
                piece = view[:num_bytes]
            destination[at : at + num_bytes] = piece
            at += num_bytes
        self.size -= at
        return at

    def clear(self) -> int:
        """Drop everything; return how many bytes it was."""
        dropped, self.size = self.size, 0
        self._pieces.clear()
        return dropped
