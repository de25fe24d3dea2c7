"""Stock Yamux, without its deadlock.

The reader of a stock py-libp2p 0.8.1 connection answers pings and new streams itself, and waits for the write
lock to do so. When both ends send in bulk, each reader may wait for a writer that waits for the other
reader: nothing moves ever again (seen within minutes: two ends sending 8 MiB to each other while the
round trip is measured). Here the reader leaves its frames to a task and reads on.

The stock class is chosen by name in `MuxerMultistream.new_conn`, so that method is replaced too.
"""

from __future__ import annotations

import logging
from typing import Any

import trio
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID, Yamux

__all__ = ["install_yamux"]

logger = logging.getLogger(__name__)

# Frames of 12 B that the reader owes the peer. A peer that asks for more answers than this while it reads
# none of them is not one of good will.
MAX_OWED_FRAMES = 4096


class _Yamux(Yamux):
    """Stock Yamux whose reader never waits for a writer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader: trio.lowlevel.Task | None = None
        self._owed_in, self._owed_out = trio.open_memory_channel[bytes](MAX_OWED_FRAMES)

    async def handle_incoming(self) -> None:
        self._reader = trio.lowlevel.current_task()
        assert self._nursery is not None
        self._nursery.start_soon(self._write_owed_frames)
        await super().handle_incoming()

    async def _write_frame(self, data: bytes) -> None:
        if trio.lowlevel.current_task() is not self._reader:
            await super()._write_frame(data)
            return
        try:
            self._owed_in.send_nowait(data)
        except trio.WouldBlock as exc:
            raise IOException(f"{self.peer_id} makes us owe it {MAX_OWED_FRAMES} frames") from exc

    async def _write_owed_frames(self) -> None:
        async for frame in self._owed_out:
            try:
                await super()._write_frame(frame)
            except (IOException, OSError) as exc:
                logger.debug("the connection to %s broke: %s", self.peer_id, exc)
                return


class _MuxerMultistream(MuxerMultistream):
    """Negotiates as stock does, and makes our Yamux where stock would make its own."""

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        protocol, transport_class = await self._selector.select(
            conn, conn.is_initiator, self.negotiate_timeout
        )
        muxed: IMuxedConn
        if protocol == PROTOCOL_ID:
            muxed = _Yamux(conn, peer_id, is_initiator=conn.is_initiator)
        else:
            muxed = transport_class(conn, peer_id)
        return self._annotate_connection(muxed, conn, protocol)


def install_yamux(swarm: Any) -> None:
    """Let a swarm make its connections with this Yamux. Before it listens or dials."""
    stock = swarm.upgrader.muxer_multistream
    replacement = _MuxerMultistream.__new__(_MuxerMultistream)
    replacement.__dict__.update(stock.__dict__)
    swarm.upgrader.muxer_multistream = replacement
