"""Transfers for programs that are not on trio: `neurogrid.p2p.transfer`, blocking, with a policy of plain functions.

Stores, sources and limits are those of `neurogrid.p2p.transfer`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import neurogrid.p2p.transfer
from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.blocking.handler_threads import HandlerThreads
from neurogrid.p2p.blocking.protocol import Protocol
from neurogrid.p2p.blocking.twins import Blocking, sync_twin, twin
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.transfer import (
    DEFAULT_TRANSFER_LIMITS,
    BlobSource,
    BlobStore,
    Held,
    OfferedBlob,
    StoredBlob,
    TransferLimits,
)
from neurogrid.p2p.wire import ErrorCode

__all__ = ["TransferPolicy", "Transfers", "Wanted", "send_blob"]

AsyncTransfers = neurogrid.p2p.transfer.Transfers
AsyncPolicy = neurogrid.p2p.transfer.TransferPolicy
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The answer to an offer: send it.

    Attributes:
        store: where its bytes go.
        use: called in a thread with the whole blob, verified, before the sender is told that it is usable.
            It may raise `RequestRefusedError`, which the sender gets in place of that.
    """

    store: BlobStore
    use: Callable[[StoredBlob], None]


class TransferPolicy:
    """The decisions that `Transfers` asks for. Every method may raise `RequestRefusedError`, which the peer gets.

    `decide`, `acknowledged` and `provide` run in threads, side by side, and may block and call this API.
    """

    def authorize(self, peer_id: str) -> None:
        """Refuse a peer that may offer or send nothing now. Called in the loop for every message, but for what
        comes because we asked for it: quick, and without a call of this API."""

    def authorize_request(self, peer_id: str) -> None:
        """Refuse a peer that may ask for nothing now; by default one that `authorize` refuses. Called as that."""
        self.authorize(peer_id)

    def decide(self, offered: OfferedBlob) -> Held | Wanted:
        """Whether a blob is wanted, and where."""
        raise RequestRefusedError("blobs are not taken here", code=ErrorCode.NOT_SUPPORTED)

    def acknowledged(self, offered: OfferedBlob) -> None:
        """The sender was told that the blob is here, because it was held or because it came."""

    def gave_up(self, offered: OfferedBlob, reason: str) -> None:
        """The peer stopped sending, and is about to be told. As `authorize`."""

    def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """The blob with this id, for a peer that asked for it; None if it is not here."""
        return None

    def served(self, peer_id: str, blob_id: bytes) -> None:
        """Note that what `provide` gave a peer is read no more, sent or not. As `authorize`; once for each."""


class Transfers(Blocking[AsyncTransfers]):
    """Transfers of blobs, in and out, on one protocol; one of these for each."""

    def __init__(
        self,
        protocol: Protocol,
        policy: TransferPolicy | None = None,
        *,
        limits: TransferLimits = DEFAULT_TRANSFER_LIMITS,
    ) -> None:
        adapter = _PolicyInThreads(
            TransferPolicy() if policy is None else policy, protocol.host._handlers
        )

        def make() -> AsyncTransfers:
            return AsyncTransfers(protocol._inner, adapter, limits=limits)

        super().__init__(protocol._thread, protocol._thread.call_sync(make))

    @property
    def num_incoming(self) -> int:
        """Transfers that come in now."""
        return self._thread.call_sync(lambda: self._inner.num_incoming)

    @property
    def idle_bytes(self) -> int:
        """Bytes of unfinished blobs that are kept in memory for a peer that offers them again."""
        return self._thread.call_sync(lambda: self._inner.idle_bytes)

    fetch_blob = twin(AsyncTransfers.fetch_blob)
    forget = sync_twin(AsyncTransfers.forget)


class _PolicyInThreads(AsyncPolicy):
    """A policy for the loop, whose questions go to one of plain functions, in threads."""

    def __init__(self, policy: TransferPolicy, threads: HandlerThreads) -> None:
        self._policy = policy
        self._threads = threads
        self._decide = threads.at_once(policy.decide)
        self._acknowledged = threads.at_once(policy.acknowledged)
        self._provide = threads.at_once(policy.provide)

    def authorize(self, peer_id: str) -> None:
        self._policy.authorize(peer_id)

    def authorize_request(self, peer_id: str) -> None:
        self._policy.authorize_request(peer_id)

    async def decide(self, offered: OfferedBlob) -> Held | neurogrid.p2p.transfer.Wanted:
        decision = await self._decide(offered)
        if isinstance(decision, Held):
            return decision
        use = self._threads.at_once(decision.use)
        return neurogrid.p2p.transfer.Wanted(decision.store, use)

    async def acknowledged(self, offered: OfferedBlob) -> None:
        await self._acknowledged(offered)

    def gave_up(self, offered: OfferedBlob, reason: str) -> None:
        self._policy.gave_up(offered, reason)

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        return await self._provide(peer_id, blob_id)

    def served(self, peer_id: str, blob_id: bytes) -> None:
        self._policy.served(peer_id, blob_id)


def _on_protocol(
    function: Callable[Concatenate[Exchange, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Protocol, P], R]:
    @functools.wraps(function)
    def call(protocol: Protocol, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return protocol._thread.call(partial(function, protocol._inner, *args, **kwargs))

    return call


send_blob = _on_protocol(neurogrid.p2p.transfer.send_blob)
"""`neurogrid.p2p.transfer.send_blob`, blocking: the same arguments, result and errors.

`on_accept` and `on_sent` are called in the loop: they must be quick, and must not call this API.
"""
