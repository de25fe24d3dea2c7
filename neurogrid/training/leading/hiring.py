"""Workers that are asked, started and kept by a leader: offers, leases, and what is said to one at a time.

What a worker is started for is the leader's.

Source: protocol_spec/training/runs.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from neurogrid.errors import (
    NeuroGridError,
    PeerRefusedError,
    TooLargeForPeerError,
    TransportError,
)
from neurogrid.p2p.exchange.exchange import Exchange, new_request_id
from neurogrid.p2p.wire import ErrorCode, MessageCode, TensorMessage
from neurogrid.training.runs.resources import Bid, LeaseBook, Need, Resources, lacking
from neurogrid.training.wire.runs import (
    Ask,
    Dismiss,
    Offer,
    Renew,
    Renewed,
    RunMessage,
    Start,
    Started,
)

__all__ = ["HEARTBEAT", "Hiring", "LackingError", "bid_of"]

logger = logging.getLogger(__name__)

HEARTBEAT: Final = 1.0
"""Seconds between two of the things that a leader says or looks at again and again."""

_ASK_TIMEOUT: Final = 10.0
# Refusals of a Start that are about the run, and not about the moment.
_CANNOT_BEGIN: Final = frozenset({ErrorCode.CONFIG_INVALID, ErrorCode.MODEL_UNSUPPORTED})


class LackingError(NeuroGridError):
    """A worker does not offer what is needed, or refuses; the text says why."""


class Hiring:
    """Hiring of workers for a run: offers, starts, leases and dismissals.

    Args:
        exchange: of runs.
        run_id: of the run, 16 bytes.
    """

    def __init__(self, exchange: Exchange, run_id: bytes) -> None:
        self._exchange, self._run_id = exchange, run_id
        self.book = LeaseBook()

    async def ask(self, peer_id: str, need: Need) -> tuple[Offer, float]:
        """Ask a worker for an offer, and return it with the time at which the worker was asked.

        Raises:
            LackingError: it offers nothing that will do.
            NeuroGridError: it does not answer.
        """
        ask = Ask(
            run=self._run_id,
            memory=need.memory,
            storage=need.storage,
            cores=need.cores,
            gpu=need.gpu,
            price=need.price,
        )
        asked_at = trio.current_time()
        try:
            answer = await self._request(peer_id, RunMessage.ASK, ask.encode(), RunMessage.OFFER)
            offer = Offer.decode(answer.data)
        except PeerRefusedError as exc:
            raise LackingError(exc.text) from exc
        if reason := lacking(bid_of(offer), need):
            raise LackingError(reason)
        return offer, asked_at

    async def start(self, peer_id: str, start: Start, *, asked_at: float) -> None:
        """Start a worker that has made an offer, with the lease of it.

        Raises:
            LackingError: it cannot: it knows no such run, or not such a model.
            NeuroGridError: it does not begin.
        """
        try:
            answer = await self._request(
                peer_id, RunMessage.START, start.encode(), RunMessage.STARTED
            )
        except PeerRefusedError as exc:
            if exc.code in _CANNOT_BEGIN:
                raise LackingError(exc.text) from exc
            raise
        started = Started.decode(answer.data)
        self.book.granted(peer_id, start.lease, started.until, asked_at=asked_at)

    async def renew(self, on_lost: Callable[[str], None]) -> None:
        """Renew leases, for as long as this runs.

        Args:
            on_lost: is called with a worker whose lease has ended: it is to be asked anew.
        """
        async with trio.open_nursery() as nursery:
            while True:
                # Nobody is waited for: others' leases end meanwhile, and one that is silent is asked again.
                for peer_id, lease in self.book.due(trio.current_time()):
                    nursery.start_soon(self._renew_one, peer_id, lease, on_lost)
                for peer_id in self.book.expire(trio.current_time()):
                    on_lost(peer_id)
                await trio.sleep(HEARTBEAT / 2)

    async def _renew_one(self, peer_id: str, lease: int, on_lost: Callable[[str], None]) -> None:
        asked_at = trio.current_time()
        renew = Renew(self._run_id, lease)
        try:
            answer = await self._request(
                peer_id, RunMessage.RENEW, renew.encode(), RunMessage.RENEWED
            )
            until = Renewed.decode(answer.data).until
            self.book.renewed(peer_id, lease, until, asked_at=asked_at)
        except PeerRefusedError as exc:
            logger.info("%s knows nothing of its lease: %s", peer_id, exc)
            # Else it has another by now, or none that is not known to be over.
            if self.book.number(peer_id, trio.current_time()) == lease:
                self.book.drop(peer_id)
                on_lost(peer_id)
        except NeuroGridError as exc:
            logger.info("the lease of %s was not renewed: %s", peer_id, exc)

    async def dismiss(self, peer_id: str, reason: str) -> None:
        """Tell a worker that it is needed no more."""
        await self.tell(peer_id, RunMessage.DISMISS, Dismiss(self._run_id, reason).encode())

    async def tell(self, peer_id: str, code: MessageCode, data: bytes) -> None:
        """Send a message that will come again, or need not: one that cannot be sent is dropped."""
        try:
            with trio.move_on_after(10 * HEARTBEAT), suppress(TransportError):
                await self._exchange.send(peer_id, TensorMessage(code, data=data))
        except TooLargeForPeerError as exc:
            # How much a peer takes is its own word: what it does not take, ends nothing here.
            logger.info("not told: %s", exc)

    async def _request(
        self, peer_id: str, code: MessageCode, data: bytes, answer: MessageCode
    ) -> TensorMessage:
        return await self._exchange.request(
            peer_id,
            TensorMessage(code, request_id=new_request_id(), data=data),
            answer,
            timeout=_ASK_TIMEOUT,
        )


def bid_of(offer: Offer) -> Bid:
    """An offer, as offers are compared."""
    return Bid(Resources(offer.memory, offer.storage, offer.cores, offer.gpu), offer.price)
