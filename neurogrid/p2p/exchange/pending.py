"""Requests that wait for an answer, matched by peer, type of the answer and request id.

Answers without a request id are matched as their traits say (`wire.codes.Answers`); where they speak of
the peer, they go to the request that has waited longest. An answer may come before its asker waits for it: an
answer that was `announced` is kept, within bounds. Nothing here does I/O; `Exchange` drives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import trio

from neurogrid.errors import (
    LocalProtocolError,
    NeuroGridError,
    ResponseTimeout,
    StreamBrokenError,
)
from neurogrid.p2p.exchange.deadlines import Deadlines
from neurogrid.p2p.streams.bounds import DEFAULT_BOUNDS, Bounds
from neurogrid.p2p.streams.message_forms import untraced
from neurogrid.p2p.wire import Answers, MessageCode, MessageType, TensorMessage

__all__ = ["PendingRequests", "Waiter"]

# Peers that are gone and whose last answers nobody has fetched yet.
MAX_GONE_PEERS = 64


class Waiter:
    """One awaited answer. It ends once: with a message or an error. One task at a time waits for it.

    Attributes:
        peer_id: the peer that is to answer.
        answer: the type of the answer.
        correlation: its request id.
        ended_by: the peer whose answer or error ended the wait.
    """

    def __init__(
        self, peer_id: str, answer: MessageCode, correlation: int, deadlines: Deadlines
    ) -> None:
        self.peer_id = peer_id
        self.ended_by = peer_id
        self.answer = answer
        self.correlation = correlation
        self._deadlines = deadlines
        self._woken = trio.Event()
        self._sending: trio.CancelScope | None = None
        self._outcome: TensorMessage | NeuroGridError | None = None

    @property
    def is_done(self) -> bool:
        """Whether an answer or an error is there."""
        return self._outcome is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of Data that the outcome holds."""
        return len(self._outcome.data) if isinstance(self._outcome, TensorMessage) else 0

    def resolve(self, outcome: TensorMessage | NeuroGridError) -> None:
        """End the wait; a second outcome is ignored."""
        if self._outcome is None:
            self._outcome = outcome
            self._woken.set()
            if self._sending is not None:
                self._sending.cancel()

    def expire(self) -> None:
        """Wake the waiting task: its deadline has come."""
        self._woken.set()
        self._woken = trio.Event()

    def abandon(self) -> None:
        """The host is closing."""
        self.resolve(StreamBrokenError("this host is closing"))

    async def wait(self, *, timeout: float) -> TensorMessage:
        """Return the answer.

        Raises:
            ResponseTimeout: no answer in `timeout` seconds.
            NeuroGridError: the peer refused, or its stream broke.
        """
        if self._outcome is None:
            await self._wait_until(trio.current_time() + timeout)
        else:
            await trio.lowlevel.checkpoint()
        return self._result(timeout)

    async def send_and_wait(
        self,
        send: Callable[[], Awaitable[None]],
        *,
        timeout: float,
        send_nowait: Callable[[], bool] = lambda: False,
    ) -> TensorMessage:
        """Send, and return the answer: as `wait`, whose end ends the sending too. Once for a waiter.

        Args:
            send: sends.
            send_nowait: tried before: sends if nothing has to be waited for, else returns False.
        """
        deadline = trio.current_time() + timeout
        try:
            if not send_nowait():
                with trio.CancelScope(deadline=deadline) as self._sending:
                    await send()
                self._sending = None
        except NeuroGridError as exc:
            self.resolve(exc)
        if self._outcome is None:
            await self._wait_until(deadline)
        return self._result(timeout)

    async def _wait_until(self, deadline: float) -> None:
        """Return when there is an outcome, or at the deadline, of trio's clock."""
        self._deadlines.set(self, deadline)
        try:
            await self._woken.wait()
        finally:
            self._deadlines.clear(self)

    def _result(self, timeout: float) -> TensorMessage:
        if self._outcome is None:
            raise ResponseTimeout(f"{self.peer_id} sent no {self.answer.name} within {timeout:g} s")
        if isinstance(self._outcome, NeuroGridError):
            raise self._outcome
        return self._outcome


