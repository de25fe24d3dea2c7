"""Print an address, then double every array that comes. Start this first: python examples/receive_array.py"""

import numpy as np
import trio

from neurogrid.p2p import Protocol, TensorMessage, open_host


def double(message: TensorMessage) -> np.ndarray:
    print(message.envelope.dtype, message.envelope.shape, "from", message.from_peer, flush=True)
    return 2 * np.frombuffer(message.data, np.float32).reshape(message.envelope.shape)


async def main() -> None:
    async with open_host() as host:
        Protocol(host).on_activation_received(double)
        print(host.addresses[0], flush=True)
        await trio.sleep_forever()


trio.run(main)
