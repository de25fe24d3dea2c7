"""A session over all stages: hidden states in, hidden states out, through every worker in order.

The stages are one chain, or several where `Routing` cuts them: the answer of one then goes on from here. Whatever
a stage does instead of answering ends the session with an error that names its layers and its peer.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch
import trio

from neurogrid.errors import (
    NeuroGridError,
    NoRouteError,
    PeerRefusedError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.inference.chain import Chain
from neurogrid.inference.chain_stage import PipelineStage
from neurogrid.inference.routing import Routing
from neurogrid.p2p.wire import ErrorCode

__all__ = ["PipelineSession", "open_session"]

logger = logging.getLogger(__name__)

# A session is closed politely, but nobody waits long for a worker that is gone. Seconds.
CLOSE_TIMEOUT = 2.0


class PipelineSession:
    """An open session. Made by `open_session`.

    Attributes:
        session_id: u64, not 0.
        chains: the way that its activations take.
        length: tokens that have gone through all stages.
    """

    def __init__(self, session_id: int, chains: Sequence[Chain]) -> None:
        self.session_id = session_id
        self.chains = tuple(chains)
        self.length = 0

    async def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Extend the session by [1, T, D]; returns what leaves the last layer, [1, T, D].

        Raises:
            NoRouteError: a stage did not answer; names its layers and its peer.
        """
        for chain in self.chains:
            hidden_BTD = await chain.forward(self.session_id, hidden_BTD, position=self.length)
        self.length += hidden_BTD.shape[1]
        return hidden_BTD


@asynccontextmanager
async def open_session(
    stages: Sequence[PipelineStage], routing: Routing, *, max_length: int
) -> AsyncIterator[PipelineSession]:
    """Open a session of at most `max_length` tokens on every stage; closed when the block is left.

    Where a worker cannot reach its successor, the session is opened anew with that link through the coordinator.

    Raises:
        NoRouteError: a stage does not open it; names its layers and its peer.
    """
    session: PipelineSession | None = None
    while session is None:
        opening = PipelineSession(secrets.randbits(64) or 1, routing.chains(stages))
        try:
            # Each time a link less is left that may turn out to be cut.
            if await _open(opening, routing, max_length):
                session = opening
        finally:
            if session is None:
                await _close(opening, routing)
    try:
        yield session
    finally:
        await _close(session, routing)


async def _open(session: PipelineSession, routing: Routing, max_length: int) -> bool:
    """Open a session on all stages at once; False if some links have to be relayed instead."""
    lost: list[NoRouteError] = []
    cut: list[tuple[PipelineStage, PipelineStage, str]] = []

    async def open_on(item: PipelineStage, behind: PipelineStage | None, route: bytes) -> None:
        try:
            await item.worker.open_session(
                session.session_id,
                start=item.stage.start,
                stop=item.stage.stop,
                max_length=max_length,
                route=route,
                wire=routing.wire,
            )
        except (TransportError, PeerRefusedError, RemoteProtocolError) as exc:
            code = exc.code if isinstance(exc, PeerRefusedError) else None
            if code == ErrorCode.PEER_UNREACHABLE and behind is not None:
                cut.append((item, behind, str(exc)))
                return
            error = item.lost(exc)
            error.__cause__ = exc
            lost.append(error)

    async with trio.open_nursery() as nursery:
        for chain in session.chains:
            route = routing.signed_route(session.session_id, chain)
            for item, behind in zip(chain.stages, (*chain.stages[1:], None), strict=True):
                nursery.start_soon(open_on, item, behind, route)
    if lost:
        # First of all those whose worker is gone: that others cannot reach it follows from that.
        raise lost[0]
    for before, behind, reason in cut:
        routing.relay(before, behind, reason)
    return not cut


async def _close(session: PipelineSession, routing: Routing) -> None:
    """Close a session on all stages that can be told; a slow one will find that out in its own time."""

    async def close_on(item: PipelineStage) -> None:
        try:
            await item.worker.close_session(session.session_id)
        except NeuroGridError as exc:
            logger.debug("could not close a session on %s: %s", item.peer_id, exc)

    with trio.move_on_after(CLOSE_TIMEOUT) as scope:
        scope.shield = True
        async with trio.open_nursery() as nursery:
            for chain in session.chains:
                for item in chain.stages:
                    if item.times.is_slow and routing.watch is not None:
                        routing.watch.start_soon(item.worker.close_session, session.session_id)
                    else:
                        nursery.start_soon(close_on, item)