class _ErrorWatch(Waiter):
    """Lets an error of one more peer end the wait for an answer of another."""

    def __init__(self, peer_id: str, main: Waiter) -> None:
        super().__init__(peer_id, MessageType.ERROR, main.correlation, main._deadlines)
        self._main = main

    def resolve(self, outcome: TensorMessage | NeuroGridError) -> None:
        super().resolve(outcome)
        if not self._main.is_done:
            self._main.ended_by = self.peer_id
            self._main.resolve(outcome)


class _Expectation(AbstractContextManager[Waiter]):
    """A waiter that is in the table for the length of a block."""

    __slots__ = ("_answer", "_correlation", "_peer_id", "_table", "_waiter")

    def __init__(
        self, table: PendingRequests, peer_id: str, answer: MessageCode, correlation: int
    ) -> None:
        self._table = table
        self._peer_id = peer_id
        self._answer = answer
        self._correlation = correlation

    def __enter__(self) -> Waiter:
        self._waiter = self._table._begin(self._peer_id, self._answer, self._correlation)
        return self._waiter

    def __exit__(self, *exc_info: object) -> None:
        self._table._end(self._waiter)


class _Peer:
    """The waiters of one peer, oldest first, and answers that were announced and not awaited yet."""

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self.announced: deque[Waiter] = deque()


