"""The tensor protocol by name: what is sent, awaited and served, for every message of 1.0.0.

Works the same over both versions. A tensor is any contiguous buffer: bytes, a NumPy array, a torch tensor on the
CPU; over 1.1.0 it travels with its dtype and shape, which `message.envelope` has at the other end, over 1.0.0 as
bare bytes. Handlers are sync (quick, in the order of arrival) or async (in tasks of their own), and several may
register. What the messages are used for is not known here.

Source: protocol_spec/messages.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from neurogrid.errors import NeuroGridError, StreamBrokenError
from neurogrid.p2p.exchange.exchange import new_request_id
from neurogrid.p2p.exchange.subscribers import is_async
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.bounds import DEFAULT_BOUNDS, Bounds
from neurogrid.p2p.streams.buffers import Tensor, tensor_buffer
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.tensor.handlers import answering, as_async, with_sender
from neurogrid.p2p.tensor.versions import VersionedExchange
from neurogrid.p2p.wire import (
    DEFAULT_LIMITS,
    PROTOCOL_V10,
    PROTOCOL_V11,
    Data,
    GPUInfo,
    LayerIds,
    Limits,
    MessageType,
    TensorEnvelope,
    TensorMessage,
    TraceContext,
    WeightsChunk,
    iter_weights_chunks,
)

__all__ = ["Protocol", "new_request_id"]

Result: TypeAlias = Awaitable[None] | None
MessageHandler = Callable[[TensorMessage], Result]
ActivationHandler = Callable[[TensorMessage], Awaitable[Tensor | None] | Tensor | None]
WeightsHandler = Callable[..., Result]
LayersHandler = Callable[[tuple[int, ...], str], Result]
LayerRequestHandler = Callable[
    [tuple[int, ...], str], Awaitable[Sequence[int] | None] | Sequence[int] | None
]
ConfigHandler = Callable[[bytes, str], Result]
GPUInfoHandler = Callable[[GPUInfo, str], Result]
GPUInfoRequestHandler = Callable[[str], Awaitable[GPUInfo | None] | GPUInfo | None]


class Protocol(VersionedExchange):
    """The tensor protocol on a host: `Protocol(host)`, then register handlers, send and request.

    Args:
        host: one that runs. It can have one protocol of this kind.
        role: what 1.1.0 peers are told that this one is: "worker", "coordinator" or "peer".
        agent: what program this is, for people; at most 256 characters.
        name: what people call this machine (`machine_name`); at most 32 characters, empty to tell nothing.
        limits: how large the Data of each message may be, in bytes.
        bounds: what peers may have under way here, and for how long.
        versions: the protocol ids that are spoken, the preferred one first.

    Attributes:
        host: the host underneath.
        counters: messages and bytes by peer, type and direction.

    Raises:
        LocalProtocolError: the host has a protocol of this kind already.

    Every `send_*` raises TransportError (PeerUnreachableError, HeaderWriteError, DataWriteError) when the
    message did not go out, PeerRefusedError when a 1.0.0 peer resets its stream, and LocalProtocolError for
    what the protocol cannot say. Every `wait_for_*` and `request_*` takes `timeout` in seconds and raises
    ResponseTimeout after it, PeerRefusedError when the peer refuses, StreamBrokenError when it is lost. Any of
    them may be cancelled: the connection stays whole. A tensor is read where it lies: after a timeout or a
    cancellation the last of it may still be on its way out, so it must not be written to.
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
        super().__init__(
            host,
            role=role,
            agent=agent,
            name=name,
            limits=limits,
            bounds=bounds,
            versions=versions,
        )

    # Tensors

    def on_tensor_received(self, handler: MessageHandler) -> None:
        """Call `handler(message)` for each legacy message: a tensor without type and request id (1.0.0)."""
        self.on_message(None, handler)

    def on_activation_received(self, handler: ActivationHandler) -> None:
        """Call `handler(message)` for each activation, traced or not.

        `message.data` is the tensor's bytes, a writable memoryview that the handler may keep; `message.envelope`
        has its dtype and shape (1.1.0) or is None. What the handler returns, if not None, is sent as the
        response; it may also send it itself, now or later, or raise RequestRefusedError. Credit is given back
        to the peer when the handler, and what it returned, is done.
        """

        def response(message: TensorMessage, tensor: Tensor) -> TensorMessage:
            return _tensor_message(
                MessageType.RESPONSE,
                message.layer_id,
                message.seq_id,
                message.request_id,
                tensor,
                None,
                message.envelope,
            )

        self.on_message(MessageType.ACTIVATION, self._answering(handler, response))

    def on_response_received(self, handler: MessageHandler) -> None:
        """Call `handler(message)` for each response, traced or not, that no request waits for."""
        self.on_message(MessageType.RESPONSE, handler)

    async def send_tensor(self, peer_id: str, layer_id: int, seq_id: int, data: Data) -> None:
        """Send bytes with the legacy header of 1.0.0, on a 1.0.0 stream. `layer_id` is below 2**24."""
        message = TensorMessage(msg_type=None, layer_id=layer_id, seq_id=seq_id, data=data)
        await self.send(peer_id, message)

    async def send_activation(
        self, peer_id: str, layer_id: int, seq_id: int, request_id: int, data: Tensor
    ) -> None:
        """Send a tensor to be computed with; the response can be awaited with `wait_for_response`.

        Args:
            layer_id: the layer asked for; below 65,536.
            seq_id: u64, the position of the first token.
            request_id: u64, see `new_request_id`; unique among the requests under way.
            data: the tensor; over 1.0.0 float16 or bytes.
        """
        with self._announced(peer_id, MessageType.RESPONSE, request_id):
            await self._send_tensor_message(
                MessageType.ACTIVATION, peer_id, layer_id, seq_id, request_id, data
            )

    async def send_response(
        self, peer_id: str, layer_id: int, seq_id: int, request_id: int, data: Tensor
    ) -> None:
        """Answer an activation: layer, position and request id are those of the activation."""
        await self._send_tensor_message(
            MessageType.RESPONSE, peer_id, layer_id, seq_id, request_id, data
        )

    async def send_traced_activation(
        self,
        peer_id: str,
        layer_id: int,
        seq_id: int,
        request_id: int,
        data: Tensor,
        trace_context: TraceContext | None,
    ) -> None:
        """`send_activation` with this trace context, instead of OpenTelemetry's active one."""
        with self._announced(peer_id, MessageType.RESPONSE, request_id):
            await self._send_tensor_message(
                MessageType.TRACED_ACTIVATION,
                peer_id,
                layer_id,
                seq_id,
                request_id,
                data,
                trace_context=trace_context,
            )

    async def send_traced_response(
        self,
        peer_id: str,
        layer_id: int,
        seq_id: int,
        request_id: int,
        data: Tensor,
        trace_context: TraceContext | None,
    ) -> None:
        """`send_response` with this trace context, instead of OpenTelemetry's active one."""
        await self._send_tensor_message(
            MessageType.TRACED_RESPONSE,
            peer_id,
            layer_id,
            seq_id,
            request_id,
            data,
            trace_context=trace_context,
        )

    async def wait_for_response(
        self, peer_id: str, request_id: int, *, timeout: float
    ) -> TensorMessage:
        """The response of `peer_id` to the request with this id, also if it came before this call.

        A response that is refused, or whose peer is lost, raises as in `request_activation`.
        """
        return await self._wait_for(peer_id, MessageType.RESPONSE, request_id, timeout)

    async def request_activation(
        self, peer_id: str, layer_id: int, seq_id: int, data: Tensor, *, timeout: float
    ) -> TensorMessage:
        """Send an activation under a new request id, and wait for its response.

        Args:
            layer_id: the layer asked for; below 65,536.
            seq_id: u64, the position of the first token.
            data: the tensor; over 1.0.0 float16 or bytes.
            timeout: seconds, for sending and for the answer together.

        Returns:
            The response: `data` the bytes of its tensor, `envelope` the dtype and shape (1.1.0) or None.
        """
        request = _tensor_message(
            MessageType.ACTIVATION, layer_id, seq_id, new_request_id(), data, None, None
        )
        return await self.request(peer_id, request, MessageType.RESPONSE, timeout=timeout)

    # Weights

    def on_weights_received(self, handler: WeightsHandler) -> None:
        """Call `handler(layer_id, chunk_index, total_chunks, data)` for each chunk, in the order of arrival.

        A handler with a parameter `from_peer` is given the sender too. `data` is a memoryview of at most
        1 MiB. An async handler begins in a task for each chunk, and tasks have no order: where order matters,
        let a sync one take the chunk, and return an awaitable for the rest. Chunks that belong to an offered
        transfer are the matter of `neurogrid.p2p.transfer`.
        """
        wants_sender = "from_peer" in inspect.signature(handler).parameters

        def call(message: TensorMessage) -> Result:
            chunk = WeightsChunk.decode(message.data)
            sender = {"from_peer": message.from_peer} if wants_sender else {}
            return handler(
                message.layer_id, chunk.chunk_index, chunk.total_chunks, chunk.data, **sender
            )

        self.on_message(
            MessageType.WEIGHTS,
            as_async(call) if is_async(handler) else call,
            when=lambda message: message.request_id == 0,
        )

    async def send_weights(self, peer_id: str, layer_id: int, data: Data) -> None:
        """Send a layer's bytes in chunks of 1 MiB; `wait_for_weights_ack` tells when they are usable.

        Nothing is offered, verified or resumed: `neurogrid.p2p.transfer` does that. At most 64 GiB. A send
        that fails or is cancelled has left some of the chunks there.
        """
        with self._announced(peer_id, MessageType.WEIGHTS_ACK, layer_id):
            for chunk in iter_weights_chunks(data):
                numbers, content = chunk.encode_parts()
                message = TensorMessage(
                    msg_type=MessageType.WEIGHTS, layer_id=layer_id, data=numbers
                )
                await self.send(peer_id, message, content)

    async def send_weights_ack(self, peer_id: str, layer_id: int) -> None:
        """Tell that the layer, whole, is usable."""
        await self.send(peer_id, TensorMessage(msg_type=MessageType.WEIGHTS_ACK, layer_id=layer_id))

    async def wait_for_weights_ack(self, peer_id: str, layer_id: int, *, timeout: float) -> None:
        """Wait until `peer_id` acknowledges the layer; at once if it did since `send_weights`."""
        await self._wait_for(peer_id, MessageType.WEIGHTS_ACK, layer_id, timeout)

    # Layers

    def on_layer_status_received(self, handler: LayersHandler) -> None:
        """Call `handler(layer_ids, from_peer)` for each status that no request waits for."""
        self.on_message(
            MessageType.LAYER_STATUS,
            with_sender(handler, lambda message: LayerIds.decode(message.data).ids),
        )

    def on_layer_request_received(self, handler: LayerRequestHandler) -> None:
        """Call `handler(layer_ids, from_peer)` for each request; no ids ask for the status.

        What it returns, if not None, are the ids of the layers held now, which are sent as the status.
        """

        def call(message: TensorMessage) -> Any:
            return handler(LayerIds.decode(message.data).ids, sender_of(message))

        def status(message: TensorMessage, layer_ids: Sequence[int]) -> TensorMessage:
            return _answer(message, MessageType.LAYER_STATUS, LayerIds(tuple(layer_ids)).encode())

        wrapped = as_async(call) if is_async(handler) else call
        self.on_message(MessageType.LAYER_REQUEST, self._answering(wrapped, status))

    async def send_layer_status(self, peer_id: str, layer_ids: Sequence[int]) -> None:
        """Tell a peer which layers are held here, asked or not."""
        data = LayerIds(tuple(layer_ids)).encode()
        await self.send(peer_id, TensorMessage(msg_type=MessageType.LAYER_STATUS, data=data))

    async def send_layer_request(self, peer_id: str, layer_ids: Sequence[int]) -> None:
        """Ask a peer to load layers of its own model, or, without ids, for its status."""
        data = LayerIds(tuple(layer_ids)).encode()
        request_id = new_request_id()
        await self.send(
            peer_id,
            TensorMessage(msg_type=MessageType.LAYER_REQUEST, request_id=request_id, data=data),
        )

    async def request_layer_status(self, peer_id: str, *, timeout: float) -> tuple[int, ...]:
        """Ask which layers a peer has in memory; `timeout` in seconds."""
        answer = await self._request(
            peer_id,
            MessageType.LAYER_REQUEST,
            LayerIds(()).encode(),
            MessageType.LAYER_STATUS,
            timeout,
        )
        return LayerIds.decode(answer.data).ids

    # Model config

    def on_model_config_received(self, handler: ConfigHandler) -> None:
        """Call `handler(config, from_peer)` for each model config, as bytes: see `deserialize_config`."""
        self.on_message(
            MessageType.MODEL_CONFIG, with_sender(handler, lambda message: bytes(message.data))
        )

    async def send_model_config(self, peer_id: str, config: Data) -> None:
        """Send a model config, as `serialize_config` makes it."""
        request_id = new_request_id()
        await self.send(
            peer_id,
            TensorMessage(msg_type=MessageType.MODEL_CONFIG, request_id=request_id, data=config),
        )

    # GPU info

    def on_gpu_info_received(self, handler: GPUInfoHandler) -> None:
        """Call `handler(info, from_peer)` for each GPU info that no request waits for."""
        self.on_message(
            MessageType.GPU_INFO,
            with_sender(handler, lambda message: GPUInfo.decode(message.data)),
        )

    def on_gpu_info_request_received(self, handler: GPUInfoRequestHandler) -> None:
        """Call `handler(from_peer)` for each request; the GPUInfo that it returns, if any, is the answer."""

        def call(message: TensorMessage) -> Any:
            return handler(sender_of(message))

        def answer(message: TensorMessage, info: GPUInfo) -> TensorMessage:
            return _answer(message, MessageType.GPU_INFO, info.encode())

        wrapped = as_async(call) if is_async(handler) else call
        self.on_message(MessageType.GPU_INFO_REQUEST, self._answering(wrapped, answer))

    async def send_gpu_info(self, peer_id: str, info: GPUInfo) -> None:
        """Tell a peer about the memory here, asked or not."""
        message = TensorMessage(msg_type=MessageType.GPU_INFO, data=info.encode())
        await self.send(peer_id, message)

    async def send_gpu_info_request(self, peer_id: str) -> None:
        """Ask a peer about its memory; the answer goes to `on_gpu_info_received`."""
        request_id = new_request_id()
        await self.send(
            peer_id, TensorMessage(msg_type=MessageType.GPU_INFO_REQUEST, request_id=request_id)
        )

    async def request_gpu_info(self, peer_id: str, *, timeout: float) -> GPUInfo:
        """Ask a peer about its memory, and wait `timeout` seconds for the answer. A Go peer gives none."""
        answer = await self._request(
            peer_id, MessageType.GPU_INFO_REQUEST, b"", MessageType.GPU_INFO, timeout
        )
        return GPUInfo.decode(answer.data)

    # What these share

    @contextmanager
    def _announced(self, peer_id: str, answer: MessageType, correlation: int) -> Iterator[None]:
        """Keep an answer that comes before anybody waits for it, unless its request cannot be sent."""
        self.announce(peer_id, answer, request_id=correlation)
        try:
            yield
        except NeuroGridError:
            self._dispatcher.pending.take_back(peer_id, answer, correlation)
            raise

    async def _send_tensor_message(
        self,
        msg_type: MessageType,
        peer_id: str,
        layer_id: int,
        seq_id: int,
        request_id: int,
        data: Tensor,
        trace_context: TraceContext | None = None,
    ) -> None:
        await self.send(
            peer_id,
            _tensor_message(msg_type, layer_id, seq_id, request_id, data, trace_context, None),
        )

    async def _request(
        self, peer_id: str, asked: MessageType, data: bytes, answer: MessageType, timeout: float
    ) -> TensorMessage:
        message = TensorMessage(msg_type=asked, request_id=new_request_id(), data=data)
        return await self.request(peer_id, message, answer, timeout=timeout)

    def _answering(
        self,
        handler: Callable[[TensorMessage], Any],
        answer: Callable[[TensorMessage, Any], TensorMessage],
    ) -> MessageHandler:
        return answering(handler, answer, send=self.send, send_nowait=self.send_nowait)

    async def _wait_for(
        self, peer_id: str, answer: MessageType, correlation: int, timeout: float
    ) -> TensorMessage:
        with self.expect(peer_id, answer, request_id=correlation) as waiter:
            lost = not self.host.is_connected(peer_id) and peer_id != self.host.peer_id
            if lost and not waiter.is_done:
                waiter.resolve(StreamBrokenError(f"there is no connection to {peer_id}"))
            return await waiter.wait(timeout=timeout)


def _tensor_message(
    msg_type: MessageType,
    layer_id: int,
    seq_id: int,
    request_id: int,
    data: Tensor,
    trace_context: TraceContext | None,
    like: TensorEnvelope | None,
) -> TensorMessage:
    """A tensor with an envelope; a response repeats what the envelope of its activation says."""
    tensor = tensor_buffer(data)
    return TensorMessage(
        msg_type=msg_type,
        layer_id=layer_id,
        seq_id=seq_id,
        request_id=request_id,
        trace_context=trace_context,
        envelope=TensorEnvelope(
            session_id=like.session_id if like else 0,
            position=like.position if like else seq_id,
            start_layer=like.start_layer if like else layer_id,
            stop_layer=like.stop_layer if like else layer_id + 1,
            dtype=tensor.dtype,
            shape=tensor.shape,
            data=tensor.data,
        ),
    )


def _answer(message: TensorMessage, msg_type: MessageType, data: bytes) -> TensorMessage:
    return TensorMessage(msg_type=msg_type, request_id=message.request_id, data=data)
