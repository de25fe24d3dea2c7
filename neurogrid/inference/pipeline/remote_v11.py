"""A worker that speaks 1.1.0, with its sessions.

Source: protocol_spec/sessions.md.
"""

from __future__ import annotations

from neurogrid.fleet.placing.delivery_v11 import DeliveryV11
from neurogrid.inference.pipeline.session_worker import Prior, SessionWorker
from neurogrid.p2p.wire import MessageType, SessionAck, SessionClose, SessionOpen, SessionQuery

__all__ = ["RemoteWorkerV11"]


class RemoteWorkerV11(DeliveryV11, SessionWorker):
    """See `SessionWorker`."""

    takes_priors = True
    takes_chunks = True

    async def open_session(
        self,
        session_id: int,
        *,
        start: int,
        stop: int,
        max_length: int,
        route: bytes = b"",
        wire: str = "",
        prior: Prior | None = None,
    ) -> int:
        opened = SessionOpen(
            session_id=session_id,
            start_layer=start,
            stop_layer=stop,
            max_length=max_length,
            route=route,
            wire=wire,
            prior=prior.session_id if prior else 0,
            prior_length=prior.num_tokens if prior else 0,
            keep_prior=prior.stays_open if prior else False,
        )
        reply = await self._request(
            MessageType.SESSION_OPEN,
            opened.encode(),
            MessageType.SESSION_ACK,
            timeout=self.timeouts.describe,
        )
        return SessionAck.decode(reply.data).length or 0

    async def close_session(self, session_id: int) -> None:
        await self._request(
            MessageType.SESSION_CLOSE,
            SessionClose(session_id=session_id).encode(),
            MessageType.SESSION_ACK,
            timeout=self.timeouts.describe,
        )

    async def session_length(self, session_id: int) -> int:
        reply = await self._request(
            MessageType.SESSION_QUERY,
            SessionQuery(session_id=session_id).encode(),
            MessageType.SESSION_ACK,
            timeout=self.timeouts.describe,
        )
        return SessionAck.decode(reply.data).length or 0
