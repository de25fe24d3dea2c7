"""The tensor protocol for programs that are not on trio: every call of `neurogrid.p2p.Protocol`, blocking.

The calls are twins of the async ones. Only the handlers differ: they run in threads, and may block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

import neurogrid.p2p.tensor.protocol
from neurogrid.p2p.blocking.host import Host
from neurogrid.p2p.blocking.twins import Blocking, sync_twin, twin
from neurogrid.p2p.exchange.counters import TrafficCounters
from neurogrid.p2p.streams.bounds import DEFAULT_BOUNDS, Bounds
from neurogrid.p2p.streams.buffers import Tensor
from neurogrid.p2p.streams.message_forms import untraced
from neurogrid.p2p.wire import (
    DEFAULT_LIMITS,
    PROTOCOL_V10,
    PROTOCOL_V11,
    GPUInfo,
    Limits,
    MessageCode,
    MessageType,
    TensorMessage,
)

__all__ = ["AsyncProtocol", "Protocol"]

AsyncProtocol = neurogrid.p2p.tensor.protocol.Protocol

# Requests: the handler of one may have to wait for another one to be served.
_AT_ONCE: Final = frozenset(
    {MessageType.ACTIVATION, MessageType.LAYER_REQUEST, MessageType.GPU_INFO_REQUEST}
)


class Protocol(Blocking[AsyncProtocol]):
    """The tensor protocol on a host: `Protocol(host)`, then register handlers, send and request.

    Everything may be called from any thread, from many at once, and by handlers. From asyncio:
    `await asyncio.to_thread(protocol.request_activation, ...)`; to cancel that cancels the waiting, and the call goes
    on in its thread until it ends. An interrupt (Ctrl-C) ends the call that the main thread waits in. A `send_*` has
    no timeout of its own: `with fail_after(seconds)` gives it one.

    Handlers are plain functions and run in threads, at most `MAX_HANDLER_THREADS` for a host; the trace of a
    message is active in its handler. What a handler returns or raises means what it does in the async API.
    Handlers of requests (activations, layer requests, GPU info requests) run side by side. Every other handler is
    called for one message at a time, in the order of arrival: chunks of weights come in their order. Credit
    is given back when the handler returns, so a peer cannot send faster than handlers take.

    Raises:
        LocalProtocolError: the host has a protocol of this kind already, or was closed.
    """

    def __init__(
        self,
        host: Host,
        *,
        role: str = "peer",
        agent: str = "neurogrid",
        name: str = "",
        limits: Limits = DEFAULT_LIMITS,
        bounds: Bounds = DEFAULT_BOUNDS,
        versions: Sequence[str] = (PROTOCOL_V11, PROTOCOL_V10),
    ) -> None:
        def make() -> AsyncProtocol:
            return AsyncProtocol(
                host._inner,
                role=role,
                agent=agent,
                name=name,
                limits=limits,
                bounds=bounds,
                versions=versions,
            )

        super().__init__(host._thread, host._thread.call_sync(make))
        self.host = host

    @property
    def counters(self) -> TrafficCounters:
        """Messages and bytes by peer, type and direction, up to now: a copy."""
        return self._thread.call_sync(lambda: copy.deepcopy(self._inner.counters))

    # Any message

    open = twin(AsyncProtocol.open)
    close_peer = twin(AsyncProtocol.close_peer)
    aclose = twin(AsyncProtocol.aclose)
    send = twin(AsyncProtocol.send)
    request = twin(AsyncProtocol.request)
    refuse = twin(AsyncProtocol.refuse)
    hello_of = sync_twin(AsyncProtocol.hello_of)
    is_v10 = sync_twin(AsyncProtocol.is_v10)

    def on_message(
        self,
        msg_type: MessageCode | None,
        handler: Callable[[TensorMessage], None],
        *,
        when: Callable[[TensorMessage], bool] | None = None,
        version: str | None = None,
    ) -> None:
        """Serve messages of a type (None: legacy) for which `when(message)` holds.

        `version` is the protocol id of the streams on which they come; None is each that is spoken. `when` is called in
        the loop: it must be quick, and must not call this API.
        """
        self._register(
            lambda wrapped: self._inner.on_message(msg_type, wrapped, when=when, version=version),
            handler,
            at_once=untraced(msg_type) in _AT_ONCE,
        )

    # Tensors

    send_tensor = twin(AsyncProtocol.send_tensor)
    send_activation = twin(AsyncProtocol.send_activation)
    send_response = twin(AsyncProtocol.send_response)
    send_traced_activation = twin(AsyncProtocol.send_traced_activation)
    send_traced_response = twin(AsyncProtocol.send_traced_response)
    wait_for_response = twin(AsyncProtocol.wait_for_response)
    request_activation = twin(AsyncProtocol.request_activation)

    def on_tensor_received(self, handler: Callable[[TensorMessage], None]) -> None:
        """Call `handler(message)` for each legacy message, in order."""
        self._register(self._inner.on_tensor_received, handler)

    def on_activation_received(self, handler: Callable[[TensorMessage], Tensor | None]) -> None:
        """Call `handler(message)` for each activation, side by side.

        What it returns, if not None, is sent as the response; it may also send it itself, now or later, or
        raise RequestRefusedError.
        """
        self._register(self._inner.on_activation_received, handler, at_once=True)

    def on_response_received(self, handler: Callable[[TensorMessage], None]) -> None:
        """Call `handler(message)` for each response that no request waits for, in order."""
        self._register(self._inner.on_response_received, handler)

    # Weights

    send_weights = twin(AsyncProtocol.send_weights)
    send_weights_ack = twin(AsyncProtocol.send_weights_ack)
    wait_for_weights_ack = twin(AsyncProtocol.wait_for_weights_ack)

    def on_weights_received(self, handler: Callable[..., None]) -> None:
        """Call `handler(layer_id, chunk_index, total_chunks, data)` for each chunk, in order.

        A handler with a parameter `from_peer` is given the sender too.
        """
        self._register(self._inner.on_weights_received, handler)

    # Layers

    send_layer_status = twin(AsyncProtocol.send_layer_status)
    send_layer_request = twin(AsyncProtocol.send_layer_request)
    request_layer_status = twin(AsyncProtocol.request_layer_status)

    def on_layer_status_received(self, handler: Callable[[tuple[int, ...], str], None]) -> None:
        """Call `handler(layer_ids, from_peer)` for each status that no request waits for, in order."""
        self._register(self._inner.on_layer_status_received, handler)

    def on_layer_request_received(
        self, handler: Callable[[tuple[int, ...], str], Sequence[int] | None]
    ) -> None:
        """Call `handler(layer_ids, from_peer)` for each request, side by side; no ids ask for the status.

        What it returns, if not None, are the ids of the layers held now, which are sent as the status.
        """
        self._register(self._inner.on_layer_request_received, handler, at_once=True)

    # Model config

    send_model_config = twin(AsyncProtocol.send_model_config)

    def on_model_config_received(self, handler: Callable[[bytes, str], None]) -> None:
        """Call `handler(config, from_peer)` for each model config, as bytes, in order."""
        self._register(self._inner.on_model_config_received, handler)

    # GPU info

    send_gpu_info = twin(AsyncProtocol.send_gpu_info)
    send_gpu_info_request = twin(AsyncProtocol.send_gpu_info_request)
    request_gpu_info = twin(AsyncProtocol.request_gpu_info)

    def on_gpu_info_received(self, handler: Callable[[GPUInfo, str], None]) -> None:
        """Call `handler(info, from_peer)` for each GPU info that no request waits for, in order."""
        self._register(self._inner.on_gpu_info_received, handler)

    def on_gpu_info_request_received(self, handler: Callable[[str], GPUInfo | None]) -> None:
        """Call `handler(from_peer)` for each request, side by side; the GPUInfo it returns is the answer."""
        self._register(self._inner.on_gpu_info_request_received, handler, at_once=True)

    def _register(
        self,
        register: Callable[[Callable[..., Any]], None],
        handler: Callable[..., object],
        *,
        at_once: bool = False,
    ) -> None:
        threads = self.host._handlers
        wrapped = threads.at_once(handler) if at_once else threads.in_order(handler)
        self._thread.call_sync(lambda: register(wrapped))
