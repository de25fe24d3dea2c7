"""Fleet of connected workers and a plan for them, made from settings; nothing is sent yet.

Order comes from acknowledgements: a worker's memory is known before the plan, its config acknowledged before weights go
out, every stage ready before the first token.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import trio

from neurogrid.assembly.coordinator_settings import CoordinatorSettings
from neurogrid.assembly.local_stage import MEMORY_FRACTION, enlist_with_local
from neurogrid.assembly.memory_sharing import MemoryShare
from neurogrid.assembly.plan_request import PlanRequest
from neurogrid.errors import ConfigurationError, TransportError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.fleet.gathering import open_gathering
from neurogrid.fleet.local_trust import (
    credentials_of_local_workers,
    listen_address_beside,
)
from neurogrid.fleet.local_workers import start_local_workers
from neurogrid.fleet.placing.fleet import Fleet
from neurogrid.fleet.placing.fleet_plan import FleetPlanning
from neurogrid.fleet.placing.placer import open_placer
from neurogrid.fleet.progress import FleetProgress
from neurogrid.fleet.remote_worker import RemoteWorker
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.fleet.worker_questions import capacities, describe_workers, links
from neurogrid.fork_server import start_fork_server
from neurogrid.inference.generation.adapters import ServedAdapters
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.pipeline.remote_workers import remote_worker
from neurogrid.inference.pipeline.session_trials import SessionTrials
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.stages.device import device_memory, select_device
from neurogrid.node.discovery import open_discovery
from neurogrid.node.kept_connections import keep_workers
from neurogrid.node.reach_settings import open_reach
from neurogrid.node.roles import COORDINATOR_TAKES, authorise
from neurogrid.p2p.discovery.dht import Announcement
from neurogrid.p2p.discovery.records import MAX_MODEL_CHARS
from neurogrid.p2p.hosts.host import Host, parse_peer_address
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.hosts.machine import machine_name
from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.tensor.protocol import Protocol
from neurogrid.p2p.transfer import Transfers
from neurogrid.p2p.wire import (
    PROTOCOL_V10,
    PROTOCOL_V11,
    GPUInfo,
    LayerIds,
    MessageType,
    TensorMessage,
)
from neurogrid.planner import Explanation, Plan, explain

__all__ = ["PlannedFleet", "load_model", "open_plan"]

logger = logging.getLogger(__name__)

# Of the machine's free memory, what local workers get; the rest is the coordinator's own.
LOCAL_WORKERS_FRACTION = 0.8


@dataclass(frozen=True)
class PlannedFleet:
    """Workers that are connected, and a plan for them; nothing has been sent. Made by `open_plan`.

    Attributes:
        adapters: what can be added to the layers of the model.
        why_local: why the coordinator computes layers itself, or does not.
        max_sessions: of the greatest length, that memory is set aside for.
    """

    protocol: Protocol
    model: LoadedModel
    fleet: Fleet
    adapters: ServedAdapters
    why_local: str
    max_sessions: int

    @property
    def plan(self) -> Plan:
        """The layers that each member is to hold."""
        return self.fleet.plan

    @property
    def planning(self) -> FleetPlanning:
        """The demands on each of its plans."""
        return self.fleet.planning

    @property
    def infos(self) -> tuple[WorkerInfo, ...]:
        """The workers, by what each said of itself."""
        return tuple(self.fleet.infos.values())

    def explain(self, *, max_sessions: int, ends_seconds: float = 0.0) -> Explanation:
        """Explain why the plan is as it is, with the links as they were measured."""
        size = self.model.size(
            num_sessions=max_sessions,
            ends_seconds=ends_seconds,
            beside_bytes=self.adapters.layer_bytes(len(self.model.costs)),
        )
        peers = capacities(self.infos, len(self.model.costs))
        return explain(self.plan, size, peers, links(self.infos))


@asynccontextmanager
async def open_plan(
    settings: CoordinatorSettings,
    *,
    model: LoadedModel | None = None,
    progress: FleetProgress | None = None,
    share: MemoryShare | None = None,
) -> AsyncIterator[PlannedFleet]:
    """Load the model, gather workers and plan; nothing is sent to them.

    What was asked for is checked before anybody is waited for.

    Args:
        model: what `load_model(settings)` gave, for callers that look at it first.
        share: what it may plan with, where other models of this process have their part; None for all that there is.

    Raises:
        ConfigurationError: what was asked for cannot be right.
        ModelError: the model cannot be loaded or split.
        CapacityError: the layers do not fit the workers.
        NoRouteError: too few workers, or too few that say what they have.
    """
    progress = progress or FleetProgress()
    request = _check(settings)
    machine = machine_name(settings.name)
    progress.named(machine)
    async with AsyncExitStack() as stack:
        stack.enter_context(unwrap_errors())
        model = model or await load_model(settings)
        progress.model_read(model.name, len(model.costs))
        request.check_layers(len(model.costs), model.name)
        adapters = await trio.to_thread.run_sync(ServedAdapters.load, model, settings.adapters)
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
        protocol = Protocol(host, role="coordinator", name=machine, versions=versions)
        authorise(protocol, COORDINATOR_TAKES)
        Transfers(protocol, adapters)  # for workers that ask for a part
        local: list[str] = []
        if settings.local_workers:
            many = settings.local_workers > 1
            progress.working(f"starting {settings.local_workers} worker{'s' if many else ''} here")
            free_here = int(device_memory(torch.device("cpu")).free_bytes * LOCAL_WORKERS_FRACTION)
            credentials = stack.enter_context(
                credentials_of_local_workers(
                    settings.local_workers, settings.admission, host.peer_id
                )
            )
            local += await stack.enter_async_context(
                start_local_workers(
                    settings.local_workers,
                    memory_bytes=free_here if share is None else share.workers_here(free_here),
                    name=machine,
                    max_seq_len=settings.max_seq_len,
                    listen=listen_address_beside(settings.listen, settings.admission),
                    credentials=credentials,
                    num_threads=settings.num_threads,
                    progress=progress,
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
                make_worker=partial(remote_worker, protocol, timeouts=settings.timeouts),
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
            model.size(
                num_sessions=settings.max_sessions,
                beside_bytes=adapters.layer_bytes(len(model.costs)),
            ),
            num_stages=request.num_stages,
            with_replicas=settings.with_replicas and share is None,
            prepares_spares=share is None,
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
            SessionTrials(model.ends.hidden_size, model.dtype, model.max_seq_len),
            progress,
            partial(_disconnect, host),
        )
        progress.formed(fleet, protocol.counters)
        workers = await gathering.enough(request.num_awaited, settings.wait)
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

        def on_memory(message: TensorMessage) -> None:
            """A worker that says unasked what memory it has gave some to others (sessions.md, "Giving way")."""
            if not message.request_id:
                fleet.said_memory(sender_of(message), GPUInfo.decode(message.data))

        protocol.on_message(MessageType.LAYER_STATUS, on_layer_status)
        protocol.on_message(MessageType.GPU_INFO, on_memory)
        if workers:
            progress.working("asking the workers what they have")
        # Workers that were started here have this machine for themselves.
        is_shared = settings.local_layers == "auto" and settings.local_workers
        local_layers = "none" if is_shared else settings.local_layers
        max_sessions = settings.max_sessions
        if share is not None:
            fleet.limited = share.limited
            beside_bytes = adapters.layer_bytes(len(model.costs))
            share.divide(
                await fleet.describe(workers) if workers else [],
                own_id=host.peer_id,
                free_here=None if local_layers == "none" else _free_here(),
                beside_bytes=beside_bytes,
            )
            max_sessions = placer.max_sessions = share.num_sessions
            size = model.size(num_sessions=max_sessions, beside_bytes=beside_bytes)
            fleet.planning = replace(planning, size=size)
        why_local = await enlist_with_local(
            stack,
            fleet,
            workers,
            model,
            adapters,
            host.identity,
            name=machine,
            local_layers=local_layers,
            max_sessions=max_sessions,
            memory_bytes=None if share is None else share.local_bytes,
            timeouts=settings.timeouts,
        )
        if share is not None:
            stack.enter_context(share.holding(lambda: fleet.plan))
        if is_shared:
            why_local = (
                "the coordinator itself computes no layer: the workers that it started here do"
            )
        elif workers and settings.local_layers != "none":
            logger.info("%s", why_local)
        yield PlannedFleet(protocol, model, fleet, adapters, why_local, max_sessions)


def _free_here() -> int:
    """Memory of this machine that layers may take, as its device has it now."""
    return int(device_memory(select_device(None)).free_bytes * MEMORY_FRACTION)


def _disconnect(host: Host, peer_id: str) -> None:
    """Close the connection to a worker that failed on it, if there is one."""

    async def disconnect() -> None:
        try:
            await host.disconnect(peer_id)
        except TransportError as exc:
            logger.debug("%s", exc)

    if host.is_connected(peer_id):
        host.start_soon(disconnect)


async def load_model(settings: CoordinatorSettings) -> LoadedModel:
    """Read the model that `settings` name, if the rest of them can be right.

    Raises:
        ConfigurationError: there is no such directory, or what was asked for cannot be right.
        ModelError: a file is missing or broken, or the architecture cannot be split.
    """
    _check(settings)  # for its errors: they take no time, loading does
    start_fork_server()  # here, where there may be no other thread yet
    run_sync: Any = trio.to_thread.run_sync  # its stubs lack `abandon_on_cancel`
    model: LoadedModel = await run_sync(
        lambda: LoadedModel.load(
            settings.model or embedded_model_path(),
            name=settings.model_name,
            max_seq_len=settings.max_seq_len,
            dtype=settings.dtype,
            quantize=settings.quantize,
            has_coded_caches=settings.kv_cache_dtype is not None,
        ),
        abandon_on_cancel=True,
    )
    return model


def _check(settings: CoordinatorSettings) -> PlanRequest:
    """Return what is asked for; refuse what cannot come true however long one waits."""
    for address in settings.bootstrap:
        parse_peer_address(address)
    if settings.kv_cache_dtype not in (None, "int8"):
        raise ConfigurationError(
            f"keys and values cannot be kept as {settings.kv_cache_dtype!r}: say int8, or nothing for what is "
            "computed in"
        )
    request = PlanRequest(
        num_named=len({parse_peer_address(address)[1] for address in settings.peers}),
        local_workers=settings.local_workers,
        is_looking=settings.finding.is_looking,
        min_peers=settings.min_peers,
        local_layers=settings.local_layers,
        stages=settings.stages,
    )
    request.check_workers()
    return request