class PendingRequests:
    """The table of waiters, bounded for each peer and in total.

    Args:
        spawn: starts a task as `Host.start_soon` does: the one that watches the deadlines.
    """

    def __init__(
        self,
        bounds: Bounds = DEFAULT_BOUNDS,
        *,
        spawn: Callable[..., object] = trio.lowlevel.spawn_system_task,
    ) -> None:
        self._bounds = bounds
        self._deadlines = Deadlines(spawn)
        self._peers: dict[str, _Peer] = {}
        self._gone: dict[str, None] = {}  # in the order in which they went
        self._num_waiters = 0

    def __len__(self) -> int:
        return self._num_waiters

    def expect(
        self, peer_id: str, answer: MessageCode, correlation: int
    ) -> AbstractContextManager[Waiter]:
        """Register a waiter for the length of the block; an answer that was kept is there at once.

        `correlation` is the request id; 0 for answers that carry none; the layer where an
        answer without request id is matched by that.

        Raises:
            LocalProtocolError: as many requests wait as may, to this peer or to all.
        """
        return _Expectation(self, peer_id, answer, correlation)

    def _begin(self, peer_id: str, answer: MessageCode, correlation: int) -> Waiter:
        peer = self._peers.get(peer_id)
        if peer is None:
            peer = self._peers[peer_id] = _Peer()
        full = len(peer.waiters) >= self._bounds.max_pending_per_peer
        if full or self._num_waiters >= self._bounds.max_pending:
            self._drop_if_empty(peer_id)
            raise LocalProtocolError(
                f"{len(peer.waiters)} requests to {peer_id} and {self._num_waiters} in all are pending"
            )
        waiter = self._take_announced(peer, answer, correlation)
        waiter = waiter or Waiter(peer_id, answer, correlation, self._deadlines)
        peer.waiters.append(waiter)
        self._num_waiters += 1
        return waiter

    def _end(self, waiter: Waiter) -> None:
        self._peers[waiter.peer_id].waiters.remove(waiter)
        self._num_waiters -= 1
        self._drop_if_empty(waiter.peer_id)

    @contextmanager
    def expect_through(
        self, peer_ids: Sequence[str], answer: MessageCode, correlation: int
    ) -> Iterator[Waiter]:
        """As `expect` of the last of these peers; an error of any of them, or its loss, ends the wait too."""
        *others, last = peer_ids
        with self.expect(last, answer, correlation) as waiter:
            watches = [_ErrorWatch(peer_id, waiter) for peer_id in others]
            for watch in watches:
                self._peers.setdefault(watch.peer_id, _Peer()).waiters.append(watch)
            try:
                yield waiter
            finally:
                for watch in watches:
                    self._peers[watch.peer_id].waiters.remove(watch)
                    self._drop_if_empty(watch.peer_id)

    def announce(self, peer_id: str, answer: MessageCode, correlation: int) -> None:
        """Keep this answer for a later `expect` if it comes first. The oldest are forgotten at the bound."""
        self._gone.pop(peer_id, None)  # it is back, and no longer a peer to forget
        peer = self._peers.setdefault(peer_id, _Peer())
        self._take_announced(peer, answer, correlation)
        while len(peer.announced) >= self._bounds.max_pending_per_peer:
            peer.announced.popleft()
        peer.announced.append(Waiter(peer_id, answer, correlation, self._deadlines))

    def take_back(self, peer_id: str, answer: MessageCode, correlation: int) -> None:
        """Forget an announced answer that will not be asked for after all, or not of a peer that is there."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            self._take_announced(peer, answer, correlation)
            self._drop_if_empty(peer_id)

    def resolve(self, message: TensorMessage) -> bool:
        """Hand an answer to the waiter that it belongs to; False when nobody waits for it."""
        peer = self._peers.get(message.from_peer or "")
        if peer is None:
            return False
        for waiter in peer.waiters:
            if not waiter.is_done and _matches(waiter, message):
                waiter.resolve(message)
                return True
        return False

    def keep(self, message: TensorMessage) -> bool:
        """Keep an answer that was announced and that nobody waits for yet; False when it was not."""
        peer = self._peers.get(message.from_peer or "")
        if peer is None:
            return False
        for waiter in peer.announced:
            if not waiter.is_done and _matches(waiter, message):
                waiter.resolve(message)
                self._forget_excess(peer)
                return True
        return False

    def fail(self, peer_id: str, error: NeuroGridError, *, correlation: int | None = None) -> bool:
        """Fail the waiters of a peer: all, or those of one request. False when there was none."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return False
        waiters = [
            waiter
            for waiter in (*peer.waiters, *peer.announced)
            if not waiter.is_done and (correlation is None or waiter.correlation == correlation)
        ]
        for waiter in waiters:
            waiter.resolve(error)
        return bool(waiters)

    def forget(self, peer_id: str) -> None:
        """Note that a peer is gone: the answers and errors that it left are kept for the latest such peers only."""
        if peer_id not in self._peers:
            return
        self._gone[peer_id] = self._gone.pop(peer_id, None)
        while len(self._gone) > MAX_GONE_PEERS:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._peers[oldest].announced.clear()
            self._drop_if_empty(oldest)

    def _take_announced(self, peer: _Peer, answer: MessageCode, correlation: int) -> Waiter | None:
        for waiter in peer.announced:
            if waiter.answer is answer and waiter.correlation == correlation:
                peer.announced.remove(waiter)
                return waiter
        return None

    def _forget_excess(self, peer: _Peer) -> None:
        total = sum(waiter.num_bytes for waiter in peer.announced)
        for waiter in tuple(peer.announced):
            if total <= self._bounds.max_early_bytes_per_peer or len(peer.announced) == 1:
                break
            if waiter.num_bytes:  # an answer that is still to come costs nothing
                total -= waiter.num_bytes
                peer.announced.remove(waiter)

    def _drop_if_empty(self, peer_id: str) -> None:
        peer = self._peers.get(peer_id)
        if peer is not None and not peer.waiters and not peer.announced:
            del self._peers[peer_id]
            self._gone.pop(peer_id, None)


def _matches(waiter: Waiter, message: TensorMessage) -> bool:
    if waiter.answer is not untraced(message.msg_type):
        return False
    answers = waiter.answer.traits.answers
    if message.request_id == 0 and answers is Answers.LAYER:
        return waiter.correlation == message.layer_id
    if message.request_id == 0 and answers is Answers.PEER:
        return True
    return waiter.correlation == message.request_id
