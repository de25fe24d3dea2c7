"""The worker: holds a stage of each coordinator that it serves, and computes with it.

Stateless unless it has a model directory of its own. Layers come in by `worker.layers` and
`worker.transfers`, sessions are computed by `inference.sessions`; here they are put on a host and kept running.

    async with open_worker(WorkerSettings()) as worker:
        print(worker.addresses)
        await trio.sleep_forever()
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import torch
import trio

from neurogrid.assembly.training import open_training
from neurogrid.errors import ConfigurationError, NeuroGridError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.fork_server import start_fork_server
from neurogrid.inference.sessions.board import WorkerBoard
from neurogrid.inference.sessions.service import SessionService
from neurogrid.inference.sessions.worker_v10 import WorkerV10
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config, model_config_message, resolve_dtype
from neurogrid.model.kernels import library
from neurogrid.model.stages.device import (
    DeviceMemory,
    avoid_planned_attention,
    device_name,
    select_device,
)
from neurogrid.model.stages.skeleton import Skeleton
from neurogrid.node.discovery import open_discovery
from neurogrid.node.kept_connections import keep_coordinators
from neurogrid.node.reach_settings import open_reach
from neurogrid.node.roles import WORKER_TAKES, authorise
from neurogrid.node.torch_thread import TorchThread
from neurogrid.p2p.discovery.dht import Announcement
from neurogrid.p2p.discovery.records import MAX_LAYER_RANGES, MAX_MODEL_CHARS, layer_ranges
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import parse_peer_address
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.hosts.machine import machine_name
from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.tensor.protocol import Protocol
from neurogrid.p2p.tensor.versions import VersionedExchange
from neurogrid.p2p.wire import PROTOCOL_V10, PROTOCOL_V11
from neurogrid.training.members import MemberService
from neurogrid.worker.device import DeviceService
from neurogrid.worker.layers import LayerService
from neurogrid.worker.links import WorkerLinks
from neurogrid.worker.settings import WorkerSettings
from neurogrid.worker.state import WeightSource, WorkerState
from neurogrid.worker.transfers import TransferService

__all__ = ["Worker", "WorkerSettings", "open_worker"]

logger = logging.getLogger(__name__)


class Worker:
    """A worker that runs. Made by `open_worker`.

    Attributes:
        protocol: its tensor protocol, with the traffic counters.
        board: what is known of it, for display.
        training: what takes part in training runs; None where its owner does not lend it to them.
    """

    def __init__(
        self, state: WorkerState, protocol: VersionedExchange, *, name: str, machine: str
    ) -> None:
        """Puts the services on the protocol, which is that of `state`; device and machine are called so."""
        self._state = state
        self._transfers = TransferService(state, on_gave_up=self.forget)
        self._layers = LayerService(state, self._transfers)
        links = WorkerLinks(protocol, protocol.host.connect)
        self._sessions = SessionService(state, links, self._transfers, device_name=name)
        self._v10 = WorkerV10(state, protocol, self._layers, self._transfers, self._sessions.steps)
        for service in (
            *(self._transfers, self._layers, self._sessions, self._v10),
            DeviceService(state),
        ):
            service.register()
        state.on_layers_changed = self._layers_changed
        state.on_gave_way = self._gave_way
        state.caches_in_use = self._sessions.caches_in_use
        self.board = WorkerBoard(state, self._sessions, name=name, machine=machine)
        self.training: MemberService | None = None
        self.protocol = protocol
        self.protocol.on_peer_lost(self._on_peer_lost)
        self.protocol.on_stream_broken(self._on_stream_broken)
        self.protocol.host.on_disconnected(self._on_disconnected)

    @property
    def peer_id(self) -> str:
        """The worker's peer id (base58)."""
        return self.protocol.host.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs that a coordinator can dial."""
        return self.protocol.host.addresses

    @property
    def held_layers(self) -> tuple[int, ...]:
        """Layers in memory; of several models, those of each."""
        return tuple(sorted(layer_id for model in self._state.models for layer_id in model.held))

    @property
    def sessions(self) -> SessionService:
        """The service that computes."""
        return self._sessions

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return self._state.device

    @property
    def memory(self) -> DeviceMemory:
        """Memory of the device, or the limit; what layers held here take counts as free."""
        return self._state.memory()

    @property
    def promised_bytes(self) -> int:
        """Bytes of the device's memory that coordinators were promised."""
        return self._state.room.promised_bytes

    @property
    def num_given_way(self) -> int:
        """Coordinators that were idle and whose memory another one got, since the start."""
        return self._state.num_given_way

    @property
    def received_bytes(self) -> Mapping[WeightSource, int]:
        """Weights of the layers that were loaded since the start, by where they came from."""
        return self._state.received_bytes

    async def load_own(self, checkpoint: Checkpoint, settings: WorkerSettings) -> None:
        """Load what there is room for of the worker's own model, before anybody asks for it.

        Raises:
            ModelError: it cannot be served.
        """
        config = build_config(checkpoint.config)
        dtype = resolve_dtype(config, None)
        quantization = None
        if checkpoint.has_codes:
            skeleton = Skeleton(config, dtype=dtype, device=torch.device("cpu"))
            quantization = checkpoint.quantization(None, skeleton.loader)
        await self._layers.load_own_layers(
            model_config_message(
                config,
                checkpoint.config,
                model_name=checkpoint.name,
                max_seq_len=settings.max_seq_len,
                dtype=dtype,
                quantization=quantization,
            )
        )

    def start(self) -> None:
        """Begin to compute, and to drop what is over; for as long as the host runs."""
        host = self.protocol.host
        host.start_soon(self._v10.expire, self.forget)
        host.start_soon(self._state.blobs.run)
        host.start_soon(self._sessions.steps.run)
        host.start_soon(self._sessions.expire)

    async def drain(self) -> None:
        """Open no session any more, wait until coordinators have taken the open ones elsewhere, and write the cache.

        To be called before the worker is ended, with a deadline: there may be nobody who could take them.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._state.blobs.flush)
            nursery.start_soon(self._sessions.drain)

    def announcement(self) -> Announcement:
        """Return what this worker says of itself to peers that look for workers: of its models the first."""
        models = self._state.models
        served = [tenant.model for tenant in self._state.tenants.values() if tenant.model]
        model = next(iter((*served, *models)), None)
        return Announcement(
            "worker",
            model=model.name[:MAX_MODEL_CHARS] if model is not None else "",
            free_memory=self._state.memory_for("").free_bytes,
            layers=layer_ranges(tuple(sorted(model.held)) if model is not None else ())[
                :MAX_LAYER_RANGES
            ],
        )

    def _layers_changed(self, owner: str) -> None:
        """Layers of a tenant are being replaced: no session over them goes on."""
        self._sessions.forget_sessions(owner)
        self._v10.forget_caches(owner)

    def _gave_way(self, owner: str) -> None:
        self.protocol.host.start_soon(self._sessions.announce_memory, owner)

    def _on_peer_lost(self, peer_id: str, reason: NeuroGridError) -> None:
        logger.debug("the stream with %s ended: %s", peer_id, reason)
        self.forget(peer_id)

    def _on_stream_broken(self, peer_id: str, reason: NeuroGridError) -> None:
        self.protocol.host.start_soon(self._sessions.activations.link_lost, peer_id, reason)

    def _on_disconnected(self, peer_id: str) -> None:
        self.forget(peer_id)

    def forget(self, peer_id: str) -> None:
        """Drop all that was begun for a peer; a coordinator's layers are kept for the next."""
        self._sessions.forget(peer_id)
        self._transfers.forget(peer_id)
        self._layers.forget(peer_id)
        self._v10.forget(peer_id)
        if peer_id in self._state.tenants:
            logger.log(
                self._state.settings.says_at,
                "the coordinator %s is gone; its layers are kept",
                peer_id,
            )
            self._state.release(peer_id)


