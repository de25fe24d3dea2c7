"""A session over all stages: hidden states in, hidden states out, through every worker in order.

Star routing: the coordinator sends to each stage and takes its answer. Whatever a stage does instead of
answering ends the session with an error that names its layers and its peer.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
import trio

from neurogrid.errors import (
    NeuroGridError,
    NoRouteError,
    PeerRefusedError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.inference.planner import PlannedStage
from neurogrid.inference.remote_worker import RemoteWorker

__all__ = ["PipelineStage", "PipelineSession", "open_session"]

logger = logging.getLogger(__name__)

# A session is closed politely, but nobody waits long for a worker that is gone. Seconds.
CLOSE_TIMEOUT = 2.0


@dataclass(frozen=True)
class PipelineStage:
    """A planned stage and the worker that holds it."""

    stage: PlannedStage
    worker: RemoteWorker

    def lost(self, exc: NeuroGridError) -> NoRouteError:
        """The error that says that these layers are gone."""
        start, stop = self.stage.start, self.stage.stop
        layers = f"layer {start}" if stop - start == 1 else f"layers {start} to {stop - 1}"
        return NoRouteError(
            f"lost {layers} on worker {self.worker.peer_id}: {exc}",
            layers=range(start, stop),
            peer_id=self.worker.peer_id,
        )


class PipelineSession:
    """An open session. Made by `open_session`.

    Attributes:
        length: tokens that have gone through all stages.
    """

    def __init__(self, session_id: int, stages: Sequence[PipelineStage]) -> None:
        self.session_id = session_id
        self.length = 0
        self._stages = stages

    async def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Extend the session by [1, T, D]; returns what leaves the last layer, [1, T, D].

        Raises:
            NoRouteError: a stage did not answer; names its layers and its peer.
        """
        for item in self._stages:
            try:
                hidden_BTD = await item.worker.forward(
                    self.session_id,
                    hidden_BTD,
                    start=item.stage.start,
                    stop=item.stage.stop,
                    position=self.length,
                )
            except (TransportError, PeerRefusedError, RemoteProtocolError) as exc:
                raise item.lost(exc) from exc
        self.length += hidden_BTD.shape[1]
        return hidden_BTD


@asynccontextmanager
async def open_session(
    stages: Sequence[PipelineStage], *, max_length: int
) -> AsyncIterator[PipelineSession]:
    """Open a session of at most `max_length` tokens on every stage; closed when the block is left."""
    session_id = secrets.randbits(64)
    for item in stages:
        try:
            await item.worker.open_session(
                session_id, start=item.stage.start, stop=item.stage.stop, max_length=max_length
            )
        except (TransportError, PeerRefusedError, RemoteProtocolError) as exc:
            raise item.lost(exc) from exc
    try:
        yield PipelineSession(session_id, stages)
    finally:
        with trio.move_on_after(CLOSE_TIMEOUT) as scope:
            scope.shield = True
            for item in stages:
                try:
                    await item.worker.close_session(session_id)
                except NeuroGridError as exc:
                    logger.debug("could not close a session on %s: %s", item.worker.peer_id, exc)
