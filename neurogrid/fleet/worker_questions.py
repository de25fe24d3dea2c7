"""Questions that a coordinator asks its workers before it plans, and what it makes of the answers.

Memory, speed, the layers that they have, and how long a message takes. Nothing of it is needed: where no speed is
known, memory decides.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median

import trio

from neurogrid.errors import (
    NeuroGridError,
    NoRouteError,
    PeerRefusedError,
    RemoteProtocolError,
    ResponseTimeout,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.fleet.remote_worker import RemoteWorker
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.model.files.tensors import dtype_name
from neurogrid.model.source import ModelSource
from neurogrid.p2p.exchange.exchange import new_request_id
from neurogrid.p2p.wire import (
    PROTOCOL_V11,
    DeviceInfo,
    DeviceInfoRequest,
    MessageType,
    TensorMessage,
)
from neurogrid.planner import Link, Links, PeerCapacity, PeerSpeed

__all__ = ["capacities", "describe_workers", "far_links", "links"]

logger = logging.getLogger(__name__)

# The matrices of a layer are smaller than those that a device measures itself with, and are read at this part of the
# rate: 0.72 to 0.8 for layers of 16 and 63 MB in float32 (one core of an EPYC).
LAYER_EFFICIENCY = 0.75
# Round trips of which the shortest is taken.
NUM_ROUND_TRIPS = 3
# Below this a link is as good as any other to a plan: a busy machine's answers vary by as much. Seconds.
FAR_LATENCY = 5e-3
# Devices of one name differ by noise. What is faster or slower than the others by more than this is different.
SAME_SPEED = 2.0


async def describe_workers(
    workers: Sequence[RemoteWorker],
    model: ModelSource,
    *,
    assumed_bytes: int,
    alike: Collection[str] = (),
) -> list[WorkerInfo]:
    """Ask all workers at once; return the infos of those that answered, in their order. The log names the others.

    Args:
        assumed_bytes: of memory, where a worker does not tell.
        alike: peer ids of workers that share one machine, and are equally fast.

    Raises:
        NoRouteError: none of them answered, or all with nonsense.
    """
    infos: dict[str, WorkerInfo] = {}
    failures: list[str] = []
    asked = DeviceInfoRequest(dtype_name(model.dtype), model.fingerprint)

    async def describe(worker: RemoteWorker) -> None:
        # It answers several questions; one that lets each wait for as long as it may is not worth the others' waiting.
        seconds = 2 * worker.timeouts.describe
        reason = f"it took more than {seconds:g} s"
        try:
            with trio.move_on_after(seconds):
                info = await worker.describe(assumed_bytes=assumed_bytes)
                if worker.protocol_id == PROTOCOL_V11:
                    info = await _with_device(worker, info, asked)
                infos[worker.peer_id] = info
        except NeuroGridError as exc:
            reason = str(exc)
        if worker.peer_id not in infos:
            failures.append(f"worker {worker.shown} did not describe itself: {reason}")

    with unwrap_errors():
        async with trio.open_nursery() as nursery:
            for worker in workers:
                nursery.start_soon(describe, worker)
    if failures and not infos:
        raise NoRouteError("; ".join(failures))
    for failure in failures:
        logger.warning("%s; it is left out", failure)
    shared = [info.speed for info in infos.values() if info.speed and info.peer_id in alike]
    for peer_id, info in infos.items():
        if peer_id in alike and info.speed:
            infos[peer_id] = replace(info, speed=_typical(shared))
    return [infos[worker.peer_id] for worker in workers if worker.peer_id in infos]


async def _with_device(
    worker: RemoteWorker, info: WorkerInfo, asked: DeviceInfoRequest
) -> WorkerInfo:
    """`info` with speed, layers and latency, as far as the worker tells them."""
    try:
        data = await _ask(
            worker, MessageType.DEVICE_INFO_REQUEST, MessageType.DEVICE_INFO, asked.encode()
        )
        device = DeviceInfo.decode(data)
    except (PeerRefusedError, RemoteProtocolError, ResponseTimeout) as exc:
        logger.info("%s does not say how fast it is: %s", info.label, exc)
        return info
    trips = []
    for _ in range(NUM_ROUND_TRIPS):
        started = trio.current_time()
        await _ask(worker, MessageType.GPU_INFO_REQUEST, MessageType.GPU_INFO)
        trips.append(trio.current_time() - started)
    speed = None
    if device.read_rate and device.dtype == asked.dtype:
        speed = PeerSpeed(LAYER_EFFICIENCY * device.read_rate, device.layer_nanos / 1e9)
    return replace(
        info,
        speed=speed,
        model_layers=frozenset(device.held),
        latency=min(trips) / 2,
        device_kind=device.kind,
        flops=device.compute_rate,
    )


async def _ask(
    worker: RemoteWorker, msg_type: MessageType, answer: MessageType, data: bytes = b""
) -> bytes:
    message = TensorMessage(msg_type=msg_type, request_id=new_request_id(), data=data)
    reply = await worker.protocol.request(
        worker.peer_id, message, answer, timeout=worker.timeouts.describe
    )
    return bytes(reply.data)


def capacities(infos: Sequence[WorkerInfo], num_layers: int) -> list[PeerCapacity]:
    """The workers as the planner takes them; speeds of like devices evened out, but for what was seen of them."""
    speeds: dict[str, list[PeerSpeed]] = {}
    for info in infos:
        if info.speed:
            speeds.setdefault(info.name, []).append(info.speed)
    return [
        PeerCapacity(
            info.peer_id,
            info.free_bytes,
            speed=_slower(
                _evened(info.speed, speeds[info.name]),
                info.slowness * (1 + info.num_models_beside),
            )
            if info.speed
            else None,
            held=frozenset(layer for layer in info.model_layers if layer < num_layers),
        )
        for info in infos
    ]


def links(infos: Sequence[WorkerInfo]) -> Links:
    """The ways to the coordinator; none unless all are known, so that a silent worker is not the nearest."""
    known = {info.peer_id: Link(info.latency) for info in infos if info.latency is not None}
    return Links(known) if len(known) == len(infos) else Links()


def far_links(infos: Sequence[WorkerInfo]) -> Links:
    """Return the links to plan with: without latencies that differ by noise, so that plans come out the same again."""
    nearest = min((info.latency for info in infos if info.latency is not None), default=0.0)
    far = []
    for info in infos:
        # What all have in common, as on a busy machine, makes none of them the farther one.
        latency = None if info.latency is None else info.latency - nearest
        is_near = latency is not None and latency < FAR_LATENCY
        far.append(replace(info, latency=0.0 if is_near else latency))
    return links(far) if any(info.latency for info in far) else Links()


def _evened(speed: PeerSpeed, alike: Sequence[PeerSpeed]) -> PeerSpeed:
    typical = _typical(alike)
    ratio = speed.bytes_per_second / typical.bytes_per_second
    return typical if 1 / SAME_SPEED <= ratio <= SAME_SPEED else speed


def _slower(speed: PeerSpeed, factor: float) -> PeerSpeed:
    return PeerSpeed(speed.bytes_per_second / factor, speed.layer_seconds * factor)


def _typical(speeds: Sequence[PeerSpeed]) -> PeerSpeed:
    return PeerSpeed(
        median(speed.bytes_per_second for speed in speeds),
        median(speed.layer_seconds for speed in speeds),
    )
