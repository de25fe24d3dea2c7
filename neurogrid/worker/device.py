"""A worker's account of its device for a plan: how fast it computes, and which layers it has already.

It measures itself when it is first asked for a dtype, for half a second in its torch thread, and keeps the
figures as long as it runs. While it computes for other coordinators it measures nothing.

Source: protocol_spec/messages.md, DeviceInfo.
"""

from __future__ import annotations

import logging

import trio

from neurogrid.model.files.config import config_fingerprint
from neurogrid.model.files.tensors import TORCH_DTYPES, dtype_name
from neurogrid.model.stages.device_speed import DeviceSpeed, measure_speed
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import (
    CONFIG_DTYPES,
    DeviceInfo,
    DeviceInfoRequest,
    MessageType,
    TensorMessage,
)
from neurogrid.worker.state import WorkerState

__all__ = ["DeviceService"]

logger = logging.getLogger(__name__)


class DeviceService:
    """The handler of DeviceInfoRequest."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._speeds: dict[str, DeviceSpeed | None] = {}
        self._lock = trio.Lock()

    def register(self) -> None:
        """Serve the messages of this service on the worker's protocol."""
        self._state.protocol.on_message(MessageType.DEVICE_INFO_REQUEST, self._on_request)

    async def _on_request(self, message: TensorMessage) -> None:
        request = DeviceInfoRequest.decode(message.data)
        speed = await self._speed(request.dtype, sender_of(message))
        info = DeviceInfo(
            kind=self._state.device.type,
            dtype=request.dtype,
            held=tuple(sorted(await self._held(request, sender_of(message)))),
            read_rate=int(speed.bytes_per_second) if speed else 0,
            compute_rate=int(speed.flops) if speed else 0,
            layer_nanos=int(speed.layer_seconds * 1e9) if speed else 0,
        )
        await self._state.answer(message, MessageType.DEVICE_INFO, info.encode())

    async def _speed(self, dtype: str, peer_id: str) -> DeviceSpeed | None:
        """Return the speed in this dtype, measured once; None where it was not measured, or cannot be."""
        state = self._state
        if dtype not in CONFIG_DTYPES.values():
            return None
        async with self._lock:
            is_busy = any(owner != peer_id for owner in state.tenants)
            if dtype not in self._speeds and not is_busy:
                self._speeds[dtype] = await state.run_torch(
                    measure_speed,
                    state.device,
                    TORCH_DTYPES[dtype],
                    free_bytes=state.memory().free_bytes,
                )
                logger.debug("measured in %s: %s", dtype, self._speeds[dtype])
        return self._speeds.get(dtype)

    async def _held(self, request: DeviceInfoRequest, peer_id: str) -> set[int]:
        """Layers of the model that is asked about, on disk and, of those that others do not have, in memory."""
        state = self._state
        if not request.model:
            return set()
        held = set(await state.blobs.layers_on_disk(request.model.hex()))
        tenant = state.tenants.get(peer_id)
        own = [tenant.model] if tenant is not None and tenant.model is not None else []
        for model in (*state.kept, *own):
            if (model.fingerprint, dtype_name(model.dtype)) == (request.model, request.dtype):
                held |= set(model.held)
        checkpoint = state.checkpoint
        if checkpoint is not None and config_fingerprint(checkpoint.config) == request.model:
            held |= checkpoint.present_layers
        return held
