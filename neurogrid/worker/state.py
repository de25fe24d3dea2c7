"""State that the parts of a worker share: its settings, its model, who has it, and its torch thread.

No handlers here, and no messages: `layers` brings layers in, `inference.sessions` computes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ParamSpec, TypeVar

import torch
import trio

from neurogrid.errors import CapacityError, RequestRefusedError
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.stages.device import DeviceMemory, device_memory
from neurogrid.node.torch_thread import TorchThread
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import ErrorCode, MessageType, ModelConfig, TensorMessage
from neurogrid.worker.blobs import WorkerBlobs
from neurogrid.worker.claim import SERVING, Claim
from neurogrid.worker.held_model import HeldModel, proving, refusing_config
from neurogrid.worker.proofs import result_of
from neurogrid.worker.settings import WorkerSettings

__all__ = [
    "Assignment",
    "WeightSource",
    "WorkerState",
    "name_layers",
]

P = ParamSpec("P")
R = TypeVar("R")

# What a second coordinator is told to wait for; a generation takes seconds to minutes. Seconds.
BUSY_RETRY_AFTER = 10.0
MAX_LAYERS_NAMED = 8


class WeightSource(StrEnum):
    """Where a layer's weights came from."""

    COORDINATOR = "coordinator"
    WORKER = "worker"
    DISK = "disk"
    """The cache of an earlier start."""
    OWN = "own"
    """The worker's own model."""