@asynccontextmanager
async def open_worker(settings: WorkerSettings) -> AsyncIterator[Worker]:
    """Run a worker until the block is left; it is ready when the block is entered.

    Raises:
        ConfigurationError: an address, the identity file, the device or the level of the kernels is not usable.
        ModelError: the worker's own model cannot be served.
    """
    if not (settings.serves or settings.trains):
        raise ConfigurationError("a worker serves, trains, or both")
    start_fork_server()  # before a GPU, other threads and the identity's key
    machine = machine_name(settings.name)
    device = select_device(settings.device)
    avoid_planned_attention(device)
    library()  # for its errors, here and not when a layer has come
    for address in settings.bootstrap:
        parse_peer_address(address)
    identity = Identity.load(settings.identity_file) if settings.identity_file else None
    checkpoint = None
    if settings.model is not None:
        checkpoint = await trio.to_thread.run_sync(
            lambda path: Checkpoint.open(path, partial=True), settings.model
        )
    # Outermost: a task that waits for a call has it ended before the thread goes.
    with TorchThread() as torch_thread, unwrap_errors():
        async with open_host(
            listen=settings.listen,
            listen_fallback=settings.listen_fallback,
            identity=identity,
            admission=settings.admission,
            keep_alive=settings.reach.keep_alive,
        ) as host:
            versions = settings.protocol_versions or (PROTOCOL_V11, PROTOCOL_V10)
            protocol = Protocol(host, role="worker", name=machine, versions=versions)
            authorise(protocol, WORKER_TAKES if settings.serves else {})
            state = WorkerState(settings, protocol, device, torch_thread)
            state.checkpoint = checkpoint
            worker = Worker(state, protocol, name=device_name(device), machine=machine)
            if checkpoint is not None and not settings.wait_for_assignment:
                await worker.load_own(checkpoint, settings)
            worker.start()
            reach = await open_reach(host, settings.reach)
            protocols: list[Exchange] = [protocol] if settings.serves else []
            async with (
                open_training(
                    host, settings, device, machine, protocols, state.blobs
                ) as worker.training,
                keep_coordinators(protocols, settings.bootstrap),
                # Last: a peer that finds this worker may use it.
                open_discovery(
                    host,
                    settings.finding,
                    announcement=worker.announcement,
                    admission=settings.admission,
                    reach=reach,
                ),
            ):
                yield worker
