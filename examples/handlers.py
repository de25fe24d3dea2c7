"""Handlers, sync and async, several for one message, in their order; and a refusal, with its reason and code.

python examples/handlers.py
"""

import trio

from neurogrid.errors import PeerRefusedError, RequestRefusedError
from neurogrid.p2p import ErrorCode, Protocol, TensorMessage, open_host


def count(message: TensorMessage) -> None:
    """Sync: runs where the stream is read, in the order of arrival, so it must be quick."""
    print(f"layer {message.layer_id} is asked for")


async def compute(message: TensorMessage) -> bytes:
    """Async: runs in a task of its own, beside those of other messages."""
    if message.layer_id > 9:
        raise RequestRefusedError(
            f"layer {message.layer_id} is not here", code=ErrorCode.LAYER_NOT_HELD, retry_after=30
        )
    await trio.sleep(0.1)  # for a GPU, a disk, another peer
    return bytes(message.data).upper()


async def main() -> None:
    async with open_host() as server, open_host() as client:
        served = Protocol(server)
        served.on_activation_received(count)
        served.on_activation_received(compute)

        protocol = Protocol(client)
        peer_id = await client.connect(server.addresses[0])
        answer = await protocol.request_activation(peer_id, 3, 0, b"hidden state", timeout=60)
        print(bytes(answer.data))
        try:
            await protocol.request_activation(peer_id, 12, 0, b"hidden state", timeout=60)
        except PeerRefusedError as error:
            print(f"{ErrorCode(error.code).name}: {error.text}; again in {error.retry_after:g} s")


trio.run(main)
