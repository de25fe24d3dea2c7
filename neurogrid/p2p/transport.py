"""One peer to compute with, wherever it is: `P2PTransport` reaches it over the network, `LocalTransport` is here.

A program that sends activations and weights through a `Transport` does not know which of the two it has. Both
serve with the same handlers, those of a `Protocol`: the local one hands messages to those of its own, without a
stream and without encoding.
"""

from __future__ import annotations

from neurogrid.p2p.streams.buffers import Tensor
from neurogrid.p2p.tensor.protocol import Protocol
from neurogrid.p2p.wire import Data, GPUInfo, TensorMessage

__all__ = ["LocalTransport", "P2PTransport", "Transport"]


class Transport:
    """Calls to one peer of a protocol. Errors and cancellation are those of `Protocol`'s methods of the same names."""

    def __init__(self, protocol: Protocol, peer_id: str) -> None:
        self._protocol = protocol
        self._peer_id = peer_id

    @property
    def peer_id(self) -> str:
        """The peer (base58)."""
        return self._peer_id

    async def send_activation(
        self, layer_id: int, seq_id: int, request_id: int, data: Tensor
    ) -> None:
        """Send a tensor to be computed with; `wait_for_response` gives the result."""
        await self._protocol.send_activation(self._peer_id, layer_id, seq_id, request_id, data)

    async def wait_for_response(self, request_id: int, *, timeout: float) -> TensorMessage:
        """The response to the activation with this request id, within `timeout` seconds."""
        return await self._protocol.wait_for_response(self._peer_id, request_id, timeout=timeout)

    async def request_activation(
        self, layer_id: int, seq_id: int, data: Tensor, *, timeout: float
    ) -> TensorMessage:
        """Send a tensor and wait for its response, `timeout` seconds at most."""
        return await self._protocol.request_activation(
            self._peer_id, layer_id, seq_id, data, timeout=timeout
        )

    async def send_weights(self, layer_id: int, data: Data) -> None:
        """Send a layer's bytes."""
        await self._protocol.send_weights(self._peer_id, layer_id, data)

    async def wait_for_weights_ack(self, layer_id: int, *, timeout: float) -> None:
        """Wait until the layer is usable, `timeout` seconds at most."""
        await self._protocol.wait_for_weights_ack(self._peer_id, layer_id, timeout=timeout)

    async def send_model_config(self, config: Data) -> None:
        """Send a model config, as `serialize_config` makes it."""
        await self._protocol.send_model_config(self._peer_id, config)

    async def request_layer_status(self, *, timeout: float) -> tuple[int, ...]:
        """Ask which layers the peer has in memory."""
        return await self._protocol.request_layer_status(self._peer_id, timeout=timeout)

    async def request_gpu_info(self, *, timeout: float) -> GPUInfo:
        """Ask about the peer's memory."""
        return await self._protocol.request_gpu_info(self._peer_id, timeout=timeout)


class P2PTransport(Transport):
    """A peer of `protocol`, over its host's network."""


class LocalTransport(Transport):
    """The handlers of `protocol` itself, in this process.

    Data is copied once, so that a handler may keep it and write to it, as with what came over a stream.
    """

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(protocol, protocol.host.peer_id)
