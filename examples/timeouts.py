"""A deadline for one answer, a deadline for several steps, and what is left after either: everything.

python examples/timeouts.py
"""

import trio

from neurogrid.errors import ResponseTimeout
from neurogrid.p2p import Protocol, TensorMessage, open_host


async def slow(message: TensorMessage) -> bytes:
    await trio.sleep(float(bytes(message.data)))
    return b"done"


async def main() -> None:
    async with open_host() as server, open_host() as client:
        Protocol(server).on_activation_received(slow)
        protocol = Protocol(client)
        peer_id = await client.connect(server.addresses[0])
        await protocol.open(peer_id)

        try:
            await protocol.request_activation(peer_id, 0, 0, b"3600", timeout=0.2)
        except ResponseTimeout as error:
            print(f"{type(error).__name__}; worth a retry: {error.retryable}")

        with trio.move_on_after(0.2) as scope:
            await protocol.request_activation(peer_id, 0, 0, b"0", timeout=60)
            await protocol.request_activation(peer_id, 0, 0, b"3600", timeout=60)
        print(f"cancelled: {scope.cancelled_caught}")

        answer = await protocol.request_activation(peer_id, 0, 0, b"0", timeout=60)
        print(f"the connection is as good as before: {bytes(answer.data)}")


trio.run(main)
