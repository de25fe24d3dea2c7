"""The other process of test_two_processes.py: a peer of the named API, on trio or with the blocking face.

Prints its address, then what it receives, one JSON object a line, until its standard input ends.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading

import trio
from opentelemetry import trace

from neurogrid.p2p import PROTOCOL_V10, GPUInfo, Protocol, TensorMessage, blocking, open_host

# What is asked of a layer of this peer.
REVERSED, SILENT, HELD, TRACED = 1, 2, 3, 4
LAYERS = (3, 5, 8)
GPU = GPUInfo(total_bytes=24 * 2**30, used_bytes=2**30, name="the other process")

held: dict[str, TensorMessage] = {}
printing = threading.Lock()


def report(kind: str, **fields: object) -> None:
    """Tell the test; handlers of the blocking face do so from several threads."""
    with printing:
        print(json.dumps({"kind": kind, **fields}), flush=True)


def active_trace() -> str:
    return f"{trace.get_current_span().get_span_context().trace_id:032x}"


def digest(data: object) -> str:
    return hashlib.sha256(bytes(data)).hexdigest()  # type: ignore[call-overload]


def on_tensor(message: TensorMessage) -> None:
    report(
        "tensor",
        layer_id=message.layer_id,
        seq_id=message.seq_id,
        digest=digest(message.data),
        sender=message.from_peer,
    )


def on_response(message: TensorMessage) -> None:
    report("response", request_id=message.request_id, sender=message.from_peer)


def on_layer_status(layer_ids: tuple[int, ...], from_peer: str) -> None:
    report("layer_status", layer_ids=layer_ids, sender=from_peer)


def on_layer_request(layer_ids: tuple[int, ...], from_peer: str) -> tuple[int, ...]:
    report("layer_request", layer_ids=layer_ids, sender=from_peer)
    return LAYERS


def on_model_config(config: bytes, from_peer: str) -> None:
    report("model_config", config=config.decode(), sender=from_peer)


def on_gpu_info(info: GPUInfo, from_peer: str) -> None:
    report(
        "gpu_info",
        total_bytes=info.total_bytes,
        used_bytes=info.used_bytes,
        name=info.name,
        sender=from_peer,
    )


def on_gpu_info_request(from_peer: str) -> GPUInfo:
    return GPU


def report_activation(message: TensorMessage) -> None:
    context = message.trace_context
    report(
        "activation",
        request_id=message.request_id,
        digest=digest(message.data),
        sender=message.from_peer,
        type=message.msg_type.name if message.msg_type else None,
        trace_on_wire=context.trace_id.hex() if context else None,
        active_trace=active_trace(),
    )


def report_chunk(layer_id: int, index: int, total: int, data: memoryview, sender: str) -> None:
    report("chunk", layer_id=layer_id, index=index, total=total, digest=digest(data), sender=sender)


def register(protocol: Protocol | blocking.Protocol) -> None:
    """The handlers that are the same for both faces: plain functions, whose result is the answer."""
    protocol.on_tensor_received(on_tensor)
    protocol.on_response_received(on_response)
    protocol.on_layer_status_received(on_layer_status)
    protocol.on_layer_request_received(on_layer_request)
    protocol.on_model_config_received(on_model_config)
    protocol.on_gpu_info_received(on_gpu_info)
    protocol.on_gpu_info_request_received(on_gpu_info_request)


async def serve_under_trio(versions: list[str]) -> None:
    async with open_host() as host:
        protocol = Protocol(host, role="peer", versions=versions)

        async def on_activation(message: TensorMessage) -> bytes | None:
            report_activation(message)
            assert message.from_peer is not None
            args = (message.from_peer, message.layer_id, message.seq_id)
            data = bytes(message.data)[::-1]
            if message.layer_id == REVERSED:
                return data
            if message.layer_id == HELD:
                held[message.from_peer] = message
            elif message.layer_id == TRACED:
                await protocol.send_traced_response(
                    *args, message.request_id, data, message.trace_context
                )
            elif message.layer_id != SILENT:
                # Any other layer lets go the activation that is held back.
                await protocol.send_response(*args, message.request_id, data)
                first = held.pop(message.from_peer, None)
                if first is not None:
                    await protocol.send_response(*args, first.request_id, bytes(first.data)[::-1])
            return None

        async def on_weights(
            layer_id: int, index: int, total: int, data: memoryview, from_peer: str
        ) -> None:
            report_chunk(layer_id, index, total, data, from_peer)
            if index == total - 1:
                await protocol.send_weights_ack(from_peer, layer_id)

        register(protocol)
        protocol.on_activation_received(on_activation)
        protocol.on_weights_received(on_weights)
        print(host.addresses[0], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


def serve_blocking(versions: list[str]) -> None:
    with blocking.open_host() as host:
        protocol = blocking.Protocol(host, role="peer", versions=versions)

        def on_activation(message: TensorMessage) -> bytes | None:
            report_activation(message)
            assert message.from_peer is not None
            args = (message.from_peer, message.layer_id, message.seq_id)
            data = bytes(message.data)[::-1]
            if message.layer_id == REVERSED:
                return data
            if message.layer_id == HELD:
                held[message.from_peer] = message
            elif message.layer_id == TRACED:
                protocol.send_traced_response(
                    *args, message.request_id, data, message.trace_context
                )
            elif message.layer_id != SILENT:
                # Any other layer lets go the activation that is held back.
                protocol.send_response(*args, message.request_id, data)
                first = held.pop(message.from_peer, None)
                if first is not None:
                    protocol.send_response(*args, first.request_id, bytes(first.data)[::-1])
            return None

        def on_weights(
            layer_id: int, index: int, total: int, data: memoryview, from_peer: str
        ) -> None:
            report_chunk(layer_id, index, total, data, from_peer)
            if index == total - 1:
                protocol.send_weights_ack(from_peer, layer_id)

        register(protocol)
        protocol.on_activation_received(on_activation)
        protocol.on_weights_received(on_weights)
        print(host.addresses[0], flush=True)
        sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", nargs="+", default=[PROTOCOL_V10])
    parser.add_argument("--face", choices=["trio", "blocking"], default="trio")
    options = parser.parse_args()
    if options.face == "trio":
        trio.run(serve_under_trio, options.versions)
    else:
        serve_blocking(options.versions)


if __name__ == "__main__":
    main()