@dataclass
class Assignment:
    """Layers [start, stop) that the coordinator wants here, and those confirmed by their hash.

    Ready is announced once: two layers may be confirmed before either of their tasks goes on.
    """

    start: int
    stop: int
    max_length: int
    max_sessions: int
    request_id: int
    confirmed: set[int] = field(default_factory=set)
    is_announced: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether every layer is here with the announced content."""
        return len(self.confirmed) == self.stop - self.start

    def __contains__(self, layer_id: int) -> bool:
        return self.start <= layer_id < self.stop


class WorkerState:
    """The mutable state of one worker.

    Attributes:
        checkpoint: the worker's own model directory, if it has one.
        blobs: the bytes of layers that came, in memory and on disk.
        model: the model of the last config, with the layers that are held.
        assignment: the stage of the current coordinator, once assigned (1.1.0).
        claimed: who has the worker, and for what.
        received_bytes: weights of the layers that were loaded, by where they came from.
        torch_thread: where the device is used.
        on_layers_changed: called when a config or an assignment replaces the layers under open sessions.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        protocol: Exchange,
        device: torch.device,
        torch_thread: TorchThread,
    ) -> None:
        self.settings = settings
        self.protocol = protocol
        self.device = device
        self.checkpoint: Checkpoint | None = None
        self.blobs = WorkerBlobs(settings.cache)
        self.model: HeldModel | None = None
        self.assignment: Assignment | None = None
        self.claimed: Claim | None = None
        self.received_bytes = dict.fromkeys(WeightSource, 0)
        self.on_layers_changed: Callable[[], None] = lambda: None
        self.torch_thread = torch_thread
        self._model_lock = trio.Lock()

    async def run_torch(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function` in the torch thread, after those that wait already.

        Cancellation waits for the call to end: torch cannot be interrupted.
        """
        return await self.torch_thread.run(lambda: function(*args, **kwargs))

    @property
    def model_lock(self) -> trio.Lock:
        """Held while the model, the assignment or the held layers change."""
        return self._model_lock

    def memory(self) -> DeviceMemory:
        """Memory of the device, or the limit; what layers held here take counts as free.

        They make room for the next assignment, or are part of it. So `free_bytes` is what an assignment
        may take in all.
        """
        held = self.model.held_bytes if self.model else 0
        actual = device_memory(self.device)
        free = actual.free_bytes + held
        total = actual.total_bytes
        if self.settings.memory_limit is not None:
            total = self.settings.memory_limit
        return DeviceMemory(total_bytes=total, used_bytes=max(total - free, 0))

    @property
    def coordinator(self) -> str | None:
        """The peer that the worker serves now."""
        return self.claimed.owner if self.claimed and self.claimed.purpose == SERVING else None

    def claim(self, peer_id: str) -> bool:
        """Make `peer_id` the coordinator that this worker serves; False if it is already.

        Raises:
            RequestRefusedError: another one has the worker (BUSY).
        """
        before, claim = self.claimed, Claim(peer_id)
        if before == claim:
            return False
        if before is not None:
            is_connected = self.protocol.host.is_connected(before.owner)
            if not before.allows(claim, trio.current_time(), is_connected=is_connected):
                raise self._busy(before)
            self.release()
        self.claimed = claim
        return True

    def release(self) -> None:
        """Serve nobody; the layers stay for the next coordinator that wants the same bytes."""
        self.claimed = None
        self.assignment = None

    def require_coordinator(self, peer_id: str | None) -> HeldModel:
        """The model, for the peer whose config it came with.

        Raises:
            RequestRefusedError: no config was sent (CONFIG_REQUIRED), or another peer is served (BUSY).
        """
        if self.claimed is not None and self.coordinator != peer_id:
            raise self._busy(self.claimed)
        if self.model is None or self.coordinator is None:
            raise RequestRefusedError(
                "no model config was received: send ModelConfig first",
                code=ErrorCode.CONFIG_REQUIRED,
            )
        return self.model

    def require_layer_room(self, model: HeldModel, layer_id: int) -> None:
        """Check that one more layer's weights fit beside those that are held.

        Raises:
            RequestRefusedError: they do not (OUT_OF_MEMORY).
        """
        try:
            model.require_room(
                layer_id,
                layer_id + 1,
                num_tokens=0,
                num_sessions=0,
                limit_bytes=self.memory().free_bytes - model.held_bytes,
            )
        except CapacityError as exc:
            raise RequestRefusedError(str(exc), code=ErrorCode.OUT_OF_MEMORY) from exc

    def note_received(self, source: WeightSource, num_bytes: int) -> None:
        """A layer of so many bytes came from there, and is loaded."""
        self.received_bytes[source] += num_bytes

    def note_held(self) -> None:
        """Tell the cache which blobs the model is made of: they are not to go."""
        held = self.model.held.values() if self.model else ()
        self.blobs.use(layer.blob_id for layer in held)

    async def build_model(self, config: ModelConfig, *, seconds: float) -> HeldModel:
        """The model of a config, built here once a child process has proven it within so many seconds.

        Cancellation ends the child.

        Raises:
            RequestRefusedError: CONFIG_INVALID, MODEL_UNSUPPORTED or LIMIT_EXCEEDED, with the reason.
        """
        with refusing_config():
            proof = await result_of(proving(config), seconds=seconds)
        return await self.run_torch(HeldModel, config, proof, device=self.device)

    async def load_own_layer(
        self, model: HeldModel, layer_id: int, *, only: bytes | None = None
    ) -> bool:
        """Load one layer from the worker's own checkpoint; False if it is not there.

        Args:
            only: the content id that it must have; None for whatever it has.

        Raises:
            CheckpointError: its file is broken.
            RequestRefusedError: it does not fit the model or the memory.
        """
        checkpoint = self.checkpoint
        if checkpoint is None or layer_id not in checkpoint.present_layers:
            return False
        if not checkpoint.has_form(model.quantization):
            return False
        blob = checkpoint.layer_blob(layer_id, model.quantization)
        blob_id = await trio.to_thread.run_sync(blob.blob_id)
        if only is not None and blob_id != only:
            return False

        def load() -> None:
            data = bytearray(blob.num_bytes)
            filled = 0
            with blob.held():
                for chunk in blob.chunks():
                    data[filled : filled + len(chunk)] = chunk
                    filled += len(chunk)
            model.load(layer_id, memoryview(data), blob_id, is_own=True)

        if layer_id in model.held:
            self.on_layers_changed()
        else:
            self.require_layer_room(model, layer_id)
        await self.run_torch(load)
        self.note_received(WeightSource.OWN, blob.num_bytes)
        return True

    async def answer(
        self,
        message: TensorMessage,
        msg_type: MessageType,
        data: bytes = b"",
        *,
        layer_id: int | None = None,
    ) -> None:
        """Answer a message: to its sender, under its ids."""
        reply = replace(
            message,
            msg_type=msg_type,
            layer_id=message.layer_id if layer_id is None else layer_id,
            data=data,
            from_peer=None,
        )
        await self.protocol.send(sender_of(message), reply)

    def _busy(self, claim: Claim) -> RequestRefusedError:
        if claim.purpose == SERVING:
            reason = f"busy: this worker serves the coordinator {claim.owner}"
        else:
            reason = f"busy: this worker is claimed by {claim.owner} for {claim.purpose}"
        return RequestRefusedError(
            f"{reason}; try again when that has ended, or start another worker",
            code=ErrorCode.BUSY,
            retry_after=BUSY_RETRY_AFTER,
        )


def name_layers(layer_ids: Iterable[int]) -> str:
    """Layers for an error's text, which must stay short: `layers 1, 2, 3 and 9 more`."""
    ids = sorted(layer_ids)
    shown = ", ".join(map(str, ids[:MAX_LAYERS_NAMED]))
    more = f" and {len(ids) - MAX_LAYERS_NAMED} more" if len(ids) > MAX_LAYERS_NAMED else ""
    return f"layer{'s' if len(ids) > 1 else ''} {shown}{more}"
