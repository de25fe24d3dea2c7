"""A worker, seen from its leader: what it is asked and what it is given, whatever it is to compute.

The leader talks to `RemoteWorker` and knows no versions (`placing.delivery_v11`). Each step waits for the
acknowledgement of the one before, and every wait has a deadline.

Source: protocol_spec/sessions.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import trio

from neurogrid.errors import PeerRefusedError, ResponseTimeout
from neurogrid.fleet.spread import Spread
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.model.files.blob import LayerBlob
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.wire import (
    ErrorCode,
    GPUInfo,
    LayerIds,
    MessageType,
    ModelConfig,
    TensorMessage,
)
from neurogrid.planner import PlannedStage

__all__ = ["Placement", "RemoteWorker", "Timeouts", "TransferReports", "without_coded_caches"]


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a coordinator for its workers. Seconds; generous, for slow machines and links.

    Attributes:
        describe: for memory and layer status.
        configure: for the acknowledgement of a config, which costs the worker a check of the model.
        layer: for one layer's acknowledgement after its last byte has gone out.
        stall: without any chunk going out while weights are sent.
        step: for one stage's answer to an activation.
    """

    describe: float = 15.0
    configure: float = 180.0
    layer: float = 180.0
    stall: float = 60.0
    step: float = 120.0


@dataclass(frozen=True)
class Placement:
    """The layers that one worker is to hold, and where their bytes are.

    Attributes:
        stage: the layers.
        blobs: layer id to blob, for the layers of the stage.
        max_length: tokens that a session may have.
        max_sessions: sessions open at once.
        dtype: what the stage computes in.
        has_coded_caches: whether keys and values are kept as codes.
        making: held while a layer is brought whose bytes are made for it.
        skip_weight_transfer: refuse to send: the worker must hold the layers already.
        spread: which other workers have which layer, and get which.
    """

    stage: PlannedStage
    blobs: Mapping[int, LayerBlob]
    max_length: int
    max_sessions: int
    dtype: torch.dtype
    has_coded_caches: bool
    making: trio.CapacityLimiter
    skip_weight_transfer: bool
    spread: Spread


@dataclass(frozen=True)
class TransferReports:
    """Callbacks while a worker gets its layers; each but the first is called with a number of bytes.

    Attributes:
        begun: bytes are about to go, of this layer or that; called before each layer.
        sent: went out to it.
        held: need not be sent, because they are there.
        passed_on: came to it from other workers.
    """

    begun: Callable[[], None]
    sent: Callable[[int], None]
    held: Callable[[int], None]
    passed_on: Callable[[int], None]


def without_coded_caches(peer_id: str) -> PeerRefusedError:
    """The error of a worker that would keep other caches than were asked for, of which it has not the room."""
    text = (
        f"worker {peer_id} does not know of --kv-cache-dtype: it is of an older version, and needs to be updated, or "
        "the coordinator is to be started without"
    )
    return PeerRefusedError(text, code=ErrorCode.NOT_SUPPORTED, text=text)


class RemoteWorker(ABC):
    """One connected worker. Its methods raise TransportError or PeerRefusedError.

    Attributes:
        stores_prefixes: whether it can write what sessions over these layers have to disk.
        same_bits: whether a token gets the same bits in the layers that it was given last, whatever it is computed
            with; False also where it does not say.
    """

    def __init__(self, protocol: Exchange, peer_id: str, timeouts: Timeouts) -> None:
        self.protocol = protocol
        self.peer_id = peer_id
        self.timeouts = timeouts
        self.same_bits = False
        self.stores_prefixes = False

    @property
    @abstractmethod
    def protocol_id(self) -> str:
        """The version spoken with this worker."""

    @property
    def shown(self) -> str:
        """The worker for a text: its peer id, and what its machine is called, as far as that is known."""
        hello, host = self.protocol.hello_of(self.peer_id), self.protocol.host
        known = (hello.name if hello is not None else "", host.remote_ip(self.peer_id))
        where = ", ".join(filter(None, known))
        return f"{self.peer_id} ({where})" if where else self.peer_id

    async def describe(self, *, assumed_bytes: int) -> WorkerInfo:
        """Ask for memory and layers; `assumed_bytes` of memory where the peer does not answer."""
        held = await self.held_layers(timeout=self.timeouts.describe)
        try:
            info = await self.memory()
            name, free, known = info.name, max(info.total_bytes - info.used_bytes, 0), True
            total = info.total_bytes
        except (ResponseTimeout, PeerRefusedError):
            name, free, known = "unknown device", assumed_bytes, False
            total = 0
        hello = self.protocol.hello_of(self.peer_id)
        return WorkerInfo(
            peer_id=self.peer_id,
            name=name,
            free_bytes=free,
            protocol_id=self.protocol_id,
            memory_known=known,
            held_layers=held,
            total_bytes=total,
            machine=hello.name if hello is not None else "",
            address=self.protocol.host.remote_ip(self.peer_id),
        )

    async def memory(self) -> GPUInfo:
        """Ask the worker what memory it has now."""
        message = TensorMessage(MessageType.GPU_INFO_REQUEST, request_id=self._request_id())
        reply = await self.protocol.request(
            self.peer_id, message, MessageType.GPU_INFO, timeout=self.timeouts.describe
        )
        return GPUInfo.decode(reply.data)

    async def held_layers(self, *, timeout: float) -> tuple[int, ...]:
        """Ask the worker which layers it has in memory; `timeout` in seconds."""
        message = TensorMessage(
            MessageType.LAYER_REQUEST, request_id=self._request_id(), data=LayerIds(()).encode()
        )
        reply = await self.protocol.request(
            self.peer_id, message, MessageType.LAYER_STATUS, timeout=timeout
        )
        return LayerIds.decode(reply.data).ids

    @abstractmethod
    def _request_id(self) -> int:
        """A request id for questions that 1.0.0 asks without one."""

    @abstractmethod
    async def configure(self, config: ModelConfig) -> None:
        """Send the model's config; returns when the worker has taken it."""

    @abstractmethod
    async def place(self, placement: Placement, reports: TransferReports) -> None:
        """Bring the stage's layers to the worker; returns when all are usable.

        Raises:
            ModelError: a layer is missing there and `skip_weight_transfer` forbids to send it.
        """
