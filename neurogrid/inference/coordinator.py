"""The coordinator: has the model, gathers workers, places layers on them, generates.

    async with open_coordinator(CoordinatorSettings(model=path, local_workers=2)) as coordinator:
        async for token_id in coordinator.generate(prompt_ids, max_tokens=64):
            ...

Order comes from acknowledgements: a worker's memory is known before the plan, its config acknowledged before
weights go out, every stage ready before the first token.

T = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import torch
import trio

from neurogrid.errors import ConfigurationError, NeuroGridError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.inference.authorisation import COORDINATOR_TAKES, authorise
from neurogrid.inference.cache_room import MAX_WAITING_SESSIONS, CacheRoom
from neurogrid.inference.caching import CacheSettings
from neurogrid.inference.describing import capacities, describe_workers, links
from neurogrid.inference.ends_queue import Chosen, EndsQueue, open_ends
from neurogrid.inference.finding import FindingSettings, open_discovery
from neurogrid.inference.fleet import Fleet
from neurogrid.inference.fleet_plan import FleetPlanning
from neurogrid.inference.gathering import open_gathering
from neurogrid.inference.generation_spans import generation_spans
from neurogrid.inference.hedging import SlowWatch
from neurogrid.inference.keeping import keep_workers
from neurogrid.inference.kept_sessions import Beginning, KeptSessions, open_kept_sessions
from neurogrid.inference.loaded_model import LoadedModel
from neurogrid.inference.local_stage import LocalLayers, enlist_with_local
from neurogrid.inference.local_trust import (
    credentials_of_local_workers,
    listen_address_beside,
)
from neurogrid.inference.local_workers import start_local_workers
from neurogrid.inference.placing import open_placer
from neurogrid.inference.planner import Explanation, Plan, PlannedStage, explain
from neurogrid.inference.progress import Progress, WorkerInfo
from neurogrid.inference.reaching import ReachSettings, open_reach
from neurogrid.inference.remote_worker import RemoteWorker, Timeouts
from neurogrid.inference.routing import Routing, RoutingMode
from neurogrid.inference.sampling import (
    FinishReason,
    GeneratedToken,
    Logprobs,
    Sampler,
    SamplingParams,
    token_logprobs,
)
from neurogrid.inference.text_generation import TextGeneration
from neurogrid.inference.token_session import TokenSession
from neurogrid.inference.watching import watch_workers
from neurogrid.model.device import device_memory
from neurogrid.model.embedded import embedded_model_path
from neurogrid.p2p.counters import TrafficCounters
from neurogrid.p2p.discovery.dht import Announcement
from neurogrid.p2p.discovery.records import MAX_MODEL_CHARS
from neurogrid.p2p.host import Host, parse_peer_address
from neurogrid.p2p.identity import Identity
from neurogrid.p2p.libp2p_host import open_host
from neurogrid.p2p.message_forms import sender_of
from neurogrid.p2p.protocol import Protocol
from neurogrid.p2p.tracing import past_span
from neurogrid.p2p.trust import Admission
from neurogrid.p2p.wire import (
    PROTOCOL_V10,
    PROTOCOL_V11,
    LayerIds,
    MessageType,
    TensorMessage,
)

__all__ = [
    "Coordinator",
    "CoordinatorSettings",
    "PlannedFleet",
    "load_model",
    "open_coordinator",
    "open_plan",
]

logger = logging.getLogger(__name__)

# Of the machine's free memory, what local workers get; the rest is the coordinator's own.
LOCAL_WORKERS_FRACTION = 0.8
GIB = 1024**3


@dataclass(frozen=True)
class CoordinatorSettings:
    """What a coordinator was started with.

    Attributes:
        model: a checkpoint directory; None for the embedded model.
        model_name: what the model is called; None for the directory's name.
        peers: workers to dial, as full multiaddrs.
        bootstrap: other peers to dial; workers among them are used, but not waited for.
        finding: how workers are found that nobody named.
        reach: how this host is reached, and reaches others, where neither can simply be dialled.
        min_peers: workers to wait for; None for as many as `peers` and local workers, or one that is found.
        local_workers: processes to start on this machine.
        local_layers: how many layers the coordinator computes itself: `none`, exactly so many, the first, or `auto`
            for as many as it takes where the workers cannot hold the model (or it has a GPU that makes it much
            faster). With workers started here `auto` is `none`: they have this machine's memory.
        stages: that many stages; None for the fewest that fit (one a local worker).
        wait: seconds to wait for the workers.
        listen: multiaddrs to listen on.
        listen_fallback: where to listen if one of them is taken; empty makes that an error.
        identity_file: where the key pair lives; None for a new identity each time.
        admission: who is served and used; None for whoever reaches a listen address.
        cache: where the hashes of the model's files are kept; None for nowhere.
        skip_weight_transfer: workers must hold their layers already.
        max_seq_len: tokens of the longest session.
        max_sessions: sessions at once that memory is set aside for on the workers.
        max_waiting: sessions that may wait for a place in that memory; more are refused.
        peer_memory_bytes: assumed for workers that do not tell.
        dtype: to compute in; None for the checkpoint's own.
        routing: `chain`: workers hand activations on to each other where they can; `star`: all through here.
        wire_dtype: `float32`, `float16`, `bfloat16` or `int8`: in what activations travel; None for `dtype`.
        timeouts: deadlines towards workers.
        patience: seconds that a generation waits for a way around a worker that failed.
        with_replicas: workers that are left over get layers too, to stand by.
        prefix_reuse: finished sessions stay open for a while, for those that begin with the same tokens.
        protocol_versions: protocol ids to speak; None for all.
    """

    model: Path | None = None
    model_name: str | None = None
    peers: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    finding: FindingSettings = field(default_factory=FindingSettings)
    reach: ReachSettings = field(default_factory=ReachSettings)
    min_peers: int | None = None
    local_workers: int = 0
    local_layers: LocalLayers = "auto"
    stages: int | None = None
    wait: float = 60.0
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    listen_fallback: tuple[str, ...] = ()
    identity_file: Path | None = None
    admission: Admission | None = None
    cache: CacheSettings | None = None
    skip_weight_transfer: bool = False
    max_seq_len: int = 4096
    max_sessions: int = 1
    max_waiting: int = MAX_WAITING_SESSIONS
    peer_memory_bytes: int = 8 * GIB
    dtype: str | None = None
    routing: RoutingMode = "chain"
    wire_dtype: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    patience: float = 120.0
    with_replicas: bool = True
    prefix_reuse: bool = True
    protocol_versions: tuple[str, ...] | None = None


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
    """

    def __init__(
        self,
        protocol: Protocol,
        model: LoadedModel,
        fleet: Fleet,
        routing: Routing,
        ends: EndsQueue,
        kept: KeptSessions,
        *,
        patience: float,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.fleet = fleet
        self._protocol = protocol
        self._routing = routing
        self._ends = ends
        self._kept = kept
        self._patience = patience
        self._progress = progress or Progress()
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
    def cache_bytes(self) -> tuple[int, int]:
        """Memory for KV caches on all workers: set aside for sessions that are open, and all there is."""
        return self._kept.room.reserved_bytes, self._kept.room.limit_bytes

    @property
    def stages(self) -> tuple[PlannedStage, ...]:
        """The stages of the current plan, in order."""
        return self.fleet.plan.stages

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """What the workers said of themselves."""
        return tuple(self.fleet.infos.values())

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams | None = None,
    ) -> AsyncGenerator[int, None]:
        """Yield new token ids, at most `max_tokens`, until an end-of-sequence token or the last place.

        The end-of-sequence token itself is not yielded. Everything else is as for `generate_tokens`.
        """
        generating = self.generate_tokens(token_ids, max_tokens=max_tokens, sampling=sampling)
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

        Raises:
            ConfigurationError: the prompt cannot be served.
            NoRouteError: a worker was lost, and no other took its layers in time; names them.
            CapacityError: too many wait for room already.
        """
        model = self.model
        model.check_prompt(token_ids)
        max_length = min(len(token_ids) + max_tokens, model.max_seq_len)
        ends = frozenset() if ignore_eos else model.eos_token_ids
        sampler = Sampler(sampling or SamplingParams())
        tokens = list(token_ids)

        def choose(logits_V: torch.Tensor) -> Chosen[_Sampled]:
            started = time.time_ns()
            token_id = sampler.sample(logits_V)
            logprobs = None
            if num_logprobs is not None:
                logprobs = token_logprobs(logits_V, token_id, num_top=num_logprobs)
            is_last = token_id in ends or len(tokens) + 1 >= max_length
            sampled = _Sampled(token_id, logprobs, started, time.time_ns())
            return Chosen(sampled, None if is_last else token_id)

        told: dict[str, str | int] = {
            "neurogrid.model": model.name,
            "neurogrid.prompt_tokens": len(token_ids),
            "neurogrid.max_tokens": max_length - len(token_ids),
        }
        with self._told(len(token_ids)) as number, generation_spans(told) as spans:
            async with self._kept.begin(token_ids, max_length) as beginning:
                self._progress.session_opened(number)
                while len(tokens) < max_length:
                    # A model whose caches hold only below some length starts over there, by one prefill.
                    bound = model.traits.recompute_at
                    is_past = bound is None or len(tokens) >= bound
                    stop = max_length if is_past else min(max_length, bound or max_length)
                    new_tokens = tokens
                    async with self._open_session(beginning, stop, number) as session:
                        while len(tokens) < stop:
                            with spans.step(len(tokens) - len(new_tokens), len(new_tokens)):
                                sampled = await session.extend(new_tokens, choose)
                                past_span("inference.sample", sampled.started, sampled.ended)
                            token_id, logprobs = sampled.token_id, sampled.logprobs
                            if token_id in ends:
                                self._progress.session_finished(number, "stop")
                                spans.finished("stop")
                                yield GeneratedToken(token_id, logprobs, "stop", session.num_reused)
                                return
                            tokens.append(token_id)
                            new_tokens = [token_id]
                            is_last = len(tokens) == max_length
                            self._progress.token_generated(number)
                            if is_last:
                                self._progress.session_finished(number, "length")
                                spans.finished("length")
                            reason: FinishReason | None = "length" if is_last else None
                            yield GeneratedToken(token_id, logprobs, reason, session.num_reused)

    @contextmanager
    def _told(self, num_prompt_tokens: int) -> Iterator[int]:
        """Tell of a session from when it is wanted until it is over; gives its number."""
        number, error = next(self._numbers), ""
        self._progress.session_queued(number, num_prompt_tokens)
        try:
            yield number
        except NeuroGridError as exc:
            error = str(exc)
            raise
        finally:
            self._progress.session_ended(number, error)

    def _open_session(self, beginning: Beginning, max_length: int, number: int) -> TokenSession:
        return TokenSession(
            self._ends,
            self.fleet,
            self._routing,
            self._kept,
            beginning,
            max_length=max_length,
            patience=self._patience,
            replays=self.model.replays,
            on_failed=partial(self._progress.step_failed, number),
            on_rerouted=partial(self._progress.session_rerouted, number),
        )


@dataclass(frozen=True)
class PlannedFleet:
    """Workers that are connected, and a plan for them; nothing has been sent. Made by `open_plan`.

    Attributes:
        why_local: why the coordinator computes layers itself, or does not.
    """

    protocol: Protocol
    model: LoadedModel
    fleet: Fleet
    why_local: str

    @property
    def plan(self) -> Plan:
        """Who is to hold what."""
        return self.fleet.plan

    @property
    def infos(self) -> tuple[WorkerInfo, ...]:
        """What the workers said of themselves."""
        return tuple(self.fleet.infos.values())

    def explain(self, *, max_sessions: int, ends_seconds: float = 0.0) -> Explanation:
        """Why the plan is as it is, with the links as they were measured."""
        size = self.model.size(num_sessions=max_sessions, ends_seconds=ends_seconds)
        peers = capacities(self.infos, len(self.model.costs))
        return explain(self.plan, size, peers, links(self.infos))


@asynccontextmanager
async def open_coordinator(
    settings: CoordinatorSettings,
    *,
    model: LoadedModel | None = None,
    progress: Progress | None = None,
) -> AsyncIterator[Coordinator]:
    """Load the model, gather workers, place the layers; ready when the block is entered.

    Args, and what may be raised before anything is sent: as for `open_plan`.

    Raises:
        NoRouteError: a worker was lost while it got its layers.
    """
    progress = progress or Progress()
    async with AsyncExitStack() as stack:
        planned = await stack.enter_async_context(
            open_plan(settings, model=model, progress=progress)
        )
        model, fleet, protocol = planned.model, planned.fleet, planned.protocol
        await fleet.start()
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(fleet.mend)
        nursery.start_soon(watch_workers, fleet, progress)
        stack.callback(nursery.cancel_scope.cancel)
        ends = await stack.enter_async_context(
            open_ends(model.ends, shares_forward=model.traits.row_bounds is not None)
        )
        # For each layer, so that it holds for every plan.
        room = CacheRoom(
            [[cost] for cost in model.costs],
            max_sessions=settings.max_sessions,
            max_length=model.max_seq_len,
            max_waiting=settings.max_waiting,
        )
        kept = await stack.enter_async_context(
            open_kept_sessions(
                room,
                fleet,
                shortest_cut=model.ends.shortest_cut,
                replays=model.replays,
                is_enabled=settings.prefix_reuse and model.traits.takes_chunks,
            )
        )
        watch = SlowWatch(fleet)
        nursery.start_soon(watch.run)
        routing = Routing(protocol, settings.routing, wire_dtype=settings.wire_dtype, watch=watch)
        yield Coordinator(
            protocol,
            model,
            fleet,
            routing,
            ends,
            kept,
            patience=settings.patience,
            progress=progress,
        )


@asynccontextmanager
async def open_plan(
    settings: CoordinatorSettings,
    *,
    model: LoadedModel | None = None,
    progress: Progress | None = None,
) -> AsyncIterator[PlannedFleet]:
    """Load the model, gather workers and plan; nothing is sent to them.

    What was asked for is checked before anybody is waited for.

    Args:
        model: what `load_model(settings)` gave, for those who want to look at it first.

    Raises:
        ConfigurationError: what was asked for cannot be right.
        ModelError: the model cannot be loaded or split.
        CapacityError: the layers do not fit the workers.
        NoRouteError: too few workers, or one did not say what it has.
    """
    progress = progress or Progress()
    min_peers = _num_awaited(settings)
    async with AsyncExitStack() as stack:
        stack.enter_context(unwrap_errors())
        model = model or await load_model(settings)
        progress.model_read(model.name, len(model.costs))
        has_own = isinstance(settings.local_layers, int)
        num_stages = settings.stages or (
            settings.local_workers + has_own if settings.local_workers else None
        )
        if num_stages is not None and num_stages > len(model.costs):
            raise ConfigurationError(
                f"{num_stages} stages (--stages, or one for each local worker) are more than the "
                f"{len(model.costs)} layers of {model.name}: ask for at most {len(model.costs)}"
            )
        if isinstance(settings.local_layers, int) and not (
            1 <= settings.local_layers <= len(model.costs)
        ):
            raise ConfigurationError(
                f"--local-layers {settings.local_layers}: {model.name} has {len(model.costs)} layers"
            )
        identity = Identity.load(settings.identity_file) if settings.identity_file else None
        host = await stack.enter_async_context(
            open_host(
                listen=settings.listen,
                listen_fallback=settings.listen_fallback,
                identity=identity,
                admission=settings.admission,
                keep_alive=settings.reach.keep_alive,
            )
        )
        reach = await open_reach(host, settings.reach)
        progress.listening(host.peer_id, host.addresses)
        versions = settings.protocol_versions or (PROTOCOL_V11, PROTOCOL_V10)
        protocol = Protocol(host, role="coordinator", versions=versions)
        authorise(protocol, COORDINATOR_TAKES)
        local: list[str] = []
        if settings.local_workers:
            many = settings.local_workers > 1
            progress.working(f"starting {settings.local_workers} worker{'s' if many else ''} here")
            memory = device_memory(torch.device("cpu"))
            credentials = stack.enter_context(
                credentials_of_local_workers(
                    settings.local_workers, settings.admission, host.peer_id
                )
            )
            local += await stack.enter_async_context(
                start_local_workers(
                    settings.local_workers,
                    memory_bytes=int(memory.free_bytes * LOCAL_WORKERS_FRACTION),
                    max_seq_len=settings.max_seq_len,
                    listen=listen_address_beside(settings.listen, settings.admission),
                    credentials=credentials,
                )
            )
        announcement = Announcement("coordinator", model=model.name[:MAX_MODEL_CHARS])
        discovery = await stack.enter_async_context(
            open_discovery(
                host,
                settings.finding,
                announcement=lambda: announcement,
                admission=settings.admission,
                reach=reach,
            )
        )
        named = [*settings.peers, *local, *settings.bootstrap]
        gathering = await stack.enter_async_context(
            open_gathering(
                protocol,
                discovery,
                addresses=named,
                timeouts=settings.timeouts,
                progress=progress,
            )
        )
        placer = await open_placer(
            model,
            host,
            max_sessions=settings.max_sessions,
            skip_weight_transfer=settings.skip_weight_transfer,
            cache=settings.cache,
        )
        planning = FleetPlanning(
            model.size(num_sessions=settings.max_sessions),
            num_stages=num_stages,
            with_replicas=settings.with_replicas,
        )
        fleet = Fleet(
            planning,
            placer,
            partial(
                describe_workers,
                model=model,
                assumed_bytes=settings.peer_memory_bytes,
                alike={parse_peer_address(address)[1] for address in local},
            ),
            progress,
        )
        progress.formed(fleet, protocol.counters)
        workers = await gathering.enough(min_peers, settings.wait)
        keep = await stack.enter_async_context(keep_workers(protocol, discovery, named))

        def join(worker: RemoteWorker) -> None:
            keep(worker.peer_id)
            fleet.join(worker)

        for worker in workers:
            keep(worker.peer_id)
        gathering.tell(on_worker=join, on_lost=fleet.lost)

        def on_layer_status(message: TensorMessage) -> None:
            """A worker that says unasked that it holds nothing is about to end (sessions.md, "Announcements")."""
            if not message.request_id and not LayerIds.decode(message.data).ids:
                fleet.leave(sender_of(message))

        protocol.on_message(MessageType.LAYER_STATUS, on_layer_status)
        progress.working("asking the workers what they have")
        is_shared = settings.local_layers == "auto" and settings.local_workers
        why_local = await enlist_with_local(
            stack,
            fleet,
            workers,
            model,
            host.identity,
            local_layers="none" if is_shared else settings.local_layers,
            max_sessions=settings.max_sessions,
            timeouts=settings.timeouts,
        )
        logger.info("%s", why_local)
        yield PlannedFleet(protocol, model, fleet, why_local)


async def load_model(settings: CoordinatorSettings) -> LoadedModel:
    """Read the model that `settings` name, if the rest of them can be right.

    Raises:
        ConfigurationError: there is no such directory, or what was asked for cannot be right.
        ModelError: a file is missing or broken, or the architecture cannot be split.
    """
    _num_awaited(settings)  # for its errors: they take no time, loading does
    return await trio.to_thread.run_sync(
        lambda: LoadedModel.load(
            settings.model or embedded_model_path(),
            name=settings.model_name,
            max_seq_len=settings.max_seq_len,
            dtype=settings.dtype,
        )
    )


def _num_awaited(settings: CoordinatorSettings) -> int:
    """How many workers to wait for; refuses what cannot come true however long one waits."""
    for address in settings.bootstrap:
        parse_peer_address(address)
    named = {parse_peer_address(address)[1] for address in settings.peers}
    num_awaited = settings.min_peers
    if num_awaited is None:
        num_awaited = len(named) + settings.local_workers or int(settings.finding.is_looking)
    has_own = isinstance(settings.local_layers, int)
    can_be_alone = has_own or (settings.min_peers == 0 and settings.local_layers == "auto")
    if num_awaited < 1 and not can_be_alone:
        raise ConfigurationError(
            "there is no worker to run on: name some with --peer, start some here with "
            "--local-workers, wait for some to be found or to dial in with --min-peers, or compute here "
            "alone with --min-peers 0"
        )
    if settings.stages is not None and settings.stages > num_awaited + has_own:
        raise ConfigurationError(
            f"--stages {settings.stages} takes as many workers, and {num_awaited} will be waited "
            f"for: name more with --peer, or say --min-peers {settings.stages}"
        )
    return num_awaited
