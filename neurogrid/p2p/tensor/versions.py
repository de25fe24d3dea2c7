"""An exchange of the tensor protocol that speaks 1.0.0 besides: the one place below the handlers that knows it.

multistream-select picks the newer version that both sides have. With 1.0.0 every message has a stream of its own, which
the receiver ends once it has dealt with the message: its end confirms, its reset refuses.

Source: protocol_spec/versioning.md, protocol_spec/framing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.exchange.subscribers import MessageHandler, Subscribers
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.tensor.oneshot import OneshotStreams
from neurogrid.p2p.wire import (
    PROTOCOL_V10,
    PROTOCOL_V11,
    Data,
    Limits,
    MessageCode,
    TensorMessage,
    v10_table,
    v11_table,
)

__all__ = ["VersionedExchange"]


class VersionedExchange(Exchange):
    """An `Exchange` whose peers may speak 1.0.0 alone.

    Args:
        limits: how large the Data of each message may be, in bytes.
        versions: the protocol ids that are spoken, the preferred one first.
    """

    def __init__(
        self,
        host: Host,
        *,
        role: str,
        agent: str,
        name: str,
        limits: Limits,
        bounds: Bounds,
        versions: Sequence[str],
    ) -> None:
        super().__init__(
            host,
            v11_table(limits),
            role=role,
            agent=agent,
            name=name,
            bounds=bounds,
            versions=versions,
        )
        self._of_v10, self._of_both = Subscribers(), Subscribers()
        self._v10_alone: set[str] = set()  # peers of whom the negotiation told
        self._oneshot = OneshotStreams(
            host,
            table=v10_table(limits),
            bounds=bounds,
            budget=self._budget,
            on_message=self._receive_v10,
            on_sent=partial(self.counters.add, Direction.SENT),
        )
        if PROTOCOL_V10 in versions:
            host.set_stream_handler(PROTOCOL_V10, self._oneshot.serve)

    async def open(self, peer_id: str) -> str:
        """Find out which version a connected peer speaks, and bring up its stream if that is 1.1.0.

        Returns:
            The protocol id.

        Raises:
            TransportError: the peer speaks neither, does not answer, or is not connected.

        Cancellation leaves the connection whole, and perhaps the stream up.
        """
        if peer_id in self._v10_alone and self.hello_of(peer_id) is None:
            return PROTOCOL_V10
        version = await super().open(peer_id)
        if version == PROTOCOL_V10 and self.host.is_connected(peer_id):
            self._v10_alone.add(peer_id)
        return version

    def is_v10(self, peer_id: str) -> bool:
        """Whether a peer is known to speak 1.0.0 alone, or has used nothing else so far."""
        if peer_id in self._streams:
            return False
        return peer_id in self._v10_alone or self._oneshot.has_served(peer_id)

    def on_message(
        self,
        msg_type: MessageCode | None,
        handler: MessageHandler,
        *,
        when: Callable[[TensorMessage], bool] | None = None,
        version: str | None = None,
    ) -> None:
        """Serve messages of a type (None: with the legacy header) for which `when(message)` holds.

        `version` is the protocol id of the streams on which they come; None is each that is spoken, but for messages
        that have handlers for 1.0.0 alone, which take the place of those for both there.

        A traced message counts as its untraced type; its trace is active while the handler runs. Handlers are
        called in the order in which they were registered. A sync handler may return an awaitable, which runs
        in a task. Of a type that is an answer, handlers get those that no request waits for.
        """
        if version != PROTOCOL_V10:
            super().on_message(msg_type, handler, when=when)
        if version != PROTOCOL_V11:
            table = self._of_both if version is None else self._of_v10
            table.add(msg_type, handler, when)

    async def _send_to(self, peer_id: str, message: TensorMessage, *more: Data) -> None:
        if message.msg_type is None or await self.open(peer_id) == PROTOCOL_V10:
            await self._oneshot.send(peer_id, message, *more)
        else:
            await super()._send_to(peer_id, message, *more)

    async def _receive_v10(self, peer_id: str, message: TensorMessage) -> None:
        self._count_received(peer_id, message)
        subscribers = self._of_v10 if self._of_v10.has(message) else self._of_both
        job = self._dispatcher.take(message, subscribers=subscribers)
        if job is not None:
            # Served at once, whatever the number: an answer must not wait behind the handlers that wait for it.
            # The number of streams bounds it.
            with self._budget.hold(peer_id, len(message.data)):
                await job.run()

    def _forget(self, peer_id: str) -> None:
        super()._forget(peer_id)
        self._oneshot.forget(peer_id)
        self._v10_alone.discard(peer_id)
