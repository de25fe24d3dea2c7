"""Requests that wait for an answer, matched by peer, type of the answer and request id.

1.0.0 has answers without a request id: a WeightsAck is matched by its layer, a LayerStatus and a
GPUInfo go to whoever has waited longest. Nothing here does I/O; `Protocol` drives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from neurogrid.errors import LocalProtocolError, NeuroGridError, ResponseTimeout
from neurogrid.p2p.wire import MessageType, TensorMessage

__all__ = ["PendingRequests", "Waiter"]

# A coordinator has a handful of requests under way for each peer; 1,024 means that answers get lost.
MAX_PENDING_PER_PEER = 1024


class Waiter:
    """One awaited answer. It ends once: with a message, an error or its deadline."""

    def __init__(self, peer_id: str, answer: MessageType, correlation: int) -> None:
        self.peer_id = peer_id
        self.answer = answer
        self.correlation = correlation
        self._done = trio.Event()
        self._outcome: TensorMessage | NeuroGridError | None = None

    @property
    def is_done(self) -> bool:
        """Whether an answer or an error is there."""
        return self._done.is_set()

    def resolve(self, outcome: TensorMessage | NeuroGridError) -> None:
        """End the wait; a second outcome is ignored."""
        if self._outcome is None:
            self._outcome = outcome
            self._done.set()

    async def wait(self, *, timeout: float) -> TensorMessage:
        """Return the answer.

        Raises:
            ResponseTimeout: no answer in `timeout` seconds.
            NeuroGridError: the peer refused, or its stream broke.
        """
        with trio.move_on_after(timeout):
            await self._done.wait()
        if self._outcome is None:
            raise ResponseTimeout(f"{self.peer_id} sent no {self.answer.name} within {timeout:g} s")
        if isinstance(self._outcome, NeuroGridError):
            raise self._outcome
        return self._outcome


class PendingRequests:
    """The table of waiters, bounded for each peer."""

    def __init__(self) -> None:
        self._waiters: dict[str, list[Waiter]] = {}

    @contextmanager
    def expect(self, peer_id: str, answer: MessageType, correlation: int) -> Iterator[Waiter]:
        """Register a waiter for the length of the block.

        `correlation` is the request id; 0 for answers that carry none; the layer for a 1.0.0 WeightsAck.
        """
        waiters = self._waiters.setdefault(peer_id, [])
        if len(waiters) >= MAX_PENDING_PER_PEER:
            raise LocalProtocolError(f"{MAX_PENDING_PER_PEER} requests to {peer_id} are pending")
        waiter = Waiter(peer_id, answer, correlation)
        waiters.append(waiter)
        try:
            yield waiter
        finally:
            waiters.remove(waiter)
            if not waiters:
                self._waiters.pop(peer_id, None)

    def resolve(self, message: TensorMessage) -> bool:
        """Hand an answer to the waiter that it belongs to; False when nobody waits for it."""
        correlation = message.request_id
        if correlation == 0 and message.msg_type is MessageType.WEIGHTS_ACK:
            correlation = message.layer_id
        for waiter in self._waiters.get(message.from_peer or "", ()):
            matches = waiter.answer is message.msg_type and waiter.correlation == correlation
            if matches and not waiter.is_done:
                waiter.resolve(message)
                return True
        return False

    def fail(self, peer_id: str, error: NeuroGridError, *, correlation: int | None = None) -> bool:
        """Fail the waiters of a peer: all, or those of one request. False when there was none."""
        waiters = [
            waiter
            for waiter in self._waiters.get(peer_id, ())
            if correlation is None or waiter.correlation == correlation
        ]
        for waiter in waiters:
            waiter.resolve(error)
        return bool(waiters)
