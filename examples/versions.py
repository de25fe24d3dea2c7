"""A peer that speaks 1.0.0 alone: the calls are the same, and tensors are bare float16, without dtype and shape.

python examples/versions.py
"""

import numpy as np
import trio

from neurogrid.errors import LocalProtocolError
from neurogrid.p2p import PROTOCOL_V10, Protocol, TensorMessage, open_host

SHAPE = (1, 4, 8)  # over 1.0.0 both sides have to know it


def halve(message: TensorMessage) -> np.ndarray:
    print(f"{len(message.data)} B, envelope: {message.envelope}")
    return np.frombuffer(message.data, np.float16).reshape(SHAPE) / np.float16(2)


async def main() -> None:
    async with open_host() as old_host, open_host() as new_host:
        Protocol(old_host, versions=[PROTOCOL_V10]).on_activation_received(halve)
        protocol = Protocol(new_host)
        peer_id = await new_host.connect(old_host.addresses[0])
        print(f"spoken with it: {await protocol.open(peer_id)}")

        hidden = np.ones(SHAPE, np.float16)
        answer = await protocol.request_activation(peer_id, 0, 0, hidden, timeout=60)
        print(np.frombuffer(answer.data, np.float16).reshape(SHAPE)[0, 0, 0])
        try:
            await protocol.request_activation(peer_id, 0, 0, hidden.astype(np.float32), timeout=60)
        except LocalProtocolError as error:
            print(error)


trio.run(main)
