"""A session over all stages: hidden states in, hidden states out, through every worker in order.

The stages are one chain, or several where `Routing` cuts them: the answer of one then goes on from here. Whatever
a stage does instead of answering ends the session with an error that names its layers and its peer.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Sequence

import torch
import trio

from neurogrid.errors import (
    NeuroGridError,
    NoRouteError,
    PeerRefusedError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.inference.pipeline.chain import Chain
from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.prefill import Bounds, MakeHidden, Prefill, TakeHidden
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.pipeline.session_worker import Prior
from neurogrid.model.adapters import AdapterSource
from neurogrid.p2p.wire import ErrorCode, SessionOpen

__all__ = ["PipelineSession", "PriorLostError", "open_session"]

logger = logging.getLogger(__name__)

# A session is closed politely, but nobody waits long for a worker that is gone. Seconds.
CLOSE_TIMEOUT = 2.0
# So long may it take workers to write what it has to disk. Seconds.
STORE_TIMEOUT = 20.0
# Codes that say: the prior is not there, or not as it should be.
PRIOR_REFUSED = frozenset({ErrorCode.SESSION_UNKNOWN, ErrorCode.POSITION_MISMATCH})


class PriorLostError(NeuroGridError):
    """A session that another was to begin with is not to be had."""


class PipelineSession(trio.abc.AsyncResource):
    """An open session, closed when its block is left. Made by `open_session`.

    Attributes:
        session_id: u64, not 0.
        chains: the way that its activations take.
        peer_ids: of the stages on it, in order.
        length: tokens that have gone through all stages.
        takes_chunks: whether all of the workers take several tokens at once also when the session has begun.
        takes_no_cuts: the peer ids of workers on which it cannot go back; all of them where nobody asked.
    """

    def __init__(self, session_id: int, chains: Sequence[Chain], routing: Routing) -> None:
        self.session_id = session_id
        self.chains = tuple(chains)
        self.peer_ids = tuple(item.peer_id for chain in self.chains for item in chain.stages)
        self.takes_chunks = all(
            item.worker.takes_chunks for chain in self.chains for item in chain.stages
        )
        self._routing = routing
        self.takes_no_cuts = set(self.peer_ids)
        self.length = 0

    async def forward(self, hidden_BTD: torch.Tensor, batch: tuple[int, ...] = ()) -> torch.Tensor:
        """Extend the session by [1, T, D]; returns what leaves the last layer, [1, T, D].

        Args:
            batch: number and size of the batch that it goes with; empty for none.

        Raises:
            NoRouteError: a stage did not answer; names its layers and its peer.
        """
        for chain in self.chains:
            hidden_BTD = await chain.forward(
                self.session_id, hidden_BTD, position=self.length, batch=batch
            )
        self.length += hidden_BTD.shape[1]
        return hidden_BTD

    def go_back(self, length: int) -> None:
        """Go on behind the first `length` tokens, some of the last `forward` included.

        The workers are told by where the next one begins.
        """
        assert not self.takes_no_cuts
        assert length <= self.length
        self.length = length

    async def prefill(
        self,
        chunks: Sequence[Bounds],
        make_hidden: MakeHidden,
        take_hidden: TakeHidden | None = None,
    ) -> torch.Tensor:
        """Extend the session by chunks, all stages at work; returns what leaves the last layer for the last one.

        Args, raises: see `prefill.Prefill`.
        """
        prefill = Prefill(self.chains, self.session_id, chunks, make_hidden, take_hidden)
        hidden_BTD = await prefill.run()
        self.length = chunks[-1][1]
        return hidden_BTD

    async def store(self, name: bytes) -> bool:
        """Close the session on all stages, and have what it has written to their disks first; whether all have it.

        Returns once it is closed on all of them if they have, and else after a while.
        """
        stored: list[str] = []

        async def store_on(item: PipelineStage) -> None:
            try:
                if await item.worker.store_session(self.session_id, name):
                    stored.append(item.peer_id)
            except NeuroGridError as exc:
                logger.debug("could not store a session on %s: %s", item.peer_id, exc)

        with trio.move_on_after(STORE_TIMEOUT):
            async with trio.open_nursery() as nursery:
                for chain in self.chains:
                    for item in chain.stages:
                        nursery.start_soon(store_on, item)
        return len(stored) == len(self.peer_ids)

    async def aclose(self) -> None:
        """Close the session on all stages that can be told, also when cancelled.

        Nobody waits for a slow one, which will find that out in its own time.
        """
        watch = self._routing.watch

        async def close_on(item: PipelineStage) -> None:
            try:
                await item.worker.close_session(self.session_id)
            except NeuroGridError as exc:
                logger.debug("could not close a session on %s: %s", item.peer_id, exc)

        with trio.move_on_after(CLOSE_TIMEOUT) as scope:
            scope.shield = True
            async with trio.open_nursery() as nursery:
                for chain in self.chains:
                    for item in chain.stages:
                        if item.times.is_slow and watch is not None:
                            watch.start_soon(item.worker.close_session, self.session_id)
                        else:
                            nursery.start_soon(close_on, item)


async def open_session(
    stages: Sequence[PipelineStage],
    routing: Routing,
    *,
    max_length: int,
    prior: Prior | None = None,
    link_patience: float = math.inf,
    adapter: AdapterSource | None = None,
    cuts: bool = False,
    images: bytes = b"",
) -> PipelineSession:
    """Open a session of at most `max_length` tokens on every stage, whose owner closes it.

    Where a worker cannot reach its successor, the session is opened anew with that link through the coordinator.

    Args:
        prior: open on the same stages; the new session begins with its first tokens.
        link_patience: seconds that a worker may take to reach its successor before that link goes through here. With an
            adapter or a prior it is not looked at: the worker may have to fetch that, or read it from disk, too.
        adapter: what is added to the layers for this session; None for nothing.
        cuts: ask for a session that can go back.
        images: where its images are, as SessionOpen has it; empty where layers need not know.

    Raises:
        NoRouteError: a stage does not open it; names its layers and its peer.
        PriorLostError: a stage does not have the prior as it should be. It may be over on others by then.
    """
    while True:
        session = PipelineSession(secrets.randbits(64) or 1, routing.chains(stages), routing)
        is_open = False
        try:
            # Each time a link less is left that may turn out to be cut.
            is_open = await _open(
                session,
                routing,
                max_length,
                prior,
                math.inf if adapter or prior else link_patience,
                adapter,
                cuts,
                images,
            )
        finally:
            if not is_open:
                await session.aclose()
        if is_open:
            session.length = prior.num_tokens if prior else 0
            return session
        if prior is not None:
            raise PriorLostError("it was over when links turned out to be cut")


async def _open(
    session: PipelineSession,
    routing: Routing,
    max_length: int,
    prior: Prior | None,
    link_patience: float,
    adapter: AdapterSource | None,
    cuts: bool,
    images: bytes,
) -> bool:
    """Open a session on all stages at once; False if some links have to be relayed instead."""
    lost: list[NoRouteError] = []
    without_prior: list[str] = []
    cut: list[tuple[PipelineStage, PipelineStage, str]] = []

    async def open_on(item: PipelineStage, behind: PipelineStage | None, route: bytes) -> None:
        wanted = SessionOpen(
            session_id=session.session_id,
            start_layer=item.stage.start,
            stop_layer=item.stage.stop,
            max_length=max_length,
            route=route,
            wire=routing.wire,
            prior=prior.session_id if prior else 0,
            stored=prior.stored if prior else b"",
            prior_length=prior.num_tokens if prior else 0,
            keep_prior=prior.stays_open if prior else False,
            adapter=adapter.ids(item.stage.start, item.stage.stop) if adapter else b"",
            cuts=cuts,
            images=images,
        )
        try:
            with trio.move_on_after(math.inf if behind is None else link_patience) as scope:
                opened = await item.worker.open_session(wanted)
            if scope.cancelled_caught and behind is not None:
                cut.append((item, behind, f"it was not reached within {link_patience:g} s"))
                return
            if prior is None and opened.length:
                raise RemoteProtocolError(
                    f"{item.peer_id} began a session with {opened.length} tokens of none that was named",
                    code=ErrorCode.PROTOCOL_VIOLATION,
                )
            if prior is not None and opened.length != prior.num_tokens:
                without_prior.append(f"{item.name} began with {opened.length} tokens of it")
            if opened.takes_cuts:
                session.takes_no_cuts.discard(item.peer_id)
        except (TransportError, PeerRefusedError, RemoteProtocolError) as exc:
            code = exc.code if isinstance(exc, PeerRefusedError) else None
            if code == ErrorCode.PEER_UNREACHABLE and behind is not None:
                cut.append((item, behind, str(exc)))
                return
            is_refused = code in PRIOR_REFUSED
            if prior is not None and prior.stored:
                is_refused |= code == ErrorCode.OUT_OF_MEMORY  # for reading it, beside all else
            if prior is not None and is_refused:
                without_prior.append(f"{item.name} says: {exc}")
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
        # The errors of workers that are gone come first: that others cannot reach them follows from that.
        raise lost[0]
    if without_prior:
        raise PriorLostError("; ".join(without_prior))
    for before, behind, reason in cut:
        routing.relay(before, behind, reason)
    return not cut
