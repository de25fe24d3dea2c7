"""A sequence of tokens that goes through the model, over whichever workers are ready.

When one of them fails, others are chosen and the caches there are built anew from the tokens, so that a reader of
the tokens sees a pause. That is one prefill of all tokens before the step that failed, and what comes after is equal to
the undisturbed run: in float32, and on workers where a token gets the same bits whatever it is computed with, as they
do where our kernels compute whole layers. Elsewhere sums in half precision depend on the shapes of the calls, which
are replayed as they were.

T = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch
import trio

from neurogrid.errors import NoRouteError, PeerRefusedError
from neurogrid.fleet.placing.fleet import Fleet
from neurogrid.inference.generation.ends_queue import Choose, EndsQueue
from neurogrid.inference.generation.generation_spans import note_failure, recovery_span
from neurogrid.inference.generation.kept_sessions import Beginning, KeptSessions
from neurogrid.inference.generation.prefixes import first_calls
from neurogrid.inference.generation.prompt_readers import PromptReader
from neurogrid.inference.generation.sight import SeenImages
from neurogrid.inference.generation.stored_prefixes import StoredPrefix
from neurogrid.inference.pipeline.prefill import Bounds, chunk_lengths
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.pipeline.selection import Selection, Selector
from neurogrid.inference.pipeline.session import PipelineSession, PriorLostError, open_session
from neurogrid.inference.pipeline.session_worker import Prior
from neurogrid.inference.verification.verifier import Recording
from neurogrid.model.adapters import AdapterSource
from neurogrid.p2p.streams.tracing import span
from neurogrid.p2p.wire import ErrorCode

__all__ = ["TokenSession"]

C = TypeVar("C")

logger = logging.getLogger(__name__)

# Seconds for workers that go on for others to reach each other: somebody waits for the next token, and through the
# coordinator they reach each other at once.
DETOUR_LINK_PATIENCE = 2.0
# Seconds until a worker that had no room is asked again, whatever it says itself.
MIN_RETRY, MAX_RETRY = 0.05, 5.0


class TokenSession:
    """A context manager: leaving it closes the session wherever it is open, or leaves it to `kept`.

    Args:
        ends: embedding and head.
        kept: keeps it when it is finished.
        beginning: its room, and what it may begin with.
        number: its own among those of `ends`.
        max_length: tokens that it may come to hold.
        patience: seconds that one step may take to find its way around failures.
        replays: repeat the calls as they were, instead of one for all tokens, on workers where that makes a difference.
        max_piece: the most tokens that are sent in one piece; None where a session that has begun takes no several, as
            the model's check found, so that they cannot be cut.
        adapter: what is added to the layers; None for nothing.
        speculates: tokens are going to be proposed, so that it has to be able to go back.
        needs_same_bits: they are not, where a token may get other bits beside others.
        recording: where it is drawn to be verified; None where not.
        images: those of its first tokens; None for none.
        on_failed: told of each step that a member failed.
        on_rerouted: told when others have taken over from a member that failed or is gone: why, and after how many
            seconds.

    Attributes:
        num_reused: of its tokens, those that an earlier session had computed.
        is_followed: another one begins anew in its room when it ends, so that it cannot be kept.
    """

    def __init__(
        self,
        ends: EndsQueue,
        fleet: Fleet,
        selector: Selector,
        routing: Routing,
        kept: KeptSessions,
        beginning: Beginning,
        *,
        number: int,
        max_length: int,
        patience: float,
        replays: bool,
        max_piece: int | None,
        adapter: AdapterSource | None = None,
        speculates: bool = False,
        needs_same_bits: bool = False,
        recording: Recording | None = None,
        images: SeenImages | None = None,
        on_failed: Callable[[NoRouteError], None] = lambda error: None,
        on_rerouted: Callable[[str, float], None] = lambda reason, seconds: None,
    ) -> None:
        self._ends = ends
        self._fleet = fleet
        self._selector = selector
        self._routing = routing
        self._kept = kept
        self._beginning = beginning
        self._number = number
        self.num_reused = 0
        self.is_followed = False
        self._replays = replays
        self._max_piece = max_piece
        self._adapter = adapter
        self._speculates = speculates
        self._needs_same_bits = needs_same_bits
        self._recording = recording
        self._images = images
        self._on_failed = on_failed
        self._on_rerouted = on_rerouted
        self._max_length = max_length
        self._patience = patience
        self._tokens: list[int] = []
        self._calls: list[int] = []  # tokens of each forward pass, in order
        self._num_done = 0  # tokens of the steps before this one, also those of an earlier session
        self._is_cut = True  # the last of them is not to be cut into chunks any more
        self._avoid: set[str] = set()  # peers whose answers were no good
        self._begun_anew: set[str] = set()  # those that had dropped it before this step
        self._selection: Selection | None = None
        self._pipeline: PipelineSession | None = None
        self._reader: PromptReader | None = None
        self._ahead: tuple[int, int, torch.Tensor] | None = None  # position, token, embedding
        self._link_patience = math.inf
        self._is_kept = False
        self._counted = ExitStack()  # the members of the selection count this session

    async def __aenter__(self) -> TokenSession:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._ends.forget(self._number)
        if error is None or isinstance(error, GeneratorExit | trio.Cancelled):
            self._keep()
        if self._recording is not None:
            self._recording.ended(is_kept=self._is_kept)
        await self._close()

    def read_prompt(self, reader: PromptReader) -> None:
        """Have `reader` shown what leaves the last layer for all tokens of the first `extend`."""
        self._reader = reader

    def _keep(self) -> None:
        """Leave the session open for others, if nothing is under way in it."""
        pipeline, selection = self._pipeline, self._selection
        if pipeline is None or selection is None or pipeline.length != len(self._tokens):
            return
        if self.is_followed:
            return
        tokens: Sequence[int] = self._tokens
        if self._images is not None:
            tokens = self._images.identities(tokens)
        if self._kept.keep(pipeline, selection, tokens, self._calls, self._beginning):
            self._pipeline, self._is_kept = None, True

    @property
    def why_no_proposals(self) -> str | None:
        """Reason that tokens cannot be proposed to the session as it is open now; None where they can, or it is not."""
        pipeline, selection = self._pipeline, self._selection
        if pipeline is None or selection is None:
            return None
        if pipeline.takes_no_cuts:
            return f"worker {min(pipeline.takes_no_cuts)} takes no token back: it is of an older version"
        if self._needs_same_bits and not selection.has_same_bits:
            return (
                "a token may get other bits on its workers beside others than alone, and another be chosen in a tie "
                "(--speculate lookup does not mind)"
            )
        return None

    async def extend(
        self, token_ids: Sequence[int], choose: Choose[C], proposed: Sequence[int] = ()
    ) -> list[C]:
        """Append tokens; returns what `choose` makes of the logits after the last of them, [V].

        Args:
            choose: runs in the torch thread. The token that it gives is expected next: it is embedded at once.
            proposed: tokens that are expected to follow one that goes on. Those that `choose` gives are appended, too,
                and it is called for each of them: then several come back. If a member fails, none are.

        Raises:
            Exception: what `choose` raises.
            NoRouteError: a member failed, and no other way was found in time; names its layers.
        """
        self._num_done = len(self._tokens)
        self._tokens += token_ids
        self._calls.append(len(token_ids))
        self._is_cut = len(token_ids) == 1
        deadline = trio.current_time() + self._patience
        failure: NoRouteError | None = None
        why, failed_at = "", 0.0
        while True:
            try:
                if self._selection is not None and self._selector.should_leave(self._selection):
                    if not why and (gone := self._selector.gone(self._selection)) is not None:
                        why, failed_at = f"worker {gone} is gone", trio.current_time()
                    await self._close()
                with recovery_span(failure):
                    if self._pipeline is None:
                        await self._open(deadline)
                    values = await self._catch_up(choose, () if failure else proposed)
                self._link_patience = math.inf
                self._begun_anew.clear()
                if why:
                    self._on_rerouted(why, trio.current_time() - failed_at)
                return values
            except NoRouteError as exc:
                self._ends.forget(self._number)
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
                failed_at = failed_at if why else trio.current_time()
                failure, why, self._link_patience = exc, str(exc), DETOUR_LINK_PATIENCE
                logger.debug("%s; %d tokens go another way", exc, len(self._tokens))

    def _may_try_again(self, error: NoRouteError, selection: Selection | None) -> bool:
        """Whether others may do what these could not."""
        peer_id = error.peer_id
        if peer_id is None or selection is None:
            return False
        if error.unreachable_from is not None:
            stages = {item.peer_id: item for item in selection.stages}
            self._routing.cut(stages[error.unreachable_from], stages[peer_id], str(error))
            return True
        if self._selector.failed(error, selection):
            return True
        if _is_over(error) and peer_id not in self._begun_anew:
            # As where no token was asked for in a long time: its caches are gone, and it may have others.
            self._begun_anew.add(peer_id)
            return True
        # It answers, and what it answers is an error: the same question may go to somebody else, once.
        has_tried = peer_id in self._avoid
        self._avoid.add(peer_id)
        return not has_tried and self._has_alternative(error)

    def _has_alternative(self, error: NoRouteError, *, avoid: Collection[str] = ()) -> bool:
        layers = range(min(error.layers), max(error.layers) + 1)
        return self._fleet.has_alternative(error.peer_id or "", layers, avoid=avoid)

    async def _open(self, deadline: float) -> None:
        if self._beginning.kept is not None and await self._go_on():
            return
        timeout = max(deadline - trio.current_time(), 0.0)
        self._select(await self._selector.select(timeout=timeout, avoid=self._avoid))
        stored = self._stored_beginning()
        while True:
            try:
                if stored is None:
                    await self._open_pipeline()
                else:
                    await self._open_pipeline(stored[0].prior(stored[1]))
                    self._begun_with(stored[0].calls, stored[1])
                return
            except PriorLostError as exc:
                assert stored is not None
                logger.debug("%d tokens are computed again: %s", stored[1], exc)
                self._kept.stored.forget(stored[0])
                stored = None
            except NoRouteError as exc:
                delay = min(_seconds_until_room(exc), deadline - trio.current_time())
                if delay <= 0:
                    raise
                # Kept sessions that nobody needs just now are in the way, or some that are over by now.
                if not await self._kept.evict_all():
                    if self._has_alternative(exc, avoid=self._avoid):
                        raise
                    logger.debug("%s; asking again in %.1f s", exc, delay)
                    await trio.sleep(delay)

    async def _go_on(self) -> bool:
        """Begin with the tokens of a kept session; False if the workers have them no more."""
        beginning, kept = self._beginning, self._beginning.kept
        assert kept is not None
        self._select(kept.selection)
        try:
            await self._open_pipeline(beginning.prior)
        except (PriorLostError, NoRouteError) as exc:
            self._kept.give_up(beginning)
            if isinstance(exc, NoRouteError) and not _seconds_until_room(exc):
                raise
            logger.debug("%d tokens are computed again: %s", beginning.num_tokens, exc)
            if not beginning.is_copy:
                await kept.closed.wait()  # this one begins anew in its room
            await self._close()
            return False
        self._kept.taken(beginning)
        self._begun_with(kept.calls, beginning.num_tokens)
        return True

    def _stored_beginning(self) -> tuple[StoredPrefix, int] | None:
        """Choose a prefix on the workers' disks to begin with, and how many tokens of it; None for none."""
        is_first = not (self._num_done or self._is_cut)
        if not is_first or self._beginning.is_alone or self._recording is not None:
            return None
        assert self._selection is not None
        tokens: Sequence[int] = self._tokens
        if self._images is not None:
            # What is on disk has no images, though it may have the tokens that stand for some here.
            tokens = self._images.identities(tokens)
        return self._kept.stored.best(tokens, self._beginning.adapter, self._selection)

    def _begun_with(self, calls: Sequence[int], num_tokens: int) -> None:
        """The session is open, with so many tokens that these calls had computed."""
        self.num_reused = num_tokens
        reused = first_calls(calls, num_tokens)
        # Where calls need not be repeated, their bounds may be others than where it was cut.
        reused += [self.num_reused - sum(reused)] if sum(reused) < self.num_reused else []
        self._calls = [*reused, len(self._tokens) - self.num_reused]
        self._num_done = num_tokens

    def _select(self, selection: Selection) -> None:
        self._selection = self._counted.enter_context(selection)

    async def _open_pipeline(self, prior: Prior | None = None) -> None:
        assert self._selection is not None
        stages = self._selection.stages
        await self._fleet.trials.give_way([stage.peer_id for stage in stages])
        told = {"neurogrid.workers": len(stages)}
        with span("inference.open_session", told):
            self._pipeline = await open_session(
                stages,
                self._routing,
                max_length=self._max_length,
                prior=prior,
                link_patience=self._link_patience,
                adapter=self._adapter,
                cuts=self._speculates,
                images=self._images.told if self._images is not None else b"",
            )
        if self._recording is not None:
            self._recording.opened(self._pipeline, prior)

    async def _catch_up(self, choose: Choose[C], proposed: Sequence[int]) -> list[C]:
        """Send what the pipeline has not seen yet, and choose from the logits after the last token."""
        assert self._pipeline is not None
        calls = self._missing_calls(self._pipeline)
        reader = self._reader if not self._num_done else None
        if reader is not None:
            reader.restart()  # what others had shown it before they failed
        if len(calls) == 1:
            start, stop = calls[0]
            if proposed and start and stop - start == 1 and self.why_no_proposals is None:
                return await self._look_at(self._pipeline, proposed, choose)
            hidden_BTD = await self._embed(start, stop)
            batch: tuple[int, ...] = ()
            if start and stop - start == 1:
                batch = await self._ends.leave(self._number, self._pipeline.peer_ids)
            hidden_BTD = await self._pipeline.forward(hidden_BTD, batch)
            if reader is not None:
                await self._ends.read(hidden_BTD, position=start, reader=reader)
        else:
            take = None
            if reader is not None:
                take = partial(_show, self._ends, reader)
            hidden_BTD = await self._pipeline.prefill(calls, self._embed, take)
        chosen, ahead_BTD = await self._ends.choose(
            hidden_BTD,
            position=calls[-1][0],
            choose=choose,
            session=self._number,
        )
        if chosen.token_id is not None and ahead_BTD is not None:
            self._ahead = (len(self._tokens), chosen.token_id, ahead_BTD)
        return [chosen.value]

    async def _look_at(
        self, pipeline: PipelineSession, proposed: Sequence[int], choose: Choose[C]
    ) -> list[C]:
        """Send the last token and what is proposed to follow it in one pass, and keep what is chosen of that."""
        self._ahead = None
        self._ends.go_alone(self._number)
        start = len(self._tokens) - 1
        hidden_BTD = await self._ends.embed(
            [self._tokens[start], *proposed], position=start, session=self._number
        )
        hidden_BTD = await pipeline.forward(hidden_BTD)
        chosen, ahead_BTD = await self._ends.choose_each(
            hidden_BTD, position=start, proposed=proposed, choose=choose, session=self._number
        )
        self._tokens += proposed[: len(chosen) - 1]
        self._calls[-1] = len(chosen)
        pipeline.go_back(len(self._tokens))
        token_id = chosen[-1].token_id
        if token_id is not None and ahead_BTD is not None:
            self._ahead = (len(self._tokens), token_id, ahead_BTD)
        return [each.value for each in chosen]

    async def _embed(self, start: int, stop: int) -> torch.Tensor:
        """Return the input of layer 0 for tokens start..stop-1; one may have been embedded when it was chosen."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (start, self._tokens[start]) and stop == start + 1:
            return ahead[2]
        return await self._ends.embed(
            self._tokens[start:stop],
            position=start,
            session=self._number,
            images=self._images.between(start, stop) if self._images is not None else (),
        )

    def _missing_calls(self, pipeline: PipelineSession) -> list[Bounds]:
        """The forward passes, as first token and end, that a pipeline lacks."""
        if not self._is_cut:
            num_tokens = self._calls[-1]
            first = len(self._tokens) - num_tokens
            self._calls[-1:] = self._chunks(first, num_tokens, pipeline)
            self._is_cut = True
        length, stop = pipeline.length, len(self._tokens)
        calls = self._calls if length >= self._num_done else self._calls_again(pipeline)
        missing: list[Bounds] = []
        # From the end: a session that decodes has many behind it, and lacks the last one.
        for num_tokens in reversed(calls):
            if stop <= length:
                break
            missing.append((stop - num_tokens, stop))
            stop -= num_tokens
        return missing[::-1]

    def _calls_again(self, pipeline: PipelineSession) -> list[int]:
        """The calls for all tokens of a pipeline that lacks some of steps before this one."""
        assert self._selection is not None
        before = first_calls(self._calls, self._num_done)
        num_lost, step = self._num_done - pipeline.length, self._calls[len(before) :]
        if self._replays and not self._selection.has_same_bits:
            logger.debug("%d tokens are computed again, in the calls that they had", num_lost)
            return self._calls
        again = self._chunks(pipeline.length, num_lost, pipeline)
        logger.debug("%d tokens are computed again, by one prefill", num_lost)
        # This step as it was: what is chosen next is chosen from the same logits.
        return [*again, *step]

    def _chunks(self, start: int, num_tokens: int, pipeline: PipelineSession) -> list[int]:
        """The lengths of the pieces in which tokens from `start` on go."""
        if self._max_piece is None or not pipeline.takes_chunks:
            return [num_tokens]
        lengths = chunk_lengths(num_tokens, len(pipeline.peer_ids), max_tokens=self._max_piece)
        return lengths if self._images is None else self._images.whole(start, lengths)

    async def _close(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        self._selection = None
        try:
            if pipeline is not None:
                await pipeline.aclose()
        finally:
            self._counted.close()


async def _show(
    ends: EndsQueue, reader: PromptReader, position: int, hidden_BTD: torch.Tensor
) -> None:
    await ends.read(hidden_BTD, position=position, reader=reader)


def _is_over(error: NoRouteError) -> bool:
    """Whether a worker failed a step because it had dropped the session before."""
    cause = error.__cause__
    return isinstance(cause, PeerRefusedError) and cause.code == ErrorCode.SESSION_UNKNOWN


def _seconds_until_room(error: NoRouteError) -> float:
    """Seconds until a worker without room for the session is asked again; 0.0 if that is not why it failed."""
    cause = error.__cause__
    if not isinstance(cause, PeerRefusedError) or cause.code != ErrorCode.SESSION_LIMIT:
        return 0.0
    return min(max(cause.retry_after or 0.0, MIN_RETRY), MAX_RETRY)
