"""The coordinator of workers that are ready: it generates.

Its model's ends are here, its layers are on the workers. Opened by `open_coordinator` (assembly/coordinator.py).

T = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from neurogrid.errors import ConfigurationError, NeuroGridError
from neurogrid.fleet.placing.fleet import Fleet
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.inference.board.progress import Progress
from neurogrid.inference.board.status import ClusterStatus
from neurogrid.inference.board.status_board import StatusBoard
from neurogrid.inference.generation.adapters import ServedAdapters
from neurogrid.inference.generation.ends_queue import Chosen, EndsQueue
from neurogrid.inference.generation.generation_spans import generation_spans
from neurogrid.inference.generation.kept_sessions import Beginning, KeptSessions, any_session
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.generation.prompt_readers import PooledHidden, PromptReader
from neurogrid.inference.generation.sampling import (
    FinishReason,
    GeneratedToken,
    Logprobs,
    Sampler,
    SamplingParams,
    token_logprobs,
)
from neurogrid.inference.generation.sight import SeenImages
from neurogrid.inference.generation.text_generation import TextGeneration
from neurogrid.inference.generation.token_session import TokenSession
from neurogrid.inference.pipeline.routing import Routing
from neurogrid.inference.pipeline.selection import Selector
from neurogrid.inference.speculation.speculation import Proposer, Speculation
from neurogrid.inference.verification.verifier import Recording, Verification
from neurogrid.model.adapters import AdapterSource
from neurogrid.model.grammars import Grammar
from neurogrid.model.images.reader import ImageInputs
from neurogrid.p2p.exchange.counters import TrafficCounters
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.tracing import past_span
from neurogrid.planner import PlannedStage

__all__ = ["Coordinator"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A token, and when it was sampled: nanoseconds of the Unix epoch."""

    token_id: int
    logprobs: Logprobs | None
    started: int
    ended: int


