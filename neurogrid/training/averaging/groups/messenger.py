"""Messages of a group to its peers: one task for each peer, and the latest of each kind.

A message says all that its sender knows, so one that waits for a slow peer gives way to the next of its kind. Peers
that are not connected are dialled where their addresses are known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

import trio

from neurogrid.errors import NeuroGridError, TransportError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.wire import TensorMessage
from neurogrid.training.averaging.rounds import Message
from neurogrid.training.wire import (
    Candidate,
    Lead,
    Leave,
    Promise,
    Status,
    TrainingMessage,
)

__all__ = ["CODES", "KINDS", "Messenger"]

logger = logging.getLogger(__name__)

CODES: Final[dict[type[Message], TrainingMessage]] = {
    Lead: TrainingMessage.LEAD,
    Status: TrainingMessage.STATUS,
    Candidate: TrainingMessage.CANDIDATE,
    Promise: TrainingMessage.PROMISE,
    Leave: TrainingMessage.LEAVE,
}
"""The code of each message that says how a group stands."""

KINDS: Final = {code: kind for kind, code in CODES.items()}

# Seconds between two attempts to dial a peer, and for one of them.
_REDIAL: Final = 1.0
_DIAL_TIMEOUT: Final = 10.0
# Seconds that a peer which is to dial this one has for it, before this one dials: one that nobody can dial never does.
_DIALLED_WITHIN: Final = 0.25
_ADDRESSES_OF_A_PEER: Final = 16


class _Outbox:
    """Messages that wait to be sent to one peer: the latest of each kind."""

    def __init__(self) -> None:
        self.latest: dict[type[Message], Message] = {}
        self.has_some = trio.Event()
        self.dialled_at = -_REDIAL


class Messenger:
    """Sends what machines say, and keeps connections to those that it is said to.

    Args:
        exchange: of `training_table()`.
        nursery: of the group: its tasks end with it.
        send_timeout: seconds for one message; then the peer is given the next.
    """

    def __init__(self, exchange: Exchange, nursery: trio.Nursery, *, send_timeout: float) -> None:
        self._exchange, self._nursery, self._send_timeout = exchange, nursery, send_timeout
        self._outboxes: dict[str, _Outbox] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._connected: dict[str, trio.Event] = {}
        exchange.host.on_connected(self._note_connected)

    def note_addresses(self, peer_id: str, addresses: Iterable[str]) -> None:
        """A peer can be dialled at these."""
        known = tuple(dict.fromkeys((*addresses, *self._addresses.get(peer_id, ()))))
        self._addresses[peer_id] = known[:_ADDRESSES_OF_A_PEER]

    def addresses_of(self, peer_id: str) -> tuple[str, ...]:
        """Addresses at which a peer can be dialled, as far as is known."""
        return self._addresses.get(peer_id, ())

    def keep(self, peer_ids: Iterable[str]) -> None:
        """Forget peers that are not among these."""
        kept = set(peer_ids)
        for peer_id in [peer for peer in self._addresses if peer not in kept]:
            del self._addresses[peer_id]

    def post(self, peer_id: str, message: Message) -> None:
        """Send a message as soon as it can be; one of its kind that still waits is not sent."""
        outbox = self._outboxes.get(peer_id)
        if outbox is None:
            outbox = self._outboxes[peer_id] = _Outbox()
            self._nursery.start_soon(self._send_all, peer_id, outbox)
        outbox.latest.pop(type(message), None)  # it goes to the end
        outbox.latest[type(message)] = message
        outbox.has_some.set()

    async def flush(self) -> None:
        """Wait until nothing waits to be sent."""
        while any(outbox.latest for outbox in self._outboxes.values()):
            await trio.sleep(0.01)

    async def reach(
        self, peer_id: str, *, patience: float = 0.0, is_dialled_by: bool = False
    ) -> None:
        """Bring up the stream to a peer.

        Args:
            patience: seconds to wait for a peer to dial this one, where nobody has said where it can be dialled.
            is_dialled_by: the peer reaches for this one at about the same time, and is the one of the two to dial: it
                is given a moment to.

        Raises:
            TransportError: it cannot be reached.
        """
        host = self._exchange.host
        addresses = self._addresses.get(peer_id)
        if not addresses or is_dialled_by:
            await self._wait_connected(peer_id, _DIALLED_WITHIN if addresses else patience)
        if addresses and not host.is_connected(peer_id):
            with trio.move_on_after(_DIAL_TIMEOUT):
                await host.connect_any(addresses)
        await self._exchange.open(peer_id)

    async def _wait_connected(self, peer_id: str, timeout: float) -> None:
        if not self._exchange.host.is_connected(peer_id):
            connected = self._connected.setdefault(peer_id, trio.Event())
            with trio.move_on_after(timeout):
                await connected.wait()

    def _note_connected(self, peer_id: str) -> None:
        if (connected := self._connected.pop(peer_id, None)) is not None:
            connected.set()

    async def _send_all(self, peer_id: str, outbox: _Outbox) -> None:
        while True:
            await outbox.has_some.wait()
            if not outbox.latest:
                outbox.has_some = trio.Event()
                continue
            kind = next(iter(outbox.latest))
            message = outbox.latest[kind]
            await self._send(peer_id, outbox, message)
            if outbox.latest.get(kind) is message:
                del outbox.latest[kind]

    async def _send(self, peer_id: str, outbox: _Outbox, message: Message) -> None:
        try:
            with trio.move_on_after(self._send_timeout):
                if not self._exchange.host.is_connected(peer_id):
                    if trio.current_time() - outbox.dialled_at < _REDIAL:
                        return
                    outbox.dialled_at = trio.current_time()
                    await self.reach(peer_id)
                await self._exchange.send(
                    peer_id, TensorMessage(CODES[type(message)], data=message.encode())
                )
        except TransportError as exc:
            # It will be told again; whether it is lost is the machine's to say.
            logger.debug("no %s for %s: %s", type(message).__name__, peer_id, exc)
        except NeuroGridError as exc:
            logger.warning("no %s for %s: %s", type(message).__name__, peer_id, exc)
