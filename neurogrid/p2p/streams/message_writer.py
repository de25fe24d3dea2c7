"""Buffers of one message onto a stream, under the bound of time that no stream sets.

A stream waits for its peer however long. Here each piece of a message has to be taken in time, at the rate at which a
message must arrive (`Bounds.message_deadline`): a peer that asks and does not read the answers would otherwise hold
their memory, and the handlers that wait to send them, for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio

from neurogrid.errors import DataWriteError, StreamBrokenError
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.wire import Data

__all__ = ["write_message"]

# Bytes. Smaller messages go out as one write: a copy is cheaper than a second encrypted frame.
JOIN_BYTES = 64 * 1024
# Bytes of one write: a peer that reads slowly is seen to read at all.
PIECE_BYTES = 1024 * 1024
# Bytes. Small neighbours are joined: each part is a frame of its own, which costs more than the copy.
SMALL_BYTES = 1024


async def write_message(stream: Stream, parts: Sequence[Data], *, bounds: Bounds) -> int:
    """Write the parts, of which the first is the header; return how many bytes they are.

    Raises:
        DataWriteError: the stream broke, perhaps with part of it sent, or the peer took none for too long and it
            was reset.

    After cancellation a part of the message may be sent, so that nothing else may be written to the stream.
    """
    num_bytes = sum(map(len, parts))
    parts = (b"".join(parts),) if num_bytes <= JOIN_BYTES else _small_joined(parts)
    for piece in _pieces(parts) if num_bytes > PIECE_BYTES else (parts,):
        piece_bytes = sum(map(len, piece))
        timeout = bounds.message_deadline(piece_bytes)
        try:
            with trio.move_on_after(timeout) as scope:
                await stream.send_parts(piece)
        except StreamBrokenError as exc:
            raise DataWriteError(str(exc)) from exc
        if scope.cancelled_caught:
            await stream.reset()
            raise DataWriteError(
                f"{stream.peer_id} took less than {piece_bytes} B in {timeout:g} s: the stream was reset"
            )
    return num_bytes


def _small_joined(parts: Sequence[Data]) -> list[Data]:
    """The parts with small neighbours as one: a header, and the numbers that begin its Data."""
    joined: list[Data] = []
    small = b""
    for part in parts:
        if len(part) <= SMALL_BYTES:
            small += part
            continue
        if small:
            joined.append(small)
            small = b""
        joined.append(part)
    if small:
        joined.append(small)
    return joined


def _pieces(parts: Sequence[Data]) -> Iterator[list[Data]]:
    """Yield pieces to be written at once: a large part in slices, with the small parts before the first of them."""
    piece: list[Data] = []
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), PIECE_BYTES):
            piece.append(view[at : at + PIECE_BYTES])
            if sum(map(len, piece)) >= PIECE_BYTES:
                yield piece
                piece = []
    if piece:
        yield piece
