"""Messages and bytes by peer, direction and type, as data: two hosts in one program talk, and one is asked.

python examples/counters.py
"""

import json
from dataclasses import asdict

import trio

from neurogrid.p2p import Direction, MessageType, Protocol, open_host


async def main() -> None:
    async with open_host() as one, open_host() as other:
        protocol = Protocol(one)
        Protocol(other).on_activation_received(lambda message: bytes(message.data))
        peer_id = await one.connect(other.addresses[0])
        for num_bytes in (10, 1_000, 100_000):
            await protocol.request_activation(peer_id, 0, 0, bytes(num_bytes), timeout=60)

        print(json.dumps(protocol.counters.snapshot(), default=asdict, indent=2))
        sent = protocol.counters.total(Direction.SENT, msg_type=MessageType.ACTIVATION)
        print(f"{sent.num_messages} activations, {sent.num_bytes} B with their headers")


trio.run(main)
