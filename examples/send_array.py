"""Send an array, print the answer: python examples/send_array.py ADDRESS (as receive_array.py prints it)"""

import sys

import numpy as np
import trio

from neurogrid.p2p import Protocol, open_host


async def main(address: str, array: np.ndarray) -> None:
    async with open_host() as host:
        peer_id = await host.connect(address)
        answer = await Protocol(host).request_activation(peer_id, 0, 0, array, timeout=60)
        print(np.frombuffer(answer.data, np.float32).reshape(answer.envelope.shape))


trio.run(main, sys.argv[1], np.arange(6, dtype=np.float32).reshape(2, 3))
