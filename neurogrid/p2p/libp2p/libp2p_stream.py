"""`Stream` on libp2p: bytes go straight to the stream of our link, beginning and end also through py-libp2p.

py-libp2p keeps a state of its own for each stream, behind a lock that costs two turns of the scheduler for each
read and write. Nothing needs it but the count of open streams, so it is told of the end alone. Here is the one
table that maps the exceptions of py-libp2p to ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import trio
from libp2p.connection_types import ConnectionType
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.stream.net_stream import NetStream

from neurogrid.errors import StreamBrokenError
from neurogrid.p2p.link import LinkStream
from neurogrid.p2p.streams.intake import Intake
from neurogrid.p2p.streams.stream import Stream

__all__ = ["Libp2pStream"]

# How long py-libp2p may take to put a stream out of its books; it waits for nobody but its own locks.
CLOSE_TIMEOUT = 2.0  # seconds


class Libp2pStream(Stream):
    """A stream of a py-libp2p host whose swarm has our link. Made by `Libp2pHost`."""

    def __init__(self, net_stream: NetStream, *, peer_id: str, protocol_id: str) -> None:
        super().__init__(peer_id=peer_id, protocol_id=protocol_id)
        self._net_stream = net_stream
        self._link_stream = cast(LinkStream, net_stream.muxed_stream)

    @property
    def is_relayed(self) -> bool:
        connection: Any = self._net_stream.muxed_conn
        return bool(connection.get_connection_type() == ConnectionType.RELAYED)

    @property
    def is_reset_by_peer(self) -> bool:
        return self._link_stream.reset_by_peer

    async def receive_some(self, max_bytes: int = 256 * 1024) -> bytes:
        try:
            return await self._link_stream.receive_some(max_bytes)
        except BaseLibp2pError as exc:
            raise self._broken(exc) from exc

    async def receive_each(self, intake: Intake) -> bool:
        try:
            return await self._link_stream.receive_each(intake)
        except BaseLibp2pError as exc:
            raise self._broken(exc) from exc

    async def receive_into(self, destination: memoryview) -> int:
        try:
            return await self._link_stream.receive_into(destination)
        except BaseLibp2pError as exc:
            raise self._broken(exc) from exc

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            await self._link_stream.write(data)
        except BaseLibp2pError as exc:
            raise self._broken(exc) from exc

    async def send_parts(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        try:
            await self._link_stream.write(*parts)
        except BaseLibp2pError as exc:
            raise self._broken(exc) from exc

    def send_nowait(self, data: bytes) -> bool:
        try:
            return self._link_stream.write_nowait(data)
        except BaseLibp2pError as exc:
            raise self._broken(exc) from exc

    async def send_eof(self) -> None:
        with trio.CancelScope(shield=True), self._map_exceptions():
            self._link_stream.check_open()
            await self._net_stream.close_write()

    async def aclose(self) -> None:
        with trio.move_on_after(CLOSE_TIMEOUT) as scope:
            scope.shield = True
            with suppress(StreamBrokenError), self._map_exceptions():
                await self._net_stream.close()

    async def reset(self) -> None:
        with trio.move_on_after(CLOSE_TIMEOUT) as scope:
            scope.shield = True
            with suppress(StreamBrokenError), self._map_exceptions():
                await self._net_stream.reset()

    @contextmanager
    def _map_exceptions(self) -> Iterator[None]:
        try:
            yield
        except BaseLibp2pError as exc:
            raise self._broken(exc) from exc

    def _broken(self, exc: BaseLibp2pError) -> StreamBrokenError:
        text = str(exc).strip() or type(exc).__name__
        return StreamBrokenError(
            f"the stream to {self.peer_id} broke: {text.splitlines()[0][:200]}"
        )