class Coordinator(TextGeneration):
    """A coordinator whose workers are ready. Made by `open_coordinator`.

    Attributes:
        model: the loaded model.
        fleet: its workers, and what each of them holds.
        selector: which of them a session goes through.
        adapters: what can be added to its layers, by name.
        verification: computes a share of its sessions again; None for none.
    """

    def __init__(
        self,
        protocol: Exchange,
        model: LoadedModel,
        fleet: Fleet,
        selector: Selector,
        routing: Routing,
        ends: EndsQueue,
        kept: KeptSessions,
        adapters: ServedAdapters,
        *,
        patience: float,
        board: StatusBoard,
        verification: Verification | None = None,
        progress: Progress | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.model = model
        self.fleet = fleet
        self.selector = selector
        self.adapters = adapters
        self._protocol = protocol
        self._routing = routing
        self._ends = ends
        self._kept = kept
        self._patience = patience
        self._board = board
        self.verification = verification
        self._progress = progress or Progress()
        self._speculation = speculation
        self._said: set[str] = set()  # why there was no speculation
        self._numbers = count(1)

    @property
    def counters(self) -> TrafficCounters:
        """Messages and bytes by peer, type and direction."""
        return self._protocol.counters

    @property
    def host(self) -> Host:
        """The host underneath."""
        return self._protocol.host

    @property
    def peer_id(self) -> str:
        """The coordinator's peer id (base58)."""
        return self.host.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs that a worker can dial."""
        return tuple(self.host.addresses)

    @property
    def why_not_ready(self) -> str | None:
        """Layers that no worker is ready for, in words; None where a token could be generated now."""
        return self.selector.why_not_ready

    def status(self) -> ClusterStatus:
        """The state of the cluster at this moment: workers, stages, rates, requests, failures, events."""
        return self._board.status()

    @property
    def cache_bytes(self) -> tuple[int, int]:
        """Memory for KV caches on all workers: set aside for sessions that are open, and all there is."""
        return self._kept.room.reserved_bytes, self._kept.room.limit_bytes

    @property
    def stages(self) -> tuple[PlannedStage, ...]:
        """The stages of the current plan, in order."""
        return self.fleet.plan.stages

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers, by what each said of itself."""
        return tuple(self.fleet.infos.values())

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[int, None]:
        """Yield new token ids, at most `max_tokens`, until one that ends the sequence or the last place.

        The token that ends it, the model's own or a stop token, is not yielded. Everything else is as for
        `generate_tokens`.
        """
        generating = self.generate_tokens(
            token_ids, max_tokens=max_tokens, sampling=sampling, adapter=adapter
        )
        async with aclosing(generating) as tokens:
            async for token in tokens:
                if token.finish_reason != "stop":
                    yield token.token_id

    async def generate_tokens(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams | None = None,
        num_logprobs: int | None = None,
        ignore_eos: bool = False,
        adapter: str | None = None,
        grammar: Grammar | None = None,
        reader: PromptReader | None = None,
        speculate: bool = True,
        images: ImageInputs | None = None,
    ) -> AsyncGenerator[GeneratedToken, None]:
        """Yield new tokens, at most `max_tokens`; the last of them says why nothing follows.

        Greedy unless `sampling` says otherwise. A worker that
        fails on the way is replaced: there is a pause, and no token that was yielded changes. Many may run at
        once; they share forward passes, so that each gives what it gives alone up to rounding. One for which the
        workers have no room waits. Close the generator (`contextlib.aclosing`) when you want no more of it: that
        ends its session on all workers, where it may be kept for a prompt that begins with the same tokens.

        Args:
            token_ids: the prompt.
            max_tokens: 1 or more; fewer come where the session has no place for them.
            num_logprobs: give the log probability of each token, and of so many of the likeliest; None for neither.
            ignore_eos: an end-of-sequence token is one like others.
            adapter: the name of one of `adapters`, with which they are computed; None for the model alone.
            grammar: what all tokens together have to be; one that ends the sequence comes only where it is complete.
                Compiled by `model.grammars`; None for anything.
            reader: is shown all of the prompt before the first token, so that nothing of it is reused. None for nobody.
            speculate: propose tokens, as the coordinator was set to; False for none. They are the same tokens.
            images: those among the prompt's tokens, read by `model.sight.reader`; None for none. With images none are
                proposed, and nothing is verified.

        Raises:
            ConfigurationError: the prompt cannot be served, fewer tokens are allowed than are to come at least, no
                adapter has that name, or the model takes no images here.
            ModelError: what sees images fails on these.
            NoRouteError: a worker was lost, and no other took its layers in time; names them.
            CapacityError: too many wait for room already.
        """
        model = self.model
        model.check_prompt(token_ids)
        source = self._source_of(adapter)
        seen: SeenImages | None = None
        if images is not None:
            if model.sight is None:
                raise ConfigurationError(f"images are not taken: {model.why_no_sight}")
            seen, speculate = await model.sight.see(images), False
        max_length = min(len(token_ids) + max_tokens, model.max_seq_len)
        sampling = sampling or SamplingParams()
        if sampling.min_tokens > max_tokens:
            raise ConfigurationError(
                f"min_tokens is {sampling.min_tokens}, and max_tokens is {max_tokens}"
            )
        own_ends = frozenset() if ignore_eos else model.eos_token_ids
        ends = own_ends.union(sampling.stop_token_ids)
        sampler = Sampler(
            sampling,
            prompt=token_ids,
            end_token_ids=ends,
            grammar=None if grammar is None else grammar.begin(),
        )
        tokens = list(token_ids)
        num_chosen = 0

        def choose(logits_V: torch.Tensor) -> Chosen[_Sampled]:
            nonlocal num_chosen
            started = time.time_ns()
            token_id = sampler.sample(logits_V)
            logprobs = None
            if num_logprobs is not None:
                logprobs = token_logprobs(logits_V, token_id, num_top=num_logprobs)
            num_chosen += 1
            is_last = token_id in ends or len(token_ids) + num_chosen >= max_length
            sampled = _Sampled(token_id, logprobs, started, time.time_ns())
            return Chosen(sampled, None if is_last else token_id)

        told: dict[str, str | int] = {
            "neurogrid.model": model.name,
            "neurogrid.prompt_tokens": len(token_ids),
            "neurogrid.max_tokens": max_length - len(token_ids),
        }
        if adapter is not None:
            told["neurogrid.adapter"] = adapter
        with self._told(len(token_ids)) as number, generation_spans(told) as spans:
            key = source.key if source is not None else b""
            # Who computes a session again is not told of images.
            recording = (
                self.verification.recording(source) if self.verification and seen is None else None
            )
            accepts = recording.may_begin_with if recording is not None else any_session
            begins = (
                self._kept.begin(
                    token_ids if seen is None else seen.identities(token_ids),
                    max_length,
                    key,
                    accepts=accepts,
                    outside=int if seen is None else seen.outside,
                )
                if reader is None
                else self._kept.begin_alone(max_length, key)
            )
            async with begins as beginning, self._proposing(token_ids, speculate) as proposer:
                self._progress.generation_opened(number)
                while len(tokens) < max_length:
                    # A model whose caches hold only below some length starts over there, by one prefill.
                    bound = model.traits.recompute_at
                    is_past = bound is None or len(tokens) >= bound
                    stop = max_length if is_past else min(max_length, bound or max_length)
                    new_tokens = tokens
                    async with self._open_session(
                        beginning, stop, number, source, recording, seen
                    ) as session:
                        if reader is not None and len(tokens) == len(token_ids):
                            session.read_prompt(reader)
                        while len(tokens) < stop:
                            proposed: Sequence[int] = ()
                            if proposer is not None and len(new_tokens) == 1:
                                room = stop - len(tokens) - 1
                                proposed = await self._proposed(proposer, session, tokens, room)
                            with spans.step(len(tokens) - len(new_tokens), len(new_tokens)):
                                started = time.perf_counter()
                                several = await session.extend(new_tokens, choose, proposed)
                                seconds = time.perf_counter() - started
                                for sampled in several:
                                    past_span("inference.sample", sampled.started, sampled.ended)
                            if proposer is not None and len(new_tokens) == 1:
                                self._passed(number, proposer, proposed, len(several), seconds)
                            for sampled in several:
                                token_id, logprobs = sampled.token_id, sampled.logprobs
                                if token_id in ends:
                                    self._progress.generation_finished(number, "stop")
                                    spans.finished("stop")
                                    yield GeneratedToken(
                                        token_id, logprobs, "stop", session.num_reused
                                    )
                                    return
                                tokens.append(token_id)
                                if proposer is not None:
                                    proposer.add(token_id)
                                is_last = len(tokens) == max_length
                                self._progress.token_generated(number)
                                if is_last:
                                    self._progress.generation_finished(number, "length")
                                    spans.finished("length")
                                reason: FinishReason | None = "length" if is_last else None
                                yield GeneratedToken(token_id, logprobs, reason, session.num_reused)
                            new_tokens = tokens[-1:]
                        session.is_followed = len(tokens) < max_length

    @asynccontextmanager
    async def _proposing(
        self, token_ids: Sequence[int], speculate: bool
    ) -> AsyncIterator[Proposer | None]:
        if self._speculation is None or not speculate:
            yield None
            return
        async with self._speculation.proposer(token_ids) as proposer:
            yield proposer

    async def _proposed(
        self, proposer: Proposer, session: TokenSession, tokens: Sequence[int], room: int
    ) -> Sequence[int]:
        """The tokens to propose to a session; none where it takes none, which is said once for each reason."""
        why_not = session.why_no_proposals
        if why_not is None:
            return await proposer.propose(tokens, room, num_sessions=self._ends.num_active)
        if why_not not in self._said:
            self._said.add(why_not)
            logger.info("no speculation: %s", why_not)
            self._progress.speculation_settled(f"none: {why_not}")
        return ()

    def _passed(
        self,
        number: int,
        proposer: Proposer,
        proposed: Sequence[int],
        num_chosen: int,
        seconds: float,
    ) -> None:
        """A pass of one token, and what was proposed behind it, is over."""
        proposer.took(1 + len(proposed), seconds, num_sessions=self._ends.num_active)
        if proposed:
            self._progress.tokens_proposed(number, len(proposed), num_chosen - 1)

    async def read_prompt(
        self,
        token_ids: Sequence[int],
        reader: PromptReader,
        *,
        adapter: str | AdapterSource | None = None,
    ) -> None:
        """Let a prompt go through the model, show `reader` all of it, and generate nothing.

        Its session is closed when this returns. Workers that fail on the way are replaced, as for `generate_tokens`.

        Args:
            token_ids: as many as a session has, or fewer.
            adapter: as for `generate_tokens`, or its parts, which it has though its name be another's by then.

        Raises:
            ConfigurationError: the prompt cannot be served, or no adapter has that name.
            NoRouteError, CapacityError: as `generate_tokens`.
        """
        self.model.check_prompt(token_ids, num_new=0)
        source = self._source_of(adapter)
        key, max_length = source.key if source is not None else b"", len(token_ids)
        with self._told(max_length) as number:
            async with self._kept.begin_alone(max_length, key) as beginning:
                self._progress.generation_opened(number)
                async with self._open_session(beginning, max_length, number, source) as session:
                    session.read_prompt(reader)
                    await session.extend(token_ids, lambda logits_V: Chosen(None, None))
                self._progress.generation_finished(number, "length")

    async def embed(
        self,
        token_ids: Sequence[int],
        *,
        dimensions: int | None = None,
        adapter: str | AdapterSource | None = None,
    ) -> list[float]:
        """The embedding of a text: its hidden states, pooled as the model's makers say.

        Args:
            token_ids: of the text, as many as a session has, or fewer.
            dimensions: only the first so many, brought to length 1; None for all, as the makers say.
            adapter: as for `read_prompt`.

        Raises:
            UnsupportedModelError: hidden states of this model are no embeddings, or not here.
            ConfigurationError, NoRouteError, CapacityError: as `read_prompt`.
        """
        reader = PooledHidden(self.model.pooling, dimensions)
        await self.read_prompt(token_ids, reader, adapter=adapter)
        return reader.embedding()

    @contextmanager
    def _told(self, num_prompt_tokens: int) -> Iterator[int]:
        """Tell of a session from when it is wanted until it is over; gives its number."""
        number, error = next(self._numbers), ""
        self._progress.generation_queued(number, num_prompt_tokens)
        try:
            yield number
        except NeuroGridError as exc:
            error = str(exc)
            raise
        finally:
            self._progress.generation_ended(number, error)

    def _source_of(self, adapter: str | AdapterSource | None) -> AdapterSource | None:
        if adapter is None or isinstance(adapter, AdapterSource):
            return adapter
        served = self.adapters.get(adapter)
        if served is None:
            raise ConfigurationError(f"there is no adapter {adapter[:100]!r}")
        return served.source

    def _open_session(
        self,
        beginning: Beginning,
        max_length: int,
        number: int,
        adapter: AdapterSource | None,
        recording: Recording | None = None,
        images: SeenImages | None = None,
    ) -> TokenSession:
        return TokenSession(
            self._ends,
            self.fleet,
            self.selector,
            self._routing,
            self._kept,
            beginning,
            number=number,
            max_length=max_length,
            patience=self._patience,
            replays=self.model.replays,
            max_piece=self.model.max_piece,
            adapter=adapter,
            speculates=self._speculation is not None,
            needs_same_bits=self._speculation is not None and self._speculation.needs_same_bits,
            recording=recording,
            images=images,
            on_failed=partial(self._progress.step_failed, number),
            on_rerouted=partial(self._progress.generation_rerouted, number),
        )
