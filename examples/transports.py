"""The same code for a peer and for this process: `Transport`, with both of its kinds behind it.

python examples/transports.py
"""

import trio

from neurogrid.p2p import Protocol, open_host
from neurogrid.p2p.transport import LocalTransport, P2PTransport, Transport


async def compute(stages: list[Transport], hidden: bytes) -> bytes:
    for layer_id, stage in enumerate(stages):
        answer = await stage.request_activation(layer_id, 0, hidden, timeout=60)
        hidden = bytes(answer.data)
    return hidden


async def main() -> None:
    async with open_host() as here, open_host() as there:
        protocol = Protocol(here)
        protocol.on_activation_received(lambda message: bytes(message.data) + b", here")
        Protocol(there).on_activation_received(lambda message: bytes(message.data) + b", there")
        peer_id = await here.connect(there.addresses[0])

        stages = [LocalTransport(protocol), P2PTransport(protocol, peer_id)]
        print((await compute(stages, b"computed")).decode())


trio.run(main)
