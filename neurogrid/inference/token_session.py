"""A sequence of tokens that goes through the model, over whichever workers are ready.

When one of them fails, others are chosen and the caches there are built anew from the tokens, so that whoever reads
the tokens sees a pause. In float32 that is one prefill of all of them, and what comes after is equal to the
undisturbed run. In half precision sums depend on the shapes of the calls: there the calls are replayed as they were.

T = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

import torch
import trio

from neurogrid.errors import NoRouteError
from neurogrid.inference.ends_queue import Choose, EndsQueue
from neurogrid.inference.fleet import Fleet
from neurogrid.inference.member import Selection
from neurogrid.inference.pipeline import PipelineSession, open_session
from neurogrid.inference.routing import Routing
from neurogrid.inference.spans import note_failure, recovery_span
from neurogrid.p2p.tracing import span

__all__ = ["TokenSession"]

C = TypeVar("C")

logger = logging.getLogger(__name__)


class TokenSession:
    """A context manager: leaving it closes the session wherever it is open.

    Args:
        ends: embedding and head.
        max_length: tokens that it may come to hold.
        patience: seconds that one step may take to find its way around failures.
        replays: repeat the calls as they were, instead of one for all tokens.
        on_failed: told of each step that a member failed.
        on_rerouted: told when others have taken over from a member that failed: why, and after how many seconds.
    """

    def __init__(
        self,
        ends: EndsQueue,
        fleet: Fleet,
        routing: Routing,
        *,
        max_length: int,
        patience: float,
        replays: bool,
        on_failed: Callable[[NoRouteError], None] = lambda error: None,
        on_rerouted: Callable[[str, float], None] = lambda reason, seconds: None,
    ) -> None:
        self._ends = ends
        self._fleet = fleet
        self._routing = routing
        self._replays = replays
        self._on_failed = on_failed
        self._on_rerouted = on_rerouted
        self._max_length = max_length
        self._patience = patience
        self._tokens: list[int] = []
        self._calls: list[int] = []  # tokens of each forward pass, in order
        self._avoid: set[str] = set()  # peers whose answers were no good
        self._selection: Selection | None = None
        self._pipeline: PipelineSession | None = None
        self._ahead: tuple[int, int, torch.Tensor] | None = None  # position, token, embedding
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> TokenSession:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._ends.forget(id(self))
        await self._close()

    async def extend(self, token_ids: Sequence[int], choose: Choose[C]) -> C:
        """Append tokens; returns what `choose` makes of the logits after the last of them, [V].

        Args:
            choose: runs in the torch thread. The token that it gives is expected next: it is embedded at once.

        Raises:
            Exception: what `choose` raises.
            NoRouteError: a member failed, and no other way was found in time; names its layers.
        """
        self._tokens += token_ids
        self._calls.append(len(token_ids))
        deadline = trio.current_time() + self._patience
        failure: NoRouteError | None = None
        failed_at = 0.0
        while True:
            try:
                if self._selection is not None and self._fleet.should_leave(self._selection):
                    await self._close()
                with recovery_span(failure):
                    if self._pipeline is None:
                        await self._open(deadline)
                    value = await self._catch_up(choose)
                if failure is not None:
                    self._on_rerouted(str(failure), trio.current_time() - failed_at)
                return value
            except NoRouteError as exc:
                self._on_failed(exc)
                note_failure(exc)
                selection = self._selection
                await self._close()
                if failure is None and exc.peer_id is not None:
                    # What it took until it failed, which may be a timeout, does not count.
                    deadline = trio.current_time() + self._patience
                if exc.peer_id is None and failure is not None:
                    raise NoRouteError(f"{failure}; {exc}", layers=exc.layers) from exc
                if trio.current_time() >= deadline or not self._may_try_again(exc, selection):
                    raise
                failed_at = failed_at if failure is not None else trio.current_time()
                failure = exc
                logger.debug("%s; %d tokens go another way", exc, len(self._tokens))

    def _may_try_again(self, error: NoRouteError, selection: Selection | None) -> bool:
        """Whether others may do what these could not."""
        peer_id = error.peer_id
        if peer_id is None:
            return False
        if error.unreachable_from is not None and selection is not None:
            stages = {item.peer_id: item for item in selection.stages}
            self._routing.cut(stages[error.unreachable_from], stages[peer_id], str(error))
            return True
        if self._fleet.failed(error):
            return True
        # It answers, and what it answers is an error: the same question may go to somebody else, once.
        has_tried = peer_id in self._avoid
        self._avoid.add(peer_id)
        layers = range(min(error.layers), max(error.layers) + 1)
        return not has_tried and self._fleet.has_alternative(peer_id, layers)

    async def _open(self, deadline: float) -> None:
        timeout = max(deadline - trio.current_time(), 0.0)
        self._selection = await self._fleet.select(timeout=timeout, avoid=self._avoid)
        self._stack.enter_context(self._selection)
        opening = open_session(self._selection.stages, self._routing, max_length=self._max_length)
        with span("inference.open_session", {"neurogrid.workers": len(self._selection.stages)}):
            self._pipeline = await self._stack.enter_async_context(opening)

    async def _catch_up(self, choose: Choose[C]) -> C:
        """Send what the pipeline has not seen yet, and choose from the logits after the last token."""
        assert self._pipeline is not None
        calls = self._missing_calls(self._pipeline.length)
        for start, stop in calls:
            ahead_BTD = self._take_ahead(start, stop)
            if ahead_BTD is None:
                ahead_BTD = await self._ends.embed(
                    self._tokens[start:stop], position=start, session=id(self)
                )
            hidden_BTD = await self._pipeline.forward(ahead_BTD)
        chosen, ahead_BTD = await self._ends.choose(
            hidden_BTD, position=calls[-1][0], choose=choose, session=id(self)
        )
        if chosen.token_id is not None and ahead_BTD is not None:
            self._ahead = (len(self._tokens), chosen.token_id, ahead_BTD)
        return chosen.value

    def _take_ahead(self, start: int, stop: int) -> torch.Tensor | None:
        """What was embedded when it was chosen, if that is what tokens start..stop-1 are."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (start, self._tokens[start]) and stop == start + 1:
            return ahead[2]
        return None

    def _missing_calls(self, length: int) -> list[tuple[int, int]]:
        """The forward passes, as first token and end, that a pipeline of so many tokens lacks."""
        if not self._replays:
            return [(length, len(self._tokens))]
        calls, start = [], 0
        for num_tokens in self._calls:
            if start >= length:
                calls.append((start, start + num_tokens))
            start += num_tokens
        return calls

    async def _close(self) -> None:
        self._pipeline = None
        self._selection = None
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()
