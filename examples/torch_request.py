"""Requests and answers with torch tensors, bfloat16 included: neither side copies what it sends or gets.

python examples/torch_request.py            # serves, and prints its address
python examples/torch_request.py ADDRESS    # asks
"""

import sys

import torch
import trio

from neurogrid.p2p import Protocol, TensorMessage, open_host

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def as_torch(message: TensorMessage) -> torch.Tensor:
    """A view of the message's own memory, which is writable and nobody else's."""
    envelope = message.envelope
    return torch.frombuffer(message.data, dtype=DTYPES[envelope.dtype]).reshape(envelope.shape)


async def serve() -> None:
    async def multiply(message: TensorMessage) -> torch.Tensor:
        hidden = as_torch(message)
        # What takes long belongs in a thread: meanwhile this program goes on receiving.
        return await trio.to_thread.run_sync(hidden.mul_, 3)

    async with open_host() as host:
        Protocol(host).on_activation_received(multiply)
        print(host.addresses[0], flush=True)
        await trio.sleep_forever()


async def ask(address: str) -> None:
    async with open_host() as host:
        protocol = Protocol(host)
        peer_id = await host.connect(address)
        for layer_id in range(3):
            hidden = torch.full((1, 4, 8), layer_id + 0.5, dtype=torch.bfloat16)
            answer = await protocol.request_activation(peer_id, layer_id, 0, hidden, timeout=60)
            tripled = as_torch(answer)
            print(f"layer {layer_id}: {tripled.dtype} {list(tripled.shape)}, {tripled[0, 0, 0]:g}")


if __name__ == "__main__":
    trio.run(ask, sys.argv[1]) if len(sys.argv) > 1 else trio.run(serve)
