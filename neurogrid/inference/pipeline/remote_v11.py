"""A worker that speaks 1.1.0, with its sessions.

Source: protocol_spec/sessions.md.
"""

from __future__ import annotations

from neurogrid.fleet.placing.delivery_v11 import DeliveryV11
from neurogrid.inference.pipeline.session_worker import (
    Opened,
    Reached,
    SessionWorker,
    without_adapters,
    without_images,
)
from neurogrid.p2p.wire import MessageType, SessionAck, SessionClose, SessionOpen, SessionQuery

__all__ = ["RemoteWorkerV11"]


class RemoteWorkerV11(DeliveryV11, SessionWorker):
    """See `SessionWorker`."""

    takes_priors = True
    takes_chunks = True

    async def open_session(self, wanted: SessionOpen) -> Opened:
        reply = await self._request(
            MessageType.SESSION_OPEN,
            wanted.encode(),
            MessageType.SESSION_ACK,
            timeout=self._open_timeout(wanted),
        )
        ack = SessionAck.decode(reply.data)
        if wanted.adapter and not ack.adapter:
            raise without_adapters(self.peer_id)
        if wanted.images and not ack.images:
            raise without_images(self.peer_id)
        return Opened(ack.length or 0, ack.cuts)

    def _open_timeout(self, wanted: SessionOpen) -> float:
        """Seconds in which a session has to be open, for what the worker has to do first."""
        if wanted.adapter or wanted.stored:
            return self.timeouts.layer  # fetch the adapter, or read a large file
        if wanted.prior:
            return self.timeouts.step  # its caches are copied or cut after what is being computed
        return self.timeouts.describe

    async def close_session(self, session_id: int) -> None:
        await self._request(
            MessageType.SESSION_CLOSE,
            SessionClose(session_id=session_id).encode(),
            MessageType.SESSION_ACK,
            timeout=self.timeouts.describe,
        )

    async def store_session(self, session_id: int, name: bytes) -> bool:
        reply = await self._request(
            MessageType.SESSION_CLOSE,
            SessionClose(session_id=session_id, store=name).encode(),
            MessageType.SESSION_ACK,
            timeout=self.timeouts.layer,  # as long as such a file takes
        )
        return SessionAck.decode(reply.data).stored

    async def session_reached(self, session_id: int) -> Reached:
        reply = await self._request(
            MessageType.SESSION_QUERY,
            SessionQuery(session_id=session_id).encode(),
            MessageType.SESSION_ACK,
            timeout=self.timeouts.describe,
        )
        ack = SessionAck.decode(reply.data)
        return Reached(ack.length or 0, ack.last_position)
